"""The Scorer with teachers, and the teachers: nothing goes on without its log-probs, no question is lost, and none
waits for ever."""

from __future__ import annotations

import actor_driver as drive
import msgspec
import pytest
from msgspec.structs import replace

from penstock.actors.engine_worker.settings import TeacherSettings
from penstock.actors.engine_worker.teacher import Teacher
from penstock.actors.scorer.machine import TEACHER_TIMER, Scorer
from penstock.actors.scorer.settings import ScorerSettings
from penstock.messages.arrays import ArrayLengthError, floats_view, pack_floats, pack_tokens, tokens_view
from penstock.messages.commands import ComputeLogprobs, OpenEngine, ReplaceActor, Score, StartTimer
from penstock.messages.flow import SampleGenerated, SampleScored, SamplesSettled, ScoringFailed, SettledState
from penstock.messages.local import EngineOpened, LogprobsComputed, SampleJudged, Started, TimerFired
from penstock.messages.membership import ActorLost, ActorReturned, LineRestored
from penstock.messages.samples import Completed, Loss, Part, Purpose, Reward, Sample, SampleKey, VersionSpan
from penstock.messages.teaching import GivenTokens, TeacherAnswered, TeacherAsked
from penstock.messages.top_logprobs import TopLogprobs
from penstock.messages.waits import OWN_BACKEND, Wait
from penstock.messages.weights import EngineReady

TEACHERS = ("teacher/0", "teacher/1")


def scorer(
    *, ready: tuple[str, ...] = TEACHERS, num_slots: int = 8, num_retries: int = 1, max_losses: int = 2
) -> drive.Driver[Scorer]:
    """With two teachers, of which these are ready."""
    settings = ScorerSettings(
        timeout_s=10.0,
        num_retries=num_retries,
        teachers=TEACHERS,
        teacher_timeout_s=20.0,
        teacher_start_timeout_s=50.0,
        max_teacher_losses=max_losses,
    )
    driver = drive.Driver(Scorer(settings))
    driver.hear(*(EngineReady(engine=name, engine_epoch=0, num_slots=num_slots) for name in ready))
    return driver


def generated(group_id: int, index: int = 0, *, attempt: int = 0, reward: float | None = None) -> SampleGenerated:
    sample = drive.sample(group_id, index, attempt=attempt, reward=reward)
    return SampleGenerated(sample=sample, group_size=8, prompt=drive.prompt(group_id))


def judged(group_id: int, index: int = 0) -> SampleJudged:
    return SampleJudged(key=SampleKey(group_id, index), attempt=0, reward=Reward(value=0.5))


def logprobs(num_tokens: int = 4) -> bytes:
    return pack_floats([-0.25] * num_tokens)


def answered(
    group_id: int, teacher: str = "teacher/0", *, index: int = 0, attempt: int = 0, error: str = "", num_tokens: int = 4
) -> TeacherAnswered:
    given = () if error else (logprobs(num_tokens),)
    return TeacherAnswered(
        teacher=teacher, key=SampleKey(group_id, index), attempt=attempt, logprobs=given, error=error
    )


def asked(driver: drive.Driver[Scorer], *events: object) -> dict[str, list[int]]:
    """Groups that these events make it ask each teacher about."""
    commands = driver.hear(*events)  # type: ignore[arg-type]
    found = {name: [e.key.group_id for e in drive.sent(commands, TeacherAsked, to=name)] for name in TEACHERS}
    return {name: groups for name, groups in found.items() if groups}


def sweep(driver: drive.Driver[Scorer]) -> list[object]:
    commands = driver.hear(TimerFired(key=TEACHER_TIMER))
    assert commands[-1] == StartTimer(TEACHER_TIMER, 20.0) or StartTimer(TEACHER_TIMER, 20.0) in commands
    return [command for command in commands if not isinstance(command, StartTimer)]


# --- one sample ---------------------------------------------------------------------------------------------------


def test_a_sample_is_judged_and_shown_to_a_teacher_at_once() -> None:
    event = generated(3)
    commands = scorer().hear(event)
    assert drive.one(commands, Score).sample == event.sample
    question = drive.one_sent(commands, TeacherAsked, to="teacher/0")
    assert question.texts == (GivenTokens(event.prompt.tokens, event.sample.parts[0].tokens),)
    assert (question.key, question.attempt) == (event.sample.key, 0)


@pytest.mark.parametrize("order", [(judged(3), answered(3)), (answered(3), judged(3))])
def test_a_sample_goes_on_when_reward_and_log_probs_are_there_whichever_comes_first(
    order: tuple[SampleJudged | TeacherAnswered, ...],
) -> None:
    driver = scorer()
    driver.hear(generated(3))
    assert driver.hear(order[0]) == []
    assert len(driver.machine.leases()) == 1
    sample = drive.one_sent(driver.hear(order[1]), SampleScored, to="filter").sample
    assert sample.reward == 0.5
    assert list(floats_view(sample.parts[0].teacher_logprobs)) == [-0.25] * 4
    assert driver.machine.leases() == ()


def test_a_reward_that_is_there_stays_as_it_is() -> None:
    """A call that was taken for lost, and made again, is answered twice."""
    driver = scorer()
    driver.hear(generated(3), judged(3))
    driver.ignores(SampleJudged(key=SampleKey(3, 0), attempt=0, reward=None, reason="it raised"))
    driver.ignores(SampleJudged(key=SampleKey(3, 0), attempt=0, reward=Reward(value=0.75)))
    assert drive.one_sent(driver.hear(answered(3)), SampleScored).sample.reward == 0.5


def test_every_part_of_an_episode_is_asked_about_after_its_own_context() -> None:
    parts = (
        Part(tokens=pack_tokens([5, 6]), logprobs=pack_floats([-1, -1]), spans=(VersionSpan(0, 2),)),
        Part(
            tokens=pack_tokens([7]),
            logprobs=pack_floats([-1]),
            spans=(VersionSpan(0, 1),),
            context_tokens=pack_tokens([1, 2, 3]),
        ),
    )
    sample = Sample(key=SampleKey(3, 0), parts=parts, outcome=Completed(reward=Reward(value=1.0)))
    driver = scorer()
    commands = driver.hear(SampleGenerated(sample=sample, group_size=8, prompt=drive.prompt(3)))
    assert drive.every(commands, Score) == []
    assert drive.one_sent(commands, TeacherAsked).texts == (
        GivenTokens(drive.prompt(3).tokens, pack_tokens([5, 6])),
        GivenTokens(pack_tokens([1, 2, 3]), pack_tokens([7])),
    )
    answer = TeacherAnswered(
        teacher="teacher/0", key=SampleKey(3, 0), attempt=0, logprobs=(pack_floats([-2, -3]), pack_floats([-4]))
    )
    taught = drive.one_sent(driver.hear(answer), SampleScored).sample.parts
    assert [list(floats_view(part.teacher_logprobs)) for part in taught] == [[-2, -3], [-4]]


def test_a_teacher_reads_what_the_row_has_for_it_in_place_of_the_prompt() -> None:
    prompt = replace(drive.prompt(3), teacher_tokens=pack_tokens([8, 9]))

    def part(*context: int) -> Part:
        of_part = pack_tokens(list(context)) if context else b""
        spans = (VersionSpan(0, 1),)
        return Part(tokens=pack_tokens([7]), logprobs=pack_floats([-1]), spans=spans, context_tokens=of_part)

    own = list(tokens_view(prompt.tokens))
    sample = Sample(
        key=SampleKey(3, 0),
        parts=(part(), part(*own, 4, 5), part(*(token + 1 for token in own))),
        outcome=Completed(reward=Reward(value=1.0)),
    )
    commands = scorer().hear(SampleGenerated(sample=sample, group_size=8, prompt=prompt))
    contexts = [text.context for text in drive.one_sent(commands, TeacherAsked).texts]
    edited = [token + 1 for token in own]
    assert contexts == [pack_tokens([8, 9]), pack_tokens([8, 9, 4, 5]), pack_tokens(edited)]
    assert drive.one_sent(commands, TeacherAsked).texts[0].tokens == sample.parts[0].tokens


def test_the_likeliest_tokens_come_with_the_sample_and_only_as_many_as_it_has_places() -> None:
    driver = scorer()
    driver.hear(generated(3), judged(3))
    top = TopLogprobs(2, pack_tokens(range(8)), pack_floats([-0.5] * 8))
    short = TopLogprobs(2, pack_tokens(range(6)), pack_floats([-0.5] * 6))
    again = driver.hear(replace(answered(3), top=(short,)))
    assert drive.one_sent(again, TeacherAsked).key == SampleKey(3, 0), "an answer for three of four places is none"
    sample = drive.one_sent(driver.hear(replace(answered(3), top=(top,))), SampleScored).sample
    assert sample.parts[0].teacher_top == top
    with pytest.raises(ArrayLengthError, match="teacher_top: expected 4 tokens, got 3"):
        replace(sample.parts[0], teacher_top=short)
    with pytest.raises(ArrayLengthError, match="expected 3 a place"):
        TopLogprobs(3, pack_tokens(range(8)), pack_floats([-0.5] * 8))


@pytest.mark.parametrize("why", ["evaluation", "imitated", "empty"])
def test_what_the_objective_does_not_train_costs_no_teacher(why: str) -> None:
    event = generated(3, reward=1.0)
    sample = event.sample
    if why == "evaluation":
        event = msgspec.structs.replace(event, purpose=Purpose.EVALUATE)
    elif why == "imitated":
        event = msgspec.structs.replace(event, sample=msgspec.structs.replace(sample, loss=Loss.SUPERVISED))
    else:
        event = msgspec.structs.replace(event, sample=msgspec.structs.replace(sample, parts=(Part(),)))
    scored = drive.one_sent(scorer().hear(event), SampleScored)
    assert scored.sample == event.sample


def test_an_answer_that_is_not_asked_for_changes_nothing() -> None:
    driver = scorer()
    assert driver.hear(answered(3)) == []
    driver.hear(generated(3, attempt=1), judged(3))
    assert driver.hear(answered(3, attempt=0)) == []
    assert list(driver.machine.pending) == [SampleKey(3, 0)]


def test_a_settled_sample_is_no_longer_asked_about() -> None:
    driver = scorer(ready=("teacher/0",), num_slots=1)
    driver.hear(generated(0), generated(1))
    assert asked(driver, SamplesSettled(settled=SettledState(1, 1, ()))) == {"teacher/0": [1]}
    assert driver.hear(answered(0)) == []
    assert list(driver.machine.pending) == [SampleKey(1, 0)]


# --- failures -----------------------------------------------------------------------------------------------------


def test_a_question_that_fails_is_asked_again_and_then_the_sample_fails_with_the_reason() -> None:
    driver = scorer()
    driver.hear(generated(3), judged(3))
    assert drive.one_sent(driver.hear(answered(3, error="too long")), TeacherAsked).key == SampleKey(3, 0)
    failed = drive.one_sent(driver.hear(answered(3, error="too long")), ScoringFailed, to="filter")
    assert (failed.key, failed.reason, failed.num_tokens) == (SampleKey(3, 0), "the teacher: too long", 4)
    assert driver.machine.pending == {}


def test_an_answer_of_another_length_is_no_answer() -> None:
    driver = scorer(num_retries=0)
    driver.hear(generated(3), judged(3))
    failed = drive.one_sent(driver.hear(answered(3, num_tokens=3)), ScoringFailed)
    assert failed.reason == "the teacher: it answered with [3] log-probs, asked were [4]"


def test_a_sample_without_a_reward_fails_whatever_the_teacher_will_say() -> None:
    driver = scorer(num_retries=0)
    driver.hear(generated(3))
    lost = SampleJudged(key=SampleKey(3, 0), attempt=0, reward=None, reason="it raised")
    assert drive.one_sent(driver.hear(lost), ScoringFailed).reason == "it raised"
    assert driver.hear(answered(3)) == []


def test_what_a_dead_teacher_had_is_asked_of_another_at_once() -> None:
    driver = scorer()
    assert asked(driver, generated(0), generated(1)) == {"teacher/0": [0], "teacher/1": [1]}
    assert asked(driver, ActorLost(name="teacher/0", epoch=0)) == {"teacher/1": [0]}
    driver.ignores(ActorLost(name="teacher/0", epoch=0))
    driver.ignores(ActorLost(name="filter", epoch=0))


def test_without_any_teacher_questions_wait_for_one_that_is_ready() -> None:
    driver = scorer(ready=("teacher/0",))
    driver.hear(generated(0))
    assert asked(driver, ActorLost(name="teacher/0", epoch=0), generated(1)) == {}
    assert Wait("a place at a teacher for", "0/0", "teacher/0", 1) in driver.machine.waits()
    assert asked(driver, ActorReturned(name="teacher/0", epoch=1)) == {}
    assert asked(driver, EngineReady(engine="teacher/0", engine_epoch=1, num_slots=8)) == {"teacher/0": [0, 1]}


def test_the_answer_of_a_teacher_that_was_lost_since_is_as_good_as_any() -> None:
    driver = scorer()
    driver.hear(generated(0), judged(0), ActorLost(name="teacher/0", epoch=0))
    assert drive.one_sent(driver.hear(answered(0, "teacher/0")), SampleScored).sample.reward == 0.5
    assert driver.hear(answered(0, "teacher/1")) == []


def test_a_sample_that_kills_teachers_comes_to_its_end() -> None:
    driver = scorer(ready=("teacher/0",), max_losses=1)
    driver.hear(generated(0), judged(0), ActorLost(name="teacher/0", epoch=0))
    driver.hear(EngineReady(engine="teacher/0", engine_epoch=1, num_slots=8))
    failed = drive.one_sent(driver.hear(ActorLost(name="teacher/0", epoch=1)), ScoringFailed)
    assert failed.reason == "2 teachers died with it"


def test_a_line_that_was_cut_is_not_trusted_to_have_carried_the_questions() -> None:
    driver = scorer()
    driver.hear(generated(0), generated(1))
    assert asked(driver, LineRestored(name="teacher/1")) == {"teacher/1": [1]}
    assert asked(driver, LineRestored(name="filter")) == {}


def test_a_silent_teacher_is_replaced_and_one_that_answers_others_is_asked_again() -> None:
    driver = scorer(ready=("teacher/0",))
    driver.hear(generated(0), generated(1))
    assert sweep(driver) == []
    driver.hear(answered(1))
    again = sweep(driver)
    assert [type(command).__name__ for command in again] == ["Send"]
    assert sweep(driver) == []
    assert sweep(driver) == [ReplaceActor("teacher/0", 0, "no answer for 20 s about 1 samples")]


def test_a_teacher_that_does_not_get_ready_is_replaced() -> None:
    driver = scorer(ready=())
    driver.hear(ActorReturned(name="teacher/0", epoch=3), ActorReturned(name="buffer", epoch=0))
    found = [sweep(driver) for _ in range(4)]
    assert found == [[], [], [], [ReplaceActor("teacher/0", 3, "not ready within 50 s")]]
    driver.hear(EngineReady(engine="teacher/0", engine_epoch=3, num_slots=8))
    assert sweep(driver) == []


def test_no_teacher_has_more_than_its_share_and_the_least_loaded_is_next() -> None:
    driver = scorer(ready=("teacher/0",), num_slots=2)
    driver.hear(EngineReady(engine="teacher/1", engine_epoch=0, num_slots=4))
    found = asked(driver, *(generated(group_id) for group_id in range(8)))
    assert {name: len(groups) for name, groups in found.items()} == {"teacher/0": 2, "teacher/1": 4}
    assert asked(driver, answered(found["teacher/1"][0], "teacher/1")) == {"teacher/1": [6]}


# --- the teacher --------------------------------------------------------------------------------------------------


def teacher() -> drive.Driver[Teacher]:
    return drive.Driver(Teacher(TeacherSettings(name="teacher/0", epoch=2)))


def question(group_id: int = 3, attempt: int = 0) -> TeacherAsked:
    texts = (GivenTokens(pack_tokens([1, 2]), pack_tokens([3, 4, 5])),)
    return TeacherAsked(key=SampleKey(group_id, 0), attempt=attempt, texts=texts)


def test_a_teacher_opens_says_so_to_the_scorer_and_then_works_on_what_came_before() -> None:
    driver = teacher()
    assert driver.hear(Started(epoch=2)) == [OpenEngine()]
    assert driver.hear(question()) == []
    assert driver.machine.waits() == (Wait("start of", "the teacher", OWN_BACKEND),)
    commands = driver.hear(EngineOpened(num_slots=8))
    ready = drive.one_sent(commands, EngineReady, to="scorer")
    assert (ready.engine, ready.engine_epoch, ready.num_slots) == ("teacher/0", 2, 8)
    assert drive.one(commands, ComputeLogprobs).texts == question().texts


def test_a_teacher_computes_a_question_once_however_often_it_hears_it_before_it_has_the_answer() -> None:
    driver = teacher()
    driver.hear(EngineOpened(num_slots=8), question())
    driver.ignores(question())
    assert driver.machine.shows[0].value == "working"
    answer = LogprobsComputed(key=SampleKey(3, 0), attempt=0, logprobs=(logprobs(3),))
    told = drive.one_sent(driver.hear(answer), TeacherAnswered, to="scorer")
    assert (told.teacher, told.key, told.attempt, told.logprobs) == ("teacher/0", SampleKey(3, 0), 0, (logprobs(3),))
    driver.ignores(answer)
    assert driver.machine.shows[0].value == "waiting_for_samples"
    assert len(drive.every(driver.hear(question()), ComputeLogprobs)) == 1


def test_a_teacher_holds_no_lease_and_passes_the_reason_on() -> None:
    driver = teacher()
    driver.hear(EngineOpened(num_slots=8), question())
    assert driver.machine.leases() == ()
    told = drive.one_sent(
        driver.hear(LogprobsComputed(key=SampleKey(3, 0), attempt=0, error="too long")), TeacherAnswered
    )
    assert (told.error, told.logprobs) == ("too long", ())
