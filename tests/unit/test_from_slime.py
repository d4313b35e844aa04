"""A slime launch script as a scenario: what becomes a key, what needs none, what is left and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml
from typer.testing import CliRunner

from penstock.runtime.cli.app import app
from penstock.runtime.scenario import load_scenario
from penstock.runtime.slime.convert import to_scenario
from penstock.runtime.slime.script import read_script

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.slime.convert import Converted

SCRIPT = r"""#!/bin/bash
pkill -9 sglang   # --not-a-flag
GPUS=${GPUS:-4}
MODEL="/models/Qwen3-4B"
HERE="$(cd -- "$(dirname -- "$0")" && pwd)"
source "${HERE}/models/qwen3-4B.sh"

CKPT=(
   --hf-checkpoint ${MODEL}
   #--hf-checkpoint /models/other
   --ref-load /models/Qwen3-4B_torch_dist
   --save-interval 25
)
ROLLOUT=(
   --prompt-data /data/maths.jsonl@[0:1000]
   --input-key question --label-key answer
   --apply-chat-template
   --rm-type dapo
   --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 16 --global-batch-size 256
   --over-sampling-batch-size 64
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --rollout-max-response-len=4096
   --rollout-stop "</answer>" "<|im_end|>"
)
EVAL=(--eval-interval 20 --eval-prompt-data aime /data/aime.jsonl gpqa /data/gpqa.jsonl@[0:100]
   --n-samples-per-eval-prompt 8 --eval-max-response-len 8192 --eval-top-p 0.7 --eval-function-path a.b.c)
OTHERS=(
   --advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4
   --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl
   --use-tis --tis-clip 3
   --lr 2e-6 --min-lr 1e-6 --lr-decay-style cosine --adam-beta2 0.98
   --tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --max-tokens-per-gpu 8192 --use-dynamic-batch-size
   --update-weight-buffer-size $(( 256 * 1024 * 1024 ))
   --moe-token-dispatcher-type alltoall --no-bias-swiglu-fusion
   --moe-enable-deepep --moe-token-dispatcher-type flex
   --sglang-mem-fraction-static 0.7 --sglang-no-such-option 3
   --use-wandb --wandb-project mine
   --something-new 1 2
)
JSON='{
  "env_vars": {"A": "--flag-in-json"}
}'
ray start --head --num-gpus ${GPUS}
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${JSON}" \
   -- python3 train_async.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node ${GPUS} \
   --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 \
   ${CKPT[@]} ${ROLLOUT[@]} ${EVAL[@]} ${OTHERS[@]}
"""


@pytest.fixture
def converted(tmp_path: Path) -> Converted:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return to_scenario(read_script(path), "maths")


def test_a_script_becomes_a_scenario_that_loads(converted: Converted, tmp_path: Path) -> None:
    path = tmp_path / "maths.yaml"
    path.write_text(converted.text)
    scenario = load_scenario(path)
    learner, sampling = scenario.learner, scenario.sampling
    assert (scenario.run.name, scenario.run.num_steps) == ("maths", 300)
    assert scenario.data.path == "/data/maths.jsonl@[0:1000]"
    assert (scenario.data.prompt_key, scenario.data.label_key) == ("question", "answer")
    assert (scenario.data.chat_template, scenario.data.shuffle) == (True, False)
    assert (scenario.model.path, scenario.model.dtype) == ("/models/Qwen3-4B", "bfloat16")
    assert (sampling.samples_per_group, sampling.max_response_tokens) == (16, 4096)
    assert sampling.stop == ("</answer>", "<|im_end|>")
    assert scenario.reward.function == "dapo"
    assert (scenario.staleness.policy, scenario.staleness.over_sampling) == ("one_step_off", 2.0)
    assert scenario.filter.drop_zero_spread
    assert (learner.backend, learner.num_ranks, learner.num_updates) == ("megatron", 4, 2)
    assert (learner.groups_per_batch, learner.save_every) == (32, 25)
    assert learner.max_tokens_per_micro_batch == 2 * 8192
    assert (learner.lr_schedule, learner.min_learning_rate_ratio, learner.betas) == ("cosine", 0.5, (0.9, 0.98))
    assert (learner.megatron.tensor_parallel, learner.megatron.context_parallel) == (2, 2)
    assert learner.megatron.transformer == {
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "moe_token_dispatcher_type": "flex",
        "moe_enable_deepep": True,
    }
    assert (scenario.engines.backend, scenario.engines.count) == ("sglang", 2)
    assert scenario.engines.sglang == {"mem_fraction_static": 0.7, "tp_size": 2}
    assert scenario.weights.bucket_size_bytes == 256 * 1024 * 1024


def test_a_critic_on_gpus_of_its_own_becomes_ranks_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    own = "--critic-num-nodes 1 --critic-num-gpus-per-node 8 --tensor-model-parallel-size 4"
    script.write_text(
        "train.py --hf-checkpoint /m --prompt-data /d.jsonl --rm-type math --num-rollout 10 --rollout-batch-size 8 "
        "--rollout-max-response-len 64 --advantage-estimator ppo --actor-num-nodes 2 --actor-num-gpus-per-node 8 "
        f"--rollout-num-gpus 8 {own}\n"
    )
    path = tmp_path / "ppo.yaml"
    path.write_text(to_scenario(read_script(script), "ppo").text)
    learner = load_scenario(path).learner
    assert (learner.backend, learner.objective.critic) == ("megatron", "own")
    assert (learner.num_ranks, learner.critic_ranks) == (24, 8)


def test_the_objective_is_that_of_the_script(converted: Converted) -> None:
    objective = yaml.safe_load(converted.text)["learner"]["objective"]
    assert objective == {
        "name": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "kl_estimator": "low_var_kl",
        "kl_coef": 0.001,
        "kl_in": "loss",
        "reduction": "sequence_mean",
        "old_logprobs": "recompute",
        "correction": "tis",
        "tis_clip": 3.0,
    }


def test_every_flag_is_in_the_scenario_or_left_with_a_reason(converted: Converted) -> None:
    left = {found.flag: found for found in converted.left}
    assert set(left) >= {"ref-load", "eval-function-path", "use-wandb", "wandb-project", "something-new"}
    assert "no such option" in left["sglang-no-such-option"].reason
    assert left["something-new"].reason == "nothing here is known to do the same"
    assert SCRIPT.splitlines()[left["something-new"].line - 1].strip() == "--something-new 1 2"
    assert "--not-a-flag" not in converted.text
    assert "flag-in-json" not in converted.text
    assert "address" not in left


def test_datasets_to_evaluate_on_and_their_defaults_are_those_of_the_script(converted: Converted) -> None:
    document = yaml.safe_load(converted.text)
    assert document["evaluation"] == {
        "every": 20,
        "before_first": True,
        "defaults": {"samples_per_prompt": 8, "sampling": {"max_response_tokens": 8192, "top_p": 0.7}},
        "datasets": [
            {"name": "aime", "path": "/data/aime.jsonl"},
            {"name": "gpqa", "path": "/data/gpqa.jsonl@[0:100]"},
        ],
    }
    assert document["model"]["max_context"] > 8192  # there is room for the longer answers


@pytest.mark.parametrize(
    ("flags", "left", "reason"),
    [
        ("--eval-interval 5", "eval-interval", "no datasets are named"),
        ("--eval-prompt-data a /a.jsonl b", "eval-prompt-data", "expected pairs of name and path, found 3 values"),
        ("--loss-type sft_loss --eval-prompt-data a /a.jsonl", "eval-prompt-data", "engines generate nothing"),
        ("--eval-interval 5 --eval-config my.yaml", "eval-config", "go under evaluation.datasets"),
        (
            "--eval-prompt-data a /a.jsonl --eval-temperature 0 --n-samples-per-eval-prompt 4",
            "n-samples-per-eval-prompt",
            "at temperature 0 all answers are the same",
        ),
        (
            "--eval-prompt-data a /a.jsonl --rollout-max-context-len 99 --eval-max-response-len 100",
            "eval-max-response-len",
            "no room beyond model.max_context, 99",
        ),
    ],
)
def test_evaluation_that_cannot_be_is_left_with_the_reason(tmp_path: Path, flags: str, left: str, reason: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"python3 train.py --hf-checkpoint /m {flags}\n")
    found = {each.flag: each.reason for each in to_scenario(read_script(path), "x").left}
    assert reason in found[left]


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("train.py", "staleness.policy", "sync"),
        ("train.py --rollout-function-path fully_async_rollout.generate", "staleness.policy", "fully_async"),
        (
            "train.py --colocate --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 2",
            "engines.placement",
            "colocate",
        ),
        ("train.py --use-rollout-routing-replay", "learner.megatron.router_replay", True),
        ("train.py --use-rollout-logprobs", "learner.objective.old_logprobs", "engine"),
        (
            "train.py --enable-mtp-training --mtp-num-layers 1 --mtp-loss-scaling-factor 0.2",
            "learner.megatron",
            {"mtp": {"loss_coef": 0.2}},
        ),
        ("train.py --bf16", "model.dtype", "bfloat16"),
        ("train.py --bf16 --fp16", "model.dtype", "float16"),
        ("train.py --kl-coef 0.1", "learner.objective.kl_in", "reward"),
        ("train.py --custom-rm-path my.rewards.score", "reward.function", "my/rewards.py:score"),
        ("train.py --loss-type sft_loss", "engines.backend", "recorded"),
        ("train.py --num-rollout 200 --lr-warmup-fraction 0.1", "learner.warmup_steps", 20),
        ("train.py --optimizer-cpu-offload", "learner.megatron.optimizer.optimizer_offload_fraction", 1.0),
        ("train.py --rollout-external-engine-addrs a:1 b:2", "engines.addresses", ["http://a:1", "http://b:2"]),
    ],
)
def test_flags_that_belong_together_are_read_together(tmp_path: Path, arguments: str, key: str, value: object) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"python3 {arguments} --hf-checkpoint /m\n")
    found = yaml.safe_load(to_scenario(read_script(path), "x").text)
    for part in key.split("."):
        found = found[part]
    assert found == value


@pytest.mark.parametrize(
    ("flags", "correction"), [("", "tis"), ("--use-tis", "tis"), ("--use-rollout-logprobs", "none")]
)
def test_a_checkpoint_in_fp8_is_what_engines_start_from(tmp_path: Path, flags: str, correction: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"python3 train.py --hf-checkpoint /m/Qwen3-4B-FP8 {flags}\n")
    converted = to_scenario(read_script(path), "x")
    found = yaml.safe_load(converted.text)
    assert found["model"]["path"] == "/m/Qwen3-4B"
    assert (found["engines"]["quantization"], found["engines"]["fp8_model"]) == ("fp8", "/m/Qwen3-4B-FP8")
    assert found["learner"]["objective"].get("correction", "none") == correction
    said = [each.reason for each in converted.left if each.flag == "hf-checkpoint"]
    assert len(said) == (1 if flags else 2)
    assert "taken to be /m/Qwen3-4B" in said[0]


def test_values_that_cannot_be_read_are_left_with_their_key(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python3 train.py --lr ${UNKNOWN} --num-rollout --hf-checkpoint /m --actor-num-nodes $N\n")
    left = {found.flag: found.reason for found in to_scenario(read_script(path), "x").left}
    assert left["lr"] == "would be learner.learning_rate; its value, ${UNKNOWN}, cannot be read"
    assert left["num-rollout"] == "would be run.num_steps; its value, nothing, cannot be read"
    assert left["actor-num-nodes"] == "its value, $N, is no number; 1 was taken"


def test_the_command_prints_the_scenario(tmp_path: Path) -> None:
    path = tmp_path / "run-maths.sh"
    path.write_text(SCRIPT)
    result = CliRunner().invoke(app, ["convert", "scenario", str(path)])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.output)["run"]["name"] == "run-maths"
    assert "# Not in this scenario, with the same result:" in result.output
