"""A fuzzer for the rewards of mathematics: 0 or 1, whatever a model writes. What SymPy would work at for longer than
:data:`CPU_S` is ended, as a worker's deadline does: that is no finding, and no reward either."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from fuzzing import Draw, fuzz, instrumented

with instrumented("penstock.backends.rewards"):
    from penstock.backends.rewards.functions import REWARD, load_function

if TYPE_CHECKING:
    from types import FrameType

CPU_S = 2.0
LABELS = ("72", r"\frac{1}{2}", "x^2+1", "(1, 2)", "50\\%", "x=3", r"\text{red}", "[0, 1)", "10^{-3}", "#### 5")
WORDS = (
    "\\boxed{", "}", "{", "(", ")", "[", "]", "1", "2", "7", "72", "0.5", "10", "x", "y", "n", "+", "-", "*", "/",
    "^", "_", "=", "<", ">", "\\ne ", "\\neq", "\\le ", "\\ge", "\\frac", "\\frac{1}{2}", "\\sqrt", "\\sqrt{2}",
    "\\pi", "e", "i", "!", "%", "\\%", "$", "$$", "\\(", "\\)", "\\[", "\\]", "\\text{", "\\mathrm{", "\\left(",
    "\\right)", "\\cdot", "\\times", "\\div", "\\pm", "\\infty", "\\cup", "\\in", "\\sin", "\\log_", "\\binom{",
    "\\sum_{", "\\int", "\\lim", "\\begin{pmatrix}", "&", "\\\\", "\\end{pmatrix}", "|", ",", ";", ":", ".", "...",
    " ", "\n", "and", "or", "answer is", "^\\circ", "\\degree", "km", "\u221e", "√", "½", "²", "−", "²", "日", "\x00",
    "True", "None", "lambda", "oo", "zoo", "nan", "I", "</think>", "####", "1,000", "1e9", "0x1",
)  # fmt: skip


class OverdueError(BaseException):
    """Above everything that a library catches."""


def _end(signum: int, frame: FrameType | None) -> None:
    raise OverdueError


def check(data: bytes) -> None:
    draw = Draw(data)
    inside = draw.text(WORDS)
    text = draw.pick(("{}", "so \\boxed{{{}}}", "</think> \\boxed{{{}}}", "</think> it is ${}$", "\\boxed{{{}")).format(
        inside
    )
    name, others = draw.pick((("math", {"truncated": False}), ("boxed_math", {}), ("deepscaler", {})))
    signal.signal(signal.SIGPROF, _end)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        earned = load_function(REWARD, name).function(response=text, label=draw.pick(LABELS), **others)
    except OverdueError:
        return
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    assert earned in (0.0, 1.0), text


if __name__ == "__main__":
    fuzz(check)
