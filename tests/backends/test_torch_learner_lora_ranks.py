"""Adapters over ranks: the same merged weights as in one process, and a refresh of a divided reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from lora_rank_cases import Parallel, publish_adapters, refresh_divided, train_adapters

from penstock.backends.learners.torch.model import PackedModel

if TYPE_CHECKING:
    from pathlib import Path

    from rank_cases import Ranks

pytestmark = pytest.mark.long_run
NUM_RANKS = 2


@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_merged_weights_over_ranks_are_those_of_one_process(
    model_folder: Path, ranks: Ranks, parallel: Parallel
) -> None:
    ((alone, divergences),) = ranks.run(1, train_adapters, model_folder, parallel, "float32")
    for merged, found in ranks.run(2, train_adapters, model_folder, parallel, "float32"):
        assert merged.keys() == alone.keys()
        for name, tensor in merged.items():
            torch.testing.assert_close(tensor, alone[name], rtol=0, atol=2e-6)
        assert found == pytest.approx(divergences, abs=1e-6)
        assert found[0] == 0.0
        assert found[2] > 1e-7


def test_a_frozen_base_in_bfloat16_stays_so_over_ranks(model_folder: Path, ranks: Ranks) -> None:
    base = PackedModel.load(model_folder, dtype="bfloat16", device=torch.device("cpu")).named_tensors()
    for merged, found in ranks.run(2, train_adapters, model_folder, "fsdp", "bfloat16"):
        assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
        assert all(torch.equal(merged[name], base[name]) for name in base if "_proj." not in name)
        assert found[0] == 0.0


@pytest.mark.parametrize(("parallel", "dtype"), [("fsdp", "float32"), ("ddp", "float32"), ("fsdp", "bfloat16")])
def test_adapters_over_ranks_are_published_as_they_are_computed_with(
    model_folder: Path, ranks: Ranks, parallel: Parallel, dtype: str, tmp_path: Path
) -> None:
    (base, adapters, merged), (none, nothing, _) = ranks.run(
        2, publish_adapters, model_folder, tmp_path, parallel, dtype
    )
    assert not none
    assert not nothing
    ((whole_base, whole_adapters, _),) = ranks.run(
        1, publish_adapters, model_folder, tmp_path / "alone", parallel, dtype
    )
    assert base.keys() == whole_base.keys()
    assert all(torch.equal(base[name], whole_base[name]) for name in base)
    paths = [name.removesuffix(".lora_A.weight") for name in adapters if name.endswith(".lora_A.weight")]
    assert 2 * len(paths) == len(adapters) == len(whole_adapters)
    for path in paths:
        down, up = (adapters[f"{path}.lora_{which}.weight"] for which in "AB")
        # Parts of ranks are rounded to the type of the model before each use.
        is_rounded = parallel == "fsdp" and dtype == "bfloat16"
        assert {down.dtype, up.dtype} == {torch.bfloat16 if is_rounded else torch.float32}
        assert torch.equal(down, whole_adapters[f"{path}.lora_A.weight"].to(down.dtype))
        if dtype == "float32":
            made = base[f"{path}.weight"] + 2.0 * up @ down
            torch.testing.assert_close(made, merged[f"{path}.weight"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_a_divided_reference_is_refreshed_share_by_share(model_folder: Path, ranks: Ranks, parallel: Parallel) -> None:
    assert ranks.run(2, refresh_divided, model_folder, parallel) == [True, True]
