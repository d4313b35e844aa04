"""Drawings as files: SVG as they are drawn, PNG where the file's name ends in ``.png``.

Invariants:

* A PNG is white behind its drawing and looks the same on every machine: the font is one of ours. A character that it
  lacks is taken from the machine's fonts, and is a box where they lack it too.
* It needs no network, no browser and no program beside Python.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from penstock.messages.errors import UserFault
from penstock.runtime.output_file import write_output

_FONT: Final = Path(__file__).parent / "fonts" / "DejaVuSans.ttf"
_FAMILY: Final = "DejaVu Sans"
_ZOOM: Final = 2.0
"""Pixels for a unit of the drawing: as screens have them today, and slides and papers want more than one."""
_NO_XML: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")
"""What no XML may have, escaped or not; a name in a drawing may be anybody's."""


def write_picture(path: Path, svg: str) -> None:
    """Write a drawing as what the file's name says: PNG, or else SVG.

    Raises:
        UserFault: the disk refuses.
    """
    write_output(path, png_of(svg) if path.suffix.lower() == ".png" else svg)


def check_picture(path: Path, option: str) -> None:
    """See that the file's name says which kind of picture it is.

    Raises:
        UserFault: it does not.
    """
    if path.suffix.lower() not in (".svg", ".png"):
        raise UserFault(f"{option} {path}: a picture is an SVG or a PNG, by its name: {path.stem}.svg, {path.stem}.png")


def png_of(svg: str) -> bytes:
    """A drawing of ours, which has its width and height in it, as PNG."""
    from resvg_py import svg_to_bytes  # here, as most processes draw nothing

    return svg_to_bytes(
        _NO_XML.sub("\ufffd", svg),
        background="white",
        zoom=_ZOOM,
        font_files=[str(_FONT)],
        font_family=_FAMILY,
        serif_family=_FAMILY,
        sans_serif_family=_FAMILY,
    )
