"""Metrics among the lines that verl, slime, NeMo-RL and TRL print; lines of anything else are passed over."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Found = tuple[int, int, dict[str, float]]

MAX_CHARS: Final = 1 << 17
"""Of a line that is looked at."""
_NUMBER: Final = r"(?:np\.\w{1,16}\()?(-?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,3})?)\)?"
_VERL: Final = re.compile(r"\bstep:(\d{1,15}) - (.*)")
_VALUE: Final = re.compile(rf"{_NUMBER}\s*")
_SLIME: Final = re.compile(r"\b(?:perf|rollout|step|train|passrate) (\d{1,15}): (\{.*)")
_TRL: Final = re.compile(r"^\s*(\{'.*'completions/mean_length'.*)")
_PAIR: Final = re.compile(rf"'([^']{{1,200}})': '?{_NUMBER}'?(?=[,}}])")
_NEMO_STEP: Final = re.compile(r"={5,60} Step (\d{1,15})/\d{1,15} ={5,60}")
_NEMO_TIME: Final = re.compile(rf"• ([\w/. ]{{1,100}}): {_NUMBER}s(?: \([\d.]{{1,8}}%\))?\s*$")
_NEMO_VALUE: Final = re.compile(rf"(?:•|-) ([\w/. ()]{{1,100}}): {_NUMBER}(?: steps)?\s*$")
_NEMO_NAMES: Final = {
    "Mean Generation Length": "train/mean_gen_tokens_per_sample",
    "Avg Reward": "train/reward",
    "Avg Total Reward": "train/reward",
    "E2E (Samples/sec)": "performance/samples_per_sec",
    "E2E (Tokens/sec)": "performance/tokens_per_sec",
}


def console_rows(lines: Iterable[tuple[int, str]]) -> Iterator[Found]:
    """Line, step and metrics, in their order; a step may come several times."""
    nemo_step: int | None = None
    num_trl = 0
    for number, whole in lines:
        text = whole[:MAX_CHARS]
        if match := _VERL.search(text):
            yield number, int(match[1]), _verl(match[2])
        elif match := _SLIME.search(text):
            yield number, int(match[1]), _python(match[2])
        elif match := _TRL.search(text):
            num_trl += 1
            yield number, num_trl, _python(match[1])
        elif match := _NEMO_STEP.search(text):
            nemo_step = int(match[1])
        elif nemo_step is not None and (values := _nemo(text)):
            yield number, nemo_step, values


def _verl(text: str) -> dict[str, float]:
    pairs = (part.rpartition(":") for part in text.split(" - "))
    return {name.strip(): float(match[1]) for name, _, value in pairs if (match := _VALUE.fullmatch(value)) and name}


def _python(text: str) -> dict[str, float]:
    """Of a dictionary as Python prints it; it is not evaluated."""
    return {name: float(value) for name, value in _PAIR.findall(text)}


def _nemo(text: str) -> dict[str, float]:
    if match := _NEMO_TIME.search(text):
        name = "total_step_time" if match[1] == "Total step time" else match[1]
        return {f"timing/train/{name}": float(match[2])}
    if (match := _NEMO_VALUE.search(text)) and match[1] in _NEMO_NAMES:
        return {_NEMO_NAMES[match[1]]: float(match[2])}
    return {}
