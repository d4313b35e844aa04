"""What a server's model takes, read from its folder, and what is refused for it."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from penstock.backends.checkpoint.make import make_model
from penstock.backends.engines.served.expectation import (
    TensorSpec,
    UnfitWeightsError,
    check_tensors,
    expect_model,
    read_table,
    table_of,
)
from penstock.backends.weights.buckets import plan_buckets
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.tensor_file import lay_out, parse_header

if TYPE_CHECKING:
    from pathlib import Path


def folder_of(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 1, **config}))
    return folder


def tensors_of(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(3, 2) for name in names}


EMBED, HEAD, LAYER = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.down_proj.weight"


def test_a_made_model_fits_itself(tmp_path: Path) -> None:
    make_model("xs", tmp_path, seed=0)
    check_tensors(read_table(tmp_path), expect_model(tmp_path, "float32"))


def test_the_exports_table_survives_its_header() -> None:
    shared = torch.zeros(3, 2)
    layout = lay_out({"a": shared, "b": shared, "c": torch.zeros(4, dtype=torch.bfloat16)})
    parsed = parse_header(memoryview(layout.header))
    assert parsed == layout
    assert table_of(parsed) == {"a": TensorSpec("F32", (3, 2)), "b": TensorSpec("F32", (3, 2)),
                                "c": TensorSpec("BF16", (4,))}  # fmt: skip


def test_every_offence_is_named(tmp_path: Path) -> None:
    expected = expect_model(folder_of(tmp_path, tensors_of(EMBED, HEAD, LAYER)))
    table = {EMBED: TensorSpec("F32", (3, 2)), "x": TensorSpec("F32", (1,))}
    with pytest.raises(UnfitWeightsError, match=rf"they lack {HEAD}, {LAYER} and have unknown x"):
        check_tensors(table, expected)


def test_many_offenders_are_counted(tmp_path: Path) -> None:
    expected = expect_model(folder_of(tmp_path, tensors_of(EMBED, HEAD)))
    table = read_table(tmp_path) | {f"x{i}": TensorSpec("F32", (1,)) for i in range(9)}
    with pytest.raises(UnfitWeightsError, match="x0, x1, x2, x3, x4 and 4 more"):
        check_tensors(table, expected)


def test_plain_floats_are_cast_unless_one_is_demanded(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tensors_of(EMBED, HEAD))
    table = {EMBED: TensorSpec("BF16", (3, 2)), HEAD: TensorSpec("BF16", (3, 2))}
    check_tensors(table, expect_model(folder))
    with pytest.raises(UnfitWeightsError, match="expected dtype F32, as the server was asked for, found BF16"):
        check_tensors(table, expect_model(folder, "float32"))


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    expected = expect_model(folder_of(tmp_path, tensors_of(EMBED, HEAD)))
    with pytest.raises(UnfitWeightsError, match="dtype"):
        check_tensors({EMBED: TensorSpec("I64", (3, 2)), HEAD: TensorSpec("F32", (3, 2))}, expected)


@pytest.mark.parametrize("has_flag", [True, False])
def test_a_tied_head_may_lack_or_be_another_name_of_the_embedding(tmp_path: Path, has_flag: bool) -> None:
    config = {"tie_word_embeddings": True} if has_flag else {}
    names = (EMBED, HEAD) if has_flag else (EMBED,)
    expected = expect_model(folder_of(tmp_path, tensors_of(*names), **config))
    check_tensors({EMBED: TensorSpec("F32", (3, 2))}, expected)
    check_tensors({EMBED: TensorSpec("F32", (3, 2)), HEAD: TensorSpec("F32", (3, 2))}, expected)


def test_a_head_that_is_not_tied_may_not_lack(tmp_path: Path) -> None:
    expected = expect_model(folder_of(tmp_path, tensors_of(EMBED, HEAD), tie_word_embeddings=False))
    with pytest.raises(UnfitWeightsError, match=f"lack {HEAD}"):
        check_tensors({EMBED: TensorSpec("F32", (3, 2))}, expected)


def test_layers_of_a_draft_model_may_lack(tmp_path: Path) -> None:
    names = (EMBED, HEAD, LAYER, "model.layers.1.eh_proj.weight", "mtp.fc.weight")
    expected = expect_model(folder_of(tmp_path, tensors_of(*names)))
    check_tensors({name: TensorSpec("F32", (3, 2)) for name in (EMBED, HEAD, LAYER)}, expected)


def test_a_folder_of_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    folder_of(tmp_path, tensors_of(EMBED))
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    save_file(tensors_of(HEAD), tmp_path / "model-2.safetensors")
    save_file(tensors_of("other"), tmp_path / "consolidated.safetensors")
    index = {"metadata": {}, "weight_map": {EMBED: "model-1.safetensors", HEAD: "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_table(tmp_path).keys() == {EMBED, HEAD}


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightFetchError, match="a server is updated from safetensors only"):
        read_table(tmp_path)


@pytest.mark.parametrize("size_bytes", [0, 7, 40, -1])
def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, size_bytes: int) -> None:
    path = folder_of(tmp_path, tensors_of(EMBED, HEAD)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size_bytes])
    with pytest.raises(WeightFetchError, match="cut short"):
        read_table(tmp_path)


@pytest.mark.parametrize("bucket_size_bytes", [1, 30, 64, 1000])
def test_buckets_hold_every_tensor_once_aligned_and_within_their_size(bucket_size_bytes: int) -> None:
    shared = torch.zeros(2, 2)
    tensors = {
        "half": torch.zeros(3, dtype=torch.bfloat16), "flag": torch.zeros(5, dtype=torch.bool), "a": shared,
        "b": torch.zeros(7), "empty": torch.zeros(0), "double": torch.zeros(2, dtype=torch.float64), "again": shared,
    }  # fmt: skip
    layout = lay_out(tensors)
    buckets = plan_buckets(layout, bucket_size_bytes, ["again"])
    names = [tensor.name for bucket in buckets for tensor in bucket.tensors]
    assert sorted(names) == sorted(tensors.keys() - {"empty"})
    for bucket in buckets:
        assert bucket.size_bytes == sum(tensor.size_bytes for tensor in bucket.tensors)
        assert bucket.size_bytes <= bucket_size_bytes or len(bucket.tensors) == 1
        for tensor in bucket.tensors:
            assert (tensor.start - bucket.start) % tensor.dtype.itemsize == 0
    assert buckets[-1].start == next(tensor.start for tensor in layout.placed if tensor.name == "a")
