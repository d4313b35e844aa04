"""Functions, a tool and an environment that show images, as users write them. Loaded from the process that plays."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

from PIL import Image

from penstock.backends.episodes.interfaces import Observation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from penstock.backends.episodes.interfaces import JsonObject, Task
    from penstock.backends.episodes.play import Play

PADDED = 40 * 2**10
"""Bytes that a file may have, in these tests."""


async def episode(play: Play) -> object:
    return await FUNCTIONS[str(play.task.metadata["do"])](play)


async def shows(play: Play) -> None:
    """The prompt's image, one of it cropped, then two at once."""
    crop = cropped(play.task)
    first = play.saved is None
    if first:
        await play.say(play.messages)
        await play.say([*play.messages, user(part(crop), "so?")])
        play.save({"seen": 1})
    await play.say(
        [*play.messages, user("a", part(as_file(crop)), "b", {"type": "image_url", "image_url": url(crop, 3)})]
    )


async def branches(play: Play) -> None:
    await play.say(play.messages)
    other = play.branch()
    await other.say([*other.messages, user(part(cropped(play.task)), "here?")])
    await play.say([*play.messages, user("there?")])


async def chooses(play: Play) -> None:
    await play.say(play.messages)
    turns = await play.choices(2, [*play.messages, user(part(cropped(play.task)), "which?")])
    play.take(turns[1])
    await play.say([*play.messages, user("sure?")])


async def shows_wrongly(play: Play) -> None:
    await play.say(play.messages)
    wrong = WRONG[str(play.task.metadata["what"])]
    await play.say([*play.messages, user(part(wrong), *([part(as_file(cropped(play.task)))] if wrong is None else []))])


def cropped(task: Task) -> Image.Image:
    with Image.open(task.images[0]) as whole:
        return whole.convert("RGB").crop((0, 0, 16, 16))


def part(image: object) -> JsonObject:
    return {"type": "image", "image": image}


def user(*content: str | JsonObject) -> JsonObject:
    return {"role": "user", "content": [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]}


def as_file(image: Image.Image) -> bytes:
    written = io.BytesIO()
    image.resize((24, 16)).save(written, format="JPEG")
    return written.getvalue()


def url(image: Image.Image, times: int) -> JsonObject:
    written = io.BytesIO()
    image.resize((8 * times, 8)).save(written, format="PNG")
    return {"url": "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()}


class Crop:
    """A tool that returns an image beside a text."""

    def __init__(self) -> None:
        self.name = "crop"
        self.description = "Look closer."
        self.parameters: JsonObject = {"type": "object"}

    async def call(self, arguments: JsonObject) -> Sequence[JsonObject]:
        return [{"type": "text", "text": "look "}, part(Image.new("RGB", (16, 8), "red"))]


class Views:
    """A world of images; it can be put back."""

    def __init__(self) -> None:
        self.step_number = 0

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=[user(part(Image.new("RGB", (8, 8), "blue")), "see")])

    async def step(self, action: str) -> Observation:
        self.step_number += 1
        view = part(Image.new("RGB", (8 * self.step_number, 16), "green"))
        return Observation(messages=[user(view, "and")], reward=1.0, is_over=self.step_number == 3)

    async def close(self) -> None:
        pass

    def save(self) -> JsonObject:
        return {"step": self.step_number}

    def restore(self, state: JsonObject) -> None:
        self.step_number = int(str(state["step"]))


WRONG: dict[str, object] = {
    "path": "/etc/passwd",
    "address": "https://example.org/a.png",
    "reference": "sha256:../../etc/passwd",
    "unknown": f"sha256:{'0' * 64}",
    "damaged": b"\x89PNG\r\n\x1a\n and no more",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "large": as_file(Image.new("RGB", (8, 8))) + bytes(PADDED),
    "pixels": Image.new("L", (100, 100)),
    "base64": "data:image/png;base64,%%%",
    "number": 7,
    "nothing": None,
}
FUNCTIONS: dict[str, Callable[[Play], Awaitable[object]]] = {
    "shows": shows,
    "branches": branches,
    "chooses": chooses,
    "shows_wrongly": shows_wrongly,
}
