"""The ready episode of several turns, and the calculator's example."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import gateway_cases as cases
import pytest
from episode_functions_bench import END, FunctionBench

from penstock.backends.checkpoint.make import make_model
from penstock.backends.episodes.functions.opening import specs_of
from penstock.backends.episodes.options import EpisodeOptions
from penstock.backends.processes.user_code import UserCodeError
from penstock.messages.arrays import tokens_view
from penstock.messages.base import Metric
from penstock.messages.local import EpisodeMoved, ToolCalled, TurnTaken
from penstock.messages.samples import Completed, InfraError, PolicyError, Reward, StopReason, Truncated
from penstock.runtime.preflight.function_trial import NamedFunction, check_loads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.messages.local import GenerationEnded

WORLDS = str(Path(__file__).parent / "played_worlds.py")
CALCULATOR = str(Path(__file__).parents[2] / "scenarios" / "calculator.py")
IM_END = "<|im_end|>"
EPISODE = StopReason.EPISODE


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FunctionBench]:
    """A model of Qwen's kind with a tool."""
    folder = tmp_path_factory.mktemp("chat")
    cases.make_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    options = EpisodeOptions(kind="function", generate="multi_turn", tools=(f"{WORLDS}:Multiply",), max_turns=4)
    bench = FunctionBench(folder, options, uses_chat=True, end=IM_END, max_context=1024, max_new=64)
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def guess(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FunctionBench]:
    """A small model in a world."""
    folder = tmp_path_factory.mktemp("model")
    make_model("xs", folder, 0)
    options = EpisodeOptions(kind="function", generate="multi_turn", environment=f"{WORLDS}:Guess", max_turns=4)
    bench = FunctionBench(folder, options)
    yield bench
    bench.close()


def replies(bench: FunctionBench, *texts: str) -> None:
    told = itertools.cycle(texts)
    bench.engine.reply = lambda text: next(told)
    bench.engine.asked.clear()


def masked_text(bench: FunctionBench, ended: GenerationEnded) -> str:
    ids = tokens_view(ended.part.tokens).tolist()
    return bench.tokenizer.decode([i for i, m in zip(ids, ended.part.loss_mask, strict=True) if not m])


def test_a_tool_is_called_and_its_result_is_all_that_is_masked(chat: FunctionBench) -> None:
    replies(chat, cases.CALL + IM_END, cases.ANSWER + IM_END)
    chat.issue(cases.QUESTION)
    ended = chat.ended()
    assert ended.outcome == Completed(stop=EPISODE)
    assert chat.text(ended.part).startswith(cases.CALL)
    assert chat.text(ended.part).endswith(cases.ANSWER)
    assert masked_text(chat, ended) == "\nuser\n<tool_response>\n42\n</tool_response>\nassistant\n"
    assert "multiply" in chat.engine.text(ended.part.context_tokens)


def test_the_call_of_a_tool_is_told_with_its_name_and_the_id_that_the_model_was_shown(chat: FunctionBench) -> None:
    replies(chat, cases.CALL + IM_END, cases.ANSWER + IM_END)
    chat.issue(cases.QUESTION)
    steps: list[TurnTaken | ToolCalled] = []
    while len(steps) < 3:
        event = chat.hear(EpisodeMoved)
        steps += [] if event.step is None else [event.step]
    chat.ended()
    first, call, second = steps
    assert isinstance(call, ToolCalled)
    assert (call.after_turn, call.name, call.error) == (1, "multiply", "")
    assert call.call_id == "000001000"
    assert first.begin_ns <= first.end_ns <= call.begin_ns <= call.end_ns <= second.begin_ns <= second.end_ns
    assert [step.is_chat for step in (first, second) if isinstance(step, TurnTaken)] == [True, True]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ('<tool_call>\n{"name": "divide", "arguments": {}}\n</tool_call>', "there is no tool 'divide'"),
        ('<tool_call>\n{"name": "multiply", "arguments": {"a": 1}}\n</tool_call>', "a and b must be integers"),
        ('<tool_call>\n{"name": "multiply"\n</tool_call>', "this is no call of a tool"),
    ],
)
def test_what_the_model_does_wrong_it_gets_to_read(chat: FunctionBench, call: str, told: str) -> None:
    replies(chat, call + IM_END, cases.ANSWER + IM_END)
    chat.issue(cases.QUESTION)
    ended = chat.ended()
    assert ended.outcome == Completed(stop=EPISODE)
    assert f"error: {told}" in masked_text(chat, ended)


@pytest.mark.parametrize(
    ("argument", "detail"), [("number", "tool multiply returned int; expected text"), ("broken", "OSError: the disk")]
)
def test_what_a_tool_does_wrong_is_no_reward(chat: FunctionBench, argument: str, detail: str) -> None:
    replies(chat, f'<tool_call>\n{{"name": "multiply", "arguments": {{"a": "{argument}"}}}}\n</tool_call>{IM_END}')
    chat.issue(cases.QUESTION)
    outcome = chat.ended().outcome
    assert isinstance(outcome, InfraError)
    assert detail in outcome.detail


def test_a_model_that_only_calls_is_truncated(chat: FunctionBench) -> None:
    replies(chat, cases.CALL + IM_END)
    chat.issue(cases.QUESTION)
    assert chat.ended().outcome == Truncated()
    assert len(chat.engine.asked) == 4


def test_an_environment_answers_and_its_rewards_add_up(guess: FunctionBench) -> None:
    replies(guess, f"a{END}", f"?{END}", f"c{END}")
    guess.issue(label="c")
    ended = guess.ended()
    reward = Reward(value=0.75, components=(Metric("tries", 3.0),))
    assert ended.outcome == Completed(stop=EPISODE, reward=reward)
    assert guess.text(ended.part) == "a not a ?error: a letterc"
    assert guess.engine.text(ended.part.context_tokens) == "ab=guess "


def test_an_environment_can_end_the_episode_and_a_limit_keeps_what_was_earned(guess: FunctionBench) -> None:
    replies(guess, f"a{END}", f"cheat{END}")
    guess.issue(label="c")
    assert guess.ended().outcome == PolicyError(detail="it cheated", reward=Reward(value=-0.25))
    replies(guess, f"a{END}")
    guess.issue(label="c")
    assert guess.ended().outcome == Truncated(reward=Reward(value=-1.0))


def test_the_calculators_masked_tokens_are_the_calculators(guess: FunctionBench) -> None:
    options = EpisodeOptions(kind="function", generate=f"{CALCULATOR}:episode", max_turns=4)
    bench = FunctionBench(Path(guess.driver.model_folder), options)
    try:
        replies(bench, "(47*38)and more", f"1786{END}", f"?{END}")
        bench.issue("47*38=", label="1786")
        asked = bench.ended()
        bench.issue("47*38=", label="1786")
        gave_up = bench.ended()
    finally:
        bench.close()
    assert asked.outcome == Completed(stop=EPISODE, reward=Reward(value=1.0, components=(Metric("calls", 1.0),)))
    assert bench.text(asked.part) == "(47*38)=1786;1786"
    assert masked_text(bench, asked) == "=1786;"
    assert gave_up.outcome == Completed(stop=EPISODE, reward=Reward(value=0.0, components=(Metric("calls", 0.0),)))
    assert not gave_up.part.loss_mask


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": ("nothing",)}, "'nothing' is neither file.py:Tool nor one of calculator, python"),
        ({"tools": (f"{WORLDS}:Multiply", f"{WORLDS}:Multiply")}, "two tools have the name 'multiply'"),
        ({"tools": (f"{WORLDS}:Guess",)}, "Guess has no name, description, parameters, call"),
        ({"environment": f"{WORLDS}:Multiply"}, "Multiply has no reset, step, close"),
        ({"environment": f"{WORLDS}:Nothing"}, "has no 'Nothing'"),
    ],
)
def test_what_is_no_tool_and_no_environment_is_refused_before_a_run(options: dict[str, object], message: str) -> None:
    given = EpisodeOptions(kind="function", generate="multi_turn", **options)  # type: ignore[arg-type]
    with pytest.raises(UserCodeError, match=message):
        check_loads([NamedFunction("episode.generate", "episode", "multi_turn", specs_of(given))])
