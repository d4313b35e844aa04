"""Models as distributed checkpoints of megatron-core and back; megatron-core itself is not needed for it."""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

from penstock.backends.checkpoint.make import make_model
from penstock.backends.checkpoint.model_format import ConversionPlan
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.learners.checkpoints.folder import ALONE
from penstock.backends.learners.convert_model import FORMATS, MEGATRON, convert_model, format_of
from penstock.backends.learners.megatron.checkpoint.dist_format import DistReader
from penstock.backends.learners.megatron.checkpoint.dist_writer import WrittenPart, write_parts
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PLAN = ConversionPlan(dtype=None, max_file_bytes=100_000)


@pytest.fixture(scope="module", params=["xs", "moe_xs"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    size: Literal["xs", "moe_xs"] = request.param
    path = tmp_path_factory.mktemp("made") / size
    make_model(size, path, seed=0)
    return path


@pytest.fixture(scope="module")
def converted(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("converted") / "megatron"
    assert sum(convert(made, path, MEGATRON)[1:]) == sum(tensor.nbytes for tensor in weights_of(made).values())
    return path


def convert(source: Path, target: Path, target_format: str, plan: ConversionPlan = PLAN) -> list[int]:
    """The sizes that were reported, the sum of what is to be written first."""
    told: list[int] = []

    def begun(size_bytes: int) -> Callable[[int], None]:
        told.append(size_bytes)
        return told.append

    convert_model(source, target, plan, begun=begun, target_format=target_format)
    return told


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    with CheckpointTensors(folder) as tensors:
        return dict(tensors)


def test_a_model_comes_back_bit_for_bit_in_files_of_the_size_that_was_asked_for(
    made: Path, converted: Path, tmp_path: Path
) -> None:
    convert(converted, tmp_path / "back", "huggingface")
    wanted, found = weights_of(made), weights_of(tmp_path / "back")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((made / "config.json").read_text())


def test_a_folder_is_recognized_and_found_sound(made: Path, converted: Path) -> None:
    assert (format_of(made), format_of(converted)) == ("huggingface", "megatron")
    found, wanted = FORMATS["megatron"].examine(converted), FORMATS["huggingface"].examine(made)
    assert not found.problems
    assert (found.num_parameters, found.dtypes, found.size_bytes) == (
        wanted.num_parameters,
        wanted.dtypes,
        wanted.size_bytes,
    )


def test_weights_are_rounded_on_the_way(made: Path, tmp_path: Path) -> None:
    convert(made, tmp_path / "megatron", MEGATRON, PLAN._replace(dtype="bfloat16"))
    tensors = DistReader(tmp_path / "megatron/policy").tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "megatron/config.json").read_text())["dtype"] == "bfloat16"
    convert(tmp_path / "megatron", tmp_path / "back", "huggingface")
    wanted, found = weights_of(made), weights_of(tmp_path / "back")
    assert all(torch.equal(found[name], wanted[name].bfloat16()) for name in wanted)


def test_stacked_layers_of_older_checkpoints_are_read(made: Path, converted: Path, tmp_path: Path) -> None:
    if "moe" in made.name:
        pytest.skip("layers of experts are not stacked")
    stacked = restacked(converted, tmp_path / "stacked", num_layers=2)
    assert any(".layers.mlp." in name for name in DistReader(stacked).tensors)
    convert(stacked, tmp_path / "back", "huggingface")
    wanted, found = weights_of(made), weights_of(tmp_path / "back")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def restacked(source: Path, target: Path, *, num_layers: int) -> Path:
    """The same checkpoint with an axis over the layers, in the folder itself."""
    reader = DistReader(source / "policy")
    target.mkdir()
    for path in source.iterdir():
        if path.is_file():
            shutil.copyfile(path, target / path.name)
    parts: list[WrittenPart] = []
    for name in reader.tensors:
        tensor = reader.read(name)
        if ".layers." in name:
            layer = int(name.split(".")[2])
            name, shape = name.replace(f".layers.{layer}.", ".layers."), (num_layers, *tensor.shape)
            tensor, offset = tensor[None], (layer, *(0 for _ in tensor.shape))
        else:
            shape, offset = tuple(tensor.shape), (0,) * tensor.ndim
        parts.append(part_of(name, shape, offset, tensor))
    write_parts(target, parts, {}, ALONE)
    return target


def part_of(name: str, shape: tuple[int, ...], offset: tuple[int, ...], tensor: torch.Tensor) -> WrittenPart:
    return WrittenPart(name, shape, offset, tuple(tensor.shape), tensor.dtype, lambda: tensor)


def test_what_is_wrong_with_a_checkpoint_is_said(made: Path, converted: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(converted, tmp_path / "broken")
    config: dict[str, Any] = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "lacks" in FORMATS["megatron"].examine(broken).problems[0]
    (broken / "config.json").write_text(
        json.dumps(config | {"intermediate_size": 1_000, "moe_intermediate_size": 1_000})
    )
    assert "config.json says" in FORMATS["megatron"].examine(broken).problems[0]
    (broken / "config.json").write_text(json.dumps(config))
    file = next((broken / "policy").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[: math.floor(0.7 * file.stat().st_size)])
    with pytest.raises(UserFault, match="cannot be read"):
        convert(broken, tmp_path / "back", "huggingface")
    assert not (tmp_path / "back").exists()
    assert format_of(made) == "huggingface"


def test_a_family_without_a_table_is_refused(made: Path, tmp_path: Path) -> None:
    other = shutil.copytree(made, tmp_path / "other")
    config: dict[str, Any] = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"attention_bias": True, "use_sliding_window": True}))
    with pytest.raises(UserFault):
        convert(other, tmp_path / "megatron", MEGATRON)
    assert not (tmp_path / "megatron").exists()
