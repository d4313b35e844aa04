"""What is missing on this machine is said before anything starts."""

from __future__ import annotations

import json
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest

from penstock.backends.checkpoint.make import CONTEXT_TOKENS, ModelSize, make_model
from penstock.backends.engines.transport_preflight import model_size_bytes
from penstock.messages.errors import UserFault
from penstock.runtime.preflight.checkpoints import (
    MADE_MODEL_BYTES,
    check_architecture,
    check_checkpoint,
    check_weights,
)
from penstock.runtime.preflight.functions import check_user_code
from penstock.runtime.preflight.machine import check_devices, check_machine, check_port
from penstock.runtime.preflight.rows import check_data
from penstock.runtime.scenario import Scenario, load_scenario
from penstock.runtime.scenario.rules import MADE_CONTEXT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable


def scenario(folder: Path, *overrides: str) -> Scenario:
    file = folder / "example.yaml"
    file.write_text("run: {name: example}\ndata: {path: 'lines:9'}\nmodel: {make: xs}\n")
    return load_scenario(file, overrides)


def checkpoint(folder: Path, *files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in files:
        (folder / name).write_text("{}")
    return folder


def test_a_complete_checkpoint_passes(tmp_path: Path) -> None:
    check_checkpoint(checkpoint(tmp_path, "config.json", "tokenizer.json", "model.safetensors"))


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ((), "missing config.json, tokenizer.json, model.safetensors;"),
        (("config.json", "tokenizer.json"), "missing model.safetensors;"),
        (("tokenizer.json", "model.safetensors"), "missing config.json;"),
        (("config.json", "model.safetensors"), "missing tokenizer.json;"),
    ],
)
def test_a_checkpoint_s_missing_files_are_named(tmp_path: Path, files: tuple[str, ...], missing: str) -> None:
    with pytest.raises(UserFault, match=missing):
        check_checkpoint(checkpoint(tmp_path, *files))


def test_a_missing_shard_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "config.json", "tokenizer.json", "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserFault, match=r"missing two\.safetensors;"):
        check_checkpoint(folder)


def test_a_folder_that_is_not_there_or_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=r"model\.path: .*: no such folder"):
        check_checkpoint(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(UserFault, match="a file, not a folder"):
        check_checkpoint(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no file"),
        ("def other(): ...\nclass Third: ...", "defines no 'mine'; it has Third, other"),
        ("print(1)", "it has nothing"),
        ("def mine(:", r"code\.py:1: not valid Python"),
        ("\x00", "null bytes"),
    ],
)
def test_a_function_of_the_user_that_is_not_there_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    code = tmp_path / "code.py"
    if text is not None:
        code.write_text(text)
    with pytest.raises(UserFault, match=said) as caught:
        check_user_code(scenario(tmp_path, f"reward.function={code}:mine"))
    assert str(caught.value).startswith("reward.function: ")


@pytest.mark.parametrize(
    "text",
    [
        "def mine(): ...",
        "async def mine(): ...",
        "mine = print",
        "from json import loads as mine",
        "from json import *",
        "try:\n    import mine\nexcept ImportError:\n    mine = None",
        "def __getattr__(name): ...",
    ],
)
def test_a_function_of_the_user_that_is_there_passes(tmp_path: Path, text: str) -> None:
    (tmp_path / "code.py").write_text(text)
    check_user_code(scenario(tmp_path, f"filter.function={tmp_path}/code.py:mine"))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ('{"prompt": "a", "label": "b"}\n{"prompt": "a", \n', r"^data\.path: .*rows\.jsonl:2:.*malformed JSON"),
        ('{"prompt": "a", "label": "b"}\n[1]\n', r"rows\.jsonl:2: "),
        ('{"prompt": "a"}\n', r"rows\.jsonl:1: .*label.*data\.label_key"),
        ('{"question": "a", "label": "b"}\n', r"rows\.jsonl:1: .*prompt.*data\.prompt_key"),
        ("", "has no rows"),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(tmp_path: Path, rows: str, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(rows)
    with pytest.raises(UserFault, match=said):
        check_data(scenario(tmp_path, f"data.path={tmp_path}/rows.jsonl"))


def test_bad_rows_pass_where_the_scenario_allows_to_skip_them(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n{\n')
    check_data(scenario(tmp_path, f"data.path={tmp_path}/rows.jsonl", "data.skip_bad_rows=true"))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("absent.jsonl", "there is no file"),
        ("rows.csv", "cannot tell what kind of file this is"),
        ("lines:none", "lines:none"),
        ("reasoning_gym:no_such_task:5", "no_such_task" if find_spec("reasoning_gym") else "is not installed"),
    ],
)
def test_data_that_is_not_there_is_refused(tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "rows.csv").touch()
    value = path if ":" in path else f"{tmp_path}/{path}"
    with pytest.raises(UserFault, match=said) as caught:
        check_data(scenario(tmp_path, f"data.path={value}"))
    assert str(caught.value).startswith("data.path: ")


@pytest.mark.parametrize("name", ["reasoning_gym", "boxed_reasoning_gym"])
def test_a_reward_whose_extra_is_not_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The rows may come from a file, which has all that the reward needs but the checker."""
    settings = scenario(tmp_path, f"reward.function={name}")

    def find_nothing(module: str) -> None:
        del module

    monkeypatch.setattr("importlib.util.find_spec", find_nothing)
    wanted = rf"^reward\.function: {name}: reasoning-gym is not installed; .*\[reasoning-gym\]"
    with pytest.raises(UserFault, match=wanted):
        check_user_code(settings)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("run.folder=$DATA/runs", "run.folder"),
        ("data.path=${DATA}/rows.jsonl", "data.path"),
        ("data.path=/${oc.env:DATA}/rows.jsonl", "data.path"),
        ("reward.function=$DATA/mine.py:reward", "reward.function"),
        ("model={path: $DATA/model}", "model.path"),
    ],
)
def test_a_path_with_a_variable_is_told_that_none_is_expanded(tmp_path: Path, override: str, key: str) -> None:
    variable = "${oc.env:DATA}" if "oc.env" in override else "${DATA}" if "{DATA" in override else "$DATA"
    asked = scenario(tmp_path, override)
    with pytest.raises(UserFault) as caught:
        check_machine(asked, Path(asked.run.folder).absolute())
    assert f"; {variable} is taken as it stands" in str(caught.value)
    assert key in str(caught.value)


def test_a_folder_that_is_called_like_a_variable_is_one(tmp_path: Path) -> None:
    (tmp_path / "$DATA").mkdir()
    check_machine(scenario(tmp_path), tmp_path / "$DATA")


def test_the_demonstrations_of_the_warm_start_need_a_response(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    with pytest.raises(UserFault, match=r"^learner\.warm_start\.path: .*rows\.jsonl:1: .*response"):
        check_data(scenario(tmp_path, f"learner.warm_start.path={tmp_path}/rows.jsonl"))
    check_data(scenario(tmp_path, "learner.warm_start.path=lines:5"))


def test_a_port_that_somebody_listens_on_is_refused_and_a_free_one_is_not(unused_port: Callable[[], int]) -> None:
    port = unused_port()
    refused = pytest.raises(UserFault, match=f"observability.metrics_port: port {port} is in use; choose another")
    with socket.create_server(("127.0.0.1", port)), refused:
        check_port("observability.metrics_port", port)
    check_port("observability.metrics_port", port)


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=r"^engines\.device: cuda:99 is not there: torch .* sees \d+ GPUs"):
        check_devices(scenario(tmp_path, "engines.device=cuda:99"))
    check_devices(scenario(tmp_path, "engines.device=cuda:99", "runtime.ray_address=elsewhere:6379"))


def test_a_damaged_checkpoint_is_refused_when_its_size_is_asked_for(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "config.json", "tokenizer.json", "model.safetensors")
    with pytest.raises(UserFault, match="is no safetensors file"):
        check_weights(scenario(tmp_path, "model.make=null", f"model.path={folder}"), tmp_path)


def test_the_sizes_of_made_models_are_those_of_the_models_made(tmp_path: Path) -> None:
    sizes = get_args(ModelSize)
    for size in sizes:
        make_model(size, tmp_path / size, seed=0)
    assert {size: model_size_bytes(tmp_path / size, "float32") for size in sizes} == MADE_MODEL_BYTES


def test_made_models_have_the_context_that_scenarios_are_held_to() -> None:
    assert MADE_CONTEXT_TOKENS == CONTEXT_TOKENS


def test_a_model_that_no_engine_computes_or_that_is_too_short_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model("xs", folder, seed=0)
    mine = ("model.make=null", f"model.path={folder}")
    check_architecture(scenario(tmp_path, *mine), folder)
    with pytest.raises(UserFault, match=r"^model\.max_context: 4096 tokens .* max_position_embeddings is 512"):
        check_architecture(scenario(tmp_path, *mine, "model.max_context=4096"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(UserFault, match=r"^model\.path: .*MambaForCausalLM"):
        check_architecture(scenario(tmp_path, *mine), folder)


def test_a_mixture_of_experts_is_taken_where_all_of_it_is_understood(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model("xs", folder, seed=0)
    mine = ("model.make=null", f"model.path={folder}")
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    check_architecture(scenario(tmp_path, *mine), folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 9}))
    with pytest.raises(UserFault, match=r"^model\.path: .*num_experts_per_tok must be 1 to num_experts, 8, found 9"):
        check_architecture(scenario(tmp_path, *mine), folder)


def test_a_scenario_that_has_everything_passes(tmp_path: Path) -> None:
    check_machine(scenario(tmp_path), tmp_path / "runs" / "not" / "yet" / "there")
    assert not (tmp_path / "runs").exists()
