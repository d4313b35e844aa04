"""The task of the example with images: say which colour a shape has.

Invariants:

* A row is a pure function of ``(seed, index)``, to the last byte of its image.
* Place, size, shape and brightness are drawn independently of the colour, so nothing else gives the answer away.
"""

from __future__ import annotations

import io
import random
from typing import Final, NamedTuple

from PIL import Image, ImageDraw

SIDE: Final = 16
COLOURS: Final = {"r": (220, 40, 40), "g": (40, 200, 60), "b": (50, 70, 220), "y": (230, 210, 40)}
QUESTION: Final = "<image>colour?"


class ShapesRow(NamedTuple):
    """One row of the task."""

    prompt: str
    image: bytes
    """BMP: its bytes depend on no library's compression."""
    answer: str
    """First letter of the colour."""


def shapes_row(seed: int, index: int) -> ShapesRow:
    """The row with this index of the endless dataset that belongs to ``seed``."""
    draw = random.Random(f"shapes {seed} {index}")
    answer = draw.choice(list(COLOURS))
    grey = draw.randint(90, 160)
    image = Image.new("RGB", (SIDE, SIDE), (grey, grey, grey))
    size = draw.randint(7, 12)
    left, top = draw.randint(0, SIDE - size), draw.randint(0, SIDE - size)
    box = (left, top, left + size - 1, top + size - 1)
    pen = ImageDraw.Draw(image)
    (pen.ellipse if draw.random() < 0.5 else pen.rectangle)(box, fill=COLOURS[answer])
    written = io.BytesIO()
    image.save(written, format="BMP")
    return ShapesRow(QUESTION, written.getvalue(), answer)
