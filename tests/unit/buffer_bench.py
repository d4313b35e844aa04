"""A Buffer on the bench: the Filter, the Learner and the WeightPublisher are played by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import actor_driver as drive

from penstock.actors.buffer.goals import Train
from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.pacing import PacingSettings
from penstock.actors.buffer.policies import BuiltinPolicy, RankedGroup, builtin_policy
from penstock.actors.buffer.settings import BufferSettings
from penstock.messages.flow import GroupAdmitted, GroupRejected
from penstock.messages.local import Started
from penstock.messages.samples import SampleEnd, SampleKey, TerminalState
from penstock.messages.training import (
    LearnerReady,
    OnStale,
    StepFinished,
    UpdateMode,
)
from penstock.messages.weights import VersionAnnounced

if TYPE_CHECKING:
    from penstock.actors.buffer.goals import Goal
    from penstock.actors.buffer.policies import StalenessPolicy
    from penstock.actors.buffer.settings import ElasticEngines
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.training import BatchReady

MANY = 10_000
NUM_SAMPLES = 2


class LatestFirst(BuiltinPolicy, frozen=True, kw_only=True):
    """A user's policy with the worst of all ranks."""

    def rank(self, group: RankedGroup) -> tuple[int, ...]:
        return (-group.deadline_version, -group.group_id)


class Bench:
    """A Buffer, and those around it played by hand."""

    def __init__(
        self,
        *,
        eta: int = 2,
        groups_per_batch: int = 2,
        num_steps: int = 100,
        target: int | None = MANY,
        max_concurrent: int | None = None,
        over_sampling: float = 1.0,
        num_prompts: int | None = None,
        max_requeues: int = 1,
        max_rejected_batches: int = 20,
        publish_every: int = 1,
        stop_after_failures: int = 0,
        on_stale: OnStale = OnStale.WAIT,
        policy: StalenessPolicy | None = None,
        goal: Goal = Train(),  # noqa: B008 - it is frozen
        engines: tuple[str, ...] = ("engine/0", "engine/1"),
        elastic: ElasticEngines | None = None,
    ) -> None:
        pacing = PacingSettings(
            num_steps=num_steps,
            groups_per_batch=groups_per_batch,
            target_outstanding=target,
            engine_capacity_groups=100,
            max_concurrent=max_concurrent,
            over_sampling=over_sampling,
        )
        buffer_settings = BufferSettings(
            pacing=pacing,
            samples_per_group=NUM_SAMPLES,
            engines=engines,
            elastic=elastic,
            num_prompts=num_prompts,
            publish_every=publish_every,
            max_requeues=max_requeues,
            max_rejected_batches=max_rejected_batches,
            stop_after_failures=stop_after_failures,
            goal=goal,
        )
        chosen = policy or builtin_policy(
            "fully_async", max_staleness=eta, update_mode=UpdateMode.IN_FLIGHT, on_stale=on_stale
        )
        self.driver = drive.Driver(Buffer(buffer_settings, chosen))
        self.commands: list[AnyCommand] = []
        """Of the last event."""

    @property
    def buffer(self) -> Buffer:
        return self.driver.machine

    def hear(self, *events: Event) -> list[AnyCommand]:
        self.commands = self.driver.hear(*events)
        return self.commands

    def started(self) -> Bench:
        """Version 0 is announced and the Learner is ready."""
        self.hear(Started(epoch=0), announced(0), LearnerReady(epoch=0, version=0))
        return self

    @property
    def granted(self) -> int:
        """Groups granted so far."""
        return self.buffer.books.grants.total

    @property
    def outstanding(self) -> int:
        return self.buffer.books.table.num_outstanding

    def admit(self, group_id: int, *spans: tuple[int, int]) -> list[AnyCommand]:
        """The Filter admits this group; its tokens are of the version that it was granted for, unless told."""
        tracked = self.buffer.books.table.get(group_id)
        version = 0 if tracked is None else tracked.min_version
        made = drive.group(group_id, *(spans or ((version, 4),)), size=NUM_SAMPLES)
        return self.hear(GroupAdmitted(group=made))

    def reject(self, group_id: int, cause: str = "zero_spread") -> list[AnyCommand]:
        return self.hear(GroupRejected(group_id=group_id, cause=cause, ended=ends(group_id, TerminalState.FILTERED)))

    @property
    def open_batch(self) -> BatchReady | None:
        """The batch that is out, as it would be offered now."""
        books, lease = self.buffer.books, self.buffer.books.open_lease
        return None if lease is None else self.buffer.learner.batch(lease, tuple(map(books.payload, lease.group_ids)))

    def batch(self) -> tuple[int, ...] | None:
        """Groups of the open batch."""
        opened = self.open_batch
        return None if opened is None else tuple(group.group_id for group in opened.groups)

    def receipt(self) -> StepFinished:
        opened = self.open_batch
        assert opened is not None
        ages = [opened.version - 1 - (group.oldest_version or 0) for group in opened.groups]
        return StepFinished(
            version=opened.version,
            group_ids=tuple(group.group_id for group in opened.groups),
            num_trained_tokens=1,
            max_staleness=max(ages),
        )

    def train(self) -> list[AnyCommand]:
        """The receipt of the open batch arrives."""
        return self.hear(self.receipt())

    def train_in_order(self, *, announces: bool = True) -> list[AnyCommand]:
        """Admit the oldest groups until there is a batch, train it, announce the version."""
        while self.open_batch is None:
            table = self.buffer.books.table
            self.admit(next(t.group_id for t in table.outstanding() if t.record is None))
        commands = self.train()
        if announces:
            commands = [*commands, *self.hear(announced(self.buffer.version))]
        return commands


def announced(version: int) -> VersionAnnounced:
    return VersionAnnounced(version=version, publish=version)


def ends(group_id: int, state: TerminalState) -> tuple[SampleEnd, ...]:
    return tuple(
        SampleEnd(key=SampleKey(group_id, index), state=state, cause="why", num_tokens=4)
        for index in range(NUM_SAMPLES)
    )


def states_of(bench: Bench) -> dict[tuple[str, str], int]:
    """Ended samples by state and cause."""
    return {(count.state, count.cause): count.num_samples for count in bench.buffer.books.accounts.balance().ended}
