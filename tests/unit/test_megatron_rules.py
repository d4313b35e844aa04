"""What a scenario with the Megatron learner is refused for, before anything is started and without megatron-core."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock.backends.checkpoint.make import SHAPES, make_model
from penstock.backends.learners.megatron.bridge.architecture import read_architecture
from penstock.backends.learners.megatron.layout.stages import layers_of_pieces, layers_of_stages
from penstock.backends.learners.objectives.spec import objective
from penstock.messages.errors import UserFault
from penstock.runtime.preflight import megatron as megatron_preflight
from penstock.runtime.preflight.megatron import check_megatron
from penstock.runtime.scenario import Scenario, broken_rule, load_scenario
from penstock.runtime.scenario.architecture import MADE_CONFIGS, find_architecture
from penstock.runtime.scenario.resolve import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

SCENARIOS = Path(__file__).parents[2] / "scenarios"
QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip


def scenario(learner: dict[str, Any] | None = None, *, model: dict[str, Any] | None = None) -> Scenario:
    data = {
        "run": {"name": "rules"},
        "model": model or {"make": "xs"},
        "data": {"path": "lines:100"},
        "reward": {"function": "lines"},
        "sampling": {"max_response_tokens": 64},
        "staleness": {"policy": "sync"},
        "learner": {"backend": "megatron", **(learner or {})},
    }
    return resolve(msgspec.convert(data, Scenario))


def refused(learner: dict[str, Any], **blocks: Any) -> tuple[str, str]:  # noqa: ANN401 - blocks of a scenario
    found = broken_rule(scenario(learner, **blocks))
    assert found is not None
    return ".".join(map(str, found[0])), found[1]


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_float16_is_trained_by_both_learners(backend: str) -> None:
    assert broken_rule(scenario({"backend": backend}, model={"make": "xs", "dtype": "float16"})) is None


@pytest.mark.parametrize("model", [{"make": "xs", "dtype": "float16"}, {"make": "xs"}])
def test_gradients_that_overflow_float16_do_not_end_the_run(model: dict[str, Any]) -> None:
    learner: dict[str, Any] = {"megatron": {"precision": "float16", "ddp": {"check_for_nan_in_grad": True}}}
    key, text = refused(learner, model=model)
    assert key == "learner.megatron.ddp.check_for_nan_in_grad"
    assert "which the loss scale follows" in text
    learner["megatron"]["precision"] = "float32"
    assert broken_rule(scenario(learner, model=model)) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_critic_that_could_not_be_saved_is_refused(dtype: str) -> None:
    learner: dict[str, Any] = {
        "objective": msgspec.to_builtins(objective("ppo")),
        "megatron": {"distributed_optimizer": False},
    }
    model = {"make": "xs", "dtype": dtype}
    if dtype != "float32":
        key, text = refused(learner, model=model)
        assert key == "learner.megatron.distributed_optimizer"
        assert f"a float32 head on a trunk in {dtype}" in text
        learner["megatron"]["distributed_optimizer"] = True
    assert broken_rule(scenario(learner, model=model)) is None


@pytest.mark.parametrize("name", ["loss_scale", "initial_loss_scale", "loss_scale_window"])
def test_the_loss_scale_is_not_megatron_cores(name: str) -> None:
    key, text = refused({"megatron": {"optimizer": {name: 2.0}}}, model={"make": "xs", "dtype": "float16"})
    assert key == f"learner.megatron.optimizer.{name}"
    assert "the loss scale is the learner's own" in text


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """Writes a ``config.json``; says where."""

    def write(name: str = "copy.json", **changed: object) -> str:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(QWEN3 | changed))
        return str(file)

    return write


def test_a_megatron_learner_of_a_made_model_passes() -> None:
    assert broken_rule(scenario({"num_ranks": 2, "megatron": {"pipeline_parallel": 2}})) is None
    assert broken_rule(scenario({"num_ranks": 2, "megatron": {"expert_parallel": 2}}, model={"make": "moe_xs"})) is None


@pytest.mark.parametrize(
    ("learner", "key", "said"),
    [
        ({"parallel": "ddp"}, "learner.parallel", "weights are divided by learner.megatron"),
        ({"compile": True}, "learner.compile", "kernels are Transformer Engine's"),
        ({"activation_checkpointing": True}, "learner.activation_checkpointing", "learner.megatron.recompute: full"),
        ({"cpu_offload": True}, "learner.cpu_offload", "optimizer_cpu_offload: true"),
        ({"lora": {"publish": "adapter"}}, "learner.lora", "it trains all weights; adapters are for learner.backend"),
        ({"lora": {"rank": 4}}, "learner.lora", "it trains all weights; adapters are for learner.backend: torch"),
        ({"device": "cuda:1"}, "learner.device", "cuda:1 is one device"),
        (
            {"megatron": {"transformer": {"moe_z_loss_coef": 0.1}}},
            "learner.megatron.transformer.moe_z_loss_coef",
            "did you mean 'moe_z_loss_coeff'?",
        ),
        (
            {"device": "cpu", "megatron": {"transformer": {"batch_p2p_comm": True}}},
            "learner.megatron.transformer.batch_p2p_comm",
            "must be false on a CPU",
        ),
        (
            {"megatron": {"overlap_param_gather": True}},
            "learner.megatron.overlap_param_gather",
            "needs learner.megatron.overlap_grad_reduce: true",
        ),
        (
            {"num_ranks": 4, "megatron": {"tensor_parallel": 4}},
            "learner.megatron",
            "2 attention heads, which tensor_parallel 4 does not divide; the nearest possible layout of 4 ranks is "
            "tensor 2 × data 2",
        ),
        ({"megatron": {"expert_parallel": 2}, "num_ranks": 2}, "learner.megatron", "the model has no experts"),
        ({"megatron": {"mtp": {}}}, "learner.megatron.mtp", "have no layers that predict further tokens"),
        (
            {"megatron": {"transformer": {"mtp_loss_scaling_factor": 0.1}}},
            "learner.megatron.transformer.mtp_loss_scaling_factor",
            "use learner.megatron.mtp.loss_coef",
        ),
        (
            {"backend": "torch", "megatron": {"mtp": {}}},
            "learner.megatron",
            "has no effect with learner.backend: torch",
        ),
    ],
)
def test_what_megatron_cannot_have_is_refused_with_what_to_do(learner: dict[str, Any], key: str, said: str) -> None:
    found = refused(learner)
    assert found[0] == key
    assert said in found[1]


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ({}, "needs engines.record_experts: true"),
        ({"backend": "sglang", "device": "cpu", "record_experts": True}, "does not start with it on a CPU"),
        ({"record_experts": True, "more": [{"backend": "recorded"}]}, "recorded engines cannot say it"),
    ],
)
def test_a_replay_needs_engines_that_record(engines: dict[str, Any], said: str) -> None:
    learner = {"backend": "megatron", "megatron": {"router_replay": True}}
    data = {
        "run": {"name": "rules"}, "model": {"make": "moe_xs"}, "data": {"path": "lines:100"},
        "reward": {"function": "lines"}, "sampling": {"max_response_tokens": 64}, "staleness": {"policy": "sync"},
    }  # fmt: skip
    found = broken_rule(resolve(msgspec.convert({**data, "learner": learner, "engines": engines}, Scenario)))
    assert found is not None
    assert said in found[1]
    fine = msgspec.convert({**data, "learner": learner, "engines": {"record_experts": True}}, Scenario)
    assert broken_rule(resolve(fine)) is None


@pytest.mark.parametrize("backend", ["torch", "simulated"])
def test_a_layout_of_another_backend_is_refused(backend: str) -> None:
    data = msgspec.to_builtins(scenario({"backend": backend, "megatron": {"tensor_parallel": 2}}))
    data["engines"]["backend"] = backend
    found = broken_rule(msgspec.convert(data, Scenario))
    assert found is not None
    assert found[0] == ("learner", "megatron")
    assert f"has no effect with learner.backend: {backend}" in found[1]


def test_the_layout_is_checked_against_the_copy_of_the_config(config: Callable[..., str]) -> None:
    model = {"path": "/not/here", "config": config()}
    learner = {"num_ranks": 8, "megatron": {"pipeline_parallel": 8}}
    key, said = refused(learner, model=model)
    assert key == "learner.megatron"
    assert said.startswith("the model has 36 layers, which pipeline_parallel 8 does not divide; the nearest possible ")
    assert said.endswith("layout of 8 ranks is pipeline 4 × data 2")
    assert broken_rule(scenario(learner, model={"path": "/not/here"})) is None, "nothing is known about the model"


def test_the_checkpoint_s_own_config_counts(config: Callable[..., str], tmp_path: Path) -> None:
    own = Path(config("model/config.json"))
    learner = {"num_ranks": 8, "megatron": {"pipeline_parallel": 8}}
    assert refused(learner, model={"path": str(own.parent)})[0] == "learner.megatron"
    same = {"path": str(own.parent), "config": config()}
    assert broken_rule(scenario({"num_ranks": 2}, model=same)) is None
    other = {"path": str(own.parent), "config": config(num_hidden_layers=40)}
    key, said = refused({"num_ranks": 2}, model=other)
    assert key == "model.config"
    assert "says something else than" in said
    missing = {"path": "/not/here", "config": str(tmp_path / "absent.json")}
    key, said = refused({}, model=missing)
    assert key == "model.config"
    assert "absent.json cannot be read (no such file or directory)" in said
    assert broken_rule(scenario({"num_ranks": 2}, model=missing | {"path": str(own.parent)})) is None


def test_a_family_that_is_not_supported_is_named_with_the_backend_that_takes_it(config: Callable[..., str]) -> None:
    key, said = refused({}, model={"path": "/not/here", "config": config(model_type="mamba2")})
    assert key == "model.config"
    assert "no family for model_type 'mamba2'" in said
    assert "Use learner.backend: torch" in said


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_norms_after_attention_and_mlp_are_taken_everywhere(device: str, config: Callable[..., str]) -> None:
    model = {"path": "/not/here", "config": config(model_type="glm4")}
    assert broken_rule(scenario({"device": device}, model=model)) is None


def test_the_table_of_made_models_is_what_is_made(tmp_path: Path) -> None:
    assert set(MADE_CONFIGS) == set(SHAPES)
    for size in SHAPES:
        make_model(size, tmp_path / size, seed=0)
        found = find_architecture(scenario(model={"make": size}))
        assert found is not None
        assert found.architecture == read_architecture(tmp_path / size)


def test_an_error_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(
        "run: {name: x}\ndata: {path: 'lines:9'}\nmodel: {make: xs}\nlearner:\n  backend: megatron\n"
        "  device: cpu\n  megatron:\n    pipeline_parallel: 3\n"
    )
    with pytest.raises(UserFault, match=r"x\.yaml:7: learner\.megatron: .* does not divide 1 ranks"):
        load_scenario(file)


def test_scenarios_are_checked_without_torch_or_megatron_core() -> None:
    script = (
        "import sys; from pathlib import Path; from penstock.runtime.scenario import load_scenario\n"
        f"load_scenario(Path({str(SCENARIOS / 'qwen3_30b_a3b_multinode.yaml')!r}))\n"
        "print([name for name in ('torch', 'megatron') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# --- the machine ------------------------------------------------------------------------------------------------


def test_without_the_extra_the_command_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_preflight, "installed_version", lambda: None)
    with pytest.raises(UserFault, match=r'megatron-core is not installed .*pip install -e "\.\[megatron\]"'):
        check_megatron(scenario())


def test_what_gloo_gets_wrong_is_refused_where_auto_ends_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = scenario({"megatron": {"transformer": {"batch_p2p_comm": True}}})
    assert broken_rule(wrong) is None, "there may be GPUs"
    monkeypatch.setattr(megatron_preflight, "installed_version", lambda: "0.16.1")
    monkeypatch.setattr(megatron_preflight, "has_cuda_gpu", lambda: False)
    with pytest.raises(UserFault, match="batch_p2p_comm: must be false on a CPU"):
        check_megatron(wrong)
    monkeypatch.setattr(megatron_preflight, "has_cuda_gpu", lambda: True)
    monkeypatch.setattr(megatron_preflight, "has_transformer_engine", lambda: True)
    check_megatron(wrong)
    monkeypatch.setattr(megatron_preflight, "has_transformer_engine", lambda: False)
    with pytest.raises(UserFault, match="Transformer Engine, which is not installed"):
        check_megatron(wrong)


# --- layers of stages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "stages", "pieces", "fields", "layers"),
    [
        (48, 4, 1, {}, (12, 12, 12, 12)),
        (48, 2, 4, {}, (24, 24)),
        (
            94,
            4,
            1,
            {"num_layers_in_first_pipeline_stage": 23, "num_layers_in_last_pipeline_stage": 23},
            (23, 24, 24, 23),
        ),
        (61, 4, 1, {"num_layers_in_last_pipeline_stage": 13}, (16, 16, 16, 13)),
        (
            94,
            8,
            1,
            {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
            (11, 12, 12, 12, 12, 12, 12, 11),
        ),
        (47, 4, 2, {"account_for_loss_in_pipeline_split": True}, (12, 12, 12, 11)),
        (9, 4, 1, {"pipeline_model_parallel_layout": "Et*2|(ttt|)*2,tL"}, (2, 3, 3, 1)),
        (6, 2, 2, {"pipeline_model_parallel_layout": "E|tt|ttt|tL"}, (3, 3)),
    ],
)
def test_layers_are_divided_as_the_fields_say(
    num_layers: int, stages: int, pieces: int, fields: dict[str, Any], layers: tuple[int, ...]
) -> None:
    found = layers_of_pieces(num_layers, num_stages=stages, pieces_per_stage=pieces, fields=fields)
    assert layers_of_stages(found, stages) == layers


@pytest.mark.parametrize(
    ("num_layers", "stages", "pieces", "fields", "said"),
    [
        (94, 4, 1, {}, "94 layers, which pipeline_parallel 4 does not divide"),
        (94, 4, 1, {"num_layers_in_first_pipeline_stage": 23}, "of which 71 are left for 3 stages"),
        (48, 1, 1, {"num_layers_in_first_pipeline_stage": 5}, "gives the stages 5"),
        (48, 2, 3, {"num_layers_in_first_pipeline_stage": 20}, "a stage has 20 layers, which virtual_pipeline 3"),
        (
            48,
            2,
            1,
            {"num_layers_in_first_pipeline_stage": 20, "account_for_loss_in_pipeline_split": True},
            "say how many layers a stage has, and so does account_for_loss_in_pipeline_split",
        ),
        (94, 4, 1, {"account_for_loss_in_pipeline_split": True}, "94 layers, 95 with what account_for_loss"),
        (9, 4, 1, {"pipeline_model_parallel_layout": "Ett|ttt|tL"}, "has 3 pieces, and pipeline_parallel 4"),
        (9, 2, 1, {"pipeline_model_parallel_layout": "Ett|tL"}, "gives the stages 3"),
        (9, 2, 1, {"pipeline_model_parallel_layout": "Et4|tL"}, "has '4'"),
        (3, 2, 1, {"pipeline_model_parallel_layout": "tt|tL"}, "has to begin with E"),
    ],
)
def test_layers_that_cannot_be_divided_so_are_refused(
    num_layers: int, stages: int, pieces: int, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserFault, match=said):
        layers_of_pieces(num_layers, num_stages=stages, pieces_per_stage=pieces, fields=fields)


def test_where_the_fields_allow_no_layout_the_nearest_without_them_is_named(config: Callable[..., str]) -> None:
    fields = {"num_layers_in_first_pipeline_stage": 10, "num_layers_in_last_pipeline_stage": 11}
    learner = {"num_ranks": 4, "megatron": {"pipeline_parallel": 4, "transformer": fields}}
    _, said = refused(learner, model={"path": "/not/here", "config": config()})
    assert "of which 15 are left for 2 stages" in said
    assert said.endswith(
        "is pipeline 4 × data 1, without transformer.num_layers_in_first_pipeline_stage and "
        "transformer.num_layers_in_last_pipeline_stage"
    )
