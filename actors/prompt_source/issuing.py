"""Samples go to engines: for the first time, and again, as often as their budget allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.actors.prompt_source.leases import ISSUED, QUEUED, LeaseState
from penstock.actors.prompt_source.order import evaluation_seed, sample_seed
from penstock.actors.prompt_source.queues import KINDS, Queues
from penstock.messages.commands import Send
from penstock.messages.flow import SampleFailed, SampleIssued
from penstock.messages.names import SCORER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.actors.prompt_source.census import Census
    from penstock.actors.prompt_source.leases import Lease, LeasedGroup, LeaseTable
    from penstock.actors.prompt_source.queues import SampleQueue
    from penstock.actors.prompt_source.routing import EngineView
    from penstock.actors.prompt_source.settings import PromptSourceSettings
    from penstock.messages.commands import AnyCommand
    from penstock.messages.samples import Purpose, SampleKey


class Issuing:
    """What waits for engines, and what it has cost; gathers the commands of the event at hand."""

    def __init__(self, settings: PromptSourceSettings, table: LeaseTable, census: Census) -> None:
        self._settings, self._table, self._census = settings, table, census
        is_affine = settings.options.routing == "prefix_affine"
        self._queues = Queues(settings.max_evaluating, is_affine=is_affine, is_held=table.is_held)
        self.sweep = 0
        """Sweeps so far: the time of this actor."""
        self.num_issued = 0
        """Samples issued for the first time, by this incarnation."""
        self.num_reissued = 0
        self.num_salvaged_tokens = 0
        """That another attempt went on from."""
        self.num_lost_tokens = 0
        """That a failed attempt had made and not reported."""
        self.out: list[AnyCommand] = []

    def taken(self) -> list[AnyCommand]:
        """The commands, which leave here."""
        out, self.out = self.out, []
        return out

    def first(self, group: LeasedGroup, lease: Lease) -> None:
        """Issue a sample that has never been."""
        self.num_issued += 1
        self._queue_of(group).append(lease.key)

    def size_of(self, group: LeasedGroup) -> int:
        """Samples that are drawn for it, those in place of failed ones aside."""
        return self._settings.samples_per_group if group.place is None else group.place.samples_per_prompt

    def failed(self, group: LeasedGroup, lease: Lease, reason: str, num_tokens: int) -> None:
        """``num_tokens``: that the attempt had made, as far as anybody knows."""
        self.num_lost_tokens += max(0, num_tokens - lease.num_tokens)
        if lease.attempt < group.num_retries(self._settings.options.num_retries) + lease.num_vanished:
            if num_tokens > lease.num_at_issue and lease.avoids != lease.engine:
                self._table.note_cache(lease)
            else:
                lease.avoids, lease.cache = lease.engine or lease.avoids, None
                if group.engine == lease.engine:
                    group.engine = ""  # the others of the group may have better luck elsewhere too
            self.again(lease)
        else:
            self.give_up(group, lease, f"{reason} ({lease.attempt + 1} attempts)")

    def handed_back(self, lease: Lease, num_tokens: int) -> None:
        """Its engine leaves, and had made so many tokens: it goes on elsewhere, at no cost to its retries."""
        self.num_lost_tokens += max(0, num_tokens - lease.num_tokens)
        lease.num_vanished += 1
        self.again(lease)

    def again(self, lease: Lease) -> None:
        lease.attempt += 1
        self.num_reissued += 1
        if not self._settings.salvages_responses:
            num_known = lease.num_tokens
            lease.back_to_save_point()
            self.num_lost_tokens += num_known - lease.num_tokens
        self.num_salvaged_tokens += lease.num_tokens
        lease.running_since = None
        self._table.move(lease, QUEUED)
        self._queue_of(self._table.groups[lease.key.group_id]).appendleft(
            lease.key
        )  # its group is older than what has never been issued

    def give_up(self, group: LeasedGroup, lease: Lease, reason: str) -> None:
        assert group.prompt is not None
        self._table.move(lease, LeaseState.FAILED)
        failed = SampleFailed(
            key=lease.key,
            attempt=lease.attempt,
            group_size=self.size_of(group),
            purpose=group.purpose,
            prompt=group.prompt,
            reason=reason,
            num_tokens=lease.num_tokens,
            num_given_tokens=sum(chunk.num_given_tokens for chunk in lease.chunks),
        )
        self.out.append(Send(SCORER, failed))

    def forget(self, group_ids: Iterable[int]) -> None:
        """These groups are settled."""
        self._queues.forget(group_ids)

    @property
    def num_waiting(self) -> int:
        """Samples that wait here for a place at an engine."""
        return sum(self._queues.num_waiting(is_recorded=kind) for kind in KINDS)

    def _queue_of(self, group: LeasedGroup) -> SampleQueue:
        assert group.prompt is not None, "leases are opened once the prompt is read"
        return self._queues.of(group.purpose, is_recorded=group.prompt.is_recorded)

    def dispatch(self) -> None:
        """Send queued samples to engines, in the order of their turns, as long as there is room."""
        num_waiting, has_room = self._queues.num_waiting, self._table.router.has_room
        for is_recorded in KINDS:
            queues = self._queues.of_kind(is_recorded=is_recorded)
            stuck: set[Purpose] = set()
            while (num := num_waiting(is_recorded=is_recorded)) and has_room(num, is_recorded=is_recorded):
                heads = {
                    each: head
                    for each, queue in queues.items()
                    if queue.num_waiting and (head := self._head(queue)) is not None
                }
                state = (self._table.num_evaluating, self._table.has_training)
                purpose = self._queues.turn(heads, stuck, num_evaluating=state[0], has_training=state[1])
                if purpose is None:
                    break
                first, view = self._placed(queues[purpose], heads[purpose], num)
                if view is None or not self._queues.suits(
                    view, purpose, stuck, num_evaluating=state[0], has_training=state[1]
                ):
                    stuck.add(purpose)
                    continue
                self._send(queues[purpose], *first, view)

    def _placed(
        self, queue: SampleQueue, head: tuple[LeasedGroup, Lease], num_waiting: int
    ) -> tuple[tuple[LeasedGroup, Lease], EngineView | None]:
        """Who goes next, and where: the head, or where that has to wait for weights the oldest that need not."""
        view = self._table.choose_engine(*head, num_waiting=num_waiting)
        if view is None and (key := queue.oldest()) is not None and key != head[1].key:
            oldest = self._waiting(queue, key)
            if oldest is not None and oldest[0].min_version < head[0].min_version:
                return oldest, self._table.choose_engine(*oldest, num_waiting=num_waiting)
        return head, view

    def _head(self, queue: SampleQueue) -> tuple[LeasedGroup, Lease] | None:
        """The first that waits."""
        while (key := queue.head(self._table.router.num_engines)) is not None:
            if (found := self._waiting(queue, key)) is not None:
                return found
        return None

    def _waiting(self, queue: SampleQueue, key: SampleKey) -> tuple[LeasedGroup, Lease] | None:
        """This sample; what was settled, issued or queued twice leaves the queue."""
        group, lease = self._table.groups.get(key.group_id), self._table.lease(key)
        if group is None or lease is None or group.prompt is None or lease.state is not QUEUED:
            queue.remove(key)
            return None
        return group, lease

    def _send(self, queue: SampleQueue, group: LeasedGroup, lease: Lease, view: EngineView) -> None:
        """The first of the queue goes to this engine, or before it the next of the group that was begun there."""
        if not queue.begins_with(lease.key):
            while (key := queue.next_of(view.group_id)) is not None:
                if (found := self._waiting(queue, key)) is not None:
                    if self._table.suits(view, *found, instead_of=group):
                        group, lease = found
                    break
            view.group_id = group.group_id
        queue.remove(lease.key)
        self._issue(group, lease, view)

    def _issue(self, group: LeasedGroup, lease: Lease, view: EngineView) -> None:
        assert group.prompt is not None
        key = lease.key
        group.engine = view.name
        lease.round, lease.sweep = self._census.round, self.sweep
        lease.num_seen = lease.num_at_issue = lease.num_tokens
        view.awaited = max(view.awaited, group.min_version)
        self._table.move(lease, ISSUED, view.name)
        issued = SampleIssued(
            key=key,
            attempt=lease.attempt,
            group_size=self.size_of(group),
            purpose=group.purpose,
            prompt=group.prompt,
            seed=self._seed_of(group, key.index),
            min_version=group.min_version,
            deadline_version=group.deadline_version,
            prefix=lease.prefix(),
        )
        self.out.append(Send(view.name, issued))

    def _seed_of(self, group: LeasedGroup, index: int) -> int:
        if group.place is None:
            return sample_seed(self._settings.seed, group.group_id, index)
        return evaluation_seed(self._settings.seed, group.place, index)
