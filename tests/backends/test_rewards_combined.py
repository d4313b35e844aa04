"""Sums of components, functions for groups, keys of dictionaries, and functions that rows choose."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest
from reward_driver import RewardDriver, group_of, score_of

from penstock.backends.engines.surroundings import Surroundings
from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.rewards.extracted import bounded_answer
from penstock.backends.rewards.functions import REWARD, load_function
from penstock.backends.rewards.functions_asked import asks_for_groups, longest_timeout_s, scores_groups
from penstock.backends.rewards.options import (
    ComponentOptions,
    FunctionOptions,
    LengthPenaltyOptions,
    NamedFunctionOptions,
    RewardOptions,
)
from penstock.backends.rewards.service_options import JudgeOptions
from penstock.messages.base import Metric
from penstock.messages.samples import MAX_ANSWER_CHARACTERS, Reward

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MINE = """
    import asyncio

    def length(response):
        return {"points": len(response), "style": 0.5}

    def ranks(responses, indices, label):
        order = sorted(range(len(responses)), key=lambda i: len(responses[i]))
        return [{"reward": order.index(i), "index": index} for i, index in enumerate(indices)]

    async def slowly(responses):
        await asyncio.sleep(0)
        return [None if text == "no" else 1.0 for text in responses]

    def short(responses):
        return [1.0]

    def boom(responses):
        raise RuntimeError("no idea")

    def fails(response):
        if response == "bad":
            raise RuntimeError("no idea")
        return 1.0

    class Judge:
        def __init__(self):
            self.weight = 2.0
        def __call__(self, responses):
            return [self.weight] * len(responses)

    def votes(response):
        return {"reward": 1.0, "answer": response or None}

    class Plain:
        async def __call__(self, response):
            return 3.0
    """


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str], str]:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(MINE))
    return lambda name: f"{path}:{name}"


def component(name: str, function: str, weight: float = 1.0, *, key: str | None = None) -> ComponentOptions:
    return ComponentOptions(name=name, function=function, weight=weight, key=key)


def test_components_are_added_by_their_weights_and_reported_one_by_one(
    driver: Callable[..., RewardDriver], mine: Callable[[str], str]
) -> None:
    penalty = ComponentOptions(
        name="length",
        function="length_penalty",
        weight=0.5,
        length_penalty=LengthPenaltyOptions(max_tokens=20, cache_tokens=10),
    )
    options = RewardOptions(
        components=(component("right", "math"), penalty, component("n", mine("length"), 0.1, key="points"))
    )
    (answer,) = driver(options).judged(score_of(r"it is \boxed{72}", label="72"))
    assert answer.reward is not None
    assert answer.reward.value == pytest.approx(1.0 - 0.5 * 0.6 + 0.1 * 16)
    assert answer.reward.components == (
        Metric("right", 1.0),
        Metric("length", -0.6),
        Metric("n", 16.0),
        Metric("n/style", 0.5),
    )


def test_what_a_function_takes_for_the_answer_comes_with_the_reward(
    driver: Callable[..., RewardDriver], mine: Callable[[str], str]
) -> None:
    answers = driver(RewardOptions(function=mine("votes"))).judged(
        score_of("four"), score_of("", 1), score_of("x" * 500, 2)
    )
    said = [each.reward.answer for each in answers if each.reward is not None]
    assert said[:2] == ["four", ""]
    assert len(said[2]) == MAX_ANSWER_CHARACTERS
    assert said[2].startswith("xxx")
    both = RewardOptions(components=(component("length", "length_penalty"), component("right", "math")))
    (summed,) = driver(both).judged(score_of(r"so \boxed{\frac{1}{2}}", label="0.5"))
    assert summed.reward is not None
    assert (summed.reward.value, summed.reward.answer) == (1.0, "1/2")


@pytest.mark.parametrize(
    ("name", "response", "expected"),
    [
        ("math", r"first \boxed{3}, then \boxed{0.50}", "1/2"),
        ("math", "so it is 1,200.", "1200"),
        ("boxed_math", "so it is 1200.", None),
        ("deepscaler", r"\boxed{1}</think> \boxed{2}", "2"),
        ("deepscaler", r"\boxed{1}", None),
        ("dapo", "Answer: 2/4", "1/2"),
        ("dapo", "2", None),
        ("gpqa", "the answer is (b)", "B"),
        ("boxed_f1", r"\boxed{The  Cat}", "cat"),
        ("boxed_f1", "a cat", None),
    ],
)
def test_built_in_rewards_extract_answers_that_can_be_counted(name: str, response: str, expected: str | None) -> None:
    extract = load_function(REWARD, name).extract
    assert extract is not None
    assert extract(response, False) == expected


def test_an_answer_is_bounded_and_long_ones_stay_apart() -> None:
    long = ["a" * 500 + end for end in ("x", "y")]
    assert len({bounded_answer(text) for text in long}) == 2
    assert all(len(bounded_answer(text)) == MAX_ANSWER_CHARACTERS for text in long)
    assert bounded_answer(" \ud800 ") == "?"


def test_a_component_that_fails_fails_the_sample_and_no_other(
    driver: Callable[..., RewardDriver], mine: Callable[[str], str]
) -> None:
    options = RewardOptions(components=(component("right", "math"), component("mine", mine("fails"))))
    rewards = driver(options)
    values = rewards.values(*(score_of(text, i, label="1") for i, text in enumerate(("good", "bad", "good"))))
    assert values[0] == values[2] == 1.0
    assert str(values[1]).startswith("mine: RuntimeError: no idea (mine.py:")


def test_a_key_picks_the_reward_from_a_dictionary(
    driver: Callable[..., RewardDriver], mine: Callable[[str], str]
) -> None:
    (answer,) = driver(RewardOptions(function=mine("length"), key="points")).judged(score_of("abcd"))
    assert answer.reward == Reward(value=4.0, components=(Metric("style", 0.5),))
    (reason,) = driver(RewardOptions(function=mine("length"), key="point")).values(score_of("abcd"))
    assert "returned a dict without 'point'; its keys are list ['points', 'style']" in str(reason)


def test_rows_choose_among_the_functions_of_the_scenario(
    driver: Callable[..., RewardDriver], mine: Callable[[str], str]
) -> None:
    options = RewardOptions(
        function=mine("Plain"),
        function_key="kind",
        functions=(
            NamedFunctionOptions(name="maths", function="math"),
            NamedFunctionOptions(name="words", function="f1"),
        ),
    )
    rows: list[object] = [
        {"kind": "maths"},
        {"kind": "words"},
        {"other": 1},
        {"kind": None},
        {"kind": "chess"},
        {"kind": 3},
    ]
    values = driver(options).values(
        *(score_of(r"the answer is \boxed{1}", i, label="1", metadata=row) for i, row in enumerate(rows))
    )
    assert values[0] == 1.0
    assert 0.0 <= float(values[1]) < 1.0
    assert values[2:4] == [3.0, 3.0]
    assert "row 4 names 'chess' as its reward function (reward.function_key: kind)" in str(values[4])
    assert "reward.functions has maths, words" in str(values[4])
    assert "names '3'" in str(values[5])


def test_what_rows_choose_can_be_one_component_of_a_sum(
    driver: Callable[..., RewardDriver], mine: Callable[[str], str]
) -> None:
    options = RewardOptions(
        function="math",
        function_key="kind",
        functions=(NamedFunctionOptions(name="three", function=mine("Plain")),),
        components=(component("task", "chosen", 2.0), component("again", "math")),
    )
    values = driver(options).values(
        score_of(r"\boxed{1}", 0, label="1"), score_of(r"\boxed{1}", 1, label="1", metadata={"kind": "three"})
    )
    assert values == [3.0, 7.0]


def test_a_function_for_groups_sees_all_responses_at_once(
    driver: Callable[..., RewardDriver], mine: Callable[[str], str]
) -> None:
    scored = driver(RewardOptions(function=mine("ranks"))).scored(group_of("ccc", "a", "bb", group_id=7))
    assert scored.group_id == 7
    assert [(each.key.index, each.reward and each.reward.value) for each in scored.samples] == [
        (0, 2.0),
        (1, 0.0),
        (2, 1.0),
    ]
    assert scored.samples[2].reward == Reward(value=1.0, components=(Metric("index", 2.0),))


def test_functions_for_groups_may_be_async_and_classes_and_leave_single_samples_out(
    driver: Callable[..., RewardDriver], mine: Callable[[str], str]
) -> None:
    scored = driver(RewardOptions(function=mine("slowly"))).scored(group_of("yes", "no"))
    assert [each.reward and each.reward.value for each in scored.samples] == [1.0, None]
    assert "returned None; expected a number" in scored.samples[1].reason
    scored = driver(RewardOptions(function=mine("Judge"))).scored(group_of("a", "b"))
    assert [each.reward and each.reward.value for each in scored.samples] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [("short", "returned 1 reward for a group of 2 samples"), ("boom", "RuntimeError: no idea (mine.py:")],
)
def test_a_function_for_groups_that_fails_fails_all_its_samples(
    driver: Callable[..., RewardDriver], mine: Callable[[str], str], name: str, message: str
) -> None:
    scored = driver(RewardOptions(function=mine(name))).scored(group_of("a", "b"))
    assert [each.reward for each in scored.samples] == [None, None]
    assert all(message in each.reason for each in scored.samples)


def test_functions_of_samples_and_of_groups_may_be_added(
    driver: Callable[..., RewardDriver], mine: Callable[[str], str]
) -> None:
    options = RewardOptions(components=(component("rank", mine("ranks")), component("ok", mine("fails"), 10.0)))
    assert scores_groups(options)
    scored = driver(options).scored(group_of("bb", "a", "bad"))
    assert [each.reward and each.reward.value for each in scored.samples] == [11.0, 10.0, None]


def test_a_function_that_asks_for_what_the_other_kind_gets_is_refused_with_the_key_to_change(
    driver: Callable[..., RewardDriver], mine: Callable[[str], str]
) -> None:
    failure = driver(RewardOptions(function=mine("ranks"), per_group=False)).failure()
    assert isinstance(failure, UserCodeError)
    assert "set reward.per_group: true" in str(failure)


def test_signatures_say_who_scores_groups(mine: Callable[[str], str]) -> None:
    names = ("ranks", "slowly", "Judge", "length", "Plain", "nobody")
    assert [asks_for_groups(mine(name)) for name in names] == [True, True, True, False, False, False]
    assert not asks_for_groups("math")


def test_the_longest_deadline_is_that_of_any_function() -> None:
    judge = NamedFunctionOptions(name="j", function="judge", judge=JudgeOptions(url="http://x/v1", timeout_s=300.0))
    options = RewardOptions(function="math", function_key="kind", functions=(judge,))
    assert longest_timeout_s(options) > 300.0
    assert longest_timeout_s(RewardOptions(timeout_s=7.0)) == 7.0


def test_the_length_penalty_knows_the_limit_of_the_run(driver: Callable[..., RewardDriver]) -> None:
    rewards = driver(RewardOptions(function="length_penalty"), Surroundings(max_response_tokens=10))
    assert rewards.values(score_of("x" * 8), score_of("x" * 9, 1), score_of("x" * 10, 2)) == [0.0, -0.5, -1.0]


def test_functions_with_the_same_options_share_a_process() -> None:
    from penstock.backends.rewards.functions_asked import asked_functions

    options = RewardOptions(components=(component("one", "math", 1.0), component("two", "math", 2.0)))
    every = list(asked_functions(options).every())
    assert [function.function for function in every] == ["math"]
    assert all(isinstance(function, FunctionOptions) for function in every)
