"""No text makes a checker of the hub slow: its work grows with the text's length, not with a power of it."""
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from penstock.backends.rewards.code_answers import program_of
from penstock.backends.rewards.code_cases import same_output
from penstock.backends.rewards.formulas import FormulaError, literal
from penstock.backends.rewards.functions import REWARD, load_function
from penstock.backends.rewards.instruction_text import Given
from penstock.backends.rewards.instructions import CHECKERS
from penstock.backends.rewards.spec import REWARDS, lines_reward
from penstock.backends.rewards.wire import RewardCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

UNITS = (
    " ", "\n", "\t", "\r\n", "\u2003", " \n", "\n\n", "\n \n", "a", "a ", "A", "A. ", "a.", ".", ". ", "?!", "!", "…",
    "*", "**", "* ", "***", "*** ", "***\n", "*\n", "-", "- ", "- a\n", "_", "#", "`", "```", "```\n", "``` ",
    "<", "<<", ">", "<< ", "<i>", "<i>a", "</i>", "<em> ", "[", "]", "[a", "[ ", "(", "((", "{", "}", "{}",
    '"', '" ', "'", "“", '."', "1", "1 ", "1.", "1,", "1,1", "1,111", ",", ", ", ";", "-1", "1e9", "a'", "a-", "é",
    "answer", "answer ", "answer: ", "answer is ", "Answer: a\n", "option ",
    "$", "\\", "\\boxed", "\\boxed{", "\\text{",
    "\\frac", "\\frac{1}", "\\left", "=", "x=", "^", "%", "\\%", "P.S.", "P. ", "p.s. ", "mr. ", "e.g. ", "🙂", "🙂 ",
    "🙂. ", "\u0301\u0327", "\ufdfa", "日本", "\x00", "<answer>", "</answer>", "</think>", "<think>",
    "2024-01-01, ", "a,b\n", '"a"\t', "ß",
)  # fmt: skip
QUICK = ((400, 0.2), (3_000, 0.2), (20_000, 0.3))
"""Lengths, and seconds of CPU time. The short texts come first, so that what is cubic ends here within seconds."""
SLOW = (*QUICK, (100_000, 1.0))


def texts(length: int) -> Iterator[str]:
    for unit in UNITS:
        run = (unit * length)[:length]
        yield f"x{run}x"
        if length < QUICK[-1][0]:
            yield run
            yield f"{run}\nx"
            yield f"Answer: **{run}` x"


def assert_quick(check: Callable[[str], object], bounds: Sequence[tuple[int, float]] = QUICK) -> None:
    check("warm")  # models, tables and imports are read at the first use
    for length, seconds in bounds:
        for text in texts(length):
            start_s = time.process_time()
            check(text)
            took_s = time.process_time() - start_s
            if took_s > seconds:  # once more: the machine may have been elsewhere
                start_s = time.process_time()
                check(text)
                took_s = min(took_s, time.process_time() - start_s)
            assert took_s < seconds, f"{length} characters, as {text[:24]!r}: {took_s:.2f} s"


ARGUMENTS: dict[str, object] = {
    "keywords": ["red", "a"], "keyword": "a", "frequency": 2, "relation": "at least", "forbidden_words": ["z", "x"],
    "letter": "a", "let_frequency": 3, "let_relation": "at least", "language": "de", "num_sentences": 3,
    "num_paragraphs": 2, "nth_paragraph": 1, "first_word": "a", "num_words": 3, "num_placeholders": 2,
    "postscript_marker": "P.P.S", "num_bullets": 2,
    "num_highlights": 2, "section_spliter": "Section", "num_sections": 2,
    "prompt_to_repeat": "say a", "end_phrase": "a", "capital_frequency": 2, "capital_relation": "less than",
    "N": 3, "small_n": 2, "min_words": 1, "max_words": 9, "percentage": 40,
    "reference_text": "a b c d", "options": "a/b",
    "word": "a", "sep": "-", **{f"keyword{place}": "a" for place in range(1, 6)},
    "n": 1, "m": 2, "n_start": 0, "n_end": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CHECKERS))
def test_every_checker_of_instructions_is_linear(name: str) -> None:
    given = Given(name, ARGUMENTS)
    assert_quick(lambda text: CHECKERS[name](text, given))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHECKERS))
def test_every_checker_of_instructions_reads_a_hundred_thousand_characters_in_a_second(name: str) -> None:
    given = Given(name, ARGUMENTS)
    assert_quick(lambda text: CHECKERS[name](text, given), SLOW)


@pytest.mark.parametrize("name", ["f1", "gpqa", "dapo", "boxed_f1", "boxed_gpqa"])
def test_every_reward_for_texts_is_linear(name: str) -> None:
    others: dict[str, object] = {"metadata": {}} if name.endswith("gpqa") else {}
    function = load_function(REWARD, name).function
    assert_quick(lambda text: function(response=text, label="A", **others), SLOW)


@pytest.mark.parametrize("name", ["math", "deepscaler", "boxed_math"])
@pytest.mark.parametrize("wrapped", ["{}", "</think>\\boxed{{{}}}"])
def test_every_reward_for_mathematics_is_linear(name: str, wrapped: str) -> None:
    others: dict[str, object] = {"truncated": False} if name == "math" else {}
    function = load_function(REWARD, name).function
    assert_quick(lambda text: function(response=wrapped.format(text), label="5", **others), SLOW)


def test_every_other_parser_is_linear() -> None:
    call = RewardCall(0, 1.0, "", "", "AaBb", b"", False, b"", b"", 0, 0, 0)
    assert_quick(lambda text: lines_reward(response=text, label=call.label, truncated=call.truncated, row=call.row))
    assert_quick(program_of)
    assert_quick(_literal)
    assert_quick(partial(same_output, wanted="1.5 a\n"))
    assert {name for name in REWARDS.builtin if name.startswith("boxed_")} >= {"boxed_f1", "boxed_gpqa", "boxed_math"}


def _literal(text: str) -> None:
    with contextlib.suppress(FormulaError):
        literal(text)
