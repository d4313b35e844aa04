"""Functions of the user's that play episodes: what becomes of their samples, and of each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from episode_functions_bench import END, MAX_CONTEXT, MAX_NEW, FunctionBench

from penstock.actors.prompt_source.leases import Lease
from penstock.backends.episodes.functions import driver
from penstock.backends.episodes.options import EpisodeOptions
from penstock.messages.arrays import floats_view, tokens_view
from penstock.messages.base import Metric
from penstock.messages.commands import AbortGeneration, InterruptGenerations
from penstock.messages.local import EpisodeMoved, GenerationAdvanced, ToolCalled
from penstock.messages.samples import (
    Cancelled,
    Completed,
    InfraError,
    PolicyError,
    Reward,
    SampleKey,
    StopReason,
    Truncated,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.messages.local import GenerationEnded

PLAYED = str(Path(__file__).parent / "played_episodes.py")
EPISODE = StopReason.EPISODE


def open_bench(model: Path, **options: object) -> FunctionBench:
    values = {"kind": "function", "generate": f"{PLAYED}:episode", "max_turns": 6, "max_parts": 5, **options}
    return FunctionBench(model, EpisodeOptions(**values))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shared(model_folder: Path) -> Iterator[FunctionBench]:
    bench = open_bench(model_folder)
    yield bench
    bench.close()


@pytest.fixture
def bench(shared: FunctionBench) -> FunctionBench:
    shared.engine.reply = lambda text: f"yes{END}"
    shared.engine.is_held = False
    shared.engine.asked.clear()
    shared.engine.made.clear()
    return shared


def mask_of(ended: GenerationEnded) -> list[int]:
    return list(ended.part.loss_mask or b"\1" * ended.part.num_tokens)


def test_turns_are_the_very_tokens_of_the_engine_and_all_else_is_masked(bench: FunctionBench) -> None:
    bench.engine.reply = lambda text: "good; and more" if text == "ab=" else f"bad{END}"
    bench.issue(do="two_turns")
    ended = bench.ended()
    components = (Metric("first", 5.0), Metric("second", 4.0))
    assert ended.outcome == Completed(stop=EPISODE, reward=Reward(value=1.0, components=components))
    assert bench.text(ended.part) == "good; no bad"
    ids, mask = tokens_view(ended.part.tokens).tolist(), mask_of(ended)
    made = [bench.engine.made[0][:5], bench.engine.made[1]]
    assert [i for i, m in zip(ids, mask, strict=True) if m] == made[0] + made[1]
    assert bench.engine.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if not m]) == " no "
    assert [x for x, m in zip(floats_view(ended.part.logprobs), mask, strict=True) if not m] == [0.0] * 4
    assert not ended.part.context_tokens
    assert not ended.parts
    assert [bench.engine.text(asked.prompt.tokens) for asked in bench.engine.asked] == ["ab=", "ab=good; no "]


def test_a_function_that_returns_nothing_leaves_the_reward_to_the_scenario(bench: FunctionBench) -> None:
    bench.issue(do="nothing")
    assert bench.ended().outcome == Completed(stop=EPISODE)


def test_a_last_turn_that_a_limit_cut_off_is_a_truncated_sample(bench: FunctionBench) -> None:
    bench.engine.reply = lambda text: "a" * (MAX_NEW + 5)
    bench.issue(do="nothing")
    assert bench.ended().outcome == Truncated()


@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        ({"do": "returns", "what": "end"}, PolicyError(detail="it lied", reward=Reward(value=0.5))),
        ({"do": "policy_error"}, PolicyError(detail="it cheated", reward=Reward(value=-1.0))),
        ({"do": "raises", "what": "tool"}, PolicyError(detail="no such thing")),
    ],
)
def test_what_the_function_blames_on_the_model_is_a_policy_error(
    bench: FunctionBench, row: dict[str, str], outcome: PolicyError
) -> None:
    bench.issue(**row)  # type: ignore[arg-type]
    assert bench.ended().outcome == outcome


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ({"do": "returns", "what": "text"}, "the episode function returned str 'good'; expected a number"),
        ({"do": "returns", "what": "nan"}, "expected a finite number"),
        ({"do": "raises", "what": "value"}, "ValueError: no such thing (played_episodes.py:"),
        ({"do": "raises", "what": "exit"}, "SystemExit: no such thing (played_episodes.py:"),
        ({"do": "hangs_in_a_tool"}, "tool sleep took longer than 0.05 s"),
        ({"do": "foreign_ids"}, "token id 1000000: the model has those from 0 to"),
        ({"do": "unknown"}, "KeyError: 'unknown'"),
    ],
)
def test_what_is_no_fault_of_the_model_is_tried_again_and_never_a_reward(
    bench: FunctionBench, row: dict[str, str], detail: str
) -> None:
    bench.issue(**row)  # type: ignore[arg-type]
    outcome = bench.ended().outcome
    assert isinstance(outcome, InfraError)
    assert detail in outcome.detail


def test_a_call_that_is_given_up_is_told_with_its_error_and_what_was_asked_is_not(bench: FunctionBench) -> None:
    bench.issue(do="hangs_in_a_tool")
    step = None
    while not isinstance(step, ToolCalled):
        step = bench.hear(EpisodeMoved).step
    bench.ended()
    assert (step.name, step.call_id, step.error) == ("tool sleep", "", "ToolTimeoutError")
    assert step.end_ns - step.begin_ns >= 0.05e9


def test_limits_of_turns_and_context_truncate(bench: FunctionBench) -> None:
    bench.issue(do="many_turns")
    ended = bench.ended()
    assert ended.outcome == Truncated()
    assert len(bench.engine.made) == 6
    bench.issue("a" * (MAX_CONTEXT - 30), do="many_turns")
    assert bench.ended().outcome == Truncated()
    whole = MAX_CONTEXT - 30 + ended.part.num_tokens
    assert whole <= MAX_CONTEXT


def test_conversations_become_parts_and_their_tokens_are_told_once(bench: FunctionBench) -> None:
    bench.issue(do="agents")
    ended = bench.ended()
    assert ended.outcome == Completed(stop=EPISODE, reward=Reward(value=1.0))
    texts = [bench.text(part) for part in ended.parts]
    contexts = [bench.engine.text(part.context_tokens) for part in ended.parts]
    assert texts == ["yesfiveyes", "yes", "yes", "yes"]
    assert contexts == ["ab=one", "two=", "ab=oneyesthree=", "four="]
    assert set(ended.parts[3].loss_mask) == {0}
    assert sum(part.num_tokens for part in ended.parts) == ended.part.num_tokens
    assert mask_of(ended).count(1) == sum(len(made) for made in bench.engine.made) - len(bench.engine.made[3])


def test_more_conversations_than_the_scenario_allows_truncate(bench: FunctionBench) -> None:
    bench.issue(do="too_many_agents")
    ended = bench.ended()
    assert ended.outcome == Truncated()
    assert len(ended.parts) == 5


def test_a_turn_that_is_drawn_otherwise_is_masked_and_one_that_is_not_is_trained(bench: FunctionBench) -> None:
    bench.issue(do="draws_otherwise")
    ended = bench.ended()
    figures = (Metric("masked", 1.0), Metric("same", 1.0))
    assert ended.outcome == Completed(stop=EPISODE, reward=Reward(value=1.0, components=figures))
    first, second = bench.engine.asked
    assert first.sampling is not None
    assert (first.sampling.temperature, first.seed, second.seed != 9) == (0.0, 9, True)
    num_first, num_second = (len(made) for made in bench.engine.made)
    assert mask_of(ended) == [0] * (num_first + 1) + [1] * num_second


def test_an_episode_of_which_nothing_can_be_trained_says_why(bench: FunctionBench) -> None:
    for do, why in (("draws_only_otherwise", "other_sampling"), ("takes_none", "none of its choices was taken")):
        bench.issue(do=do)
        outcome = bench.ended().outcome
        assert isinstance(outcome, InfraError)
        assert why in outcome.detail


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        ({"json_schema": "{}"}, "cannot hold a turn to a JSON schema"),
        ({"temperature": -1.0}, ">= 0"),
        ({"seed": 1 << 63}, "seed"),
    ],
)
def test_a_wish_that_cannot_be_met_is_the_functions_fault(
    bench: FunctionBench, sampling: dict[str, object], why: str
) -> None:
    bench.issue(do="is_held_to_a_schema", sampling=sampling)
    outcome = bench.ended().outcome
    assert isinstance(outcome, InfraError)
    assert why in outcome.detail
    assert not bench.engine.asked


def test_a_choice_that_is_taken_is_part_of_its_conversation_and_no_other_is(bench: FunctionBench) -> None:
    answers = iter(["no", "yes", "good", "bad", "evil", "end"])
    bench.engine.reply = lambda text: f"{next(answers)}{END}"
    bench.issue(do="chooses")
    ended = bench.ended()
    assert ended.outcome == Completed(stop=EPISODE, reward=Reward(value=1.0))
    (part,) = ended.parts
    assert bench.engine.text(part.context_tokens) == "ab=one="
    assert bench.text(part) == "yesthree=end"
    made = bench.engine.made
    assert list(part.loss_mask) == [1] * len(made[1]) + [0] * len("three=") + [1] * len(made[5])
    assert [bench.engine.text(asked.prompt.tokens) for asked in bench.engine.asked[3:]] == [
        "ab=one=yestwo=", "ab=one=yestwo=", "ab=one=yesthree="
    ]  # fmt: skip


def test_a_turn_that_nobody_waited_for_is_not_trained(bench: FunctionBench) -> None:
    bench.engine.is_held = True
    bench.issue(do="leaves_a_turn")
    assert isinstance(bench.ended().outcome, InfraError)  # not one token of the model


def test_an_episode_lives_through_a_swap_of_weights(bench: FunctionBench) -> None:
    bench.engine.is_held = True
    key = bench.issue(do="two_turns")
    bench.until(lambda: bool(bench.engine.held))
    bench.backend.execute(InterruptGenerations())
    paused = bench.ended(key)
    assert paused.outcome == Cancelled(cause="interrupted")
    bench.engine.is_held = False
    bench.issue_again(key, attempt=0, prefix=paused.part, do="two_turns")
    ended = bench.ended(key)
    assert isinstance(ended.outcome, Completed)


def test_an_aborted_episode_stops_its_function_and_nothing_else(bench: FunctionBench) -> None:
    key = bench.issue(do="is_silent")
    bench.until(lambda: len(bench.engine.made) == 1)
    pid = bench.driver.pid
    bench.backend.execute(AbortGeneration(key, 0))
    assert bench.ended(key).outcome == Cancelled(cause="aborted")
    bench.issue(do="two_turns")
    assert isinstance(bench.ended().outcome, Completed)
    assert bench.driver.pid == pid


@pytest.mark.parametrize(
    ("do", "how"),
    [
        ("exits", "ended with exit code 3"),
        ("is_killed", "was killed by SIGKILL, as the kernel does when memory runs out"),
    ],
)
def test_a_process_that_dies_costs_its_episodes_and_nothing_else(bench: FunctionBench, do: str, how: str) -> None:
    other = bench.issue(do="is_silent")
    bench.until(lambda: len(bench.engine.made) == 1)
    key = bench.issue(do=do)
    ends = {event.key: event.outcome for event in (bench.ended(), bench.ended())}
    assert ends == dict.fromkeys((other, key), InfraError(detail=f"the process that plays episodes {how}"))
    bench.issue_again(other, attempt=1, do="two_turns")
    assert isinstance(bench.ended(other).outcome, Completed)


@pytest.mark.parametrize(
    ("do", "options", "detail"),
    [
        ("blocks", {"stall_timeout_s": 0.5}, "blocked it for 0.5 s (episode.stall_timeout_s)"),
        ("is_silent", {"idle_timeout_s": 0.3}, "asked the model for nothing for 0.3 s (episode.idle_timeout_s)"),
        ("is_silent", {"timeout_s": 0.3}, "took longer than 0.3 s (episode.timeout_s)"),
    ],
)
def test_what_takes_too_long_is_ended_and_the_next_is_played(
    model_folder: Path, do: str, options: dict[str, object], detail: str
) -> None:
    bench = open_bench(model_folder, **options)
    try:
        bench.issue(do=do)
        outcome = bench.ended().outcome
        assert isinstance(outcome, InfraError)
        assert detail in outcome.detail
        bench.issue(do="nothing")
        assert isinstance(bench.ended().outcome, Completed)
    finally:
        bench.close()


def test_a_function_that_ignores_that_it_is_stopped_costs_its_process(
    bench: FunctionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "STOP_TIMEOUT_S", 0.2)
    key, pid = bench.issue(do="never_ends"), bench.driver.pid
    other = bench.issue(do="is_silent")
    bench.until(lambda: len(bench.engine.made) == 1)
    bench.backend.execute(AbortGeneration(key, 0))
    assert bench.ended(key).outcome == Cancelled(cause="aborted")
    outcome = bench.ended(other).outcome
    assert outcome == InfraError(
        detail="the process that plays episodes was killed: a function did not end within 0.2 s of being told to"
    )
    assert bench.driver.pid != pid


def test_a_plain_function_answers_responses_until_it_gives_a_reward(model_folder: Path) -> None:
    bench = open_bench(model_folder, generate=f"{PLAYED}:feedback")
    try:
        bench.issue(label="why")
        ended = bench.ended()
        assert ended.outcome == Completed(stop=EPISODE, reward=Reward(value=1.0))
        assert bench.text(ended.part) == "yes why yes why yes"
    finally:
        bench.close()


def test_an_episode_goes_on_elsewhere_from_what_it_has_saved(bench: FunctionBench, model_folder: Path) -> None:
    """Its engine dies in its third turn: what the actor was told of becomes the prefix, cut at the save point."""
    key, lease, num_turns = bench.issue(do="saves"), Lease(SampleKey(0, 0)), 0
    while num_turns < 2:
        event = bench.hear(GenerationAdvanced)
        lease.add_progress(event.from_token, event.chunk)
        num_turns = 0 if event.chunk.save_point is None else event.chunk.save_point.num_turns
    later = bench.hear(GenerationAdvanced)
    lease.add_progress(later.from_token, later.chunk)
    assert isinstance(bench.ended(key).outcome, Completed)
    assert later.chunk.num_tokens
    lease.back_to_save_point()
    prefix = lease.prefix()
    assert prefix is not None
    elsewhere = open_bench(model_folder)
    try:
        elsewhere.issue_again(key, attempt=1, prefix=prefix, do="saves")
        ended = elsewhere.ended(key)
    finally:
        elsewhere.close()
    components = (Metric("turns", 3.0),)
    assert ended.outcome == Completed(stop=EPISODE, reward=Reward(value=1.0, components=components))
    assert elsewhere.text(ended.part) == "yes1yes2yes"
    assert elsewhere.engine.text(ended.part.context_tokens) == "ab=0"
    assert [elsewhere.engine.text(asked.prompt.tokens) for asked in elsewhere.engine.asked] == ["ab=0yes1yes2"]
