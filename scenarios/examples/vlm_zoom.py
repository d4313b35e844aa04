"""The episode of vlm_zoom.yaml: the model is shown a drawing without colours, and looks closer."""

import io

from PIL import Image

from penstock.backends.episodes.play import Play


async def episode(play: Play) -> float:
    """1 if the letter after the second image is that of the colour, which only that one has."""
    with Image.open(play.task.images[0]) as drawing:
        colours = drawing.convert("RGB")
    if play.saved is None:
        await play.say([shown(colours.convert("L"), "colour?")])
        play.save({})  # from here it goes on elsewhere, if its engine dies
    turn = await play.say([*play.messages, shown(zoomed(colours), "closer")])
    return float(turn.text[:1] == play.task.label)


def zoomed(drawing: Image.Image) -> Image.Image:
    """The part of the drawing that is not of one grey, twice as large."""
    box = drawing.convert("HSV").getchannel("S").getbbox()
    part = drawing.crop(box)
    return part.resize((2 * part.width, 2 * part.height))


def shown(image: Image.Image, text: str) -> dict[str, object]:
    """A message of the user with an image, as bytes of a file."""
    written = io.BytesIO()
    image.save(written, format="PNG")
    parts = [{"type": "image", "image": written.getvalue()}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}
