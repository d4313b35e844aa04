"""From images to patches, as the image processor of a checkpoint says: its size, its mean, its patch.

Invariants:

* An image has as many tokens as squares of patches, whoever asks: the reader of the rows by its size, engine and
  learner by its pixels.
"""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.backends.vision.pictures import read_picture
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.backends.checkpoint.vision_config import VisionPart
    from penstock.messages.samples import Media

MAX_KEPT_BYTES: Final = 128 * 2**20
"""Of patches that are kept in case the same image comes again, as it does for each sample of its group."""


class Patches(NamedTuple):
    """Of one image."""

    values: NDArray[np.float32]
    """``[patches, numbers of a patch]``"""
    grid: tuple[int, int, int]
    """Patches along time, height and width."""


class ImageProcessor:
    """The image processor of one checkpoint."""

    def __init__(self, part: VisionPart) -> None:
        """
        Raises:
            UserFault: the model's folder has no configuration of it.
        """
        folder = Path(part.folder)
        try:
            self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserFault(
                f"{folder}: its image processor cannot be loaded ({str(error).partition(chr(10))[0]}); copy "
                "preprocessor_config.json from the model"
            ) from error
        self._square = part.merge_size**2
        self._kept: OrderedDict[str, Patches] = OrderedDict()
        self._kept_bytes = 0

    def num_tokens(self, width: int, height: int) -> int:
        """Of an image of this size.

        Raises:
            UserFault: it is of a shape that the processor refuses.
        """
        try:
            return int(self._processor.get_number_of_image_patches(height, width, {})) // self._square
        except ValueError as error:
            raise UserFault(f"the model's image processor refuses {width} x {height} pixels: {error}") from error

    def patches(self, media: Media) -> Patches:
        """Of an image of a prompt; not to be changed.

        Raises:
            BadPictureError: its file is not what it was.
        """
        found = self._kept.get(media.digest)
        if found is not None:
            self._kept.move_to_end(media.digest)
            return found
        made = self._processor(images=[read_picture(media)], return_tensors="np")
        values = np.ascontiguousarray(made["pixel_values"], dtype=np.float32)
        grid = cast("tuple[int, int, int]", tuple(int(side) for side in made["image_grid_thw"][0]))
        found = self._kept[media.digest] = Patches(values, grid)
        self._kept_bytes += values.nbytes
        while self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popitem(last=False)[1].values.nbytes
        return found

    def all_patches(self, media: Sequence[Media]) -> list[Patches]:
        """Of the images of a prompt, in their order; see :meth:`patches`."""
        return [self.patches(each) for each in media]
