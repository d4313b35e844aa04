"""The PromptSource: which prompt next, which engine gets it, and when a sample is issued again.

Invariants:

* Every group that is granted and not settled is here, with a lease for each of its samples once its prompt is read.
* A sample is issued again only after a census in which nobody held it, or after its attempt failed or stood still
  (``stuck.py``); never more often than its budget, which is its row's where that has one of its own.
* A sample goes to an engine that serves what keeps it within the bound by its deadline, or should in time
  (``routing.py``).
* A PromptSource that replaces another issues nothing before its first census is judged.
* An engine that is to leave is issued nothing more. What it hands back goes on elsewhere, at no cost to its retries
  (``leaving.py``).
* Groups of an evaluation are handled as those of training, but for their size, their seeds, and their turn at engines
  (``queues.py``). They have ids and a settled floor of their own, so none of training's are other ones for them.
* Row and seed of a sample are pure functions of the run's seed (``order.py``); where rows are chosen, the row is what
  the Buffer has recorded (``drawing.py``).

States: ``taking a census`` or ``issuing``.

| waits for | who ends it |
|---|---|
| prompts of granted groups | its backend, which reads them from memory; of groups that are pushed, whoever pushes |
| rows of granted groups, where they are chosen | its backend, within a deadline of its own; then the Buffer |
| an engine with room | ``EngineReady`` (the supervisor's start deadline), ``GenerationClosed`` |
| an engine with weights that a sample can use | the WeightPublisher, which stages the newest on every engine |
| the end of a lease | settlement; after ``lease_timeout_s`` without progress a census. When two of them find that it
  runs and stands still, it goes on elsewhere, or its engine is replaced if nothing moves there |
| the answers to a census | the keepers, asked again every ``census_timeout_s``; the supervisor replaces the silent |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never, final

from penstock.actors.first_failures import FirstFailures
from penstock.actors.prompt_source.census import Census, Inheritance
from penstock.actors.prompt_source.issuing import Issuing
from penstock.actors.prompt_source.leases import ISSUED, QUEUED, Lease, LeasedGroup, LeaseState, LeaseTable
from penstock.actors.prompt_source.leaving import LEAVING_TIMER, Leaving
from penstock.actors.prompt_source.policies import POLICIES
from penstock.actors.prompt_source.pools import EnginePools
from penstock.actors.prompt_source.prompts import Prompts
from penstock.actors.prompt_source.recovering import Recovering, is_outdated
from penstock.actors.prompt_source.stuck import find_stuck
from penstock.actors.prompt_source.waiting import census_waits, lease_waits
from penstock.actors.settled import KnownSettled
from penstock.messages.base import Metric
from penstock.messages.commands import Send, StartTimer
from penstock.messages.evaluation import EvaluationDue
from penstock.messages.flow import (
    DemandGranted,
    GenerationClosed,
    GenerationProgressed,
    RefillAsked,
    SamplesSettled,
)
from penstock.messages.local import PromptsFetched, RowsDrawn, Started, TimerFired
from penstock.messages.membership import (
    ActorEpoch,
    ActorLost,
    ActorReturned,
    EngineJoined,
    EngineLeaving,
    EngineLost,
    LeasesAsked,
    LeasesHeld,
    LineRestored,
)
from penstock.messages.names import BUFFER, FILTER, PROMPT_SOURCE, SCORER, is_engine
from penstock.messages.samples import (
    Cancelled,
    Completed,
    InfraError,
    PolicyError,
    SampleKey,
    Truncated,
    evaluation_place,
)
from penstock.messages.weights import EngineReady, VersionAnnounced

if TYPE_CHECKING:
    from penstock.actors.prompt_source.census import Found
    from penstock.actors.prompt_source.policies import RoutingPolicy
    from penstock.actors.prompt_source.settings import PromptSourceSettings
    from penstock.messages.commands import AnyCommand
    from penstock.messages.flow import SettledState
    from penstock.messages.inboxes import PromptSourceEvent
    from penstock.messages.membership import HeldLease
    from penstock.messages.waits import Wait

KEEPERS: Final = (SCORER, FILTER, BUFFER)
CENSUS_TIMER: Final = "census"
SWEEP_TIMER: Final = "sweep"


@final
class PromptSource:
    """The PromptSource's state machine."""

    def __init__(self, settings: PromptSourceSettings, routing: RoutingPolicy | None = None) -> None:
        """``routing``: the user's own, where the settings name one."""
        self.settings = settings
        options = settings.options
        if options.routing in POLICIES:
            routing = POLICIES[options.routing]()
        self.table = LeaseTable(
            EnginePools(
                recorded=settings.recorded_engines,
                is_affine=options.routing == "prefix_affine",
                max_load=options.max_load,
                num_generating=settings.num_generating,
                policy=routing,
            )
        )
        self.census = Census()
        self.issuing = Issuing(settings, self.table, self.census)
        self._recovering = Recovering(settings, self.table, self.issuing)
        self._members: dict[str, int] = {}
        self._settled = KnownSettled()
        self._prompts = Prompts(settings, self.table, self._settled)
        self._inherited = Inheritance()
        self._refills: tuple[SampleKey, ...] = ()
        self._may_issue = settings.epoch == 0
        self._lost_engines: set[str] = set()
        self._leaving = Leaving(self.table)
        self._failures = FirstFailures(PROMPT_SOURCE)

    @property
    def state(self) -> str:
        """For people."""
        return "issuing" if self._may_issue and not self.census.is_open else "taking a census"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Running totals of this incarnation."""
        return (
            Metric("prompt_source/issued", self.issuing.num_issued),
            Metric("prompt_source/reissued", self.issuing.num_reissued),
            Metric("prompt_source/salvaged_tokens", self.issuing.num_salvaged_tokens),
            Metric("prompt_source/lost_tokens", self.issuing.num_lost_tokens),
            *self._prompts.cursors(),
        )

    def leases(self) -> tuple[HeldLease, ...]:
        """Nothing: PromptSource asks the census, it does not answer it."""
        return ()

    def waits(self) -> tuple[Wait, ...]:
        """Census, engines, samples, prompts; see the table above."""
        return (*census_waits(self.census), *lease_waits(self.table, self._prompts.total))

    def handle(self, event: PromptSourceEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        match event:
            case GenerationProgressed():
                self._on_progress(event)
                return self.issuing.taken()  # the most frequent event; no place, queue or census is another after it
            case GenerationClosed():
                self._on_closed(event)
            case DemandGranted():
                self._on_settled(event.settled)
                self._out.extend(self._prompts.demanded(event))
            case EvaluationDue():
                self._on_settled(event.settled)
                if event.evaluation is not None:
                    self._out.extend(self._prompts.evaluated(event.evaluation))
            case SamplesSettled():
                self._on_settled(event.settled)
            case PromptsFetched():
                for fetched in event.prompts:
                    if (group := self.table.groups.get(fetched.group_id)) is not None:
                        group.prompt = fetched.prompt
                        self._open_leases(group)
                self._open_refills()
            case RowsDrawn():
                if self._prompts.drawing is not None:
                    self._prompts.drawing.drawn(event.rows)
                    self._out.extend(self._prompts.drawing.commands())
            case RefillAsked():
                self._refills = event.missing
                self._open_refills()
            case EngineReady():
                self._on_ready(event)
            case VersionAnnounced():
                self.table.router.announced(event.version)
                self._out.extend(self._prompts.announced(event.version))
            case LeasesHeld():
                self.census.answered(event, self.settings.epoch)
            case EngineJoined() | ActorReturned():
                self._on_joined(event.name, event.epoch)
            case LineRestored():
                if event.name in self._members and (is_engine(event.name) or event.name in KEEPERS):
                    self._take_census()  # samples that were on their way to it are nowhere now
            case EngineLost() | ActorLost():
                self._on_lost(event.name, event.epoch)
            case EngineLeaving():
                self._leaving.begin(event.name, event.epoch)
            case Started():
                self._out.append(StartTimer(SWEEP_TIMER, self.settings.options.lease_timeout_s / 2))
                if not self._may_issue:
                    self._take_census()
            case TimerFired():
                self._on_timer(event.key)
            case _:
                assert_never(event)
        self._judge()
        if not self.census.is_open and self._leaving.wants_census():
            self._take_census()
        if self._may_issue:
            self.issuing.dispatch()
        return self.issuing.taken()

    @property
    def _out(self) -> list[AnyCommand]:
        return self.issuing.out

    # --- groups and prompts -----------------------------------------------------------------------------------

    def _open_leases(self, group: LeasedGroup) -> None:
        """Leases for the samples of a group: those that a census found elsewhere are adopted, the others queued."""
        if not self._may_issue:
            return  # opened when the census is judged
        found = self._inherited.of(group.group_id)
        for index in sorted({*range(self.issuing.size_of(group)), *found}):
            if index not in group.leases:
                self._open_lease(group, index, found.get(index))

    def _open_lease(self, group: LeasedGroup, index: int, found: Found | None = None) -> None:
        lease = group.leases[index] = Lease(SampleKey(group.group_id, index), sweep=self.issuing.sweep)
        if found is None:
            self.issuing.first(group, lease)
        else:
            self._recovering.adopt(group, lease, *found)
            for event in self._inherited.progress_of(lease.key):
                self._take_progress(lease, event)

    def _on_settled(self, state: SettledState) -> None:
        newly = tuple(self._settled.newly(state, self.table.groups))
        self.table.forget(newly)
        self.issuing.forget(newly)
        self._inherited.forget(self._settled)
        self._out.extend(self._prompts.settled())

    def _open_refills(self) -> None:
        """Leases for the replacements that the Filter misses, as soon as their groups are here."""
        if not self._may_issue:
            return
        for key in self._refills:
            group = self.table.groups.get(key.group_id)
            if group is not None and group.prompt is not None and key.index not in group.leases:
                self._open_lease(group, key.index)

    # --- leases -----------------------------------------------------------------------------------------------

    def _on_progress(self, event: GenerationProgressed) -> None:
        lease = self.table.lease(event.key)
        self.table.router.progressed(event.engine, self.issuing.sweep)
        if lease is not None:
            self._take_progress(lease, event)
        elif event.key.group_id not in self._settled:
            self._inherited.progressed(event)

    def _take_progress(self, lease: Lease, event: GenerationProgressed) -> None:
        if event.attempt == lease.attempt:
            lease.sweep = self.issuing.sweep
            lease.has(event.num_tokens)
            lease.add_progress(event.from_token, event.chunk)

    def _on_ready(self, event: EngineReady) -> None:
        self.table.router.ready(event, self.issuing.sweep)

    def _on_closed(self, event: GenerationClosed) -> None:
        group, lease = self.table.groups.get(event.key.group_id), self.table.lease(event.key)
        self.table.router.progressed(event.engine, self.issuing.sweep)
        if group is None or lease is None or event.attempt < lease.attempt:
            return
        if lease.state is not ISSUED and lease.state is not QUEUED:
            return
        lease.catch_up(event.attempt)
        lease.sweep = self.issuing.sweep
        match event.outcome:
            case Completed() | Truncated() | PolicyError():
                lease.forget_response()
                self.table.move(lease, LeaseState.LEFT)
            case InfraError(detail=detail):
                self._out.extend(self._failures.hear(f"sample {lease.key} on {event.engine}", detail))
                self.issuing.failed(group, lease, detail, event.num_tokens)
            case Cancelled():
                self.issuing.handed_back(lease, event.num_tokens)

    # --- membership and census --------------------------------------------------------------------------------

    def _on_joined(self, name: str, epoch: int) -> None:
        if self._members.get(name, -1) >= epoch:
            return
        self._members[name] = epoch
        if is_engine(name):
            self.table.join_engine(name, epoch)
        if is_engine(name) or name in KEEPERS:
            self.census.joined(name, epoch)
            self._ask()

    def _on_lost(self, name: str, epoch: int) -> None:
        if self._members.get(name, -1) != epoch:
            return
        del self._members[name]
        if is_engine(name):
            self.table.lose_engine(name)
            if not self._leaving.gone(name):
                self._lost_engines.add(name)
        if is_engine(name) or name in KEEPERS:
            self._take_census()

    def _take_census(self) -> None:
        members = {name: epoch for name, epoch in self._members.items() if is_engine(name) or name in KEEPERS}
        self.census.open(members, KEEPERS)
        self._ask()

    def _ask(self) -> None:
        if not self.census.is_open:
            return
        members = tuple(ActorEpoch(name, epoch) for name, epoch in self._members.items())
        asked = LeasesAsked(round=self.census.round, members=members, with_prefixes=not self._may_issue)
        self._out.extend(Send(name, asked) for name in self.census.missing())
        self._out.append(StartTimer(CENSUS_TIMER, self.settings.options.census_timeout_s))

    def _on_timer(self, key: str) -> None:
        if key == CENSUS_TIMER:
            self._ask()
            return
        if key == LEAVING_TIMER:
            self._leaving.look_again()
            return
        self.issuing.sweep += 1
        self._out.append(StartTimer(SWEEP_TIMER, self.settings.options.lease_timeout_s / 2))
        if self.census.is_open:
            return  # restarted by every sweep, one that is slower than they are would never end
        last = self.issuing.sweep - 1
        if any(lease.sweep < last and lease.state is not QUEUED for _, lease in self.table.all_leases()):
            self._take_census()

    def _judge(self) -> None:
        """If the census is complete: adopt what somebody holds, issue again what nobody does."""
        if not self.census.is_complete(self._settled.sequence):
            return
        held = self.census.close()
        lost, self._lost_engines = self._lost_engines, set()
        self._out.extend(self._leaving.judged(held, self._settled))
        if not self._may_issue:
            self._may_issue = True
            self._inherited.take(held)
            for group in self.table.groups.values():
                if group.prompt is not None:
                    self._open_leases(group)
            self._open_refills()
            return
        self._inherited.confirm(held)
        missing: list[tuple[LeasedGroup, Lease]] = []
        for group, lease in list(self.table.all_leases()):
            found = held.get(lease.key)
            if found is not None and not is_outdated(lease, found[1]):
                self._recovering.adopt(group, lease, *found)
            elif lease.round < self.census.round and lease.state in (LeaseState.ISSUED, LeaseState.LEFT):
                missing.append((group, lease))
        self._recovering.revoke_again(self.census.requests())
        self._recovering.reissue(missing, lost)
        for engine in find_stuck(self.table, self.issuing.sweep):
            self._recovering.give_up_stuck(engine)

    def validate(self) -> None:
        """Assert the invariants."""
        self.table.validate()
        if self._prompts.drawing is not None:
            self._prompts.drawing.validate()
        for group in self.table.groups.values():
            assert group.group_id not in self._settled
            if group.place is None:
                assert 0 <= group.group_id < self._prompts.total
            else:
                assert evaluation_place(group.group_id) < self._prompts.next_place
            for lease in group.leases.values():
                assert lease.attempt <= group.num_retries(self.settings.options.num_retries) + lease.num_vanished, lease
                assert lease.num_engine_losses <= self.settings.options.max_engine_losses + 1, lease
                if lease.engine:
                    is_known = lease.engine in self.settings.recorded_engines
                    assert group.prompt is not None, lease
                    assert group.prompt.is_recorded == is_known, lease
