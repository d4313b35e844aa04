"""Evaluation, actor by actor: when it is due, whose turn it is, what becomes of its samples, what it never touches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import actor_driver as drive
import msgspec
import pytest
from buffer_bench import Bench, announced
from engine_bench import EngineBench, applied, manifest, submitted
from source_bench import SourceBench, keys

from penstock.actors.buffer.evaluating import EvaluationSchedule
from penstock.actors.buffer.goals import Evaluate
from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.outbox import SETTLE_TIMER
from penstock.actors.filter.machine import Filter
from penstock.actors.filter.options import FilterOptions
from penstock.actors.filter.settings import FilterSettings
from penstock.actors.learner.machine import Learner
from penstock.actors.learner.settings import LearnerSettings
from penstock.actors.prompt_source.queues import Queues
from penstock.actors.prompt_source.routing import EngineView
from penstock.actors.settled import KnownSettled
from penstock.messages.commands import (
    FetchPrompts,
    InterruptGenerations,
    KeepAnswers,
    PublishWeights,
    Record,
    StartTimer,
)
from penstock.messages.errors import UserFault
from penstock.messages.evaluation import (
    Evaluation,
    EvaluationDue,
    EvaluationFinished,
    EvaluationOpened,
    EvaluationShape,
    GroupEvaluated,
    PublishDemanded,
)
from penstock.messages.flow import (
    GroupAdmitted,
    RefillAsked,
    SampleIssued,
    SampleScored,
    SamplesSettled,
    ScoringFailed,
    SettledState,
)
from penstock.messages.ledger import BatchLeased, GroupsGranted, VersionRecorded
from penstock.messages.local import BatchTrained, LearnerOpened, Started, TimerFired, WeightsPublished
from penstock.messages.samples import (
    Completed,
    Prompt,
    Purpose,
    Reward,
    SampleKey,
    TerminalState,
    evaluation_group_id,
)
from penstock.messages.training import (
    BatchReady,
    CheckpointDemanded,
    CheckpointNamed,
    CheckpointSaved,
    LearnerReady,
    NoticeGiven,
    RunFinished,
    StopAsked,
    UpdateMode,
)

if TYPE_CHECKING:
    from penstock.messages.commands import AnyCommand

E0, E1, E2 = (evaluation_group_id(place) for place in range(3))
SHAPES = (
    EvaluationShape(name="easy", num_rows=2, samples_per_prompt=2),
    EvaluationShape(name="hard", num_rows=1, samples_per_prompt=2),
)
OPEN = Evaluation(number=0, version=0, deadline_version=4, first_place=0, datasets=SHAPES)
NOTHING = SettledState(0, 0, ())


# --- the Buffer ---------------------------------------------------------------------------------------------------


def evaluating(**schedule: object) -> Bench:
    """A Buffer that evaluates by this schedule; nothing has started."""
    bench = Bench(num_steps=4)
    plan = msgspec.convert({"datasets": SHAPES, **schedule}, EvaluationSchedule)
    settings = msgspec.structs.replace(bench.buffer.settings, evaluation=plan)
    bench.driver = drive.Driver(Buffer(settings, bench.buffer.policy))
    return bench


def evaluate(bench: Bench, *groups: int, version: int = 0) -> list[AnyCommand]:
    """These groups come in, whole."""
    return bench.hear(*(GroupAdmitted(group=drive.group(group_id, (version, 4))) for group_id in groups))


def open_versions(commands: list[AnyCommand]) -> list[int]:
    return [entry.evaluation.version for entry in drive.recorded(commands, EvaluationOpened)]


def test_the_first_evaluation_is_recorded_before_it_is_told_and_before_anything_is_granted() -> None:
    bench = evaluating(before_first=True)
    commands = bench.hear(Started(epoch=0), LearnerReady(epoch=0, version=0), announced(0))
    assert open_versions(commands) == [0]
    due = drive.one_sent(commands, EvaluationDue, to="prompt_source")
    assert due.evaluation == msgspec.structs.replace(OPEN, deadline_version=4)
    order = [
        next(place for place, command in enumerate(commands) if drive.recorded([command], EvaluationOpened)),
        next(place for place, command in enumerate(commands) if drive.sent([command], EvaluationDue)),
        next(place for place, command in enumerate(commands) if drive.recorded([command], GroupsGranted)),
    ]
    assert order == sorted(order)
    assert bench.granted == 6, "as many as without"


def test_an_evaluation_is_told_as_finished_when_its_last_group_is_recorded() -> None:
    bench = evaluating(before_first=True).started()
    commands = evaluate(bench, E2, E0)
    assert not drive.sent(commands, EvaluationFinished)
    assert len(drive.recorded(commands, GroupEvaluated)) == 2
    finished = drive.one_sent(evaluate(bench, E1), EvaluationFinished, to="supervisor")
    assert [(d.name, [row.row for row in d.rows]) for d in finished.datasets] == [("easy", [0, 1]), ("hard", [0])]
    assert [s.reward for s in finished.datasets[0].rows[0].samples] == [0.0, 1.0]
    balance = bench.buffer.books.accounts.balance()
    assert {count.state: count.num_samples for count in balance.ended} == {TerminalState.EVALUATED: 6}


def test_the_extracted_answer_of_a_sample_is_recorded_with_it() -> None:
    bench = evaluating(before_first=True).started()
    group = drive.group(E0, (0, 4))
    voted = tuple(
        msgspec.structs.replace(s, outcome=Completed(reward=Reward(value=1.0, answer=f"{s.key.index}/3")))
        for s in group.samples
    )
    commands = bench.hear(GroupAdmitted(group=msgspec.structs.replace(group, samples=voted)))
    (entry,) = drive.recorded(commands, GroupEvaluated)
    assert [sample.answer for sample in entry.row.samples] == ["0/3", "1/3"]


def test_what_comes_twice_or_of_no_open_evaluation_changes_nothing() -> None:
    bench = evaluating(before_first=True).started()
    evaluate(bench, E0)
    bench.driver.ignores(GroupAdmitted(group=drive.group(E0)))
    bench.driver.ignores(GroupAdmitted(group=drive.group(evaluation_group_id(3))))


def test_training_is_granted_and_leased_as_without() -> None:
    bench, plain = evaluating(every=1, before_first=True).started(), Bench(num_steps=4).started()
    for each in (bench, plain):
        each.train_in_order()
    assert bench.granted == plain.granted
    assert bench.batch() == plain.batch()
    assert bench.buffer.books.settled.floor == plain.buffer.books.settled.floor


def test_a_version_that_is_due_is_published_and_evaluated_when_engines_serve_it() -> None:
    bench = evaluating(every=2).started()
    bench.train_in_order()
    commands = bench.train_in_order(announces=False)
    assert drive.one_sent(commands, PublishDemanded, to="learner") == PublishDemanded(version=2)
    assert not open_versions(commands)
    assert open_versions(bench.hear(announced(2))) == [2]


def test_of_versions_that_become_due_while_one_is_open_the_newest_is_next() -> None:
    bench = evaluating(every=1).started()
    commands = [command for _ in range(3) for command in bench.train_in_order()]
    assert open_versions(commands) == [1]
    assert [n.text for n in drive.sent(commands, NoticeGiven)] == [
        "version 2 is not evaluated: evaluations are due more often than they can be made"
    ]
    assert open_versions(evaluate(bench, E0, E1, E2, version=1)) == [3]


def test_no_batch_is_leased_while_a_pinned_evaluation_is_due_or_open() -> None:
    bench = evaluating(every=1, is_pinned=True).started()
    bench.train_in_order(announces=False)
    for group_id in range(2, 6):
        bench.admit(group_id)
    assert bench.open_batch is None, "due"
    assert not drive.recorded(bench.hear(announced(1)), BatchLeased), "open"
    assert not drive.recorded(evaluate(bench, E0, E1, version=1), BatchLeased)
    assert drive.recorded(evaluate(bench, E2, version=1), BatchLeased)


def test_a_pinned_evaluation_before_the_first_batch_holds_that_too() -> None:
    bench = evaluating(before_first=True, is_pinned=True).started()
    for group_id in range(4):
        bench.admit(group_id)
    assert bench.open_batch is None
    evaluate(bench, E0, E1, E2)
    assert bench.batch() == (0, 1)


def finish_training(bench: Bench) -> list[AnyCommand]:
    commands = [command for _ in range(4) for command in bench.train_in_order()]
    return [*commands, *bench.hear(CheckpointSaved(version=4, path="c4"))]


def test_the_run_ends_when_the_last_evaluation_is_done() -> None:
    bench = evaluating(at_end=True).started()
    commands = finish_training(bench)
    assert not drive.sent(commands, RunFinished)
    assert open_versions(commands) == [4]
    finished = drive.one_sent(evaluate(bench, E0, E1, E2, version=4), RunFinished)
    assert finished.completed
    assert finished.balance.is_balanced
    assert finished.balance.in_system == 0


def test_a_stop_while_something_is_evaluated_saves_what_is_trained() -> None:
    bench = evaluating(before_first=True).started()
    bench.train_in_order()
    commands = bench.hear(StopAsked(reason="enough"))
    assert drive.one_sent(commands, CheckpointDemanded, to="learner") == CheckpointDemanded(version=1, ends_run=True)


def test_the_last_evaluation_does_not_end_a_run_whose_last_checkpoint_is_not_written() -> None:
    bench = evaluating(at_end=True).started()
    for _ in range(4):
        bench.train_in_order()
    assert not drive.sent(evaluate(bench, E0, E1, E2, version=4), RunFinished)
    assert drive.one_sent(bench.hear(CheckpointSaved(version=4, path="c4")), RunFinished).completed


def test_a_group_that_is_evaluated_is_held_and_its_answers_are_kept_until_that_is_told() -> None:
    bench = evaluating(before_first=True).started()
    commands = evaluate(bench, E1)
    kept = drive.one(commands, KeepAnswers)
    assert (kept.evaluation, kept.version, kept.dataset, kept.group.group_id) == (0, 0, "easy", E1)
    assert drive.one(commands, StartTimer).key == SETTLE_TIMER
    assert [lease.key for lease in bench.buffer.leases()] == [SampleKey(E1, 0), SampleKey(E1, 1)]
    bench.hear(TimerFired(key=SETTLE_TIMER))
    assert bench.buffer.leases() == ()


def test_a_version_that_is_due_is_published_although_an_older_one_is_evaluated_still() -> None:
    bench = evaluating(every=1).started()
    assert open_versions(bench.train_in_order()) == [1]
    assert drive.one_sent(bench.train_in_order(announces=False), PublishDemanded) == PublishDemanded(version=2)
    assert bench.hear(announced(1)) == [], "it is said once"


def test_a_version_that_waits_for_engines_to_serve_it_keeps_its_turn_however_quick_the_steps_are() -> None:
    bench = evaluating(every=1).started()
    for _ in range(2):
        bench.train_in_order(announces=False)
    assert open_versions(bench.hear(announced(2))) == [1]


def test_a_stop_does_not_wait_for_the_last_evaluation() -> None:
    bench = evaluating(at_end=True).started()
    finish_training(bench)
    finished = drive.one_sent(bench.hear(StopAsked(reason="enough")), RunFinished)
    assert (finished.completed, finished.story, finished.balance.in_system) == (False, "enough", 6)


def test_at_the_end_engines_get_the_last_weights_for_an_evaluation_that_is_open_still() -> None:
    """Those that sleep, or came anew, would get none by a further step."""
    bench = evaluating(every=3).started()
    commands = [command for _ in range(4) for command in bench.train_in_order()]
    assert open_versions(commands) == [3]
    assert drive.sent(commands, PublishDemanded) == [PublishDemanded(version=3), PublishDemanded(version=4)]
    assert open_versions(evaluate(bench, E0, E1, E2, version=3)) == [], "no one is wanted at the end"


def test_a_version_that_no_engine_served_in_time_is_left_out_for_the_last_one_and_people_are_told() -> None:
    bench = evaluating(every=3, at_end=True).started()
    commands = [command for _ in range(4) for command in bench.train_in_order(announces=bench.buffer.version < 2)]
    text = "version 3 is not evaluated: evaluations are due more often than they can be made"
    assert [notice.text for notice in drive.sent(commands, NoticeGiven)] == [text]
    assert drive.sent(commands, PublishDemanded)[-1] == PublishDemanded(version=4)
    assert open_versions(bench.hear(announced(4))) == [4]


def rebuilt(bench: Bench, entries: list[AnyCommand], **changes: object) -> Buffer:
    settings = msgspec.structs.replace(bench.buffer.settings, **changes)
    return Buffer(settings, bench.buffer.policy, [e for c in drive.every(entries, Record) for e in c.entries])


def test_a_buffer_that_takes_anothers_place_goes_on_with_the_open_evaluation() -> None:
    bench = evaluating(before_first=True)
    commands = bench.hear(Started(epoch=0), announced(0), LearnerReady(epoch=0, version=0))
    commands += evaluate(bench, E1)
    successor = drive.Driver(rebuilt(bench, commands))
    said = successor.hear(Started(epoch=1))
    assert drive.one_sent(said, EvaluationDue).evaluation == bench.buffer.books.evaluations.open
    assert drive.one_sent(said, EvaluationDue).settled.above == (E1,)
    said = successor.hear(GroupAdmitted(group=drive.group(E0)), GroupAdmitted(group=drive.group(E2)))
    finished = drive.one_sent(said, EvaluationFinished)
    third = drive.Driver(rebuilt(bench, commands + said))
    assert drive.sent(third.hear(Started(epoch=2)), EvaluationFinished) == [finished]


def test_a_buffer_that_takes_anothers_place_demands_the_publish_again() -> None:
    """The Learner may never have heard of it, and nothing else would make engines serve a version off the grid."""
    bench = evaluating(every=2)
    commands = bench.hear(Started(epoch=0), LearnerReady(epoch=0, version=0), announced(0))
    while bench.buffer.version < 2:
        if bench.open_batch is not None:
            commands += bench.train()
        else:
            waiting = (t.group_id for t in bench.buffer.books.table.outstanding() if t.record is None)
            commands += bench.admit(next(waiting))
    assert drive.one_sent(commands, PublishDemanded) == PublishDemanded(version=2)
    successor = drive.Driver(rebuilt(bench, commands))
    said = successor.hear(Started(epoch=1), LearnerReady(epoch=0, version=2))
    assert drive.one_sent(said, PublishDemanded, to="learner") == PublishDemanded(version=2)


def test_an_open_evaluation_cannot_go_on_with_other_datasets() -> None:
    bench = evaluating(before_first=True)
    commands = bench.hear(Started(epoch=0), announced(0), LearnerReady(epoch=0, version=0))
    fewer = EvaluationSchedule(before_first=True, datasets=SHAPES[:1])
    with pytest.raises(UserFault, match=r"version 0 was begun on easy \(2 rows, 2 samples each\), hard"):
        rebuilt(bench, commands, evaluation=fewer)


def test_a_run_that_was_begun_without_it_gets_no_evaluation_before_its_first_batch() -> None:
    bench = Bench(num_steps=4)
    commands = bench.hear(Started(epoch=0), announced(0), LearnerReady(epoch=0, version=0))
    resumed = rebuilt(bench, commands, evaluation=EvaluationSchedule(before_first=True, datasets=SHAPES))
    assert not open_versions(drive.Driver(resumed).hear(Started(epoch=1), LearnerReady(epoch=1, version=0)))


def test_a_token_older_than_the_version_stops_the_run() -> None:
    bench = evaluating(every=1).started()
    bench.train_in_order()
    commands = evaluate(bench, E0, version=0)
    assert "e0 has a token of version 0" in drive.one_sent(commands, RunFinished).story


def test_a_run_that_only_evaluates_ends_with_its_evaluation() -> None:
    bench = evaluating(before_first=True)
    settings = msgspec.structs.replace(bench.buffer.settings, goal=Evaluate())
    bench.driver = drive.Driver(Buffer(settings, bench.buffer.policy))
    assert open_versions(bench.hear(Started(epoch=0), LearnerReady(epoch=0, version=0), announced(0))) == [0]
    assert bench.granted == 0
    finished = drive.one_sent(evaluate(bench, E0, E1, E2), RunFinished)
    assert (finished.completed, finished.version) == (True, 0)


def test_all_who_keep_hear_what_is_settled_of_an_evaluation_from_a_buffer_that_takes_anothers_place() -> None:
    """Nothing of training is granted, so nothing else would tell them."""
    bench = evaluating(before_first=True)
    settings = msgspec.structs.replace(bench.buffer.settings, goal=Evaluate())
    bench.driver = drive.Driver(Buffer(settings, bench.buffer.policy))
    commands = bench.hear(Started(epoch=0), LearnerReady(epoch=0, version=0), announced(0))
    commands += evaluate(bench, E0)
    said = drive.Driver(rebuilt(bench, commands)).hear(Started(epoch=1))
    assert drive.one_sent(said, SamplesSettled, to="filter").settled.evaluation_floor == 1


def test_an_announcement_is_recorded_before_the_evaluation_that_it_opens() -> None:
    bench = evaluating(every=1).started()
    bench.train_in_order(announces=False)
    entries = [e for record in drive.every(bench.hear(announced(1)), Record) for e in record.entries]
    kinds = [type(entry) for entry in entries]
    assert kinds.index(VersionRecorded) < kinds.index(EvaluationOpened)


# --- PromptSource -------------------------------------------------------------------------------------------------


def source(max_evaluating: int = 8) -> SourceBench:
    bench = SourceBench(num_samples=2)
    settings = msgspec.structs.replace(bench.source.settings, max_evaluating=max_evaluating)
    bench.driver = drive.Driver(type(bench.source)(settings))
    return bench


def due(evaluation: Evaluation | None = OPEN, settled: SettledState = NOTHING) -> EvaluationDue:
    return EvaluationDue(evaluation=evaluation, settled=settled)


def test_rows_of_each_dataset_are_read_once_and_drawn_as_often_as_it_says() -> None:
    bench = source()
    bench.joins("engine/0")
    fetch = drive.one(bench.driver.hear(due()), FetchPrompts)
    assert [(r.group_id, r.row, r.dataset) for r in fetch.requests] == [(E0, 0, 0), (E1, 1, 0), (E2, 0, 1)]
    assert not drive.every(bench.driver.hear(due()), FetchPrompts), "said again"


def test_an_evaluation_says_so_to_engines_and_is_drawn_alike_every_time() -> None:
    seeds: list[list[int]] = []
    for number in (0, 1):
        bench = source()
        bench.joins("engine/0")
        again = msgspec.structs.replace(OPEN, number=number, first_place=3 * number)
        issued = drive.sent(bench.hear(due(again)), SampleIssued)
        assert {each.purpose for each in issued} == {Purpose.EVALUATE}
        assert {(each.min_version, each.deadline_version, each.group_size) for each in issued} == {(0, 4, 2)}
        seeds.append([each.seed for each in issued])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 6


def test_training_keeps_its_ids_seeds_and_rows_beside_an_evaluation() -> None:
    with_it, without = source(), source()
    for bench in (with_it, without):
        bench.joins("engine/0")
    with_it.hear(due())
    found = [
        [(s.key, s.seed, s.prompt.row) for s in drive.sent(bench.grant(4), SampleIssued) if s.key.group_id >= 0]
        for bench in (with_it, without)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 8


def test_settled_groups_of_an_evaluation_are_forgotten_and_training_is_not() -> None:
    bench = source()
    bench.joins("engine/0")
    bench.hear(due())
    bench.grant(2)
    bench.hear(SamplesSettled(settled=SettledState(2, 0, (E2,), 1)))
    assert sorted(bench.source.table.groups) == [E1, 0, 1]


def test_a_new_prompt_source_begins_no_group_of_an_evaluation_that_is_settled() -> None:
    bench = source()
    fetch = drive.one(bench.driver.hear(due(settled=SettledState(2, 0, (E2,), 1))), FetchPrompts)
    assert [request.group_id for request in fetch.requests] == [E1]


def test_training_goes_first_and_a_few_of_an_evaluation_before_it() -> None:
    bench = source(max_evaluating=8)
    bench.hear(due())
    bench.grant(8)
    issued = keys(bench.joins("engine/0", num_slots=4))
    assert [group_id < 0 for group_id, _ in issued] == [True, True, False, False, False, False]


def test_an_evaluation_does_not_queue_in_front_of_training_that_is_to_come() -> None:
    bench = source(max_evaluating=8)
    bench.hear(due())
    bench.grant(1)
    assert [group_id < 0 for group_id, _ in keys(bench.joins("engine/0", num_slots=4))] == [True, True, False, False]


def test_without_training_an_evaluation_has_all_slots() -> None:
    bench = source(max_evaluating=1)
    bench.hear(due())
    assert len(keys(bench.joins("engine/0", num_slots=6))) == 6


@pytest.mark.parametrize(
    ("waiting", "stuck", "num_evaluating", "has_training", "expected"),
    [
        ("te", "", 0, True, "e"),
        ("te", "", 2, True, "t"),
        ("te", "t", 2, True, "e"),
        ("te", "t", 8, True, ""),
        ("te", "te", 2, True, ""),
        ("te", "t", 1, True, "e"),
        ("te", "e", 0, True, "t"),
        ("e", "", 7, True, "e"),
        ("e", "", 8, True, ""),
        ("e", "", 8, False, "e"),
        ("e", "e", 0, False, ""),
        ("t", "", 0, True, "t"),
    ],
)
def test_whose_turn_it_is(waiting: str, stuck: str, num_evaluating: int, has_training: bool, expected: str) -> None:
    names = {"t": Purpose.TRAIN, "e": Purpose.EVALUATE}
    turn = Queues(8, is_affine=True, is_held=lambda _group_id: False).turn(
        [names[each] for each in waiting],
        [names[each] for each in stuck],
        num_evaluating=num_evaluating,
        has_training=has_training,
    )
    assert turn is (names[expected] if expected else None)


@pytest.mark.parametrize(
    ("purpose", "load", "lag", "stuck", "num_evaluating", "has_training", "suits"),
    [
        ("t", 1, 0, "t", 8, True, True),
        ("e", 1, 0, "", 1, True, True),
        ("e", 1, 0, "t", 2, False, True),
        ("e", 1, 0, "", 2, True, False),
        ("e", 0, 0, "", 2, True, True),
        ("e", 0, 0, "t", 2, True, False),
        ("e", 0, 1, "t", 2, True, True),
    ],
)
def test_which_engine_with_room_an_evaluation_may_have(
    purpose: str, load: int, lag: int, stuck: str, num_evaluating: int, has_training: bool, suits: bool
) -> None:
    names = {"t": Purpose.TRAIN, "e": Purpose.EVALUATE}
    view = EngineView("engine/0", 0, num_slots=1, capacity=2, load=load, lag=lag)
    assert suits is Queues(8, is_affine=True, is_held=lambda _group_id: False).suits(
        view,
        names[purpose],
        [names[each] for each in stuck],
        num_evaluating=num_evaluating,
        has_training=has_training,
    )


# --- what is settled ----------------------------------------------------------------------------------------------


def test_each_kind_of_group_has_its_own_floor() -> None:
    known = KnownSettled(SettledState(5, 2, (E2, 7), 1))
    assert [group_id in known for group_id in (0, 1, 2, 7, E0, E1, E2)] == [
        True, True, False, True, True, False, True,
    ]  # fmt: skip
    assert sorted(known.newly(SettledState(6, 3, (7,), 3), {2, E1, 9, 11, 12, 13, 14, 15})) == [E1, 2]


# --- the EngineWorker ---------------------------------------------------------------------------------------------


def test_a_drain_waits_for_training_and_interrupts_what_is_evaluated() -> None:
    bench = EngineBench().serving(num_slots=2)
    bench.issue(E0)
    bench.issue(0)
    bench.stage(1)
    assert not drive.every(bench.commit(1, UpdateMode.DRAIN), InterruptGenerations)
    assert drive.every(bench.end(0), InterruptGenerations)
    assert applied(bench.interrupted(E0, drive.part((0, 2)))) == [1]
    assert submitted(bench.swap()) == [E0]


def test_an_interrupted_evaluation_gives_its_slot_to_training_that_waits() -> None:
    bench = EngineBench().serving(num_slots=1)
    bench.issue(E0)
    bench.issue(0)
    bench.stage(1)
    assert drive.every(bench.commit(1, UpdateMode.DRAIN), InterruptGenerations)
    bench.interrupted(E0, drive.part((0, 2)))
    assert submitted(bench.swap()) == [0]
    bench.issue(1)
    assert submitted(bench.end(0, drive.part((1, 2)))) == [E0], "before what came later"


# --- the Filter ---------------------------------------------------------------------------------------------------


def test_a_group_of_an_evaluation_goes_out_unjudged_and_unrefilled() -> None:
    strict = FilterSettings(
        options=FilterOptions(
            drop_zero_spread=True,
            min_response_tokens=100,
            max_response_tokens=None,
            function="mine.py:judge",
            on_failed_sample="refill",
            max_refills=4,
            min_group_size=2,
        )
    )
    driver = drive.Driver(Filter(strict))
    about = {"group_size": 2, "purpose": Purpose.EVALUATE, "prompt": drive.prompt(0)}
    failed = msgspec.convert(
        {"key": SampleKey(E0, 0), "attempt": 0, "reason": "it raised", "num_tokens": 4, **about}, ScoringFailed
    )
    commands = driver.hear(failed)
    assert not drive.sent(commands, RefillAsked)
    scored = SampleScored(
        sample=drive.sample(E0, 1, reward=1.0), group_size=2, purpose=Purpose.EVALUATE, prompt=drive.prompt(0)
    )
    group = drive.one_sent(driver.hear(scored), GroupAdmitted, to="buffer").group
    assert [sample.key.index for sample in group.samples] == [1]
    assert [(end.key.index, end.state) for end in group.ended] == [(0, TerminalState.FAILED)]


def test_a_group_of_an_evaluation_without_any_sample_goes_out_too() -> None:
    driver = drive.Driver(
        Filter(
            FilterSettings(
                options=FilterOptions(
                    drop_zero_spread=False,
                    min_response_tokens=0,
                    max_response_tokens=None,
                    on_failed_sample="reject",
                    max_refills=0,
                    min_group_size=1,
                )
            )
        )
    )
    prompt = Prompt(row=0, epoch=0, tokens=b"", dataset=0)
    lost = [
        ScoringFailed(
            key=SampleKey(E0, index),
            attempt=0,
            group_size=2,
            purpose=Purpose.EVALUATE,
            prompt=prompt,
            reason="down",
            num_tokens=0,
        )
        for index in (0, 1)
    ]
    group = drive.one_sent(driver.hear(*lost), GroupAdmitted).group
    assert (len(group.samples), len(group.ended)) == (0, 2)


# --- the Learner --------------------------------------------------------------------------------------------------


def learner(version: int = 0, *, announced_version: int = -1, publish_every: int = 4) -> drive.Driver[Learner]:
    driver = drive.Driver(
        Learner(LearnerSettings(epoch=0, publish_every=publish_every, save_every=1000, step_timeout_s=50.0))
    )
    named = CheckpointNamed(learner_epoch=0, version=version, path="", announced_version=announced_version)
    driver.hear(Started(epoch=0), named, LearnerOpened(version=version))
    return driver


def published(version: int) -> WeightsPublished:
    return WeightsPublished(manifest=manifest(version))


def last_batch(version: int, *, announced_version: int = 0) -> BatchReady:
    return BatchReady(
        version=version,
        groups=(drive.group(7, (version - 1, 4)),),
        announced_version=announced_version,
        max_staleness=2,
        update_mode=UpdateMode.INTERRUPT,
        is_last=True,
    )


def test_a_version_that_is_demanded_is_published_off_the_grid_and_be_it_the_last() -> None:
    driver = learner()
    driver.hear(published(0), last_batch(1))
    trained = BatchTrained(version=1, num_trained_tokens=1, num_masked_tokens=0, metrics=())
    assert not drive.every(driver.hear(trained), PublishWeights)
    assert [p.version for p in drive.every(driver.hear(PublishDemanded(version=1)), PublishWeights)] == [1]
    assert not drive.every(driver.hear(published(1), PublishDemanded(version=1)), PublishWeights)


def test_a_demand_that_comes_late_is_met_by_a_later_version() -> None:
    driver = learner(publish_every=9)
    driver.hear(published(0), msgspec.structs.replace(last_batch(1), is_last=False))
    driver.hear(BatchTrained(version=1, num_trained_tokens=1, num_masked_tokens=0, metrics=()))
    driver.hear(msgspec.structs.replace(last_batch(2), is_last=False))
    driver.hear(BatchTrained(version=2, num_trained_tokens=1, num_masked_tokens=0, metrics=()))
    assert [p.version for p in drive.every(driver.hear(PublishDemanded(version=1)), PublishWeights)] == [2]


def test_a_demand_is_met_by_no_version_that_is_older_than_what_engines_were_told_of() -> None:
    driver = learner(0, announced_version=2)
    driver.hear(PublishDemanded(version=1), last_batch(1, announced_version=2))
    trained = [BatchTrained(version=v, num_trained_tokens=1, num_masked_tokens=0, metrics=()) for v in (1, 2)]
    assert not drive.every(driver.hear(trained[0]), PublishWeights)
    driver.hear(last_batch(2, announced_version=2))
    assert [p.version for p in drive.every(driver.hear(trained[1]), PublishWeights)] == [2]


def test_a_demand_is_met_when_the_version_is_reached_again() -> None:
    driver = learner(0, announced_version=1)
    driver.hear(PublishDemanded(version=1), last_batch(1, announced_version=1))
    trained = BatchTrained(version=1, num_trained_tokens=1, num_masked_tokens=0, metrics=())
    assert [p.version for p in drive.every(driver.hear(trained), PublishWeights)] == [1]
