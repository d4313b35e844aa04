"""A run of each family of models: megatron-core learns, a stock SGLang server on the CPU generates, and both compute
the same model before and after each update."""

# safetensors is typed in part only:
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from live_run import LiveRun
from tiny_families import make_predicting, make_served

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.cli.convert import convert
from penstock.runtime.observability.trackers import read_run_events, read_steps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.runtime.observability.summary import RunSummary

pytestmark = [pytest.mark.megatron, pytest.mark.sglang, pytest.mark.timeout(600)]

NUM_STEPS: Final = 3
MEAN_DIFFERENCE: Final = 1e-5
"""Nats a token, between the log-probs of server and learner, the mean of each step; about 4e-7 is seen."""
RUN_S: Final = 500.0
"""As long as a machine with other work may need; alone it takes less than a minute."""
OVERRIDES: Final = (
    f"run.num_steps={NUM_STEPS}",
    "runtime.host=local",
    "runtime.heartbeat_timeout_s=60",
    "model.make=null",
    "model.max_context=256",
    "staleness.policy=sync",  # so that every token is trained by the weights that made it
    "staleness.max_staleness=0",
    "sampling.samples_per_group=4",
    "sampling.max_response_tokens=24",
    "reward.function=random",
    "engines.count=1",
    "engines.slots=16",
    "engines.start_timeout_s=300",
    "learner.backend=megatron",
    "learner.device=cpu",
    "learner.groups_per_batch=4",
    "learner.warm_start=null",
)


NIGHTLY: Final = (pytest.mark.slow,)


class Family(NamedTuple):
    """A family as it is published."""

    name: str
    """Of the tiny model that is built like it."""
    config: Mapping[str, object] = MappingProxyType({})
    """What its ``config.json`` says besides."""
    marks: tuple[pytest.MarkDecorator, ...] = NIGHTLY


# Weights, log-probs and steps of every family are held to transformers' in test_megatron_weights.py and
# test_megatron_training.py, in CI too; Qwen3 has whole runs in test_megatron_runs.py. So CI runs the one here that
# is most unlike it, with the layers that predict further tokens: experts, shared ones, a router with biases, heads that
# are turned by half.
SERVED: Final = {
    "Llama 3": Family("llama scaled"),
    "Qwen2.5": Family("qwen2"),
    "Qwen3": Family("qwen3"),
    "Qwen3-MoE": Family("qwen3_moe"),
    "GLM-4": Family("glm4"),
    "GLM-4.5": Family("glm4_moe"),
    "GLM-4.5-Air": Family("glm4_moe air"),
}
LATENT: Final = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
KIMI: Final = LATENT | {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1}
NO_LATENT_ATTENTION: Final = "RuntimeError: Expected size for first two dimensions of batch2 tensor to be: [4, 24] but"
"""``torch_native`` is the only attention of SGLang 0.5.23 on a CPU without AMX. Prompts of latent attention come to it
with keys of each head, and it takes the compressed ones out of the cache instead."""
NO_PLAIN_ROTATION: Final = "assert rope_scaling is not None"
"""For DeepSeek-V3 the CPU build has the rotary positions of ``yarn`` alone."""
UNSERVED: Final = {
    "DeepSeek-V3": (Family("deepseek_v3", LATENT), NO_LATENT_ATTENTION),
    "Kimi K2": (Family("deepseek_v3", KIMI), NO_LATENT_ATTENTION),
    "Moonlight": (Family("deepseek_v3 plain", LATENT), NO_PLAIN_ROTATION),
    "GLM-4.7-Flash": (Family("glm4_moe_lite", LATENT | {"first_k_dense_replace": 1}), NO_LATENT_ATTENTION),
}


def live_run(family: Family, folder: Path) -> LiveRun:
    model = make_served(family.name, folder / "model", **family.config)
    return LiveRun("sglang_cpu.yaml", folder, (*OVERRIDES, f"model.path={model}"), timeout_s=RUN_S)


@pytest.mark.parametrize("family", [pytest.param(name, marks=family.marks) for name, family in SERVED.items()])
def test_a_family_is_trained_behind_a_stock_server(family: str, servers: None, tmp_path: Path) -> None:
    with live_run(SERVED[family], tmp_path) as run:
        summary = run.finish()
        assert_trained(run.folder, summary)


def test_layers_that_predict_further_tokens_are_trained_behind_a_stock_server(servers: None, tmp_path: Path) -> None:
    model = make_predicting("glm4_moe", tmp_path / "model", is_served=True)
    keys = (f"model.path={model}", "learner.megatron.mtp.loss_coef=0.3", "learner.learning_rate=1e-3")
    with LiveRun("sglang_cpu.yaml", tmp_path, (*OVERRIDES, *keys), timeout_s=RUN_S) as run:
        summary = run.finish()
        assert_trained(run.folder, summary)
        for step in read_steps(run.folder):
            assert 0.0 < (step.metrics["train/mtp_loss"] or 0.0) < 10.0
            assert step.metrics["train/mtp_grad_norm"]
        console = Console(file=io.StringIO(), width=200)
        assert not convert(
            run.folder, tmp_path / "after", console, version=None, dtype=None, max_shard_size="1GB",
            target_format="huggingface",
        )  # fmt: skip
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "after"))
    assert before.keys() == after.keys()
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert {"model.layers.4.eh_proj.weight", "model.layers.4.enorm.weight"} <= moved


@pytest.mark.slow
@pytest.mark.parametrize("family", UNSERVED)
def test_a_family_that_the_servers_of_a_cpu_cannot_serve_still_fails_as_documented(
    family: str, servers: None, tmp_path: Path
) -> None:
    """Where this does not hold any more, a newer SGLang may serve it: move it up, and in docs/models.md."""
    made, reason = UNSERVED[family]
    deadline_s = time.monotonic() + RUN_S
    with live_run(made, tmp_path) as run:
        run.await_file("logs/engine-0-sglang.log")
        log = run.folder / "logs" / "engine-0-sglang.log"
        while reason not in log.read_text(errors="replace"):
            assert run.process.poll() is None, run.ending
            assert time.monotonic() < deadline_s, log.read_text(errors="replace")[-3000:]
            time.sleep(0.2)  # between two looks at a file; nothing is timed by it
        assert not read_steps(run.folder)


def assert_trained(folder: Path, summary: RunSummary) -> None:
    """Every step moved the weights, the server took each of them, and the next tokens are the learner's own."""
    steps = read_steps(folder)
    assert [step.version for step in steps] == list(range(1, NUM_STEPS + 1))
    for step in steps:
        assert (step.metrics["train/grad_norm"] or 0.0) > 0.0
        difference = step.metrics["train/train_rollout_logprob_abs_diff"]
        assert difference is not None
        assert difference <= MEAN_DIFFERENCE
    # A version is announced once an engine serves it, and that is after its canary was compared.
    rows = [row for row in read_run_events(folder) if (row.actor, row.event) == ("buffer", "VersionAnnounced")]
    assert {int(row.summary.split()[1]) for row in rows} >= set(range(NUM_STEPS))
    assert (summary.restarts, summary.warnings, summary.failures) == ((), (), ())
    assert summary.max_staleness == 0
    assert audit_ledger(folder / LEDGER_FILE).findings == ()
