# pyright: reportUnknownMemberType=false
"""Charts of the report as inline SVG that follows the page's colours, in light and in dark.

matplotlib draws in stand-in colours; each is then replaced by a CSS variable of the page. Text stays text, in the
font of the page.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

INK: Final = "#a10001"
MUTED: Final = "#a10002"
GRID: Final = "#a10003"
BLUE: Final = "#a10004"
ORANGE: Final = "#a10005"
GREEN: Final = "#a10006"
RED: Final = "#a10007"
VIOLET: Final = "#a10008"
_VARIABLES: Final = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    BLUE: "--blue",
    ORANGE: "--orange",
    GREEN: "--green",
    RED: "--red",
    VIOLET: "--violet",
}
SERIES_COLOURS: Final = (BLUE, ORANGE, GREEN, VIOLET, RED)

_STYLE: Final[dict[str, Any]] = {
    "svg.fonttype": "none",
    "font.size": 8,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.01,
    "axes.ymargin": 0.08,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.color": GRID,
    "ytick.labelcolor": MUTED,
    "ytick.left": False,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "legend.fontsize": 8,
    "legend.handlelength": 1.4,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
}
_WIDTH_IN: Final = 5.6
_HEIGHT_IN: Final = 2.5
_METADATA: Final = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_SIZE: Final = re.compile(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"|(<svg [^>]*?)height="[^"]*" width="[^"]*"')


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = BLUE
    width: float = 1.6
    alpha: float = 1.0
    dashed: bool = False
    filled: bool = False
    """Fill the area below."""
    steps: bool = False
    """Draw levels with steps between them."""
    marked: bool = False
    """Mark each point."""


def line_chart(
    name: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str = "",
    y_from_zero: bool = False,
    whole_y: bool = False,
) -> str:
    """A chart of lines over a common x.

    Args:
        name: what the chart is called on the page; makes its element ids unique.
        lines: drawn in order.
        x_label: below the axis.
        y_label: above the axis, horizontally.
        y_from_zero: begin the y axis at 0.
        whole_y: tick whole numbers only.
    """
    with mpl.rc_context(_style(name)):
        figure, axes = _figure()
        for line in lines:
            _draw(axes, line)
        axes.set_xlabel(x_label)
        if y_from_zero:
            axes.set_ylim(bottom=0)
        if whole_y:
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(axes, y_label, num_legends=sum(bool(line.label) for line in lines))
        return _svg(figure, name)


def bar_chart(name: str, heights: Sequence[float], *, x_label: str, y_label: str, bound: float | None = None) -> str:
    """Bars at 0, 1, 2, …, each with its value in percent above it.

    Args:
        name: as for :func:`line_chart`.
        heights: in percent.
        x_label: below the axis.
        y_label: above it.
        bound: x of a vertical line that the bars must not pass.
    """
    with mpl.rc_context(_style(name)):
        figure, axes = _figure()
        bars = axes.bar(range(len(heights)), heights, width=0.72, color=BLUE, alpha=0.85)
        if len(heights) <= _MAX_LABELLED_BARS:
            labels = [f"{height:.0f} %" if height >= 1 or not height else "<1 %" for height in heights]
            axes.bar_label(bars, labels=labels, padding=2, color=MUTED, fontsize=7)
        if bound is not None:
            axes.axvline(bound + 0.5, color=RED, linewidth=1.2, linestyle=(0, (4, 3)))
            axes.annotate(
                f"bound {bound:g}",
                (bound + 0.5, 1),
                xycoords=("data", "axes fraction"),
                xytext=(-4, -2),
                textcoords="offset points",
                ha="right",
                va="top",
                color=RED,
                fontsize=8,
            )
        last = max(len(heights) - 1, 0 if bound is None else int(bound))
        axes.set_xlim(-0.6, last + 0.7)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_ylim(0, max([*heights, 1]) * 1.18)
        axes.set_xlabel(x_label)
        _finish(axes, y_label, num_legends=0)
        return _svg(figure, name)


_MAX_LABELLED_BARS: Final = 16


def _style(name: str) -> Any:  # noqa: ANN401 - matplotlib types its keys as a union of 300 literals
    # Without a salt of its own each chart would use the element ids of the others on the page.
    return {**_STYLE, "svg.hashsalt": name}


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


def _draw(axes: Axes, line: Line) -> None:
    marker = "o" if line.marked or len(line.x) == 1 else ""
    axes.plot(
        line.x,
        line.y,
        color=line.colour,
        linewidth=line.width,
        alpha=line.alpha,
        linestyle=(0, (4, 3)) if line.dashed else "solid",
        drawstyle="steps-post" if line.steps else "default",
        marker=marker,
        markersize=4,
        label=line.label or "_",
    )
    if line.filled:
        axes.fill_between(line.x, line.y, color=line.colour, alpha=0.12 * line.alpha, linewidth=0)


def _finish(axes: Axes, y_label: str, *, num_legends: int) -> None:
    axes.tick_params(length=0, pad=4)
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    if y_label:
        axes.set_title(y_label, loc="left", fontsize=8, color=MUTED, pad=6)
    if num_legends > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, borderaxespad=0.2, columnspacing=1.2)


def _tick(value: float, _position: int) -> str:
    """A short label: ``12k``, ``0.8``, ``2e-05``."""
    if value == 0:
        return "0"
    if abs(value) >= 1_000_000:
        return f"{value / 1_000_000:g}M"
    if abs(value) >= 10_000:
        return f"{value / 1_000:g}k"
    if abs(value) < 1e-3:
        return f"{value:.0e}"
    return f"{value:g}"


def _svg(figure: Figure, name: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = _METADATA.sub("", text[text.index("<svg") :])
    text = _SIZE.sub(lambda match: (match[1] or match[2]) + 'width="100%"', text, count=1)
    text = re.sub(r'(<g id=")([^"]+")', rf"\g<1>{name}-\g<2>", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.replace("<svg ", f'<svg class="chart" role="img" aria-label="{name}" ', 1)
