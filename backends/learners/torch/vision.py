"""The images of a micro-batch, as the learner's model sees them.

Axis letters: ``N`` input tokens of a micro-batch, ``H`` hidden size.

Invariants:

* An image of a prompt is computed once for all samples of it in a micro-batch, and every one of them sends its
  gradient; one that came in an episode is its sample's own.
* Where ranks have shares of the weights, each runs the vision tower for every micro-batch, with images or without: what
  it asks of the others must not depend on its tokens.
* A sequence has the embeddings and the positions that it would have alone, in transformers' own forward pass.
"""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from penstock.backends.learners.torch.parallel import is_sharded
from penstock.backends.vision.places import placed
from penstock.backends.vision.processor import ImageProcessor

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.backends.checkpoint.vision_config import VisionPart
    from penstock.backends.learners.batch.packing import PackedTokens


class LearnerEyes:
    """Looks at images with the vision part of one model."""

    def __init__(self, model: PreTrainedModel, part: VisionPart) -> None:
        """
        Raises:
            UserFault: the model's folder has no image processor.
        """
        self._model = model
        self._part = part
        self._processor = ImageProcessor(part)
        self.is_blank = False
        """Every image is as if nothing were on it: to see whether anything depends on what is."""

    def of(self, model: PreTrainedModel) -> LearnerEyes:
        """Those of a copy of the model."""
        return LearnerEyes(model, self._part)

    @contextmanager
    def looking(self, packed: PackedTokens, device: torch.device) -> Generator[None]:
        """While the block runs, the model is given embeddings and positions of a micro-batch in place of its ids. They
        are computed within its forward pass, where the weights of embedding and vision tower are whole."""
        if not packed.looks and not is_sharded(self._model):
            yield
            return

        def see(_model: object, inputs: tuple[object, ...], keys: dict[str, Any]) -> tuple[object, dict[str, Any]]:
            ids = cast("Tensor", keys.pop("input_ids"))
            return inputs, keys | (self._inputs(packed, device) if packed.looks else self._blind(ids))

        # Sharding has put its own hook, which gathers weights, before all others.
        handle = self._model.register_forward_pre_hook(see, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _blind(self, ids: Tensor) -> dict[str, Tensor]:
        """Embeddings of text. Other ranks may see images meanwhile, so this one runs the tower over one blank square,
        of which nothing is taken, and to which a gradient of 0 flows back."""
        embedded = cast("Tensor", self._model.get_input_embeddings()(ids))
        side, patch = self._part.merge_size, cast("Any", self._model.model).visual.patch_embed
        num_values = patch.in_channels * patch.temporal_patch_size * patch.patch_size**2
        blank = torch.zeros(side * side, num_values, device=ids.device)
        seen = self._features(blank, torch.tensor([[1, side, side]], device=ids.device))[:0]
        nowhere = torch.zeros(0, dtype=torch.int64, device=ids.device)
        return {"inputs_embeds": embedded.index_copy(1, nowhere, seen[None].to(embedded.dtype))}

    def _inputs(self, packed: PackedTokens, device: torch.device) -> dict[str, Tensor]:
        """Embeddings ``[1, N, H]`` and positions ``[3, 1, N]`` of a micro-batch with images."""
        ids = torch.from_numpy(packed.input_ids).to(device)
        embedded = cast("Tensor", self._model.get_input_embeddings()(ids))
        positions = packed.position_ids[None].repeat(3, axis=0)
        values, grids, at = [], [], []
        shifts: dict[int, int] = {}
        for look in packed.looks:
            patches = self._processor.all_patches(look.media)
            values += [torch.from_numpy(each.values) for each in patches]
            grids += [each.grid for each in patches]
            end = look.start + look.num_tokens
            tokens = packed.input_ids[look.start : end].astype("int32")
            where = placed(
                tokens, self._part.image_token_id, look.media, [each.grid for each in patches], self._part.merge_size,
                first=int(packed.position_ids[look.start]) + shifts.get(look.context_start, 0),
            )  # fmt: skip
            at.append(torch.from_numpy(where.at + look.start))
            if look.start == look.context_start:
                shifts[look.start] = where.shift
                positions[:, packed.context_starts == look.start] += where.shift
            positions[:, look.start : end] = where.positions
        seen = self._features(torch.cat(values).to(device), torch.tensor(grids, device=device))
        embedded = embedded.index_copy(0, torch.cat(at).to(device), seen.to(embedded.dtype))
        return {"inputs_embeds": embedded[None], "position_ids": torch.from_numpy(positions).to(device)[:, None]}

    def _features(self, values: Tensor, grids: Tensor) -> Tensor:
        """``[squares of patches, H]``"""
        tower = cast("Any", self._model.model).visual
        if self.is_blank:
            values = torch.zeros_like(values)
        return cast("Tensor", tower(values.to(tower.dtype), grid_thw=grids).pooler_output)
