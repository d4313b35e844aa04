"""What was tried, as one picture: speed over the bound of staleness, or over price; no script, no font of its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

from penstock.runtime.observability.texts import number_text, short_count
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.prediction.planning.measured import Measured
    from penstock.runtime.prediction.planning.search import Plan

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 24, 44, 56
_GREY: Final = "#8a8f98"
_BLUE: Final = "#2563eb"
_RED: Final = "#dc2626"


def pareto_svg(plan: Plan, title: str, *, has_price: bool) -> str:
    """Grey: what was tried; blue: what nothing beats, with intervals; red: what was chosen.

    Args:
        plan: what was found.
        title: heads the picture.
        has_price: across is the price of a token, for which the plan has prices; else the bound of staleness.
    """
    title = terminal_text(title)
    front = [*plan.pareto] if plan.chosen in plan.pareto else [plan.chosen, *plan.pareto]
    everything = [*plan.tried, *front]
    name = "price of a million trained tokens" if has_price else "bound of staleness (versions)"
    xs = [_across(each, has_price=has_price) for each in everything]
    x_of = _Scale(min(xs), max(xs), LEFT + 20, WIDTH - RIGHT - 20)
    y_of = _Scale(0.0, max(each.tokens_per_s.high for each in everything) * 1.05, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
        *_axes(x_of, y_of, xs, everything, name),
    ]
    for each in plan.tried:
        x, y = x_of(_across(each, has_price=has_price)), y_of(each.tokens_per_s.mean)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_GREY}" fill-opacity="0.5"/>')
    for each in front:
        parts += _member(each, x_of(_across(each, has_price=has_price)), y_of, is_chosen=each == plan.chosen)
    return "\n".join([*parts, "</svg>\n"])


def _across(each: Measured, *, has_price: bool) -> float:
    return each.cost.mean if has_price and each.cost is not None else float(each.candidate.max_staleness)


class _Scale:
    """From a range of values to one of pixels."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self.low, self.high = low, high if high > low else low + 1
        self.first, self.last = first, last

    def __call__(self, value: float) -> float:
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Round numbers, about five of them."""
        rough = (self.high - self.low) / 5
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
        first = math.ceil(self.low / step)
        return [step * place for place in range(first, int(self.high / step) + 1)]


def _axes(x_of: _Scale, y_of: _Scale, xs: Sequence[float], found: Sequence[Measured], name: str) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts: list[str] = []
    for tick in y_of.ticks():
        y = y_of(tick)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(short_count(tick))}</text>')
    for tick in sorted(set(xs)) if len(set(xs)) <= 8 else x_of.ticks():
        text = escape(number_text(tick, 3))
        parts.append(f'<text x="{x_of(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [
        *parts,
        f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}" stroke="black"/>',
        f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">{escape(name)}</text>',
        f'<text x="18" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 18 {HEIGHT / 2})">'
        "trained tokens a second</text>",
    ]


def _member(each: Measured, x: float, y_of: _Scale, *, is_chosen: bool) -> list[str]:
    colour = _RED if is_chosen else _BLUE
    speed = each.tokens_per_s
    y, top, bottom = y_of(speed.mean), y_of(speed.high), y_of(speed.low)
    text = escape(terminal_text(("chosen: " if is_chosen else "") + each.candidate.short))
    side, anchor = (-8, "end") if x > WIDTH * 0.6 else (8, "start")
    return [
        f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="{colour}" stroke-width="1.5"/>',
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"><title>{text}</title></circle>',
        f'<text x="{x + side:.1f}" y="{y - 8:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>',
    ]
