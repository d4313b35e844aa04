"""The lanes of a run as a picture that stands alone: the drawing of the report with a title, a legend, fixed colours.

Invariants:

* The drawing is the report's own, and so are the colours: those of its style sheet for a light page, written out, as
  outside of a page nobody resolves variables.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.runtime.observability.lanes import EMPTY_SLOTS
from penstock.runtime.observability.shares import LABELS
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from penstock.runtime.observability.lanes import Lanes

_STYLE_SHEET: Final = Path(__file__).with_name("report.css")
_MARGIN: Final = 16
_TITLE_HEIGHT: Final = 30
_ROW_HEIGHT: Final = 20
_SWATCH: Final = 12
_LETTER_WIDTH: Final = 7.2
"""Of a letter of the legend, on average and rather too much than too little."""


def lanes_picture(lanes: Lanes, name: str) -> str:
    """The picture as SVG.

    Args:
        lanes: that are drawn.
        name: of the run; heads the picture.
    """
    legend, num_rows = _legend(lanes)
    top = _MARGIN + _TITLE_HEIGHT + num_rows * _ROW_HEIGHT + 10
    width, height = lanes.width + 2 * _MARGIN, top + lanes.height + _MARGIN / 2
    hidden = f" ({lanes.num_hidden:,} further engines are not drawn)" if lanes.num_hidden else ""
    return "".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" font-family="sans-serif">',
        f"<style>{_style()}</style>",
        f'<text class="title" x="{_MARGIN}" y="{_MARGIN + 14}">{escape(terminal_text(name))}{hidden}</text>',
        *legend,
        f'<svg x="{_MARGIN}" y="{top}" width="{lanes.width:g}" height="{lanes.height:g}">{lanes.svg}</svg>',
        "</svg>",
    ))  # fmt: skip


def _legend(lanes: Lanes) -> tuple[list[str], int]:
    """A swatch with its label for each colour, and how many rows they take."""
    parts: list[str] = []
    x, row = float(_MARGIN), 0
    for state, label in lanes.legend:
        width = _SWATCH + 6 + len(label) * _LETTER_WIDTH + 14
        if x + width > lanes.width + 2 * _MARGIN:
            x, row = float(_MARGIN), row + 1
        y = _MARGIN + _TITLE_HEIGHT + row * _ROW_HEIGHT
        parts.append(f'<rect class="{state}" x="{x:g}" y="{y}" width="{_SWATCH}" height="{_SWATCH}"/>')
        parts.append(f'<text class="key" x="{x + _SWATCH + 6:g}" y="{y + 10}">{escape(label)}</text>')
        x += width
    return parts, row + 1


@cache
def _style() -> str:
    """What the style sheet of the report says of lanes, without variables."""
    text = _STYLE_SHEET.read_text(encoding="utf-8")
    colours: dict[str, str] = dict(re.findall(r"--(\w+): ([^;]+);", text.partition("}")[0]))
    rules = [line for line in text.splitlines() if line.startswith("svg.lanes ") and "var(--state)" not in line]
    states = (EMPTY_SLOTS, *(state.value for state in LABELS))
    rules += [f".{state} {{ fill: {colours[state]}; }}" for state in states]
    rules += [".title { fill: var(--ink); font-size: 16px; }", ".key { fill: var(--muted); font-size: 12px; }"]
    return re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], "\n".join(rules))
