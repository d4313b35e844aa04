"""A fuzzer for the rewards of the hub: whatever a model writes earns a finite number, in time in proportion to its
length. That there is no reward is the row's doing, never the answer's."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fuzzing import Draw, fuzz, in_time, instrumented

with instrumented("penstock.backends.rewards", "penstock.backends.data"):
    from penstock.backends.data.generated import reasoning_gym_rows
    from penstock.backends.rewards import reasoning_gym_checkers
    from penstock.backends.rewards.code_answers import program_of
    from penstock.backends.rewards.code_cases import read_cases, same_output, same_result
    from penstock.backends.rewards.formulas import FormulaError, arithmetic, literal, parsed, polynomial, slope
    from penstock.backends.rewards.functions import REWARD, NoRewardError, judged, load_function
    from penstock.backends.rewards.instructions import CHECKERS
    from penstock.backends.rewards.spec import lines_reward
    from penstock.backends.rewards.text_answers import same_answer
    from penstock.backends.rewards.wire import RewardCall

if TYPE_CHECKING:
    from collections.abc import Callable

    Check = Callable[[str], object]

GYM = tuple(sorted(reasoning_gym_checkers.CHECKERS)) if find_spec("reasoning_gym") is not None else ()
"""Where the extra is installed."""

WORDS = (
    " ", "\n", "\t", "\r\n", "\u2003", "\n\n", "a", "b", "A", "B", "yes", "no", "the ", ".", ". ", "?", "!", "…", "*",
    "**", "* ", "***", "- ", "_", "#", "```", "```python\n", "\n```\n", "<<", ">>", "<i>", "</i>", "[", "]", "(", ")",
    "{", "}", '"', "'", "0", "1", "2", "7", "34", "0.5", "1,000", "-", "+", "/", "=", "x", "x=", "^", "**", "%",
    "\\%", "$", "\\$", "\\", "\\boxed{", "\\boxed", "\\text{", "\\frac{", "\\frac12", "\\dfrac", "\\sqrt{", "\\left(",
    "\\right)", "\\(", "\\)", "\\!", "\\,", "\\ ", "^\\circ", "\\circ", "\\pi", "\\le", "\\ne ", "\\cup", "\\infty",
    "!", "e9", "sin(", "exp(", "Integral(", "I", "Answer: ", "answer is ", "The answer is ", "Answer", "option ",
    "####", " dollars", " cm", "units", "degrees", "dollar", "<answer>", "</answer>", "</think>", "<think>", "P.S.",
    "e.g. ", "mr. ", "🙂", "\u0301", "\ufdfa", "ﬁ", "ß", "İ", "日本", "٣", "²", "\x00", "[[1, 2]]", '{"a": 1}',
    "assert f(1) == 2", "nan", "inf", "1e400", ", ", ";", ",",
)  # fmt: skip
ARGUMENTS: dict[str, object] = {
    "keywords": ["red", "a"], "keyword": "a", "frequency": 2, "relation": "at least", "forbidden_words": ["z", "x"],
    "letter": "a", "let_frequency": 3, "let_relation": "at least", "language": "de", "num_sentences": 3,
    "num_paragraphs": 2, "nth_paragraph": 1, "first_word": "a", "num_words": 3, "num_placeholders": 2,
    "postscript_marker": "P.P.S", "num_bullets": 2, "num_highlights": 2, "section_spliter": "Part", "num_sections": 2,
    "prompt_to_repeat": "say a", "end_phrase": "a", "capital_frequency": 2, "capital_relation": "less than",
    "N": 3, "small_n": 2, "min_words": 1, "max_words": 9, "percentage": 40, "reference_text": "a b c d",
    "options": "a/b", "word": "a", "sep": "-", "n_start": 0, "n_end": 1, "n": 1, "m": 1,
    **{f"keyword{place}": "a" for place in range(1, 6)},
}  # fmt: skip
CALL = RewardCall(0, 1.0, "", "", "AaBb", b"", False, b"", b"", 0, 0, 0)


def _of_label(name: str, label: str, **others: object) -> Check:
    return lambda text: load_function(REWARD, name).function(response=text, label=label, **others)


def _instruction(name: str) -> Check:
    return lambda text: load_function(REWARD, "ifbench").function(
        response=text, metadata={"instruction_id_list": [name], "kwargs": json.dumps([ARGUMENTS])}
    )


def _gym(name: str) -> Check:
    (row,) = reasoning_gym_rows(f"reasoning_gym:{name}:1", f"{name}:1", seed=3)
    metadata = json.loads(json.dumps(row.metadata))
    return lambda text: load_function(REWARD, "reasoning_gym").function(response=text, metadata=metadata)


def _slope(text: str) -> object:
    return slope(parsed(text), "x", 0.5)


def _formulas(text: str) -> None:
    for read in (arithmetic, literal, polynomial, _slope):
        try:
            read(text)
        except FormulaError:
            continue


def _code(text: str) -> None:
    program = program_of(text)
    assert program is None or program in text
    assert same_output(text, text)
    same_output(text, "1.5 a\n")
    try:
        cases = read_cases(text)
    except NoRewardError:
        return
    for case in cases:
        same_result(case.result, list(case.arguments))


REWARDS: dict[str, Check] = {
    **{
        f"{name} {label}": _of_label(name, label)
        for name in ("f1", "boxed_f1", "dapo")
        for label in ("34", "a b", "[1]")
    },
    **{name: _of_label(name, "B", metadata={}) for name in ("gpqa", "boxed_gpqa")},
    **{name: _instruction(name) for name in CHECKERS},
    "lines": lambda text: lines_reward(response=text, label=CALL.label, truncated=CALL.truncated, row=CALL.row),
}
PARSERS: dict[str, Check] = {"formulas": _formulas, "code": _code, "same": lambda text: same_answer(text, text[::-1])}
NAMES = (*REWARDS, *PARSERS)


def earned(name: str, text: str) -> None:
    found = judged(0, 0.0, REWARDS[name](text))
    assert math.isfinite(found.value), (name, text)
    assert -1 <= found.value <= 1, (name, text)


def with_any_row(draw: Draw) -> None:
    """A row may be anything as well; then there is a reward, or a reason."""
    label, response = draw.text(WORDS), draw.text(WORDS)
    metadata = {
        "choices": draw.value(WORDS),
        "instruction_id_list": [draw.pick(tuple(REWARDS))],
        "kwargs": draw.value(WORDS),
    }
    for name in ("f1", "dapo", "gpqa", "ifbench"):
        given = {"label": label, "metadata": metadata}
        names = {"f1": ("label",), "dapo": ("label",), "gpqa": ("label", "metadata"), "ifbench": ("metadata",)}[name]
        try:
            judged(
                0, 0.0, load_function(REWARD, name).function(response=response, **{each: given[each] for each in names})
            )
        except NoRewardError:
            continue


def check(data: bytes) -> None:
    draw = Draw(data)
    kind = draw.number(0, 15)
    if kind == 0:
        with_any_row(draw)
        return
    name = draw.pick(NAMES)
    text = draw.text(WORDS, max_pieces=20)
    if kind == 1 and name not in ("formulas", "code"):
        text = draw.long_text(WORDS)
    if GYM and kind == 2:
        name = draw.pick(GYM)
        REWARDS.setdefault(name, _gym(name))
        text = f"<answer>{text}</answer>"
    with in_time(f"{name}: {text[:60]!r}"):
        if name in PARSERS:
            PARSERS[name](text)
        else:
            earned(name, text)


if __name__ == "__main__":
    fuzz(check)
