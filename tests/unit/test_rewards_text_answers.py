"""Rewards that compare texts, letters and numbers: cases with known answers, the awkward ones included."""

from __future__ import annotations

import json
import time
from inspect import signature
from typing import cast

import pytest

from penstock.backends.rewards.functions import REWARD, NoRewardError, judged, load_function
from penstock.backends.rewards.math_answers import deepscaler_reward
from penstock.backends.rewards.spec import REWARDS
from penstock.backends.rewards.text_answers import dapo_reward, f1_reward, gpqa_reward, same_answer

MAX_CPU_S = 30.0
"""For a million characters; what grows with their square would take hours."""
F1 = [
    ("Paris", "Paris", 1.0),
    ("the Paris.", "paris", 1.0),
    ("It is Paris", "Paris", 0.5),
    ("London", "Paris", 0.0),
    ("", "Paris", 0.0),
    ("the", "a", 1.0),
    ("new york city", "New York", 0.8),
    ("york new", "New York", 1.0),
    ("new new york", "New York", 0.8),
    ("yes", "Yes", 1.0),
    ("yes it is", "yes", 0.0),
    ("no", "yes", 0.0),
    ("noanswer", "no answer", 0.0),
    ("1,000", "1000", 1.0),
    ("café", "CAFÉ", 1.0),
    ("ﬁne", "fine", 1.0),
    ("“quoted”", '"quoted"', 1.0),
    ("$5", "5", 1.0),
    ("a b c d", "d e", 2 / 5),
    ("Barack Obama", json.dumps(["Obama", "Barack Hussein Obama"]), 0.8),
    ("Obama", json.dumps(["Obama", "Barack Hussein Obama"]), 1.0),
    ("[1] Obama", "[1] Obama", 1.0),
    ("东京", "东京。", 1.0),
]

ELSEWHERE = ("lines", "random", "length_penalty", "remote", "judge", "code")
CALLED = [name for name in REWARDS.builtin if name not in ELSEWHERE]
KEYED = [name for name in REWARDS.builtin if REWARDS.spec(name).keys]


@pytest.mark.parametrize(("response", "label", "reward"), F1)
def test_f1_is_that_of_words(response: str, label: str, reward: float) -> None:
    assert f1_reward(response, label) == pytest.approx(reward, abs=1e-9)


GPQA = [
    (r"so \boxed{B}", "B", 1.0),
    (r"so \boxed{\text{(B)}}", "B", 1.0),
    (r"\boxed{A} no, \boxed{b.}", "B", 1.0),
    (r"\boxed{B or C}", "B", 0.0),
    (r"\boxed{}", "B", 0.0),
    (r"\boxed{A} but the answer is B", "A", 1.0),
    ("The answer is (C).", "C", 1.0),
    ("The answer is C", "C", 1.0),
    ("the answer is: **C**", "C", 1.0),
    ("Answer: D", "D", 1.0),
    ("ANSWER: d", "D", 1.0),
    ("answer is a", "A", 1.0),
    ("The answer is a long story", "A", 0.0),
    ("The answer is A long story", "A", 1.0),
    ("Answer: A\nno wait.\nAnswer: B", "B", 1.0),
    ("Answer: Absolutely not", "A", 0.0),
    ("The answer isn't clear", "T", 0.0),
    ("I think\n(D)", "D", 1.0),
    ("A\nB\nC", "C", 1.0),
    ("**B**", "(B)", 1.0),
    ("because of B12", "B", 0.0),
    ("", "A", 0.0),
    ("The answer is option B", "b", 1.0),
    ("answer = $B$", "B", 1.0),
    (r"\boxed{\text{B}}", "B", 1.0),
    (r"\boxed{\textbf{B}}", "B", 1.0),
    (r"\boxed{\text{B. Paris}}", "B", 1.0),
    (r"\boxed{\text{Option B}}", "B", 1.0),
    (r"\boxed{$B$}", "B", 1.0),
    (r"\boxed{\text{Because}}", "B", 0.0),
    (r"\boxed{\text{A}} or \boxed{\text{B}}", "B", 1.0),
    (r"Answer: $\text{B}$", "B", 1.0),
    (r"The answer is \text{B}.", "B", 1.0),
    (r"\text{B}", "B", 1.0),
    ("b", "B", 1.0),
    ("Option B", "B", 1.0),
    ("B) Paris", "B", 1.0),
    ("Blue", "B", 0.0),
]


@pytest.mark.parametrize(("response", "label", "reward"), GPQA)
def test_gpqa_finds_the_letter(response: str, label: str, reward: float) -> None:
    assert gpqa_reward(response, label, {}) == reward


def test_the_label_of_gpqa_may_be_one_of_the_choices() -> None:
    assert gpqa_reward(r"\boxed{B}", "blue", {"choices": ["red", "blue"]}) == 1.0
    with pytest.raises(NoRewardError, match="a letter, or one of the row's choices"):
        gpqa_reward(r"\boxed{B}", "green", {"choices": ["red", "blue"]})
    with pytest.raises(NoRewardError, match="a letter"):
        gpqa_reward(r"\boxed{B}", "", {})


DAPO = [
    ("Answer: 34", "34", True),
    ("Answer: 34.", "34", True),
    ("answer:34", "34", True),
    ("Answer: $34$", "34", True),
    (r"Answer: \boxed{34}", "34", True),
    ("Answer: 34.0", "34", True),
    ("Answer: 34", "34.00", True),
    ("Answer: 0.5", "1/2", True),
    (r"Answer: $\frac{1}{2}$", "0.5", True),
    (r"Answer: \dfrac12", "1/2", True),
    (r"Answer: -\frac{3}{4}", "-0.75", True),
    ("Answer: 1,000,000", "1000000", True),
    ("Answer: 1,2", "12", False),
    ("Answer: (1, 2)", "(1,2)", True),
    (r"Answer: \text{red}", "red", True),
    ("Answer: x = 7", "7", True),
    ("Answer: 50\\%", "50%", True),
    ("Answer: 50%", "50", False),
    ("Answer: 3\nAnswer: 4", "4", True),
    ("Answer: 4\nAnswer: 3", "4", False),
    ("34", "34", False),
    ("Answer:", "34", False),
    ("Answer: " + "9" * 5000, "34", False),
    ("Answer: 34" + "x" * 400, "34", False),
    ("Answer: 1/0", "1/0", True),
    ("Answer: 1/0", "5", False),
    ("Answer: −5", "-5", True),
    (r"Answer: \(5\)", "5", True),
    # Units, currencies and words around a formula.
    ("Answer: 34 dollars", "34", True),
    (r"Answer: \$34", "34", True),
    ("Answer: 34 square units", "34", True),
    ("Answer: 34 Hours.", "34", True),
    (r"Answer: 34\text{ cm}^2", "34", True),
    (r"Answer: 34 \text{ m}", "34", True),
    (r"Answer: 34^{\circ}", "34", True),
    ("Answer: 34°", "34", True),
    (r"Answer: 34\mathrm{th}", "34", True),
    ("Answer: The value is $34$", "34", True),
    ("Answer: $34$ apples", "34", True),
    ("Answer: $a+b$ = $34$", "34", True),
    ("Answer: $m+n = 34$.", "34", True),
    ("Answer: x = y = 34", "34", True),
    ("Answer: 2+2=4", "4", True),
    ("Answer: 30 = 30", "30", True),
    (r"Answer: 1{,}000", "1000", True),
    (r"Answer: 34\;\text{km}", "34", True),
    ('Answer: "34"', "34", True),
    ("Answer: an 8", "8", True),
    ("Answer: **34** cm", "34", True),
    ("Answer: 34", "34 cm", True),
    ("Answer: $34$", "$34$", True),
    # What slime takes for right, and is not: the last of different sides, relations, one of several, a digit that a
    # unit stood between, another unit, a label cut to a whole number.
    ("Answer: 4 = 5", "5", False),
    ("Answer: x <= 5", "5", False),
    ("Answer: x != 5", "5", False),
    ("Answer: $3$ or $34$", "3", False),
    ("Answer: it isn't $34$", "34", False),
    ("Answer: at least $34$", "34", False),
    ("Answer: 3hours4", "34", False),
    ("Answer: 34 km", "34 cm", False),
    (r"Answer: \overline{34}", "34", False),
    ("Answer: 34", "34.5", False),
    # What neither takes.
    ("Answer: 34 thousand", "34", False),
    ("Answer: 34M", "34", False),
    (r"Answer: x \neq 34", "34", False),
    ("Answer: 34 or 35", "34", False),
    ("Answer: degrees", "34", False),
]


@pytest.mark.parametrize(("response", "label", "is_right"), DAPO)
def test_dapo_compares_the_last_answer(response: str, label: str, is_right: bool) -> None:
    assert dapo_reward(response, label) == {"score": 1.0 if is_right else -1.0, "acc": float(is_right)}


DEEPSCALER = [
    (r"<think>hm</think> so \boxed{34}", "34", 1.0),
    (r"<think>\boxed{35}</think> so \boxed{34}", "34", 1.0),
    (r"<think>\boxed{34}</think> so 34", "34", 0.0),
    (r"so \boxed{34}", "34", 0.0),
    (r"<think>so \boxed{34}", "34", 0.0),
    (r"</think>\boxed{34}", "34", 1.0),
    (r"<think>a</think>\boxed{1}<think>b</think>\boxed{34}", "34", 1.0),
    (r"<think>a</think>\boxed{34}<think>b</think>none", "34", 0.0),
    (r"</think>\boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"</think>\boxed{x^2+1}", "1+x^2", 1.0),
    (r"</think>\boxed{34}", r"\boxed{34}", 1.0),
    (r"</think>\boxed{34}", r"thus \boxed{3} and \boxed{34}", 1.0),
    (r"</think>\boxed{}", "34", 0.0),
    (r"</think>\boxed{34", "34", 0.0),
    (r"</think>\boxed{34}", "so: #### 34", 1.0),
    (r"</think>\boxed{3} \boxed{34}", "34", 1.0),
    (r"</think>\boxed{34} \boxed{3}", "34", 0.0),
    (r"</think>\boxed{\text{red}}", r"\text{red}", 1.0),
    (r"</think>\boxed{-7}", "7", 0.0),
    (r"</think>\boxed{(1, 2)}", "(1,2)", 1.0),
    ("", "34", 0.0),
]


@pytest.mark.parametrize(("response", "label", "reward"), DEEPSCALER)
def test_deepscaler_looks_behind_the_thinking(response: str, label: str, reward: float) -> None:
    assert deepscaler_reward(response, label) == reward


def test_an_answer_of_nothing_equals_nothing() -> None:
    assert not same_answer("", "")
    assert not same_answer("$ $", "")


@pytest.mark.parametrize("name", ["f1", "dapo"])
def test_a_row_without_a_label_has_no_reward(name: str) -> None:
    with pytest.raises(NoRewardError, match="has no label"):
        load_function(REWARD, name).function(response="Answer: 1", label="")
    with pytest.raises(NoRewardError, match="empty list"):
        f1_reward("x", "[]")


@pytest.mark.parametrize("name", [name for name in CALLED if name.startswith("boxed_")])
def test_a_boxed_reward_sees_the_last_box_alone(name: str) -> None:
    loaded = load_function(REWARD, name)
    assert set(loaded.names) <= {"response", "label", "metadata"}
    if name == "boxed_f1":
        assert loaded.function(response=r"it is \boxed{Lyon} or \boxed{Paris}", label="Paris") == 1.0
        assert loaded.function(response="Paris", label="Paris") == 0.0
    if name == "boxed_gpqa":
        assert loaded.function(response=r"Answer: A, that is \boxed{B}", label="B", metadata={}) == 1.0
        assert loaded.function(response=r"that is \boxed{\text{B}}", label="B", metadata={}) == 1.0


@pytest.mark.parametrize("key", [None, *REWARDS.spec("dapo").keys])
def test_dapo_has_a_reward_by_every_key_that_a_scenario_may_name(key: str | None) -> None:
    found = judged(0, 0.0, load_function(REWARD, "dapo").function(response="Answer: 7", label="7"), key)
    assert found.value == 1.0
    assert len(found.components) == 1


@pytest.mark.parametrize("name", KEYED)
def test_rewards_that_return_dictionaries_have_the_entries_that_are_listed(name: str) -> None:
    given = {"label": "7"} if name == "dapo" else {"metadata": {"instruction_id_list": ["format:no_whitespace"]}}
    found = load_function(REWARD, name).function(response="7", **given)
    assert isinstance(found, dict)
    assert tuple(cast("dict[str, float]", found)) == REWARDS.spec(name).keys


def test_no_other_reward_returns_a_dictionary() -> None:
    returning = {
        name for name in CALLED if "dict" in str(signature(load_function(REWARD, name).function).return_annotation)
    }
    assert returning == set(KEYED)


@pytest.mark.parametrize("name", CALLED)
def test_every_reward_of_the_hub_loads(name: str) -> None:
    assert "response" in load_function(REWARD, name).names


@pytest.mark.timeout(60)  # in proportion to the square it would take hours
@pytest.mark.parametrize(
    "response",
    [
        "answer is " * 100_000,
        "answer" + " " * 300_000,
        ("answer" + " " * 100) * 3_000,
        "\n" * 300_000,
        "(" * 500_000,
        "\\boxed{" * 100_000,
        "Answer: " + "\\text{" * 50_000,
        "Answer: " + "1," * 100_000,
        "a" * 1_000_000,
        "\n".join("*A*" for _ in range(100_000)),
        "\u0f73" * 100_000,  # two marks each once they are taken apart, which are sorted
        "か" + "\uff9e\u0301" * 100_000,
    ],
)
def test_long_responses_take_time_in_proportion(response: str) -> None:
    began_s = time.process_time()  # the time of this process, whoever else is busy
    f1_reward(response, "x")
    gpqa_reward(response, "A", {})
    dapo_reward(response, "1")
    assert time.process_time() - began_s < MAX_CPU_S
