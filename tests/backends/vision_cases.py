"""Images, prompts and sequences for the tests of models that see."""

# safetensors is typed in part only:
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from PIL import Image
from safetensors.torch import load_file, save_file

from penstock.backends.checkpoint.make import write_seeing_model
from penstock.backends.checkpoint.make_vision import PATCH_SIZE
from penstock.backends.checkpoint.vision_config import read_vision_part
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.learners.batch.sequences import TrainSequence
from penstock.backends.vision.places import expanded
from penstock.backends.vision.processor import ImageProcessor
from penstock.messages.samples import Media

if TYPE_CHECKING:
    from pathlib import Path

PAD = "<|vision_start|><|image_pad|><|vision_end|>"


def model_folder(folder: Path, seed: int = 0, *, patch_size: int = PATCH_SIZE) -> Path:
    """A small model that sees, with weights so large that it matters what."""
    write_seeing_model(folder, seed, patch_size=patch_size)
    file = folder / "model.safetensors"
    tensors = {name: tensor * 4 if tensor.ndim == 2 and "embed" not in name else tensor + 0.01
               for name, tensor in load_file(file).items()}  # fmt: skip
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def picture(folder: Path, seed: int, size: tuple[int, int] = (24, 16)) -> Media:
    """An image of random pixels in a file."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    path = folder / f"{seed}_{size[0]}x{size[1]}.png"
    Image.fromarray(pixels).save(path)
    return Media("image", str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def prompt_of(folder: Path, text: str, media: tuple[Media, ...]) -> tuple[list[int], tuple[Media, ...]]:
    """Tokens of a prompt whose places for images are written ``#``, and the images with their places."""
    part = read_vision_part(folder)
    assert part is not None
    (ids,) = TextTokenizer(folder).encode([text.replace("#", PAD)], special=False)
    assert isinstance(ids, list)
    processor = ImageProcessor(part)
    counted = [replace(each, num_tokens=processor.num_tokens(*Image.open(each.reference).size)) for each in media]
    return expanded(ids, part.image_token_id, counted)


def sequence_of(
    prompt: list[int], response: list[int], media: tuple[Media, ...], *, number: int, sample: int
) -> TrainSequence:
    """A response of which every token is trained."""
    n = len(response)
    return TrainSequence(
        tokens=np.asarray([*prompt, *response], dtype=np.int32),
        num_context=len(prompt),
        prompt=number,
        trained=np.arange(len(prompt), len(prompt) + n, dtype=np.int64),
        rollout_logprobs=np.zeros(n, dtype=np.float32),
        positions=np.arange(n, dtype=np.int64),
        versions=np.zeros(n, dtype=np.int64),
        sample=sample,
        media=media,
    )
