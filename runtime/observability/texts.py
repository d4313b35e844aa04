"""Figures as people read them, the same in the report and on the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.samples import TerminalState
from penstock.runtime.observability.figures import END_STEPS, LOSS, REWARD, mean
from penstock.runtime.observability.summary import generated_tokens, trained_tokens, wasted_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.messages.training import Balance
    from penstock.runtime.observability.spans import AttributeValue
    from penstock.runtime.observability.summary import RunSummary
    from penstock.runtime.observability.trackers import StepRow

NOTHING: Final = "–"
MAX_EVALUATED: Final = 3
"""Datasets with a figure at the top."""
_UNTOLD: Final = ("group_id", "index", "min_version", "deadline_version", "tool")
_TIMES: Final = {"tool_s": "in tools", "row_wait_s": "until its row was there"}
"""What is behind a time; other names of times stand for themselves."""
_BLOCKS: Final = "▁▂▃▄▅▆▇█"


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """One of the large figures at the top of the report."""

    label: str
    value: str
    detail: str = ""


def count_text(value: int | None) -> str:
    """``1234567`` → ``1,234,567``."""
    return NOTHING if value is None else f"{value:,}"


def short_count(value: float | None) -> str:
    """``1234567`` → ``1.23M``, at most five characters up to 10¹²."""
    if value is None or not math.isfinite(value):
        return NOTHING
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}" if abs(scaled) < 1000 else f"{scaled:.0f}{unit}"
    return f"{value:,.0f}"


def number_text(value: float | None, digits: int = 4) -> str:
    """So many significant digits; ``1.20e-05`` where a number is very small or large."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    if abs(value) < 1e-3 or abs(value) >= 1e7:
        return f"{value:.2e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def fixed(value: float | None, digits: int) -> str:
    """With this many decimals, or a dash."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def duration_text(seconds: float | None) -> str:
    """``3725`` → ``1 h 2 min``, ``75`` → ``1 min 15 s``, ``7.32`` → ``7.3 s``."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def clock_text(seconds: float | None) -> str:
    """``75`` → ``1:15``, ``3725`` → ``1:02:05``."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def bytes_text(size: int) -> str:
    """``8589934592`` → ``8.0 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of finite values in at most ``width`` block characters; means where there are more values."""
    if not values or width < 1:
        return ""
    size = max(1, math.ceil(len(values) / width))
    points = [math.fsum(part) / len(part) for at in range(0, len(values), size) if (part := values[at : at + size])]
    low, high = min(points), max(points)
    if high == low:
        return _BLOCKS[len(_BLOCKS) // 2 - 1] * len(points)
    scale = (len(_BLOCKS) - 1) / (high - low)
    return "".join(_BLOCKS[round((value - low) * scale)] for value in points)


def tiles(summary: RunSummary | None, steps: Sequence[StepRow]) -> list[Tile]:
    """The large figures of a run; from its steps alone when it left no summary."""
    if summary is None:
        return [Tile(label="steps", value=str(steps[-1].version if steps else 0)), *_course(steps)]
    restarts = sum(restart.count for restart in summary.restarts)
    evaluated = [
        Tile(label=each.name, value=fixed(each.last, 3), detail=f"mean reward at version {each.last_version}")
        for each in summary.evaluations[:MAX_EVALUATED]
    ]
    planned = f"of {summary.num_steps:,}"
    return [
        *_course(steps),
        *evaluated,
        *([Tile(label="steps", value=f"{summary.version:,}", detail=planned)] if summary.num_steps else []),
        Tile(
            label="training" if summary.num_steps else "duration",
            value=duration_text(summary.training_s),
            detail=f"{duration_text(summary.wall_s)} in all",
        ),
        Tile(
            label="largest staleness",
            value=str(summary.max_staleness),
            detail=f"bound {summary.staleness_bound}, mean {fixed(summary.mean_staleness, 2)}",
        ),
        Tile(
            label="tokens a second",
            value=short_count(summary.tokens_per_s),
            detail=f"{short_count(summary.tokens_generated)} generated",
        ),
        Tile(
            label="goodput",
            value=NOTHING if summary.goodput is None else f"{100 * summary.goodput:.1f} %",
            detail=f"{short_count(summary.tokens_trained)} trained",
        ),
        Tile(
            label="restarts",
            value=str(restarts),
            detail=f"about {short_count(summary.tokens_lost_estimate)} tokens lost" if restarts else "",
        ),
    ]


def tokens_text(balance: Balance) -> str:
    """``900 generated = 640 trained + 200 wasted + 60 in the system``; ``≠`` where they do not add up."""
    evaluated = sum(count.num_made_tokens for count in balance.ended if count.state == TerminalState.EVALUATED)
    wasted = sum(waste.num_tokens for waste in wasted_tokens(balance))
    parts = {
        "trained": trained_tokens(balance),
        "evaluated": evaluated,
        "wasted": wasted,
        "in the system": balance.in_system_tokens,
    }
    generated = generated_tokens(balance)
    sign = "=" if generated == sum(parts.values()) else "≠"
    return f"{generated:,} generated {sign} {' + '.join(f'{n:,} {what}' for what, n in parts.items() if n) or '0'}"


def _course(steps: Sequence[StepRow]) -> list[Tile]:
    """The last steps against the first ones: of the reward or, where nothing is rewarded, of the loss."""
    for name, label in ((REWARD, "reward"), (LOSS, "loss")):
        values = [value for row in steps if (value := row.metrics.get(name)) is not None]
        if values:
            first, last = fixed(mean(values[:END_STEPS]), 3), fixed(mean(values[-END_STEPS:]), 3)
            return [Tile(label=f"{label}, last {END_STEPS}", value=last, detail=f"first {END_STEPS}: {first}")]
    return []


def length_text(seconds: float) -> str:
    """Of a stage, which may be short: ``12.0 ms``, ``3.4 s``."""
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else duration_text(seconds)


def told(attributes: Mapping[str, AttributeValue]) -> Iterator[str]:
    """What is known of a stage or an event, in words."""
    if "min_version" in attributes:
        yield f"weights of version {attributes['min_version']} or newer"
    if "deadline_version" in attributes:
        yield f"of use until version {attributes['deadline_version']}"
    for name, value in attributes.items():
        if name in _UNTOLD or name.startswith(("gen_ai.", "error.")):
            continue
        if isinstance(value, bool):
            yield name if value else f"not {name}"
        elif name == "conversation":
            if value:
                yield f"conversation {value}"
        elif name in ("outcome", "cause", "failure", "error", "ending"):
            yield str(value)
        elif name == "engine":
            yield f"to {value}"
        elif name.startswith("num_") and isinstance(value, int):
            yield f"{value:,} {name.removeprefix('num_').replace('_', ' ')}"
        elif name.endswith("_s") and isinstance(value, float):
            yield f"{length_text(value)} {_TIMES.get(name, name.removesuffix('_s').replace('_', ' '))}"
        else:
            yield f"{name.replace('_', ' ')} {number_text(value) if isinstance(value, float) else value}"
