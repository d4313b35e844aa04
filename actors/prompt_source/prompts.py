"""Prompts of the groups that may start: which rows they are, and how far their stream has been gone through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.actors.prompt_source.drawing import RowDrawing
from penstock.actors.prompt_source.leases import LeasedGroup
from penstock.actors.prompt_source.order import PromptOrder
from penstock.messages.base import Metric
from penstock.messages.commands import FetchPrompts, PromptRequest, TellPushers
from penstock.messages.rows import RowSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.actors.prompt_source.leases import LeaseTable
    from penstock.actors.prompt_source.settings import PromptSourceSettings
    from penstock.actors.settled import KnownSettled
    from penstock.messages.commands import AnyCommand
    from penstock.messages.evaluation import Evaluation
    from penstock.messages.flow import DemandGranted, GrantSpan


class Prompts:
    """Asks for them, once for each group."""

    def __init__(self, settings: PromptSourceSettings, table: LeaseTable, settled: KnownSettled) -> None:
        self._settings, self._table, self._settled = settings, table, settled
        self._order = PromptOrder(
            settings.sources or (RowSource(name="", num_rows=settings.num_rows),),
            seed=settings.seed,
            shuffle=settings.shuffle,
        )
        self.drawing = RowDrawing(self._order.row_of) if settings.chooses_rows else None
        self.total = 0
        """Groups that may have started."""
        self.next_place = 0
        """The first place of an evaluation that has never been heard of."""
        self._num_asked = 0
        """The first place in the stream of prompts that no group has had."""
        self._num_named = 0
        """The first place whose row has not been named to the backend."""
        self._version = -1
        """The newest that enough engines serve, as far as is known."""
        self._awaited: set[int] = set()
        """Groups whose rows are pushed, until they are settled."""

    def demanded(self, event: DemandGranted) -> list[AnyCommand]:
        """These groups may start: read their prompts, or choose their rows first."""
        commands: list[AnyCommand] = []
        requests = [request for span in event.spans for request in self._new_groups(span)]
        self.total = max(self.total, event.total)
        if self.drawing is not None:
            requests = self.drawing.heard(event, (request.group_id for request in requests))
            commands += self.drawing.commands()
        if requests:
            commands.append(FetchPrompts(tuple(map(self._dated, requests)), self._rows_ahead()))
        return commands

    def announced(self, version: int) -> list[AnyCommand]:
        """Enough engines serve it."""
        if not self._settings.awaits_pushes:
            return []
        self._version = max(self._version, version)
        return [TellPushers(self._version)]

    def settled(self) -> list[AnyCommand]:
        """The groups that are known here still are all that want rows."""
        if self.drawing is not None:
            self.drawing.keep(self._table.groups)
        gone = self._awaited - self._table.groups.keys()
        self._awaited -= gone
        return [TellPushers(self._version, tuple(sorted(gone)))] if gone else []

    def _dated(self, request: PromptRequest) -> PromptRequest:
        """Who pushes groups is told how old they may be."""
        if not self._settings.awaits_pushes:
            return request
        self._awaited.add(request.group_id)
        return msgspec.structs.replace(request, min_version=self._table.groups[request.group_id].min_version)

    def _new_groups(self, span: GrantSpan) -> list[PromptRequest]:
        """What is below the total was in an earlier snapshot: it is here already, or settled."""
        requests: list[PromptRequest] = []
        for offset in range(max(0, self.total - span.first_group), span.num_groups):
            group_id, ordinal = span.first_group + offset, span.first_ordinal + offset
            if group_id in self._settled:
                continue
            self._table.groups[group_id] = LeasedGroup(group_id, ordinal, span.min_version, span.deadline_version)
            requests.append(PromptRequest(group_id, *self._order.row_of(ordinal)))
            self._num_asked = max(self._num_asked, ordinal + 1)
        return requests

    def evaluated(self, evaluation: Evaluation) -> list[AnyCommand]:
        """What comes before the next place was in an earlier snapshot: it is here already, or settled."""
        requests: list[PromptRequest] = []
        for place in evaluation.places(self.next_place):
            if place.group_id in self._settled:
                continue
            versions = (evaluation.version, evaluation.deadline_version)
            group = LeasedGroup(place.group_id, place.row, *versions, place=place)
            self._table.add_evaluation(group)
            requests.append(PromptRequest(place.group_id, place.row, 0, place.dataset))
        self.next_place = max(self.next_place, evaluation.first_place + evaluation.num_groups)
        return [FetchPrompts(tuple(requests))] if requests else []

    def _rows_ahead(self) -> tuple[int, ...]:
        """Rows that will be wanted next and have not been named yet."""
        first = max(self._num_asked, self._num_named)
        self._num_named = max(first, self._num_asked + self._settings.prefetch_rows)
        return tuple(self._order.row_of(ordinal)[0] for ordinal in range(first, self._num_named))

    def cursors(self) -> Iterator[Metric]:
        """How far each source of a mixture has been gone through."""
        for source, count in zip(self._settings.sources, self._order.counts(self._num_asked), strict=False):
            yield Metric(f"data/{source.name}/prompts", count)
