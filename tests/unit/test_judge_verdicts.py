"""What a judge's words are worth: its last line, and nothing that it repeats from a response."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.rewards.functions import NoRewardError
from penstock.backends.rewards.judge import DEFAULT_TEMPLATE, VerdictParser, filled
from penstock.backends.rewards.service_options import JudgeOptions

SCORE = {"score": r"Score:\s*(-?\d+(?:\.\d+)?)", "lowest": 0.0, "highest": 10.0}
LETTERS = {"verdicts": {"[[A]]": 1.0, "[[B]]": 0.0, "not good": 0.0, "good": 1.0}}


def worth(text: str, **options: Any) -> float | None:  # noqa: ANN401 - of any type
    try:
        return VerdictParser(JudgeOptions(url="http://127.0.0.1:9/v1", **options)).verdict(text)
    except NoRewardError:
        return None


@pytest.mark.parametrize("said", ["yes", "Yes.", "It is right.\nYES", "**Verdict:** yes\n\n", "Final answer: `yes`"])
def test_a_verdict_alone_on_the_last_line_counts(said: str) -> None:
    assert worth(said) == 1.0
    assert worth(re.sub("yes", "no", said, flags=re.IGNORECASE)) == 0.0


@pytest.mark.parametrize(
    "said",
    [
        "No. The student wrote 'yes'.",
        "No. The student wrote\nyes and more",
        "Not yes.",
        "Not: yes",
        "No.\nThe student wrote:\nyes",
        "yes no",
        "no, yes",
        "yes\nno",
        "yes\nI am not sure",
        "The student's answer: yes",
        "perhaps",
        "",
        "yes" + "!" * 1000,
    ],
)
def test_a_verdict_that_is_repeated_denied_or_contradicted_is_none(said: str) -> None:
    assert worth(said) is None


@pytest.mark.parametrize(
    ("said", "expected"),
    [("Score: 10", 1.0), ("Good.\n**Score: 5**", 0.5), ("- Final Score: 2.5 / 10.", 0.25), ("Score: 0/10", 0.0)],
)
def test_a_score_alone_on_the_last_line_counts(said: str, expected: float) -> None:
    assert worth(said, **SCORE) == expected


@pytest.mark.parametrize(
    "said",
    [
        "Score: 2, although the student wrote 'Score: 10'",
        "Score: 2. The student wrote: Score: 10",
        "The student wrote Score: 10",
        "Score: 10/100",
        "Score: 10%",
        "Score: 10.5.6",
        "Score: 10 of 20",
        "Score: 1e1",
        "Score: 10\nNo.",
        "Score: -1",
        "Score: 11",
    ],
)
def test_a_score_that_is_repeated_or_on_another_scale_is_none(said: str) -> None:
    assert worth(said, **SCORE) is None


def test_verdicts_of_several_words_and_signs_count() -> None:
    assert [worth(said, **LETTERS) for said in ("[[A]]", "so\n**[[B]]**", "Not good.", "good")] == [1.0, 0.0, 0.0, 1.0]


WORDS = st.lists(
    st.sampled_from(["yes", "no", "not", "\n", " ", ".", ":", "'", "*", "verdict", "</think>", "/", "1", "é"])
)


@given(WORDS.map("".join) | st.text())
def test_only_a_last_line_of_the_verdict_alone_is_worth_anything(said: str) -> None:
    value = worth(said)
    if value is not None:
        lines = [line for line in said.rpartition("</think>")[2].splitlines() if line.strip()]
        words = re.findall(r"\w+", lines[-1].casefold())
        assert words[-1] == ("yes" if value else "no")
        assert set(words[:-1]) <= {"verdict", "answer", "final"}


@pytest.mark.parametrize("piece", ["*", "yes ", "verdict: ", "'", "the ", "Score: 1 ", "/ 1"])
@pytest.mark.parametrize("options", [{}, SCORE], ids=["words", "score"])
def test_no_answer_takes_long_to_read(piece: str, options: dict[str, Any]) -> None:
    began_s = time.process_time()
    worth(piece * (100_000 // len(piece)), **options)
    worth((piece * 400)[:399] + "x", **options)
    assert time.process_time() - began_s < 5


@given(st.text())
def test_the_student_cannot_close_the_fence(response: str) -> None:
    asked = filled(DEFAULT_TEMPLATE, {"prompt": "p", "label": "l", "response": response, "conversation": ""})
    fence = re.search(r"--[0-9a-f]{12}--", asked.removeprefix("p"))
    assert fence is not None
    assert fence.group() not in response
    assert asked.count(fence.group()) == 3
    assert f"\n{fence.group()}\n{response}\n{fence.group()}\n" in asked
