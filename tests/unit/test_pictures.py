"""Drawings as PNG: what is in them, on whatever machine, and that a file's name decides."""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
import resvg_py
from PIL import Image

from penstock.messages.errors import UserFault
from penstock.messages.training import Activity
from penstock.runtime.observability.lanes import MAX_LANES, lanes_of
from penstock.runtime.observability.lanes_picture import lanes_picture
from penstock.runtime.observability.trackers import ActivityRow
from penstock.runtime.pictures import png_of, write_picture

if TYPE_CHECKING:
    from pathlib import Path

SIGNS = "engine/0 fully_async η 2 × 8 − – · … ≤ ≠ → µ é ß Я “12.5 min”"
"""What our own drawings say, and names of runs may."""
WORKING, EMPTY, PUBLISHING, INK = (0x2A, 0x9D, 0x78), (0xB9, 0xE0, 0xD2), (0x4A, 0x86, 0xE0), (0x1B, 0x23, 0x30)


def drawing(text: str) -> str:
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="600" height="40" font-family="sans-serif">'
        f'<text x="4" y="24">{text}</text></svg>'
    )


def image(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png), formats=["PNG"]).convert("RGB")


def dark(png: bytes) -> int:
    """Pixels that are black or nearly so."""
    return sum(image(png).convert("L").histogram()[:64])


def row(activity: Activity, start_s: float, end_s: float, *, occupancy: float = 1.0) -> ActivityRow:
    return ActivityRow(actor="", epoch=0, activity=activity, start_s=start_s, end_s=end_s, occupancy=occupancy)


def test_a_png_is_black_on_white_with_two_pixels_for_a_unit() -> None:
    png = png_of(drawing(SIGNS))
    assert image(png).size == (1200, 80)
    assert image(png).getpixel((0, 0)) == (255, 255, 255)
    assert dark(png) > 1000


def test_letters_are_the_same_on_a_machine_without_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    here = png_of(drawing(SIGNS))
    monkeypatch.setattr(resvg_py, "svg_to_bytes", partial(resvg_py.svg_to_bytes, skip_system_fonts=True))
    assert png_of(drawing(SIGNS)) == here
    boxes = {png_of(drawing(sign)) for sign in ("中", "文")}
    assert len(boxes) == 1, "what no font has is a box"
    assert not boxes & {png_of(drawing(sign)) for sign in SIGNS.replace(" ", "")}


def test_a_name_may_have_what_no_xml_has() -> None:
    assert dark(png_of(drawing("a\x00b\ud800c\ufffed"))) > dark(png_of(drawing("abcd")))


@pytest.mark.parametrize("name", ["futures.png", "FUTURES.PNG"])
def test_the_name_of_a_file_says_what_it_is(tmp_path: Path, name: str) -> None:
    write_picture(tmp_path / name, drawing("a"))
    assert image((tmp_path / name).read_bytes()).size == (1200, 80)
    for other in ("futures.svg", "png"):
        write_picture(tmp_path / other, drawing("a"))
        assert (tmp_path / other).read_text() == drawing("a")


def test_a_disk_that_refuses_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=r"nowhere/a\.png: cannot be written: no such file"):
        write_picture(tmp_path / "nowhere" / "a.png", drawing("a"))


def test_the_lanes_stand_alone_with_their_colours_names_and_legend() -> None:
    learner = [row(Activity.PUBLISHING, 0, 5), row(Activity.WORKING, 5, 10)]
    lanes = lanes_of({"learner": learner, "engine/0": [row(Activity.WORKING, 0, 10, occupancy=0.5)]})
    assert lanes is not None
    svg = lanes_picture(lanes, "math <run> \x1b[2J")
    texts = [each.text for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:4] == ["math <run> \\x1b[2J", "working", "working, slots empty", "publishing"]
    assert {"learner", "engine/0", "0 s", "10 s"} <= set(texts)
    assert "var(" not in svg
    picture = image(png_of(svg))
    assert picture.width == 2 * (lanes.width + 32)
    colours = {colour: count for count, colour in picture.getcolors(maxcolors=1 << 20) or ()}
    area = 2 * 2 * 900 * 22  # of a lane
    assert colours[WORKING] == pytest.approx(area, rel=0.02)  # half of either lane
    assert colours[PUBLISHING] == colours[EMPTY] == pytest.approx(area / 2, rel=0.02)
    assert colours[INK] > 100
    assert colours[255, 255, 255] > 0.5 * picture.width * picture.height - 2 * area


def test_many_engines_say_that_some_are_not_drawn_and_a_long_legend_has_rows() -> None:
    rows = [row(activity, at_s, at_s + 1) for at_s, activity in enumerate(Activity)]
    lanes = lanes_of({f"engine/{number}": rows for number in range(MAX_LANES + 4)})
    assert lanes is not None
    svg = lanes_picture(lanes, "many")
    assert "many (4 further engines are not drawn)" in svg
    keys = [
        (float(each.get("x", "")), float(each.get("y", "")))
        for each in ElementTree.fromstring(svg).findall("{http://www.w3.org/2000/svg}rect")
    ]
    assert len(keys) == len(set(keys)) == len(Activity) + 1
    assert len({y for _, y in keys}) > 1
    assert max(x for x, _ in keys) < lanes.width
