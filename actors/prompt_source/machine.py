"""The PromptSource: which prompt next, which engine gets it, and when a sample is issued again.

Invariants:

* Every group that is granted and not settled is here, with a lease for each of its samples once its prompt is read.
* A sample is issued again only after a census in which nobody held it, or after its attempt failed or stood still
  (``stuck.py``); never more often than its budget, which is its row's where that has one of its own.
* A PromptSource that replaces another issues nothing before its first census is judged.
* Groups of an evaluation are handled as those of training, but for their size, their seeds, and their turn at engines
  (``queues.py``). They have ids and a settled floor of their own, so none of training's are other ones for them.
* Row and seed of a sample are pure functions of the run's seed (``order.py``); where rows are chosen, the row is what
  the Buffer has recorded (``drawing.py``).

States: ``taking a census`` or ``issuing``.

| waits for | who ends it |
|---|---|
| prompts of granted groups | its backend, which reads them from memory |
| rows of granted groups, where they are chosen | its backend, within a deadline of its own; then the Buffer |
| an engine with room | ``EngineReady`` (the supervisor's start deadline), ``GenerationClosed`` |
| the end of a lease | settlement; after ``lease_timeout_s`` without progress a census. When two of them find that it
  runs and stands still, it goes on elsewhere, or its engine is replaced if nothing moves there |
| the answers to a census | the keepers, asked again every ``census_timeout_s``; the supervisor replaces the silent |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never, final

from penstock.actors.first_failures import FirstFailures
from penstock.actors.prompt_source.census import Census, Inheritance
from penstock.actors.prompt_source.drawing import RowDrawing
from penstock.actors.prompt_source.leases import Lease, LeasedGroup, LeaseState, LeaseTable
from penstock.actors.prompt_source.order import PromptOrder, evaluation_seed, sample_seed
from penstock.actors.prompt_source.pools import EnginePools
from penstock.actors.prompt_source.queues import KINDS, Queues
from penstock.actors.prompt_source.stuck import find_stuck, note_running
from penstock.actors.prompt_source.waiting import census_waits, lease_waits
from penstock.actors.settled import KnownSettled
from penstock.messages.base import Metric
from penstock.messages.commands import FetchPrompts, PromptRequest, ReplaceActor, Send, StartTimer
from penstock.messages.evaluation import EvaluationDue
from penstock.messages.flow import (
    DemandGranted,
    GenerationClosed,
    GenerationProgressed,
    RefillAsked,
    SampleFailed,
    SampleIssued,
    SampleRevoked,
    SamplesSettled,
)
from penstock.messages.local import PromptsFetched, RowsDrawn, Started, TimerFired
from penstock.messages.membership import (
    ActorEpoch,
    ActorLost,
    ActorReturned,
    EngineJoined,
    EngineLost,
    LeasesAsked,
    LeasesHeld,
    LeaseStage,
    LineRestored,
)
from penstock.messages.names import BUFFER, FILTER, PROMPT_SOURCE, SCORER, SUPERVISOR, is_engine
from penstock.messages.rows import RowSource
from penstock.messages.samples import Cancelled, InfraError, Purpose, SampleKey, evaluation_place
from penstock.messages.training import NoticeGiven
from penstock.messages.weights import EngineReady, VersionAnnounced

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterator

    from penstock.actors.prompt_source.census import Found
    from penstock.actors.prompt_source.routing import EngineView
    from penstock.actors.prompt_source.settings import PromptSourceSettings
    from penstock.actors.prompt_source.stuck import StuckEngine
    from penstock.messages.commands import AnyCommand
    from penstock.messages.evaluation import Evaluation
    from penstock.messages.flow import GrantSpan, SettledState
    from penstock.messages.inboxes import PromptSourceEvent
    from penstock.messages.membership import HeldLease
    from penstock.messages.waits import Wait

KEEPERS: Final = frozenset((SCORER, FILTER, BUFFER))
CENSUS_TIMER: Final = "census"
SWEEP_TIMER: Final = "sweep"


@final
class PromptSource:
    """The PromptSource's state machine."""

    def __init__(self, settings: PromptSourceSettings) -> None:
        self.settings = settings
        is_affine = settings.routing == "prefix_affine"
        self.table = LeaseTable(
            EnginePools(recorded=settings.recorded_engines, is_affine=is_affine, max_load=settings.max_load)
        )
        self.census = Census()
        self.num_issued = 0
        """Samples issued for the first time, by this incarnation."""
        self.num_reissued = 0
        self.num_salvaged_tokens = 0
        """That another attempt went on from."""
        self.num_lost_tokens = 0
        """That a failed attempt had made and not reported."""
        self._members: dict[str, int] = {}
        self._order = PromptOrder(
            settings.sources or (RowSource(name="", num_rows=settings.num_rows),),
            seed=settings.seed,
            shuffle=settings.shuffle,
        )
        self._drawing = RowDrawing(self._order.row_of) if settings.chooses_rows else None
        self._num_asked = 0
        """The first place in the stream of prompts that no group has had."""
        self._num_named = 0
        """The first place whose row has not been named to the backend."""
        self._total = 0
        self._settled = KnownSettled()
        self._next_place = 0
        """The first place of an evaluation that has never been heard of."""
        self._queues = Queues(settings.max_evaluating)
        self._inherited = Inheritance()
        self._refills: tuple[SampleKey, ...] = ()
        self._may_issue = settings.epoch == 0
        self._lost_engines: set[str] = set()
        self._sweep = 0
        self._failures = FirstFailures(PROMPT_SOURCE)
        self._out: list[AnyCommand] = []

    @property
    def state(self) -> str:
        """For people."""
        return "issuing" if self._may_issue and not self.census.is_open else "taking a census"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Running totals of this incarnation."""
        return (
            Metric("prompt_source/issued", self.num_issued),
            Metric("prompt_source/reissued", self.num_reissued),
            Metric("prompt_source/salvaged_tokens", self.num_salvaged_tokens),
            Metric("prompt_source/lost_tokens", self.num_lost_tokens),
            *self._cursors(),
        )

    def _cursors(self) -> Iterator[Metric]:
        """How far each source of a mixture has been gone through."""
        for source, count in zip(self.settings.sources, self._order.counts(self._num_asked), strict=False):
            yield Metric(f"data/{source.name}/prompts", count)

    def leases(self) -> tuple[HeldLease, ...]:
        """Nothing: PromptSource asks the census, it does not answer it."""
        return ()

    def waits(self) -> tuple[Wait, ...]:
        """Census, engines, samples, prompts; see the table above."""
        return (*census_waits(self.census), *lease_waits(self.table, self._total))

    def handle(self, event: PromptSourceEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        match event:
            case DemandGranted():
                self._on_settled(event.settled)
                self._on_demand(event)
            case EvaluationDue():
                self._on_settled(event.settled)
                if event.evaluation is not None:
                    self._on_evaluation(event.evaluation)
            case SamplesSettled():
                self._on_settled(event.settled)
            case PromptsFetched():
                for fetched in event.prompts:
                    if (group := self.table.groups.get(fetched.group_id)) is not None:
                        group.prompt = fetched.prompt
                        self._open_leases(group)
                self._open_refills()
            case RowsDrawn():
                if self._drawing is not None:
                    self._drawing.drawn(event.rows)
                    self._out.extend(self._drawing.commands())
            case GenerationProgressed():
                self._on_progress(event)
            case GenerationClosed():
                self._on_closed(event)
            case RefillAsked():
                self._refills = event.missing
                self._open_refills()
            case EngineReady():
                self.table.router.ready(event.engine, event.engine_epoch, event.num_slots, self._sweep)
            case VersionAnnounced():
                self.table.router.serves(event.serving)
            case LeasesHeld():
                self.census.answered(event, self.settings.epoch)
            case EngineJoined() | ActorReturned():
                self._on_joined(event.name, event.epoch)
            case LineRestored():
                if event.name in self._members and (is_engine(event.name) or event.name in KEEPERS):
                    self._take_census()  # samples that were on their way to it are nowhere now
            case EngineLost() | ActorLost():
                self._on_lost(event.name, event.epoch)
            case Started():
                self._out.append(StartTimer(SWEEP_TIMER, self.settings.lease_timeout_s / 2))
                if not self._may_issue:
                    self._take_census()
            case TimerFired():
                self._on_timer(event.key)
            case _:
                assert_never(event)
        self._judge()
        self._dispatch()
        out, self._out = self._out, []
        return out

    # --- groups and prompts -----------------------------------------------------------------------------------

    def _on_demand(self, event: DemandGranted) -> None:
        requests = [request for span in event.spans for request in self._new_groups(span)]
        self._total = max(self._total, event.total)
        if self._drawing is not None:
            requests = self._drawing.heard(event, (request.group_id for request in requests))
            self._out.extend(self._drawing.commands())
        if requests:
            self._out.append(FetchPrompts(tuple(requests), self._rows_ahead()))

    def _new_groups(self, span: GrantSpan) -> list[PromptRequest]:
        """What is below the total was in an earlier snapshot: it is here already, or settled."""
        requests: list[PromptRequest] = []
        for offset in range(max(0, self._total - span.first_group), span.num_groups):
            group_id, ordinal = span.first_group + offset, span.first_ordinal + offset
            if group_id in self._settled:
                continue
            self.table.groups[group_id] = LeasedGroup(group_id, ordinal, span.min_version, span.deadline_version)
            requests.append(PromptRequest(group_id, *self._order.row_of(ordinal)))
            self._num_asked = max(self._num_asked, ordinal + 1)
        return requests

    def _on_evaluation(self, evaluation: Evaluation) -> None:
        """What comes before the next place was in an earlier snapshot: it is here already, or settled."""
        requests: list[PromptRequest] = []
        for place in evaluation.places(self._next_place):
            if place.group_id in self._settled:
                continue
            versions = (evaluation.version, evaluation.deadline_version)
            group = LeasedGroup(place.group_id, place.row, *versions, place=place)
            self.table.add_evaluation(group)
            requests.append(PromptRequest(place.group_id, place.row, 0, place.dataset))
        self._next_place = max(self._next_place, evaluation.first_place + evaluation.num_groups)
        if requests:
            self._out.append(FetchPrompts(tuple(requests)))

    def _size_of(self, group: LeasedGroup) -> int:
        """Samples that are drawn for it, those in place of failed ones aside."""
        return self.settings.samples_per_group if group.place is None else group.place.samples_per_prompt

    def _rows_ahead(self) -> tuple[int, ...]:
        """Rows that will be wanted next and have not been named yet."""
        first = max(self._num_asked, self._num_named)
        self._num_named = max(first, self._num_asked + self.settings.prefetch_rows)
        return tuple(self._order.row_of(ordinal)[0] for ordinal in range(first, self._num_named))

    def _open_leases(self, group: LeasedGroup) -> None:
        """Leases for the samples of a group: those that a census found elsewhere are adopted, the others queued."""
        if not self._may_issue:
            return  # opened when the census is judged
        found = self._inherited.of(group.group_id)
        for index in sorted({*range(self._size_of(group)), *found}):
            if index not in group.leases:
                self._open_lease(group, index, found.get(index))

    def _open_lease(self, group: LeasedGroup, index: int, found: Found | None = None) -> None:
        lease = group.leases[index] = Lease(SampleKey(group.group_id, index), sweep=self._sweep)
        if found is None:
            self.num_issued += 1
            self._queue_of(group).append(lease.key)
        else:
            lease.round = self._inherited.round
            self._adopt(group, lease, *found)
            for event in self._inherited.progress_of(lease.key):
                self._take_progress(lease, event)

    def _on_settled(self, state: SettledState) -> None:
        self.table.forget(self._settled.newly(state, self.table.groups))
        self._inherited.forget(self._settled)
        if self._drawing is not None:
            self._drawing.keep(self.table.groups)

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
        self.table.router.progressed(event.engine, self._sweep)
        if lease is not None:
            self._take_progress(lease, event)
        elif event.key.group_id not in self._settled:
            self._inherited.progressed(event)

    def _take_progress(self, lease: Lease, event: GenerationProgressed) -> None:
        if event.attempt == lease.attempt:
            lease.sweep = self._sweep
            lease.has(event.num_tokens)
            lease.add_progress(event.from_token, event.chunk)

    def _on_closed(self, event: GenerationClosed) -> None:
        group, lease = self.table.groups.get(event.key.group_id), self.table.lease(event.key)
        self.table.router.progressed(event.engine, self._sweep)
        if group is None or lease is None or event.attempt < lease.attempt:
            return
        if lease.state not in (LeaseState.ISSUED, LeaseState.QUEUED):
            return
        lease.catch_up(event.attempt)
        lease.sweep = self._sweep
        match event.outcome:
            case InfraError(detail=detail):
                self._out += self._failures.hear(f"sample {lease.key} on {event.engine}", detail)
                self._on_failure(group, lease, detail, event.num_tokens)
            case Cancelled():
                pass  # asked for by a settlement; the lease ends with it
            case _:
                lease.forget_response()
                self.table.move(lease, LeaseState.LEFT)

    def _on_failure(self, group: LeasedGroup, lease: Lease, reason: str, num_tokens: int) -> None:
        """``num_tokens``: that the attempt had made, as far as anybody knows."""
        self.num_lost_tokens += max(0, num_tokens - lease.num_tokens)
        if lease.attempt < group.num_retries(self.settings.num_retries) + lease.num_vanished:
            if num_tokens > lease.num_at_issue and lease.avoids != lease.engine:
                self.table.note_cache(lease)
            else:
                lease.avoids, lease.cache = lease.engine or lease.avoids, None
                if group.engine == lease.engine:
                    group.engine = ""  # the others of the group may have better luck elsewhere too
            self._issue_again(lease)
        else:
            self._give_up(group, lease, f"{reason} ({lease.attempt + 1} attempts)")

    def _issue_again(self, lease: Lease) -> None:
        lease.attempt += 1
        self.num_reissued += 1
        if not self.settings.salvages_responses:
            num_known = lease.num_tokens
            lease.back_to_save_point()
            self.num_lost_tokens += num_known - lease.num_tokens
        self.num_salvaged_tokens += lease.num_tokens
        lease.running_since = None
        self.table.move(lease, LeaseState.QUEUED)
        self._queue_of(self.table.groups[lease.key.group_id]).appendleft(
            lease.key
        )  # its group is older than what has never been issued

    def _give_up(self, group: LeasedGroup, lease: Lease, reason: str) -> None:
        assert group.prompt is not None
        self.table.move(lease, LeaseState.FAILED)
        failed = SampleFailed(
            key=lease.key,
            attempt=lease.attempt,
            group_size=self._size_of(group),
            purpose=group.purpose,
            prompt=group.prompt,
            reason=reason,
            num_tokens=lease.num_tokens,
        )
        self._out.append(Send(SCORER, failed))

    def _queue_of(self, group: LeasedGroup) -> deque[SampleKey]:
        assert group.prompt is not None, "leases are opened once the prompt is read"
        return self._queues.of(group.purpose, is_recorded=group.prompt.is_recorded)

    def _dispatch(self) -> None:
        """Send queued samples to engines, in the order of their turns, as long as there is room."""
        for is_recorded in KINDS if self._may_issue else ():
            stuck: set[Purpose] = set()
            while self.table.router.has_room(is_recorded=is_recorded):
                heads = {purpose: head for purpose in Purpose if (head := self._head(purpose, is_recorded)) is not None}
                if not heads:
                    break
                state = (self.table.num_evaluating, self.table.has_training)
                purpose = self._queues.turn(heads, stuck, num_evaluating=state[0], has_training=state[1])
                if purpose is None:
                    break
                view = self.table.choose_engine(*heads[purpose])
                if view is None or not self._queues.suits(
                    view, purpose, num_evaluating=state[0], has_training=state[1]
                ):
                    stuck.add(purpose)
                    continue
                self._queues.of(purpose, is_recorded=is_recorded).popleft()
                self._issue(*heads[purpose], view)

    def _head(self, purpose: Purpose, is_recorded: bool) -> tuple[LeasedGroup, Lease] | None:
        """The first that waits; what was settled or queued twice leaves the queue."""
        queue = self._queues.of(purpose, is_recorded=is_recorded)
        while queue:
            group, lease = self.table.groups.get(queue[0].group_id), self.table.lease(queue[0])
            if group is None or lease is None or group.prompt is None or lease.state is not LeaseState.QUEUED:
                queue.popleft()
                continue
            return group, lease
        return None

    def _issue(self, group: LeasedGroup, lease: Lease, view: EngineView) -> None:
        assert group.prompt is not None
        key = lease.key
        group.engine = view.name
        lease.round, lease.sweep = self.census.round, self._sweep
        lease.num_seen = lease.num_at_issue = lease.num_tokens
        lease.running_since = None
        self.table.move(lease, LeaseState.ISSUED, view.name)
        issued = SampleIssued(
            key=key,
            attempt=lease.attempt,
            group_size=self._size_of(group),
            purpose=group.purpose,
            prompt=group.prompt,
            seed=self._seed_of(group, key.index),
            min_version=group.min_version,
            deadline_version=group.deadline_version,
            prefix=lease.prefix(),
        )
        self._out.append(Send(view.name, issued))

    def _seed_of(self, group: LeasedGroup, index: int) -> int:
        if group.place is None:
            return sample_seed(self.settings.seed, group.group_id, index)
        return evaluation_seed(self.settings.seed, group.place, index)

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
            self._lost_engines.add(name)
        if is_engine(name) or name in KEEPERS:
            self._take_census()

    def _take_census(self) -> None:
        members = {name: epoch for name, epoch in self._members.items() if is_engine(name) or name in KEEPERS}
        self.census.open(members, set(KEEPERS))
        self._ask()

    def _ask(self) -> None:
        if not self.census.is_open:
            return
        members = tuple(ActorEpoch(name, epoch) for name, epoch in self._members.items())
        asked = LeasesAsked(round=self.census.round, members=members, with_prefixes=not self._may_issue)
        self._out.extend(Send(name, asked) for name in self.census.missing())
        self._out.append(StartTimer(CENSUS_TIMER, self.settings.census_timeout_s))

    def _on_timer(self, key: str) -> None:
        if key == CENSUS_TIMER:
            self._ask()
            return
        self._sweep += 1
        self._out.append(StartTimer(SWEEP_TIMER, self.settings.lease_timeout_s / 2))
        waits = (LeaseState.ISSUED, LeaseState.LEFT, LeaseState.FAILED)
        if any(lease.sweep < self._sweep - 1 and lease.state in waits for _, lease in self.table.all_leases()):
            self._take_census()

    def _judge(self) -> None:
        """If the census is complete: adopt what somebody holds, issue again what nobody does."""
        if not self.census.is_complete(self._settled.sequence):
            return
        held = self.census.close()
        lost, self._lost_engines = self._lost_engines, set()
        if not self._may_issue:
            self._may_issue = True
            self._inherited.take(held, self.census.round)
            for group in self.table.groups.values():
                if group.prompt is not None:
                    self._open_leases(group)
            self._open_refills()
            return
        self._inherited.confirm(held, self.census.round)
        missing: list[tuple[LeasedGroup, Lease]] = []
        for group, lease in list(self.table.all_leases()):
            found = held.get(lease.key)
            if found is not None and not _is_outdated(lease, found[1]):
                self._adopt(group, lease, *found)
            elif lease.round < self.census.round and lease.state in (LeaseState.ISSUED, LeaseState.LEFT):
                missing.append((group, lease))
        self._reissue(missing, lost)
        for engine in find_stuck(self.table, self._sweep):
            self._on_stuck(engine)

    def _adopt(self, group: LeasedGroup, lease: Lease, holder: str, found: HeldLease) -> None:
        if found.attempt < lease.attempt:
            return
        # What has left its engine, or has failed there, since that engine answered, stays as it is.
        is_open = lease.state in (LeaseState.ISSUED, LeaseState.QUEUED)
        lease.catch_up(found.attempt)
        lease.sweep = self._sweep
        if is_open:
            lease.found_prefix(found.prefix)
        if found.stage is LeaseStage.FAILED:
            if is_open or lease.state is LeaseState.LEFT:  # left: word of the failure was lost with whoever had it
                self._on_failure(group, lease, "generation failed", found.num_tokens)
        elif is_engine(holder) and found.stage is not LeaseStage.PASSED_ON:
            if is_open:
                self.table.move(lease, LeaseState.ISSUED, holder)
                note_running(lease, found, self._sweep)
        elif lease.state is not LeaseState.FAILED:
            self.table.move(lease, LeaseState.LEFT)

    def _reissue(self, missing: list[tuple[LeasedGroup, Lease]], lost: set[str]) -> None:
        saved = self.num_salvaged_tokens
        for group, lease in reversed(missing):  # each goes to the front of the queue
            self._reissue_missing(group, lease, was_on_lost=lease.engine in lost)
        if missing:
            where = f" of {', '.join(sorted(lost))}" if lost else ""
            self._notice(f"{len(missing)} samples{where} go on elsewhere", self.num_salvaged_tokens - saved)

    def _on_stuck(self, stuck: StuckEngine) -> None:
        """One of several that hang goes on elsewhere; an engine where nothing moves at all is given up."""
        engine, count, period_s = stuck.view, len(stuck.leases), self.settings.lease_timeout_s
        if not stuck.does_something:
            for _, lease in stuck.leases:
                lease.running_since = None  # its successor, or a later census, begins anew
            self._out.append(
                ReplaceActor(engine.name, engine.epoch, f"no progress on {count} samples for {period_s:g} s")
            )
            return
        saved = self.num_salvaged_tokens
        for group, lease in reversed(stuck.leases):
            self._out.append(Send(engine.name, SampleRevoked(key=lease.key, attempt=lease.attempt)))
            lease.avoids = engine.name
            self._on_failure(group, lease, f"no progress for {period_s:g} s", lease.num_seen)
        self._notice(
            f"{count} samples of {engine.name} stood still and go on elsewhere", self.num_salvaged_tokens - saved
        )

    def _reissue_missing(self, group: LeasedGroup, lease: Lease, *, was_on_lost: bool) -> None:
        lease.num_vanished += 1
        lease.num_engine_losses += was_on_lost
        if not was_on_lost and lease.num_tokens > lease.num_at_issue:
            self.table.note_cache(lease)
        if lease.num_engine_losses > self.settings.max_engine_losses:
            self._give_up(group, lease, f"{lease.num_engine_losses} engines died with it")
        else:
            self._issue_again(lease)

    def _notice(self, text: str, num_saved: int) -> None:
        text += f", {num_saved:,} tokens saved" if num_saved else ""
        self._out.append(Send(SUPERVISOR, NoticeGiven(name=PROMPT_SOURCE, text=text)))

    def validate(self) -> None:
        """Assert the invariants."""
        self.table.validate()
        if self._drawing is not None:
            self._drawing.validate()
        for group in self.table.groups.values():
            assert group.group_id not in self._settled
            if group.place is None:
                assert 0 <= group.group_id < self._total
            else:
                assert evaluation_place(group.group_id) < self._next_place
            for lease in group.leases.values():
                assert lease.attempt <= group.num_retries(self.settings.num_retries) + lease.num_vanished, lease
                assert lease.num_engine_losses <= self.settings.max_engine_losses + 1, lease
                if lease.engine:
                    is_known = lease.engine in self.settings.recorded_engines
                    assert group.prompt is not None, lease
                    assert group.prompt.is_recorded == is_known, lease


def _is_outdated(lease: Lease, found: HeldLease) -> bool:
    """Whether this is only the record of an attempt that failed before the current one: nobody works on it."""
    return found.stage is LeaseStage.FAILED and found.attempt < lease.attempt
