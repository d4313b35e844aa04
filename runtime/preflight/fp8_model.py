"""Whether the copy in FP8 that servers are started from takes what the learner will publish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.weights.protocol import WeightFetchError
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

KEY: Final = "engines.fp8_model"


def check_fp8_model(model: Path, copy: Path) -> None:
    """The copy has the weights of the model, with the same matrices in FP8 as are published, in blocks of 128 × 128.

    Raises:
        UserFault: with what to do.
    """
    from penstock.backends.checkpoint.fp8 import BLOCKS, SCALE, find_blocks, is_for_matrix  # both bring torch
    from penstock.backends.engines.served.expectation import TensorSpec, check_tensors, expect_model, read_table

    if (blocks := find_blocks(copy)) != BLOCKS:
        found = "its weights are not quantized" if blocks is None else f"it has blocks of {list(blocks)}"
        raise UserFault(f"{KEY}: {copy}: {found}; `penstock convert {model} COPY --dtype fp8` writes one that fits")
    try:
        published: dict[str, TensorSpec] = {}
        for name, spec in read_table(model).items():
            published[name] = spec
            if is_for_matrix(name, spec.shape):
                published[name] = TensorSpec("F8_E4M3", spec.shape)
                published[name + SCALE] = TensorSpec("F32", BLOCKS.scales_of(spec.shape))
        check_tensors(published, expect_model(copy))
    except WeightFetchError as error:
        raise UserFault(f"{KEY}: {error}; `penstock convert {model} COPY --dtype fp8` writes one that fits") from None
