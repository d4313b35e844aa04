"""Models written anew: the same model in other files and another dtype, and what is wrong with a folder."""

# Transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from penstock.backends.checkpoint.checkpoint_names import CheckpointNames
from penstock.backends.checkpoint.examine import examine_model
from penstock.backends.checkpoint.hf_config import INDEX_FILE
from penstock.backends.checkpoint.make import make_model
from penstock.backends.checkpoint.model_format import ConversionPlan
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.checkpoint.weight_files import SINGLE_FILE, WeightFileError, WeightFiles
from penstock.backends.learners.convert_model import convert_model, parse_size
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 79,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": 1,
}
PLAN = ConversionPlan(dtype=None, max_file_bytes=100_000)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "xs"
    make_model("xs", path, seed=0)
    return path


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A model that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "model"))


def untied() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))


def mixture() -> PreTrainedModel:
    sizes: dict[str, Any] = SIZES | {
        "head_dim": 8,
        "moe_intermediate_size": 8,
        "num_experts": 3,
        "num_experts_per_tok": 2,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))


def convert(source: Path, target: Path, plan: ConversionPlan = PLAN) -> list[int]:
    """The sizes that were reported, the sum of what is to be written first."""
    told: list[int] = []

    def begun(size_bytes: int) -> Callable[[int], None]:
        told.append(size_bytes)
        return told.append

    convert_model(source, target, plan, begun=begun)
    return told


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    with CheckpointTensors(folder) as tensors:
        return dict(tensors)


def logits_of(folder: Path) -> torch.Tensor:
    with quiet_transformers(), torch.no_grad():
        model = cast("Any", AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))
        return cast("torch.Tensor", model(torch.tensor([[3, 1, 4, 1, 5]])).logits)


@pytest.mark.parametrize("max_file_bytes", [3_000, 10**9])
@pytest.mark.parametrize("build", [untied, mixture])
def test_files_hold_what_transformers_would_write(
    build: Callable[[], PreTrainedModel], max_file_bytes: int, tmp_path: Path
) -> None:
    model = build()
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    with quiet_transformers():
        model.save_pretrained(theirs, max_shard_size=max_file_bytes)
    ours.mkdir()
    tensors = CheckpointNames(model).rename({name: weight.detach() for name, weight in model.named_parameters()})
    planned = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    with WeightFiles(ours, planned, max_file_bytes=max_file_bytes) as files:
        for name, tensor in reversed(tensors.items()):
            files.write(name, tensor)
        files.finish()
    expected, got = weights_of(theirs), weights_of(ours)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert (ours / INDEX_FILE).is_file() == (theirs / INDEX_FILE).is_file() == (max_file_bytes == 3_000)
    if max_file_bytes == 3_000:
        index, their_index = (json.loads((path / INDEX_FILE).read_bytes())["metadata"] for path in (ours, theirs))
        assert index == their_index
        largest = max(tensor.nbytes for tensor in got.values())
        assert max(path.stat().st_size for path in ours.glob("*.safetensors")) < max(3_000, largest) + 2_000


def test_weights_that_were_not_planned_or_never_came_are_refused(tmp_path: Path) -> None:
    with WeightFiles(tmp_path, {"a": torch.empty(2, device="meta")}, max_file_bytes=10) as files:
        with pytest.raises(WeightFileError, match="b was not planned"):
            files.write("b", torch.zeros(2))
        with pytest.raises(WeightFileError, match=r"a: expected torch.float32 \[2\], got torch.float32 \[3\]"):
            files.write("a", torch.zeros(3))
        with pytest.raises(WeightFileError, match="1 tensors were not written, a first"):
            files.finish()
        files.write("a", torch.ones(2))
        with pytest.raises(WeightFileError, match="a was written already"):
            files.write("a", torch.ones(2))
        files.finish()
    assert torch.equal(load_file(tmp_path / SINGLE_FILE)["a"], torch.ones(2))


def test_a_model_in_other_files_has_equal_logits_and_its_tokenizer(made: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "model"
    told = convert(made, target)
    assert sum(told[1:]) == told[0] == sum(tensor.nbytes for tensor in weights_of(made).values())
    assert len(list(target.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(target), logits_of(made))
    tokenizer = cast("Any", AutoTokenizer.from_pretrained(target))
    assert tokenizer("dbacC=").input_ids == cast("Any", AutoTokenizer.from_pretrained(made))("dbacC=").input_ids
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    again = tmp_path / "again"
    convert(target, again, ConversionPlan(dtype=None, max_file_bytes=10**9))
    assert (again / SINGLE_FILE).is_file()
    assert all(torch.equal(tensor, weights_of(made)[name]) for name, tensor in weights_of(again).items())


def test_another_dtype_rounds_each_weight_once_and_is_in_the_config(made: Path, tmp_path: Path) -> None:
    target = tmp_path / "half"
    convert(made, target, ConversionPlan(dtype="bfloat16", max_file_bytes=10**9))
    weights = weights_of(target)
    assert all(torch.equal(weights[name], tensor.bfloat16()) for name, tensor in weights_of(made).items())
    assert json.loads((target / "config.json").read_bytes())["dtype"] == "bfloat16"
    assert logits_of(target).dtype == torch.bfloat16
    assert examine_model(target).dtypes == ("bfloat16",)


def test_nothing_is_overwritten_and_nothing_half_is_left(made: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserFault, match="mine is there already, and nothing is overwritten"):
        convert(made, tmp_path / "mine")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            convert(made, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert not list((tmp_path / "mine").iterdir())


def test_what_is_on_disk_is_compared_with_what_was_meant(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = WeightFiles.finish

    def spoil(files: WeightFiles) -> None:
        finish(files)
        (path,) = (tmp_path / ".model.partial").glob("*.safetensors")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(WeightFiles, "finish", spoil)
    with pytest.raises(UserFault, match="is not on disk as it was written"):
        convert(made, tmp_path / "model", ConversionPlan(dtype=None, max_file_bytes=10**9))
    assert not list(tmp_path.iterdir())


def test_a_size_is_a_number_with_a_unit() -> None:
    assert [parse_size(text) for text in ("5GB", "512 MiB", "1.5kb", "10")] == [5 * 10**9, 512 << 20, 1500, 10]
    for text in ("", "0GB", "5 elephants", "-1GB"):
        with pytest.raises(UserFault, match="is no size; expected a number above 0 with one of KB"):
            parse_size(text)


# --- what is wrong with a folder ------------------------------------------------------------------------------------


def test_a_sound_folder_has_no_problems_and_says_what_it_is(made: Path) -> None:
    found = examine_model(made)
    weights = weights_of(made)
    assert found == found._replace(
        problems=(),
        remarks=(),
        architecture="Qwen3ForCausalLM",
        dtypes=("float32",),
        num_tensors=len(weights),
        num_parameters=sum(tensor.numel() for tensor in weights.values()),
        size_bytes=sum(tensor.nbytes for tensor in weights.values()),
    )


def changed(folder: Path, **weights: torch.Tensor | None) -> None:
    """Put weights (``__`` for a dot) into the only file of a model, or take them out of it."""
    tensors = weights_of(folder)
    for key, tensor in weights.items():
        name = key.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


def configured(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_missing_and_misshapen_weights_are_named(folder: Path) -> None:
    changed(folder, model__norm__weight=None, model__layers__0__mlp__up_proj__weight=torch.zeros(3, 64))
    problems = examine_model(folder).problems
    assert len(problems) == 2
    assert "lacks 1 weight (model.norm.weight) of Qwen3ForCausalLM" in problems[0]
    assert "model.layers.0.mlp.up_proj.weight has shape [3, 64], and config.json says [192, 64]" in problems[1]
    with pytest.raises(UserFault, match="lacks 1 weight"):
        convert(folder, folder.with_name("new"))


def test_weights_of_nobody_are_a_remark(folder: Path) -> None:
    changed(folder, model__extra__weight=torch.zeros(1))
    found = examine_model(folder)
    assert not found.problems
    assert "has 1 weight (model.extra.weight) that Qwen3ForCausalLM does not know" in found.remarks[0]


def test_a_tied_weight_may_be_stored_twice_only_with_the_same_values(folder: Path) -> None:
    embeddings = weights_of(folder)["model.embed_tokens.weight"]
    changed(folder, lm_head__weight=embeddings.clone())
    assert examine_model(folder)[:2] == ((), ())
    changed(folder, lm_head__weight=embeddings + 1)
    (problem,) = examine_model(folder).problems
    assert "config.json ties lm_head.weight to model.embed_tokens.weight" in problem
    changed(folder, lm_head__weight=None)
    configured(folder, tie_word_embeddings=False)
    (problem,) = examine_model(folder).problems
    assert "lacks 1 weight (lm_head.weight)" in problem
    assert "the output head is not tied" in problem


def test_files_that_cannot_be_read_are_named(folder: Path, made: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    convert(made, sharded)
    second = next(iter(sorted(sharded.glob("model-00002-*"))))
    second.write_bytes(second.read_bytes()[:-5])
    assert f"{second.name} is no whole safetensors file" in examine_model(sharded).problems[0]
    second.unlink()
    assert f"lacks {second.name}" in examine_model(sharded).problems[0]
    (folder / "tokenizer.json").unlink()
    (problem,) = examine_model(folder).problems
    assert "its tokenizer cannot be loaded" in problem
    configured(folder, model_type="nothing_known")
    assert "transformers cannot open it" in examine_model(folder).problems[0]
    (folder / SINGLE_FILE).unlink()
    assert "has neither model.safetensors nor" in examine_model(folder).problems[0]
    (folder / "config.json").unlink()
    assert "no config.json there" in examine_model(folder).problems[0]
