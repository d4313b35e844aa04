# ruff: noqa: ANN401 - what stands in for a rule takes whatever the rule took
"""The rules of the protocol, each with the schedules that break without it.

A test runs a family of small trials under the oracle: with the rule none may fail, and with the rule taken out some
must. A family that no longer breaks without its rule says nothing, so that is a failure too. ``docs/protocol.md`` has
all rules; those of other tests too.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import pytest
from trials import source_watch
from trials.faults import Fault, FaultKind, inject
from trials.fuzz import NeedlessError, TrialRun, run_trial, several
from trials.requests import Request
from trials.trial import Trial

from penstock.actors.buffer import batching, machine, selection
from penstock.actors.buffer.admission import Admission
from penstock.actors.buffer.grants import Grants
from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.filter.assembly import Assembly
from penstock.actors.filter.machine import Filter
from penstock.actors.prompt_source.census import Census
from penstock.actors.prompt_source.machine import PromptSource
from penstock.actors.prompt_source.recovering import Recovering
from penstock.backends.engines.options import LatencyOptions
from penstock.backends.learners.options import SimulatedLearnerOptions
from penstock.backends.simulated.rewards import JudgingModel
from penstock.messages.commands import Generate, Send
from penstock.messages.flow import GrantSpan, SampleGenerated, SampleIssued
from penstock.messages.ledger import GroupRecorded, PauseRecorded, PolicyRecorded, VersionRecorded
from penstock.messages.local import WeightsSwapped
from penstock.messages.membership import EngineLost, LeasesAsked
from penstock.messages.names import BUFFER, FILTER, LEARNER, PROMPT_SOURCE, SCORER, WEIGHT_PUBLISHER, is_engine
from penstock.messages.operator import GrantsPaused, OperatorAnswered, PolicyChanged, SaveAsked
from penstock.messages.samples import Group, SampleKey, TerminalState
from penstock.messages.training import NoticeGiven, OnStale, UpdateMode
from penstock.messages.weights import WeightsApplied, WeightsCommitted
from penstock.runtime.hosts.virtual.host import IdleWatcher
from penstock.runtime.hosts.virtual.links import LinkModel
from penstock.runtime.hosts.virtual.process import Status
from penstock.runtime.hosts.virtual.supervisor import SupervisionModel
from penstock.runtime.shell.delivery import Delivery
from penstock.runtime.shell.membership import Membership
from penstock.runtime.shell.shell import Shell

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from contextlib import AbstractContextManager

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process

NUM_GOOD = 10
NEVER = 1e6
"""A lease timeout that heals nothing, so that only the rule in question can."""


def trial(seed: int, *faults: Fault, **fields: Any) -> Trial:
    """A small fully asynchronous run with these faults."""
    fields = {"lease_timeout_s": NEVER, "num_engines": 3, **fields}
    return Trial(
        seed=seed,
        policy="fully_async",
        max_staleness=fields.pop("max_staleness", 2),
        update_mode=fields.pop("update_mode", UpdateMode.IN_FLIGHT),
        faults=faults,
        **fields,
    )


def kill(at_s: float, target: str) -> Fault:
    return Fault(at_s=at_s, kind=FaultKind.KILL, target=target)


def delay(at_s: float, sender: str, receiver: str, amount: float, duration_s: float | None = None) -> Fault:
    return Fault(at_s=at_s, kind=FaultKind.DELAY, target=sender, peer=receiver, amount=amount, duration_s=duration_s)


def fails(one: Trial) -> bool:
    try:
        run_trial(one, with_digest=False)
    except AssertionError:
        return True
    return False


def assert_needed(
    rule_taken_out: AbstractContextManager[Any],
    family: Callable[[int], Trial],
    *,
    num: int = 40,
    goes_wrong: Callable[[Trial], bool] = fails,
) -> None:
    """Without the rule one of the family goes wrong; with it neither that one nor those before it, nor fewer than
    ``NUM_GOOD`` in all. That nothing at all goes wrong with every rule in place is for the random trials to find."""
    with rule_taken_out:
        first = next((seed for seed in range(num) if goes_wrong(family(seed))), None)
    assert first is not None, "nothing goes wrong without the rule"
    wrong = [seed for seed in range(max(first + 1, NUM_GOOD)) if goes_wrong(family(seed))]
    assert not wrong, f"seeds {wrong} go wrong with the rule in place"


def does_nothing(*_: object) -> None:
    """Stands in for a rule."""


@contextmanager
def with_its_watch(rule_taken_out: AbstractContextManager[Any]) -> Generator[None]:
    """Nor does the watch of PromptSource object that it asks nobody: what comes of that is to be seen."""
    with rule_taken_out, patch.object(source_watch, "_assert_asked", does_nothing):
        yield


def finds_nothing(*_: object, **__: object) -> list[Any]:
    """Stands in for a rule."""
    return []


class Watch(IdleWatcher):
    """Remembers what the tests ask for; a base for watchers that act."""

    def __init__(self, run: TrialRun) -> None:
        self.run = run
        self.handled_by: list[tuple[Process, Event, Header | None]] = []
        self.entries: list[LedgerEntry] = []
        self.told: list[Event] = []
        run.host.watch(self)

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        self.handled_by.append((process, event, header))

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        self.entries.extend(entries)

    def heard(self, process: Process, event: Event) -> None:
        self.told.append(event)


# --- who is alive -----------------------------------------------------------------------------------------------------


def slow_word() -> SupervisionModel:
    """Announcements take seconds, new processes start at once: their frames overtake the word on them."""
    return SupervisionModel(announce_s=5.0, start_s=0.1)


def handles_before_the_directory(self: Shell, header: Header, event: Event) -> None:
    if not self.membership.admits(header.sender, header.epoch):
        return
    if isinstance(event, LeasesAsked):
        self._answer_census(event, header)  # pyright: ignore[reportPrivateUsage]
    elif self.delivery.accepts(event, header.sender, header.epoch, header.message_id):
        self._handle(event, header)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("target", [PROMPT_SOURCE, "engine/0"])
def test_first_frame_of_a_higher_epoch_updates_the_directory_before_it_is_handled(target: str) -> None:
    assert_needed(
        patch.object(Shell, "on_frame", handles_before_the_directory),
        lambda seed: trial(seed, kill(1 + seed / 10, target), supervision=slow_word()),
    )


def hears_the_given_up(one: Trial) -> bool:
    """Whether an actor handles a frame of an incarnation that it was told is lost."""
    run = TrialRun(one, with_digest=False)
    watch = Watch(run)
    run.run()
    told: set[tuple[int, str, int]] = set()
    for process, event, header in watch.handled_by:
        if isinstance(event, EngineLost):
            told.add((id(process), event.name, event.epoch))
        elif header is not None and (id(process), header.sender, header.epoch) in told:
            return True
    return False


def lost_without_a_fence(self: Membership, name: str, epoch: int) -> list[Event]:
    fences = dict(self._fences)  # pyright: ignore[reportPrivateUsage]
    events = membership_lost(self, name, epoch)
    self._fences = fences  # pyright: ignore[reportPrivateUsage]
    return events


membership_lost = Membership.lost


def test_loss_fences_at_once_and_not_when_a_successor_appears() -> None:
    """An engine that was given up goes on before its successor has started."""
    zombie = Fault(at_s=6.0, kind=FaultKind.STOP, target="engine/0", duration_s=10.1, as_zombie=True)
    assert_needed(
        patch.object(Membership, "lost", lost_without_a_fence),
        lambda seed: trial(seed, zombie, supervision=SupervisionModel(start_s=3.0), num_steps=6, num_engines=2),
        goes_wrong=hears_the_given_up,
    )


def returned_without_a_loss(self: Membership, name: str, epoch: int) -> list[Event]:
    return [event for event in membership_returned(self, name, epoch) if not isinstance(event, EngineLost)]


membership_returned = Membership.returned


def test_return_implies_the_loss_of_every_incarnation_below() -> None:
    """The new engine's frame overtakes ``EngineLost``, which is then old."""
    assert_needed(
        patch.object(Membership, "returned", returned_without_a_loss),
        lambda seed: trial(seed, kill(1 + seed / 10, "engine/0"), supervision=slow_word()),
        num=80,
    )


# --- who holds what ---------------------------------------------------------------------------------------------------


def no_census(self: PromptSource, name: str, epoch: int) -> None:
    if is_engine(name):
        self.table.lose_engine(name)


def test_census_finds_what_an_engine_took_with_it() -> None:
    assert_needed(
        patch.object(PromptSource, "_on_lost", no_census), lambda seed: trial(seed, kill(1 + seed / 10, "engine/0"))
    )


def generates_needlessly(one: Trial) -> bool:
    run = TrialRun(one, with_digest=False)
    with suppress(NeedlessError):
        run.run()
    return bool(run.oracle.num_needless or run.oracle.num_regenerated)


def issues_again_at_once(self: PromptSource, name: str, epoch: int) -> None:
    if is_engine(name):
        self.table.lose_engine(name)
        for _, lease in list(self.table.all_leases()):
            if lease.engine == name:
                self.issuing.again(lease)


def test_what_a_lost_engine_had_passed_on_is_not_generated_again() -> None:
    """The note that a sample has left its engine is late; the Scorer has it."""
    assert_needed(
        with_its_watch(patch.object(PromptSource, "_on_lost", issues_again_at_once)),
        lambda seed: trial(
            seed,
            delay(0.0, "engine/0", PROMPT_SOURCE, 2.0),
            kill(1 + seed / 10, "engine/0"),
        ),
        goes_wrong=generates_needlessly,
    )


def test_new_prompt_source_issues_nothing_before_its_first_census() -> None:
    started = PromptSource.__init__

    def may_issue_at_once(self: PromptSource, *settings: Any) -> None:
        started(self, *settings)
        self._may_issue = True  # pyright: ignore[reportPrivateUsage]

    assert_needed(
        patch.object(PromptSource, "__init__", may_issue_at_once),
        lambda seed: trial(seed, kill(1 + seed / 10, PROMPT_SOURCE)),
        goes_wrong=generates_needlessly,
    )


def test_census_asks_a_keeper_that_returns_meanwhile() -> None:
    assert_needed(
        patch.object(Census, "joined", does_nothing),
        lambda seed: trial(seed, kill(1 + seed / 10, SCORER), kill(1.3 + seed / 10, "engine/0"), num_engines=2),
    )


def whole_or_not(census: Census, _: int) -> bool:
    return census.is_open and not census.missing()


def without_the_buffer(self: Census, members: dict[str, int], awaited: tuple[str, ...]) -> None:
    others = {name: epoch for name, epoch in members.items() if name != BUFFER}
    census_opened(self, others, tuple(name for name in awaited if name != BUFFER))


census_opened = Census.open


class LosesTheLine(Watch):
    """No engine's notes reach PromptSource; when the first group is recorded and settled, its engines die."""

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        has_begun = any(isinstance(event, SampleIssued) for _, event, _ in self.handled_by)
        super().handled(process, event, header, commands)
        if isinstance(event, SampleIssued) and not has_begun:
            self._change(FaultKind.CUT, 0.0)

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        is_first = not any(isinstance(entry, GroupRecorded) for entry in self.entries)
        super().committed(process, entries)
        group = next((entry.payload for entry in entries if isinstance(entry, GroupRecorded)), None)
        if is_first and group is not None:
            self._change(FaultKind.RESTORE, 0.15)
            at_s = self.run.host.clock.now_s + 0.15
            inject(self.run.host, [kill(at_s, name) for name in sorted({s.engine for s in group.samples})])

    def _change(self, kind: FaultKind, after_s: float) -> None:
        at_s = self.run.host.clock.now_s + after_s
        engines = self.run.trial.engines
        inject(self.run.host, [Fault(at_s=at_s, kind=kind, target=name, peer=PROMPT_SOURCE) for name in engines])


def regenerates(one: Trial) -> bool:
    run = TrialRun(one, with_digest=False)
    LosesTheLine(run)
    with suppress(NeedlessError):
        run.run()
    return run.oracle.num_regenerated > 0


def test_admitted_group_is_never_generated_again() -> None:
    """Keepers have heard that it is settled and forgotten it; to PromptSource the word is still on its way. Two rules
    each prevent this alone: the Buffer takes part in the census, and PromptSource judges only when it knows as much
    to be settled as any answer. So both are taken out."""
    assert_needed(
        with_its_watch(patch.multiple(Census, is_complete=whole_or_not, open=without_the_buffer)),
        lambda seed: trial(seed, delay(0.0, "buffer", PROMPT_SOURCE, 6.0)),
        num=20,
        goes_wrong=regenerates,
    )


def reuses_an_attempt(one: Trial) -> bool:
    """Whether an engine is asked for an attempt of a sample that another incarnation of an engine was asked for."""
    run = TrialRun(one, with_digest=False)
    watch = Watch(run)
    run.run()
    asked: dict[tuple[SampleKey, int], Process] = {}
    return any(
        asked.setdefault((event.key, event.attempt), process) is not process
        for process, event, _ in watch.handled_by
        if isinstance(event, SampleIssued)
    )


def test_census_tells_a_new_prompt_source_the_attempts() -> None:
    """Samples fail, so they are at their second or third attempt when PromptSource is replaced."""
    adopt = Recovering.adopt

    def adopt_without_the_attempt(self: Recovering, group: Any, lease: Any, holder: str, found: Any) -> None:
        attempt = lease.attempt
        adopt(self, group, lease, holder, found)
        lease.attempt = attempt

    assert_needed(
        patch.object(Recovering, "adopt", adopt_without_the_attempt),
        lambda seed: trial(
            seed,
            kill(2 + seed / 20, PROMPT_SOURCE),
            latency=LatencyOptions(response_tokens_median=12, token_s=0.05, failure_rate=0.5),
            num_retries=8,
            groups_per_batch=4,
        ),
        goes_wrong=reuses_an_attempt,
    )


def newest_span(self: Grants, floor: int) -> tuple[GrantSpan, ...]:
    return grants_snapshot(self, floor)[-1:]


grants_snapshot = Grants.snapshot


def test_demand_is_a_full_snapshot_for_a_prompt_source_that_returned() -> None:
    """More is granted than the engine takes, so a part of it is known to PromptSource alone."""
    assert_needed(
        patch.object(Grants, "snapshot", newest_span),
        lambda seed: trial(
            seed,
            kill(4 + seed / 2, PROMPT_SOURCE),
            max_staleness=8,
            num_steps=8,
            num_engines=1,
            num_slots=1,
            samples_per_group=4,
            target_outstanding=12,
        ),
    )


def test_everything_is_repeated_on_a_timer_and_not_on_changes_of_membership_alone() -> None:
    assert_needed(
        patch.object(Delivery, "overdue", finds_nothing),
        lambda seed: trial(seed, link=LinkModel(drop=0.03), lease_timeout_s=40.0),
    )


def test_overdue_lease_starts_a_census() -> None:
    """``SampleIssued`` is lost, and nobody has died."""
    assert_needed(
        patch.object(PromptSource, "_take_census", does_nothing),
        lambda seed: trial(seed, link=LinkModel(drop=0.1), lease_timeout_s=40.0),
        num=10,
    )


def test_a_line_that_carries_again_starts_a_census() -> None:
    """Samples were on their way to an engine whose line broke, and nobody has died."""

    def cut(seed: int) -> Trial:
        fault = Fault(at_s=0.5 + seed / 10, kind=FaultKind.CUT, target=PROMPT_SOURCE, peer="engine/0", duration_s=0.5)
        return trial(seed, fault, num_engines=2)

    def repeats_what_is_kept(self: Shell, name: str) -> None:
        self._queue(self.delivery.returned(name, 0.0))  # pyright: ignore[reportPrivateUsage]

    assert_needed(patch.object(Shell, "on_line_restored", repeats_what_is_kept), cut)


class KillsWhoever(Watch):
    """Kills every engine that begins to generate this sample, so many times."""

    def __init__(self, run: TrialRun, key: SampleKey, times: int) -> None:
        super().__init__(run)
        run.is_calm = False
        self.key = key
        self.times = times

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        super().handled(process, event, header, commands)
        if self.times and any(isinstance(c, Generate) and c.key == self.key for c in commands):
            self.times -= 1
            inject(self.run.host, [kill(self.run.host.clock.now_s + 0.01, process.name)])


def test_death_of_engines_does_not_spend_the_retries_of_a_sample() -> None:
    run = TrialRun(trial(1, num_retries=0, max_engine_losses=5))
    KillsWhoever(run, SampleKey(0, 1), times=5)
    run.run()
    assert run.oracle.ends[SampleKey(0, 1)] is TerminalState.TRAINED


def test_sample_that_kills_engines_ends_as_failed() -> None:
    run = TrialRun(trial(1, num_retries=0, max_engine_losses=3, on_failed_sample="shrink"))
    watch = KillsWhoever(run, SampleKey(0, 1), times=100)
    run.run()
    assert run.oracle.ends[SampleKey(0, 1)] is TerminalState.FAILED
    assert 100 - watch.times == 4


def fails_at_one_scorer(seed: int) -> Trial:
    """Many samples get no reward from the first Scorer, and have one from the next. Scorer and Filter die within a
    second, while groups have both a sample and what was made in its place."""
    at_s = 1.0 + (seed % 20) / 5
    return trial(
        seed,
        kill(at_s, SCORER),
        kill(at_s + (seed % 3 - 1) / 2, FILTER),
        judging=JudgingModel(latency_s=0.01, failure_rate=0.4),
        latency=LatencyOptions(response_tokens_median=12.0, response_tokens_sigma=1.2, prefill_s=0.05, token_s=0.05),
        samples_per_group=4,
        num_slots=2,
    )


def test_a_place_counts_once_though_filter_and_scorer_were_lost() -> None:
    assert_needed(patch.object(Assembly, "_write_off", does_nothing), fails_at_one_scorer)


def has_a_place_twice(one: Trial) -> bool:
    """Whether that is what somebody notices."""
    try:
        run_trial(one, with_digest=False)
    except AssertionError as error:
        return "has a place twice" in str(error)
    return False


@pytest.mark.parametrize("takes_all", [False, True], ids=["the Buffer", "the oracle"])
def test_a_place_that_would_count_twice_is_noticed(*, takes_all: bool) -> None:
    """The Filter has forgotten the rule: the Buffer refuses the group, and the oracle sees it where that takes all."""
    assert_needed(
        several(
            patch.object(Assembly, "_write_off", does_nothing),
            patch.object(Filter, "validate", does_nothing),
            patch.object(Admission, "_refusal", return_value="") if takes_all else nullcontext(),
        ),
        fails_at_one_scorer,
        goes_wrong=has_a_place_twice,
    )


# --- batches, receipts, checkpoints -----------------------------------------------------------------------------------


def test_open_batch_and_its_receipt_survive_lost_messages() -> None:
    """The oracle sees to it that a version is trained from one batch, and recorded once."""
    for seed in range(20):
        run_trial(trial(seed, link=LinkModel(drop=0.2, duplicate=0.2), lease_timeout_s=40.0), with_digest=False)


def test_run_ends_when_the_checkpoint_of_its_last_receipt_is_recorded() -> None:
    """Word of the last checkpoint overtakes the last receipt, or is lost."""
    for seed in range(20):
        run = TrialRun(
            trial(
                seed, delay(0.0, LEARNER, "buffer", 3.0), link=LinkModel(reorder=0.5, drop=0.05), lease_timeout_s=40.0
            )
        )
        run.run()
        assert run.oracle.checkpoint_version == run.trial.num_steps


# --- selection, publishing, policies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", ["newest", "shortest", "shuffled"])
def test_batch_is_taken_in_rank_order_only_where_the_remaining_places_suffice_for_what_is_forced(rank: str) -> None:
    assert_needed(
        patch.object(batching, "forced_counts", finds_nothing),
        lambda seed: trial(seed, max_staleness=3, rank=rank, num_steps=8, target_outstanding=8),
    )


def test_batch_waits_only_when_no_allowed_one_exists() -> None:
    """Taking the batch by rank and then waiting until it happens to be allowed would wait for ever."""

    def first_of_the_rank(groups: Any, forced: Any, *, num_places: int) -> Any:
        allowed = selection.select(groups, forced, num_places=num_places)
        return allowed if allowed is not None and list(allowed) == list(groups[:num_places]) else None

    assert_needed(
        patch.object(batching, "select", first_of_the_rank),
        lambda seed: trial(seed, max_staleness=3, rank="newest", num_steps=8, target_outstanding=8),
    )


def test_target_below_one_batch_does_not_starve_the_run() -> None:
    class Timid:
        """A policy of a user that wants nothing outstanding at all."""

        max_staleness, update_mode, on_stale = 2, UpdateMode.IN_FLIGHT, OnStale.WAIT

        def target(self, state: Any, /) -> int:
            return 0

        def rank(self, group: Any, /) -> tuple[int, ...]:
            return (group.group_id,)

    run = TrialRun(trial(3, groups_per_batch=4))
    run.host.run(0.6)
    buffer = run.host.supervisor.processes["buffer"].shell.machine
    assert isinstance(buffer, machine.Buffer)
    buffer.books.policy = Timid()
    run.run()


def test_deadline_is_raised_from_the_oldest_token_only() -> None:
    """The first token of a continued response is not the oldest: its prefix may have been made before."""

    def newest(group: Group) -> int | None:
        versions = [s.version for sample in group.samples for part in sample.parts for s in part.spans if s.num_tokens]
        return max(versions, default=None)

    assert_needed(
        patch.object(Group, "oldest_version", property(newest)),
        lambda seed: trial(
            seed,
            latency=LatencyOptions(response_tokens_median=24, response_tokens_sigma=1.2, token_s=0.2),
            num_steps=6,
            update_mode=UpdateMode.INTERRUPT,
        ),
    )


class CountsVersionsAhead(Watch):
    """Counts the versions that are announced before their receipt is recorded."""

    num_ahead = 0

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        version = self.run.oracle.version
        self.num_ahead += sum(1 for e in entries if isinstance(e, VersionRecorded) and e.version > version)


def test_late_word_of_a_receipt_may_leave_the_announced_version_ahead() -> None:
    """s > v for a moment is allowed and sound."""
    num_ahead = 0
    for seed in range(10):
        run = TrialRun(trial(seed, delay(0.0, LEARNER, "buffer", 4.0)))
        watch = CountsVersionsAhead(run)
        run.run()
        num_ahead += watch.num_ahead
    assert num_ahead


def test_new_engine_takes_only_requests_whose_version_it_serves() -> None:
    handle = EngineWorker.handle

    def takes_anything(self: EngineWorker, event: Any) -> list[AnyCommand]:
        if isinstance(event, SampleIssued):
            event = msgspec.structs.replace(event, min_version=0)
        return handle(self, event)

    assert_needed(
        patch.object(EngineWorker, "handle", takes_anything),
        lambda seed: trial(
            seed,
            delay(0.0, WEIGHT_PUBLISHER, "engine/1", 3.0),
            num_steps=8,
            num_engines=2,
            num_slots=1,
            max_load=3.0,
            groups_per_batch=4,
            samples_per_group=4,
            announce_fraction=0.01,
        ),
        num=10,
    )


def test_commit_of_something_older_is_answered_with_what_is_served() -> None:
    run = TrialRun(trial(1))
    watch = Watch(run)
    run.run()
    engine = next(p for p, event, _ in watch.handled_by if isinstance(event, WeightsSwapped) and event.version == 2)
    old = WeightsCommitted(version=1, publish=1, update_mode=UpdateMode.IN_FLIGHT)
    commands = engine.shell.machine.handle(old)
    applied = [c.event for c in commands if isinstance(c, Send) and isinstance(c.event, WeightsApplied)]
    assert [event.version >= 2 for event in applied] == [True]


class SeesSpoiltEngines(Watch):
    """Engines whose canary failed, and what they say afterwards."""

    def __init__(self, run: TrialRun) -> None:
        super().__init__(run)
        self.spoilt: set[Process] = set()
        self.num_mended = 0

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        if process.shell.machine.state != "spoilt":
            self.num_mended += process in self.spoilt
            self.spoilt.discard(process)
        else:
            self.spoilt.add(process)
            assert not any(isinstance(c, Send) and isinstance(c.event, SampleGenerated) for c in commands)


def test_engine_with_wrong_weights_passes_nothing_on_and_takes_others() -> None:
    """Many a fetch and many a swap bring wrong weights: the digest or the canary gives it away."""
    num_mended = num_replaced = num_left = 0
    for seed in range(20):
        run = TrialRun(trial(seed, bad_weights_rate=0.2))
        watch = SeesSpoiltEngines(run)
        run.run()
        num_mended += watch.num_mended
        num_replaced += sum(process.status is Status.DEAD for process in watch.spoilt)
        num_left += sum(process.status is not Status.DEAD for process in watch.spoilt)
    assert num_mended >= 10
    assert num_replaced >= 10, "those that were wrong twice"
    assert num_left <= 1, "but for one that went wrong just before the end"


def test_policy_that_is_changed_live_is_recorded_first_and_holds_for_new_grants() -> None:
    """The oracle takes the bound of new grants from the record."""
    for seed in range(10):
        run = TrialRun(trial(seed, max_staleness=4, num_steps=8))
        watch = Watch(run)
        run.host.run(4.0)
        run.host.say("buffer", PolicyChanged(policy="fully_async", max_staleness=1, update_mode=UpdateMode.INTERRUPT))
        run.run()
        assert any(isinstance(entry, PolicyRecorded) for entry in watch.entries)


def operated(seed: int, *requests: Request, at_s: float) -> Trial:
    """The Buffer dies at this time, within what some turn wants done."""
    dies = Fault(at_s=at_s, kind=FaultKind.KILL, target="buffer", after_effects=seed % 4)
    return trial(seed, dies, max_staleness=1, num_steps=8, requests=requests)


def test_request_is_carried_out_once_whichever_buffer_is_there() -> None:
    """The Buffer is killed while it answers, or before, or after."""
    wider = PolicyChanged(policy="fully_async", max_staleness=4, update_mode=UpdateMode.IN_FLIGHT)
    for seed in range(12):
        run = TrialRun(operated(seed, Request(at_s=4.0, event=wider), at_s=3.9 + 0.02 * seed))
        watch = Watch(run)
        run.run()
        assert [answer.accepted for answer in run.operator.answers.values()] == [True]
        assert sum(isinstance(entry, PolicyRecorded) for entry in watch.entries) == 1


def test_checkpoint_that_a_buffer_promised_is_written_by_its_successor() -> None:
    """The Buffer is killed before it has heard of the checkpoint."""
    num_promised = 0
    for seed in range(12):
        asked = operated(seed, Request(at_s=4.0, event=SaveAsked()), at_s=4.0 + 0.05 * seed)
        run = TrialRun(msgspec.structs.replace(asked, save_every=1000))
        watch = Watch(run)
        run.run()
        answers = [event for event in watch.told if isinstance(event, OperatorAnswered)]
        num_promised += not answers[0].is_final
        assert all(answer.accepted and "is saved" in answer.text for answer in run.operator.answers.values())
        assert len(run.operator.answers) == 1
    assert num_promised


def test_pause_outlives_the_buffer_until_it_is_ended() -> None:
    """The operator's watch asserts that nothing is granted meanwhile."""
    pause = Request(at_s=3.0, event=GrantsPaused(is_paused=True))
    for seed in range(8):
        go_on = Request(at_s=300.0, event=GrantsPaused(is_paused=False))
        run = TrialRun(operated(seed, pause, go_on, at_s=3.0 + seed))
        watch = Watch(run)
        ended_s = run.run().end_s
        assert ended_s > 300.0, "with two batches' worth of groups at most nobody comes to the eighth"
        assert [entry.is_paused for entry in watch.entries if isinstance(entry, PauseRecorded)] == [True, False]


def test_policy_that_could_never_serve_the_publishing_is_refused() -> None:
    run = TrialRun(trial(1, publish_every=3, num_steps=6))
    watch = Watch(run)
    run.host.run(2.0)
    run.host.say("buffer", PolicyChanged(policy="fully_async", max_staleness=1, update_mode=UpdateMode.IN_FLIGHT))
    run.run()
    assert not any(isinstance(entry, PolicyRecorded) for entry in watch.entries)
    assert any(isinstance(event, NoticeGiven) and "publish_every" in event.text for event in watch.told)


def test_processes_that_are_stopped_for_less_than_the_limit_are_not_given_up() -> None:
    for target in (*trial(0).names,):
        stopped = Fault(at_s=2.0, kind=FaultKind.STOP, target=target, duration_s=9.0)
        assert run_trial(trial(1, stopped)).num_restarts == 0


def test_steps_take_as_long_as_the_learner_says_when_nothing_else_is_in_the_way() -> None:
    slow = trial(1, learner=SimulatedLearnerOptions(step_s=50.0, publish_s=0.0), num_steps=4)
    assert run_trial(slow).end_s == pytest.approx(200, rel=0.05)
