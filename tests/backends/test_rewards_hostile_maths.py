"""Answers that were written to break a checker of mathematics, through the processes of a real run."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from reward_driver import RewardDriver, score_of, write_tokenizer

from penstock.backends.rewards.options import RewardOptions

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_ANSWERS: Final = 1000
NUM_EVERY_TIME: Final = 200
TIMEOUT_S: Final = 2.0
MAX_ENDED: Final = 40
"""Of all answers, those that cost a process. A few get past every guard; were it most, each would cost its whole
deadline."""


def _nested(rng: random.Random, head: str, tail: str, inside: str = "1") -> str:
    depth = rng.choice((10, 100, 1000, 5000))
    return head * depth + inside + tail * depth


ENDLESS: Final = (
    r"\boxed{(a+b+c+d+e+f+g+h)^9(i+j+k+l+m+n+o+p)^9}",
    r"\boxed{\binom{9999}{3333}+\binom{9998}{x}}",
)
"""These get past every guard, and would be expanded for ever."""
KINDS: Final[tuple[Callable[[random.Random], str], ...]] = (
    lambda rng: "^".join(["9"] * rng.randint(3, 40)),
    lambda rng: "**".join(["9"] * rng.randint(3, 40)),
    lambda rng: "9^{" * (n := rng.randint(3, 200)) + "9" + "}" * n,
    lambda rng: f"{rng.randint(2, 9)}^{{{10 ** rng.randint(3, 60)}}}",
    lambda rng: f"2^{{-{10 ** rng.randint(4, 30)}}}",
    lambda rng: f"{10 ** rng.randint(3, 30)}!",
    lambda rng: "5" + "!" * rng.randint(2, 50),
    lambda rng: f"(({rng.randint(5, 99)})!)!",
    lambda rng: "9" * rng.choice((100, 1000, 10_000, 100_000)),
    lambda rng: f"1e{10 ** rng.randint(3, 15)}",
    lambda rng: f"0.{'3' * rng.choice((50, 500, 5000))}",
    lambda rng: _nested(rng, r"\frac{1}{", "}"),
    lambda rng: _nested(rng, r"\sqrt{", "}"),
    lambda rng: _nested(rng, "(", ")"),
    lambda rng: _nested(rng, "{", ""),
    lambda rng: _nested(rng, "", "}"),
    lambda rng: _nested(rng, r"\left(", r"\right)"),
    lambda rng: "1/" * rng.randint(10, 3000) + "0",
    lambda rng: rng.choice(
        ("1/0", r"\frac{1}{0}", r"\frac{0}{0}", "0^0", r"\log(0)", r"\tan(\frac{\pi}{2})", "0^{-1}")
    ),
    lambda rng: "+".join(f"x^{{{rng.randint(1, 99)}}}" for _ in range(rng.randint(20, 500))),
    lambda rng: "(x+1)" * rng.randint(20, 400),
    lambda rng: f"(x+y+z)^{{{rng.choice((20, 200, 2000, 9999))}}}",
    lambda rng: f"\\sum_{{n=1}}^{{{10 ** rng.randint(2, 20)}}} n^{{{rng.randint(1, 99)}}}",
    lambda rng: f"\\prod_{{n=1}}^{{{10 ** rng.randint(2, 20)}}} n",
    lambda rng: f"\\int_0^{{{rng.randint(1, 99)}}} x^x \\sin(x^{{{rng.randint(2, 99)}}}) dx",
    lambda rng: r"\binom{" + str(10 ** rng.randint(3, 12)) + "}{" + str(10 ** rng.randint(2, 6)) + "}",
    lambda rng: r"\begin{pmatrix}" + r"1&2\\" * rng.randint(10, 500) + r"\end{pmatrix}",
    lambda rng: r"\begin{matrix}" * rng.randint(1, 200),
    lambda rng: "\\" * rng.randint(1, 2000),
    lambda rng: "$" * rng.randint(1, 2000),
    lambda rng: "a" * rng.randint(100, 20_000),
    lambda rng: " " * rng.randint(100, 20_000) + "x",
    lambda rng: ("a=" * rng.randint(20, 2000)) + "b",
    lambda rng: ",".join(["1"] * rng.randint(20, 5000)),
    lambda rng: r"\text{" + "a " * rng.randint(10, 3000) + "}",
    lambda rng: "".join(rng.choices("\\{}()[]^_$&#%~0123456789abcxyz+-*/=!<>|,.;: ", k=rng.randint(1, 400))),
    lambda rng: "".join(rng.choices("∫√−你🙂éß", k=rng.randint(1, 400))),
    lambda rng: "-" * rng.randint(10, 3000) + "1",
    lambda rng: "|" * rng.randint(10, 1000) + "x" + "|" * rng.randint(10, 1000),
    lambda rng: r"\sin" * rng.randint(5, 300) + "x",
    lambda rng: rng.choice(
        ("__import__('os')._exit(1)", "exit()", r"\input{/etc/passwd}", "lambda: 1", "os.system('x')")
    ),
    lambda rng: r"\boxed{" * rng.randint(2, 300) + "1" + "}" * rng.randint(0, 300),
    lambda rng: "{1}}" * rng.randint(5, 300),
    lambda rng: r"\frac" * rng.randint(5, 500) + "1",
    lambda rng: "_".join("x" * rng.randint(5, 500)),
)


def hostile_answers(num: int, seed: int) -> list[str]:
    """Responses, in turn of each kind."""
    rng = random.Random(seed)
    answers: list[str] = []
    for place in range(num):
        inside = KINDS[place % len(KINDS)](rng)
        answers.append(rng.choice((f"so \\boxed{{{inside}}}", f"\\boxed{{{inside}", f"it is ${inside}$", inside)))
    return answers


def children() -> set[int]:
    """Processes of this one, by what the kernel says."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


@pytest.mark.parametrize("num_answers", [NUM_EVERY_TIME, pytest.param(NUM_ANSWERS, marks=pytest.mark.slow)])
def test_hostile_answers_end_within_their_deadlines_and_leave_no_process(num_answers: int, tmp_path: Path) -> None:
    before = children()
    driver = RewardDriver(write_tokenizer(tmp_path), RewardOptions(function="math", num_workers=2))
    answers = hostile_answers(num_answers, seed=8)
    for number, endless in enumerate(ENDLESS):
        answers[num_answers // 4 * (number + 1)] = endless
    labels = ("72", r"\frac{1}{2}", "x^2+1", "(1, 2)")
    commands = [
        score_of(answer, place, label=labels[place % 4], timeout_s=TIMEOUT_S) for place, answer in enumerate(answers)
    ]
    try:
        judged = driver.judged(*commands, score_of(r"\boxed{72}", num_answers, label="72"))
        ended = [each for each in judged if each.reward is None]
        assert all("took longer than" in each.reason for each in ended), [each.reason for each in ended]
        assert driver.gauge("reward/replaced_processes") == len(ended), [each.reason for each in ended]
        assert len(ENDLESS) <= len(ended) <= MAX_ENDED * num_answers // NUM_ANSWERS, [
            answers[each.key.index][:80] for each in ended
        ]
        assert {each.reward.value for each in judged if each.reward} <= {0.0, 1.0}
        assert judged[-1].reward is not None
        assert judged[-1].reward.value == 1.0
    finally:
        driver.close()
    assert children() <= before
