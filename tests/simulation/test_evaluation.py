"""Evaluation on the virtual host: beside training, to its end, once, whatever dies on the way; and in a ledger file."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import pytest
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun
from trials.trial import EvaluationTrial, Trial

from penstock.actors.prompt_source.queues import Queues
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.messages.commands import Send
from penstock.messages.evaluation import EvaluationFinished, EvaluationOpened, GroupEvaluated
from penstock.messages.flow import SampleIssued
from penstock.messages.ledger import RunRecorded, StepRecorded
from penstock.messages.names import BUFFER, FILTER, LEARNER, PROMPT_SOURCE, SCORER, WEIGHT_PUBLISHER
from penstock.messages.samples import Purpose, TerminalState
from penstock.messages.training import UpdateMode
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from penstock.actors.prompt_source.routing import EngineView
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.clock import VirtualClock
    from penstock.runtime.hosts.virtual.process import Process

EVALUATION = EvaluationTrial(
    every=2, before_first=True, at_end=True, num_rows=(3, 2), samples_per_prompt=(2, 3), max_running=3
)
POLICIES = {
    "sync": (0, UpdateMode.DRAIN),
    "one_step_off": (1, UpdateMode.DRAIN),
    "fully_async": (2, UpdateMode.IN_FLIGHT),
}


def trial_of(policy: str = "fully_async", **changes: object) -> Trial:
    eta, mode = POLICIES[policy]
    trial = Trial(seed=3, policy=policy, max_staleness=eta, update_mode=mode, num_steps=5, evaluation=EVALUATION)
    return msgspec.structs.replace(trial, **changes)


class Written(IdleWatcher):
    """Every entry of the ledger, as it was committed; and training's part of what was issued."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, LedgerEntry]] = []

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        self.entries += [(process.epoch, entry) for entry in entries]


def run(trial: Trial) -> tuple[TrialRun, Written]:
    trial_run, written = TrialRun(trial), Written()
    trial_run.host.watch(written, events=False)
    trial_run.run()
    return trial_run, written


def versions(trial_run: TrialRun) -> list[int]:
    return [watched.opened.version for watched in trial_run.oracle.evaluations.evaluations]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pinned", [False, True])
def test_evaluations_are_made_and_told_under_every_policy(policy: str, pinned: bool) -> None:
    evaluation = msgspec.structs.replace(EVALUATION, pinned=pinned)
    trial_run, _ = run(trial_of(policy, evaluation=evaluation))
    watch = trial_run.oracle.evaluations
    assert versions(trial_run)[0] == 0
    assert versions(trial_run)[-1] == 5
    assert not pinned or versions(trial_run) == [0, 2, 4, 5]
    assert sorted(watch.told) == list(range(len(watch.evaluations)))
    assert watch.ended == {TerminalState.EVALUATED: watch.num_issued}


@pytest.mark.parametrize("policy", POLICIES)
def test_training_is_what_it_is_without_evaluation(policy: str) -> None:
    """The same prompts, the same groups in the same batches, the same bound: only when differs."""
    with_it, _ = run(trial_of(policy))
    without, _ = run(trial_of(policy, evaluation=None))
    if policy == "sync":
        assert with_it.oracle.trained == without.oracle.trained
    assert [version for version, _ in with_it.oracle.trained] == [version for version, _ in without.oracle.trained]
    tokens = [
        {g.group_id: [s.parts[0].tokens for s in g.payload.samples] for g in r.oracle.groups.values() if g.payload}
        for r in (with_it, without)
    ]
    assert tokens[0].keys() & tokens[1].keys()
    assert all(tokens[0][group_id] == tokens[1][group_id] for group_id in tokens[0].keys() & tokens[1].keys())


def test_the_same_prompt_is_drawn_alike_in_every_evaluation() -> None:
    trial_run, _ = run(trial_of())
    lengths = [
        [tuple(sample.num_tokens for sample in row.samples) for dataset in told.datasets for row in dataset.rows]
        for told in trial_run.oracle.evaluations.told.values()
    ]
    assert len(lengths) >= 3
    assert all(found == lengths[0] for found in lengths)


class Sent(IdleWatcher):
    """Samples of evaluations by the engine that they were sent to, and how long each evaluation took."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.engines: Counter[str] = Counter()
        self._opened_s: dict[int, float] = {}
        self.took_s: dict[int, float] = {}

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        for command in commands:
            if isinstance(command, Send) and isinstance(command.event, SampleIssued):
                self.engines[command.to] += command.event.purpose is Purpose.EVALUATE

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        for entry in entries:
            if isinstance(entry, EvaluationOpened):
                self._opened_s[entry.evaluation.number] = self._clock.now_s

    def heard(self, process: Process, event: Event) -> None:
        if isinstance(event, EvaluationFinished):
            self.took_s.setdefault(event.number, self._clock.now_s - self._opened_s[event.number])


def with_a_late_engine() -> tuple[Sent, float]:
    """What was sent where, and when the last step was, where training waits for the first engine most of the time."""
    evaluation = EvaluationTrial(every=4, num_rows=(60,), samples_per_prompt=(2,), max_running=4)
    sizes: dict[str, Any] = {"num_steps": 12, "groups_per_batch": 10, "samples_per_group": 4, "max_staleness": 1}
    trial_run = TrialRun(trial_of(num_late=1, late_fetch_s=10.0, evaluation=evaluation, **sizes), with_digest=False)
    sent = Sent(trial_run.host.clock)
    trial_run.host.watch(sent)
    trial_run.run()
    return sent, trial_run.oracle.progress_s


def test_an_engine_whose_weights_come_late_evaluates_while_training_waits_for_another() -> None:
    sent, trained_s = with_a_late_engine()

    def never(self: Queues, view: EngineView, purpose: Purpose, stuck: Collection[Purpose], **state: Any) -> bool:  # noqa: ANN401
        """While training waits, but for the one that always goes first."""
        is_beyond = purpose is Purpose.EVALUATE and state["num_evaluating"] > 0
        return not (stuck and is_beyond) and suits(self, view, purpose, stuck, **state)

    suits = Queues.suits
    with patch.object(Queues, "suits", never):
        before, trained_before_s = with_a_late_engine()
    assert sent.took_s[0] < 0.7 * before.took_s[0]
    assert sent.engines["engine/1"] > 1.5 * before.engines["engine/1"]
    assert trained_s < 1.03 * trained_before_s, "training has not paid for it"


@pytest.mark.parametrize("target", [PROMPT_SOURCE, SCORER, FILTER, BUFFER, LEARNER, WEIGHT_PUBLISHER, "engine/0", ""])
def test_whatever_dies_each_evaluation_ends_once_and_the_ledger_file_balances(target: str, tmp_path: Path) -> None:
    kind = FaultKind.KILL if target else FaultKind.MACHINE
    for at_s in (2.0, 4.5):
        trial = trial_of("fully_async", faults=(Fault(at_s=at_s, kind=kind, target=target),))
        trial_run, written = run(trial)
        assert versions(trial_run)[-1] == 5
        path = tmp_path / f"{at_s}.sqlite"
        assert audited(path, written) == (0, trial_run.oracle.evaluations.num_issued)


def audited(path: Path, written: Written) -> tuple[int, int]:
    """Findings, and samples that were evaluated or failed."""
    store = SqliteStore(path)
    for epoch, entries in by_epoch(written.entries):
        store.claim(epoch)
        store.commit(entries)
    store.close()
    report = audit_ledger(path)
    assert report.is_clean, report.findings
    assert report.balance.is_balanced
    ended = [count for count in report.balance.ended if count.state == TerminalState.EVALUATED]
    return len(report.findings), sum(count.num_samples for count in ended)


def by_epoch(entries: Sequence[tuple[int, LedgerEntry]]) -> list[tuple[int, list[LedgerEntry]]]:
    found: list[tuple[int, list[LedgerEntry]]] = []
    for epoch, entry in entries:
        if not found or found[-1][0] != epoch:
            found.append((epoch, []))
        found[-1][1].append(entry)
    return found


def test_audit_is_clean_at_every_point_of_a_run_and_finds_what_is_wrong(tmp_path: Path) -> None:
    _, written = run(trial_of("sync"))
    entries = [entry for _, entry in written.entries]
    store = SqliteStore(tmp_path / "ledger.sqlite")
    store.claim(1)
    for entry in entries:
        store.commit([entry])
        if isinstance(entry, RunRecorded | EvaluationOpened | GroupEvaluated):
            report = audit_ledger(tmp_path / "ledger.sqlite")
            assert report.is_clean, report.findings
    store.commit([next(entry for entry in entries if isinstance(entry, GroupEvaluated))])
    texts = [finding.text for finding in audit_ledger(tmp_path / "ledger.sqlite").findings]
    assert any("no evaluation that has it is open" in text for text in texts), texts
    store.close()


@pytest.mark.parametrize("faults", [(), (Fault(at_s=9.0, kind=FaultKind.MACHINE, target=""),)])
@pytest.mark.parametrize("colocated", [False, True])
def test_an_evaluation_that_is_open_after_the_last_step_comes_to_its_end(
    colocated: bool, faults: tuple[Fault, ...]
) -> None:
    """The last version is published for it: engines that sleep, or came anew, would get no weights otherwise."""
    evaluation = EvaluationTrial(every=4, num_rows=(40,), samples_per_prompt=(2,), max_running=1)
    trial = trial_of("sync", colocated=colocated, evaluation=evaluation, faults=faults)
    trial_run, _ = run(trial)
    watch = trial_run.oracle.evaluations
    assert versions(trial_run) == [4]
    assert watch.ended.total() == 80


def test_a_run_that_only_evaluates_makes_one_evaluation_and_no_batch() -> None:
    evaluation = EvaluationTrial(num_rows=(7,), samples_per_prompt=(3,))
    trial_run, _ = run(trial_of("fully_async", evaluation=evaluation, only="evaluate"))
    assert versions(trial_run) == [0]
    assert trial_run.oracle.evaluations.ended == {TerminalState.EVALUATED: 21}
    assert not trial_run.oracle.groups


@pytest.mark.parametrize("policy", ["one_step_off", "fully_async"])
def test_evaluation_beside_training_does_not_hold_training_up(policy: str) -> None:
    """With slots for it, steps come as often as without; what it adds to the run is its own tail."""
    evaluation = EvaluationTrial(every=2, num_rows=(12,), samples_per_prompt=(2,), max_running=1)
    times: list[list[float]] = []
    for block in (evaluation, None):
        trial_run, written = TrialRun(trial_of(policy, num_slots=8, num_steps=8, evaluation=block)), Steps()
        written.clock = trial_run.host.clock
        trial_run.host.watch(written, events=False)
        trial_run.run()
        times.append(written.at_s)
    with_it, without = times
    assert len(with_it) == len(without) == 8
    assert with_it[-1] <= 1.1 * without[-1], times


class Steps(Written):
    """When each step was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.at_s: list[float] = []
        self.clock: VirtualClock | None = None

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        assert self.clock is not None
        self.at_s += [self.clock.now_s for entry in entries if isinstance(entry, StepRecorded)]
