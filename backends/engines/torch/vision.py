"""The part of the embedded engine's model that sees: transformers' own, with the weights that are published.

Invariants:

* An image is looked at with the weights that the keys and values of its prompt are made with.
* Weights have the names of the checkpoint.
"""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from penstock.backends.checkpoint.vision_config import VISION_PREFIX
from penstock.backends.engines.torch.sight import Sight, Stretch
from penstock.backends.vision.places import placed
from penstock.backends.vision.processor import ImageProcessor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from penstock.backends.checkpoint.vision_config import VisionPart
    from penstock.messages.samples import Media


class EngineEyes:
    """Looks at images, with weights that are unset until the first ``load``."""

    def __init__(self, part: VisionPart, dtype: torch.dtype, device: torch.device) -> None:
        """
        Raises:
            UserFault: the model's folder has no image processor.
        """
        self._part = part
        self._processor = ImageProcessor(part)
        self._device = device
        self._tower: Any = _tower(part).to(device=device, dtype=dtype).eval()

    def tensors(self) -> list[torch.Tensor]:
        """All memory of the weights."""
        return [parameter.detach() for parameter in self._tower.parameters()]

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take these weights, whose names and shapes have been checked."""
        for name, parameter in self._tower.named_parameters():
            parameter.detach().copy_(tensors[f"{VISION_PREFIX}{name}"])

    def sight(self, prompt: Sequence[int], media: Sequence[Media]) -> Sight:
        """The images of a prompt.

        Raises:
            UserFault: a file is not what it was, or the prompt has no place for it.
        """
        patches = self._processor.all_patches(media)
        grids = [each.grid for each in patches]
        ids = np.asarray(prompt, dtype=np.int32)
        return Sight(placed(ids, self._part.image_token_id, media, grids, self._part.merge_size), patches)

    def rows(self, stretches: Sequence[Stretch]) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Positions ``[N, 3]`` of all rows of these stretches, one after the other; which rows stand for squares of
        images, and what is seen there."""
        positions: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        at: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        seen: list[torch.Tensor] = []
        begin = 0
        for stretch in stretches:
            num_rows, sight = len(stretch.tokens), stretch.sight
            if sight is not None and stretch.is_fresh:
                positions.append(sight.placed.positions[:, :num_rows])
                at.append(sight.placed.at + begin)
                seen.append(self._features(sight))
            else:
                first = stretch.start + (0 if sight is None else sight.placed.shift)
                positions.append(np.arange(first, first + num_rows)[None].repeat(3, axis=0))
            begin += num_rows
        turned = torch.from_numpy(np.concatenate(positions, axis=1).T.copy()).to(self._device)
        if not seen:
            return turned, None
        return turned, (torch.from_numpy(np.concatenate(at)).to(self._device), torch.cat(seen))

    def _features(self, sight: Sight) -> torch.Tensor:
        values = torch.cat([torch.from_numpy(each.values) for each in sight.patches])
        grids = torch.tensor([each.grid for each in sight.patches], device=self._device)
        looked = self._tower(values.to(self._device, self._tower.dtype), grid_thw=grids)
        return cast("torch.Tensor", looked.pooler_output)


def vision_shapes(part: VisionPart) -> dict[str, tuple[int, ...]]:
    """Name in a checkpoint → shape of every weight of the part that sees."""
    with torch.device("meta"):
        tower = _tower(part)
    return {f"{VISION_PREFIX}{name}": tuple(parameter.shape) for name, parameter in tower.named_parameters()}


def _tower(part: VisionPart) -> nn.Module:
    config = Qwen2_5_VLVisionConfig(**msgspec.json.decode(part.config, type=dict[str, Any]))
    made = cast("Any", Qwen2_5_VisionTransformerPretrainedModel)._from_config(config, attn_implementation="sdpa")
    return cast("nn.Module", made)
