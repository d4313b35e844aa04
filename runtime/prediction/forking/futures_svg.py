"""Futures as one picture: steps over time since the fork; no script, no font of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

from penstock.runtime.observability.texts import duration_text
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from penstock.runtime.prediction.forking.futures import Futures

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 84, 48
NUM_MARKS: Final = 5
COLOURS: Final = ("#2563eb", "#dc2626", "#8a8f98")


def futures_svg(futures: Futures) -> str:
    """One line for each future: blue as it was, red with what is otherwise, grey as it was recorded."""
    each = [futures.was, futures.other, *([] if futures.recorded is None else [futures.recorded])]
    most_s = max(end_s for future in each for end_s in future.step_ends_s)
    most_steps = max(len(future.step_ends_s) for future in each)

    def x_of(at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at_s / most_s

    def y_of(num_steps: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * num_steps / most_steps

    title = f"steps since the fork at step {futures.step}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{title}</text>',
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="{COLOURS[2]}"/>',
    ]
    for mark in range(NUM_MARKS + 1):
        at_s, step = most_s * mark / NUM_MARKS, futures.step + round(most_steps * mark / NUM_MARKS)
        parts.append(
            f'<text x="{x_of(at_s):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{duration_text(at_s)}</text>'
            f'<text x="{LEFT - 8}" y="{y_of(step - futures.step) + 4:.1f}" text-anchor="end">{step}</text>'
        )
    for place, (future, colour) in enumerate(zip(each, COLOURS, strict=False)):
        points = " ".join(f"{x_of(at_s):.1f},{y_of(step):.1f}" for step, at_s in enumerate((0.0, *future.step_ends_s)))
        label = escape(terminal_text(future.label))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{LEFT}" y="{42 + 15 * place}" fill="{colour}">{label}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])
