"""A fuzzer for what a judge says and is asked: a verdict is the last line and nothing else."""

from __future__ import annotations

import asyncio
import math
import re

from fuzzing import Draw, fuzz, in_time, instrumented

with instrumented("penstock.backends.rewards"):
    from penstock.backends.engines.surroundings import Surroundings
    from penstock.backends.rewards.functions import NoRewardError
    from penstock.backends.rewards.judge import DEFAULT_TEMPLATE, JudgeReward, VerdictParser, filled
    from penstock.backends.rewards.service_options import JudgeOptions

URL = "http://127.0.0.1:9/v1"
OPTIONS = (
    JudgeOptions(url=URL),
    JudgeOptions(url=URL, score=r"Score:\s*(-?\d+(?:\.\d+)?)", lowest=0.0, highest=10.0),
    JudgeOptions(url=URL, score=r"(\S+)$", lowest=-1.0, highest=1.0),
    JudgeOptions(url=URL, verdicts={"[[A]]": 1.0, "[[B]]": 0.0, "not good": 0.0, "good": 1.0}),
)
PARSERS = tuple(VerdictParser(options) for options in OPTIONS)
WORDS = (
    "yes", "no", "Yes", "NO", "not", "n't", "\n", "\r\n", "\u2028", " ", ".", "!", ":", "'", '"', "**", "`", "-",
    "\u2013", "verdict:", "Final answer:", "my ", "the ", "Score:", "Score: 10", "Score: 1", "score:", "0", "1", "10",
    "9.5", "1e1", "/10", "/ 10", "/100", "%", "inf", "nan", "-1", "[[A]]", "[[B]]", "good", "not good", "</think>",
    "<think>", "The student wrote ", "\u0660", "\u212a", "\u0131", "\u017f", "\x00",
)  # fmt: skip


class Answered:
    """In place of a client: the endpoint's answer is this."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    async def ask(self, body: object, *, request_id: str) -> object:
        return self.answer


def worth(parser: VerdictParser, said: str) -> float | None:
    try:
        return parser.verdict(said)
    except NoRewardError:
        return None


def check_words(said: str) -> None:
    value = worth(PARSERS[0], said)
    if value is None:
        return
    lines = [line for line in said.rpartition("</think>")[2].splitlines() if line.strip()]
    words = re.findall(r"\w+", lines[-1].casefold())
    assert words[-1] == ("yes" if value else "no"), said
    own = {"my", "the", "final", "overall", "verdict", "answer", "judgement", "judgment", "decision", "result", "_"}
    assert {word.strip("_") for word in words[:-1]} <= {*own, ""}, said


def check_score(said: str) -> None:
    value = worth(PARSERS[1], said)
    if value is None:
        return
    assert 0 <= value <= 1, said
    last = [line for line in said.rpartition("</think>")[2].splitlines() if line.strip()][-1]
    numbers = [float(each) for each in re.findall(r"-?\d+(?:\.\d+)?", last)]
    assert numbers in ([10 * value], [10 * value, 10.0]) or math.isclose(numbers[0], 10 * value), said


def check_quoted(response: str) -> None:
    """Whatever the student wrote, a judge that says no and quotes it on the same line has not said yes."""
    asked = filled(DEFAULT_TEMPLATE, {"prompt": "p", "label": "l", "response": response, "conversation": ""})
    fence = re.findall(r"^--[0-9a-f]{12}--$", asked, re.MULTILINE)[0]
    assert asked.count(fence) == 3
    shown = asked.split(f"\n{fence}\n")[1]
    for line in shown.splitlines():
        assert worth(PARSERS[0], f"No. The student wrote: {line}") != 1.0, response
    assert worth(PARSERS[0], f"No.\nThe student wrote:\n{shown}") != 1.0, response


def check_reply(answer: object) -> None:
    judge = JudgeReward(OPTIONS[0], Surroundings())
    judge._client = Answered(answer)  # type: ignore[assignment] # pyright: ignore
    given = {"prompt": "p", "label": "l", "response": "r", "group_id": 0, "index": 0}
    try:
        found = asyncio.run(judge(**given))
    except NoRewardError:
        return
    assert found in (0.0, 1.0)


def check(data: bytes) -> None:
    draw = Draw(data)
    kind = draw.number(0, 15)
    if kind == 0:
        long, parser = draw.long_text(WORDS), draw.pick(PARSERS)
        with in_time(repr(long[:60])):
            worth(parser, long)
    elif kind == 1:
        keys = ("choices", "message", "content", "finish_reason", "stop", "length", "yes")
        check_reply({"choices": [{"message": draw.value(keys), "finish_reason": draw.value(keys)}]})
        check_reply(draw.value(keys))
    elif kind < 6:
        check_quoted(draw.text(WORDS))
    else:
        said = draw.text(WORDS)
        check_words(said)
        check_score(said)
        for parser in PARSERS[2:]:
            value = worth(parser, said)
            assert value is None or 0 <= value <= 1, said


if __name__ == "__main__":
    fuzz(check)
