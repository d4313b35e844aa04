"""``penstock convert``: which model is meant, and what it says."""

# safetensors is typed in part only:
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from learner_cases import open_learner
from rich.console import Console
from safetensors.torch import load_file

from penstock.backends.checkpoint.make import make_model
from penstock.messages.commands import OpenLearner, SaveCheckpoint
from penstock.messages.errors import UserFault
from penstock.messages.local import CheckpointWritten, LearnerOpened
from penstock.runtime.cli.convert import convert, show_problems
from penstock.runtime.launch.runs import model_folder

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The checkpoint of a run at version 0."""
    folder = tmp_path_factory.mktemp("runs")
    make_model("xs", folder / "model", seed=0)
    learner = open_learner(folder / "model", folder / "run" / "checkpoints")
    learner.ask(OpenLearner(), LearnerOpened)
    yield Path(learner.ask(SaveCheckpoint(version=0), CheckpointWritten).path)
    learner.close()


def said(*arguments: Path, dtype: str | None = None, size: str = "5GB", target_format: str = "huggingface") -> str:
    """What the command prints when it writes the model of one folder into another."""
    source, target = arguments
    output = StringIO()
    console = Console(file=output, width=400)
    code = convert(source, target, console, version=None, dtype=dtype, max_shard_size=size, target_format=target_format)
    assert code == 0
    return output.getvalue()


def looked_at(folder: Path) -> tuple[int, str]:
    output = StringIO()
    code = show_problems(folder, Console(file=output, width=400), version=None)
    return code, output.getvalue()


def test_the_model_of_a_run_becomes_a_folder_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    run = checkpoint.parent.parent
    text = said(run, tmp_path / "out", dtype="bfloat16")
    assert f"{checkpoint} → {tmp_path / 'out'}" in text
    assert "wrote 24 weights, 207,616 bytes, in 1 file; read back and compared" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    expected = load_file(checkpoint / "model.safetensors")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(got[name], tensor.bfloat16()) for name, tensor in expected.items())
    code, story = looked_at(run)
    assert code == 0
    assert "Qwen3ForCausalLM, 103,808 parameters in 24 weights of float32, 415,232 bytes" in story
    assert "sound" in story


def test_a_checkpoint_that_is_not_as_it_was_written_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "model.safetensors"
    data = file.read_bytes()
    try:
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(UserFault, match=r"model\.safetensors is damaged"):
            said(checkpoint, tmp_path / "out")
        code, story = looked_at(checkpoint)
        assert code == 1
        assert "model.safetensors is damaged: its bytes do not have the recorded digest" in story
    finally:
        file.write_bytes(data)
    assert not list(tmp_path.iterdir())


def test_the_newest_checkpoint_of_the_newest_incarnation_is_meant(tmp_path: Path) -> None:
    for name in (
        "version-0000002",
        "version-0000010-e3",
        "version-0000010-e12",
        ".version-0000011.partial",
        "reference",
    ):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert model_folder(tmp_path, None).name == "version-0000010-e12"
    assert model_folder(tmp_path / "checkpoints", 2).name == "version-0000002"
    with pytest.raises(UserFault, match="has no checkpoint of version 3; there are 2, 10"):
        model_folder(tmp_path, 3)


def test_what_names_no_model_is_refused_in_one_sentence(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserFault, match="the run has written no checkpoint yet"):
        model_folder(tmp_path / "run", None)
    with pytest.raises(UserFault, match="there is no such folder"):
        model_folder(tmp_path / "nothing", None)
    with pytest.raises(UserFault, match="has no checkpoints, so --version 3 names nothing"):
        model_folder(checkpoint, 3)
    with pytest.raises(UserFault, match="--dtype: expected one of float32, bfloat16, float16, fp8, got int4"):
        said(checkpoint, tmp_path / "out", dtype="int4")
    with pytest.raises(UserFault, match="'big' is no size"):
        said(checkpoint, tmp_path / "out", size="big")
    with pytest.raises(UserFault, match="--format: expected one of huggingface, megatron, got gguf"):
        said(checkpoint, tmp_path / "out", target_format="gguf")
    with pytest.raises(UserFault, match=r"no config\.json there"):
        said(tmp_path, tmp_path / "out")
