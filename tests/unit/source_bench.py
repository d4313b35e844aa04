"""A PromptSource on the bench: engines, keepers and the Buffer are played by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import actor_driver as drive
import msgspec

from penstock.actors.prompt_source.machine import PromptSource
from penstock.actors.prompt_source.options import PromptSourceOptions
from penstock.actors.prompt_source.settings import PromptSourceSettings
from penstock.messages.commands import FetchPrompts, Send
from penstock.messages.flow import (
    DemandGranted,
    GenerationClosed,
    GenerationProgressed,
    GrantSpan,
    SampleIssued,
    SettledState,
)
from penstock.messages.local import FetchedPrompt, PromptsFetched, Started
from penstock.messages.membership import (
    ActorEpoch,
    ActorLost,
    ActorReturned,
    EngineJoined,
    EngineLost,
    HeldLease,
    LeasesAsked,
    LeasesHeld,
    LeaseStage,
)
from penstock.messages.samples import Completed, InfraError, SampleKey
from penstock.messages.weights import EngineReady, VersionAnnounced

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.samples import Outcome, Part, Prompt

KEEPERS = ("scorer", "filter", "buffer")


class SourceBench:
    """A PromptSource, and those around it played by hand."""

    def __init__(
        self,
        *,
        epoch: int = 0,
        num_samples: int = 2,
        num_retries: int = 1,
        max_engine_losses: int = 2,
        shuffle: bool = False,
        num_rows: int = 100,
        seed: int = 7,
        salvages_responses: bool = True,
        routing: str = "prefix_affine",
        max_load: float = 1.5,
        recorded_engines: tuple[str, ...] = (),
        is_recorded: Callable[[int], bool] = lambda _: False,
        own_retries: Mapping[int, int] | None = None,
    ) -> None:
        self.driver = drive.Driver(
            PromptSource(
                PromptSourceSettings(
                    options=PromptSourceOptions(
                        num_retries=num_retries,
                        max_engine_losses=max_engine_losses,
                        lease_timeout_s=600.0,
                        census_timeout_s=2.0,
                        routing=routing,
                        max_load=max_load,
                    ),
                    epoch=epoch,
                    seed=seed,
                    num_rows=num_rows,
                    shuffle=shuffle,
                    samples_per_group=num_samples,
                    salvages_responses=salvages_responses,
                    recorded_engines=recorded_engines,
                )
            )
        )
        self.is_recorded = is_recorded
        """Of a row: whether it holds its responses."""
        self.own_retries = own_retries or {}
        """By row, of those that have a budget of their own."""
        self.epoch = epoch
        self.epochs: dict[str, int] = {}
        """Of those that are there."""
        self.slots: dict[str, int] = {}
        """Of engines."""

    @property
    def source(self) -> PromptSource:
        return self.driver.machine

    def hear(self, *events: Event) -> list[AnyCommand]:
        """Hand in events; what asks for prompts is answered at once."""
        commands: list[AnyCommand] = []
        for event in events:
            new = self.driver.hear(event)
            commands.extend(new)
            for fetch in drive.every(new, FetchPrompts):
                prompts = tuple(FetchedPrompt(r.group_id, self._prompt(r.row)) for r in fetch.requests)
                commands.extend(self.driver.hear(PromptsFetched(prompts=prompts)))
        return commands

    def _prompt(self, row: int) -> Prompt:
        return msgspec.structs.replace(
            drive.prompt(row), is_recorded=self.is_recorded(row), num_retries=self.own_retries.get(row)
        )

    def started(self, num_engines: int = 2, num_slots: int = 64) -> SourceBench:
        """The keepers are there and so many engines are ready."""
        for name in KEEPERS:
            self.returns(name)
        for index in range(num_engines):
            self.joins(f"engine/{index}", num_slots=num_slots)
        self.hear(Started(epoch=self.epoch))
        return self

    def returns(self, name: str, epoch: int = 0) -> list[AnyCommand]:
        self.epochs[name] = epoch
        return self.hear(ActorReturned(name=name, epoch=epoch))

    def joins(self, engine: str, epoch: int = 0, num_slots: int = 64) -> list[AnyCommand]:
        self.epochs[engine] = epoch
        self.slots[engine] = num_slots
        ready = EngineReady(engine=engine, engine_epoch=epoch, num_slots=num_slots)
        return self.hear(EngineJoined(name=engine, epoch=epoch), ready)

    def serves(self, engine: str, version: int) -> list[AnyCommand]:
        """An engine has swapped."""
        num_slots, epoch = self.slots[engine], self.epochs[engine]
        return self.hear(EngineReady(engine=engine, engine_epoch=epoch, num_slots=num_slots, version=version))

    def announced(self, version: int) -> list[AnyCommand]:
        return self.hear(VersionAnnounced(version=version, publish=version))

    def loses(self, name: str) -> list[AnyCommand]:
        epoch = self.epochs.pop(name)
        lost = EngineLost if name.startswith("engine/") else ActorLost
        return self.hear(lost(name=name, epoch=epoch))

    def grant(self, total: int, *, sequence: int = 0, floor: int = 0, min_version: int = 0) -> list[AnyCommand]:
        """Groups floor … total − 1 are granted and not settled."""
        span = GrantSpan(floor, total - floor, floor, min_version, min_version + 2)
        return self.hear(DemandGranted(total=total, spans=(span,), settled=SettledState(sequence, floor, ())))

    def closed(self, engine: str, key: SampleKey, outcome: Outcome | None = None, attempt: int = 0) -> list[AnyCommand]:
        """An engine is done with a sample; it completed unless told."""
        return self.hear(
            GenerationClosed(engine=engine, key=key, attempt=attempt, outcome=outcome or Completed(), num_tokens=4)
        )

    def failed(self, engine: str, key: SampleKey, attempt: int = 0) -> list[AnyCommand]:
        return self.closed(engine, key, InfraError(detail="out of memory"), attempt)

    def progressed(self, engine: str, key: SampleKey, from_token: int, chunk: Part, attempt: int = 0) -> None:
        num_tokens = from_token + chunk.num_tokens
        event = GenerationProgressed(
            engine=engine, key=key, attempt=attempt, from_token=from_token, chunk=chunk, num_tokens=num_tokens
        )
        assert self.hear(event) == []

    def answer(
        self,
        name: str,
        *leases: HeldLease,
        sequence: int = 0,
        census_round: int | None = None,
        epoch: int | None = None,
        asker_epoch: int | None = None,
    ) -> list[AnyCommand]:
        """A keeper answers the census; truthfully about round and epochs unless told."""
        return self.hear(
            LeasesHeld(
                actor=ActorEpoch(name, self.epochs.get(name, 0) if epoch is None else epoch),
                round=self.source.census.round if census_round is None else census_round,
                asker_epoch=self.epoch if asker_epoch is None else asker_epoch,
                settled_sequence=sequence,
                leases=leases,
            )
        )

    def answers(self, **leases: tuple[HeldLease, ...]) -> list[AnyCommand]:
        """Everyone who is there answers the census; ``engine_0`` stands for ``engine/0``."""
        commands: list[AnyCommand] = []
        for name in tuple(self.epochs):
            commands.extend(self.answer(name, *leases.get(name.replace("/", "_"), ())))
        return commands


def keys(commands: list[AnyCommand], to: str | None = None) -> list[tuple[int, int]]:
    """Group and index of every sample that is issued, in order."""
    return [(issued.key.group_id, issued.key.index) for issued in drive.sent(commands, SampleIssued, to)]


def asked(commands: list[AnyCommand]) -> list[str]:
    """Who is asked for leases."""
    return [send.to for send in drive.every(commands, Send) if isinstance(send.event, LeasesAsked)]


def held(
    group_id: int, index: int, stage: LeaseStage = LeaseStage.RUNNING, attempt: int = 0, num_tokens: int = 0
) -> HeldLease:
    return HeldLease(SampleKey(group_id, index), attempt, stage, num_tokens)
