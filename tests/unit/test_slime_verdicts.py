"""Whether a converted scenario is said to be the same job; twenty small scripts in slime's style."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import pytest
import yaml
from typer.testing import CliRunner

from penstock.runtime.cli.app import app
from penstock.runtime.run.gpu_needs import NodeGpus
from penstock.runtime.run.placement import place
from penstock.runtime.scenario import load_scenario
from penstock.runtime.slime.convert import SECTIONS, to_scenario
from penstock.runtime.slime.effective import KNOWN
from penstock.runtime.slime.mapping import FUNCTIONS, KEYS, READ_TOGETHER, SHAPE_OF_MODEL, SWITCHES, TRACKER_PREFIXES
from penstock.runtime.slime.reasons import REASONS, SGLANG_NAMES
from penstock.runtime.slime.script import read_script
from penstock.runtime.slime.training import ROWS_ELSEWHERE
from penstock.runtime.slime.verdict import verdict_on

FLAGS: Final = Path(__file__).with_name("slime_flags.txt")
BASE: Final = (
    "--hf-checkpoint /m --prompt-data /rows.jsonl --input-key question --label-key answer --apply-chat-template "
    "--rm-type math --num-rollout 10 --rollout-batch-size 8 --rollout-max-response-len 64 --max-tokens-per-gpu 4096 "
    "--attention-dropout 0.0 --hidden-dropout 0.0 "
)
FULL: Final = (
    BASE + "--n-samples-per-prompt 4 --global-batch-size 32 --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 "
    "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 "
)
ROWS: Final = BASE.replace("--rm-type math ", "").replace("--num-rollout 10 ", "").replace("--apply-chat-template ", "")
SFT: Final = (
    ROWS + "--loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout --num-epoch 3 "
    "--calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only --global-batch-size 8 "
    "--lr 1e-5 --lr-decay-style cosine --min-lr 1e-6 --lr-warmup-fraction 0.1 --actor-num-gpus-per-node 4 "
)


class Case(NamedTuple):
    flags: str
    kind: str
    decided_by: str = ""
    """Flags in their order, with blanks between."""


CASES: Final = {
    "all is said": Case(FULL, "same job"),
    "defaults": Case(BASE + "--advantage-estimator ppo --actor-num-gpus-per-node 2", "same job"),
    "groups of one, which have no advantage": Case(BASE + "--actor-num-gpus-per-node 2", "other job"),
    "gspo": Case(FULL + "--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4", "same job"),
    "ppo": Case(FULL + "--advantage-estimator ppo --value-clip 0.2", "same job"),
    "a critic on GPUs of its own": Case(
        FULL + "--advantage-estimator ppo --critic-num-nodes 1 --critic-num-gpus-per-node 4", "same job"
    ),
    "GPUs for a critic that there is not": Case(FULL + "--critic-num-gpus-per-node 4", "same job"),
    "trackers": Case(FULL + "--use-wandb --wandb-key $KEY --ci-test --balance-data", "same job"),
    "one engine shared": Case(
        FULL.replace("--rollout-num-gpus 4 --rollout-num-gpus-per-engine 2", "--rollout-num-gpus-per-engine 4")
        + "--colocate",
        "same job",
    ),
    "engines shared": Case(FULL + "--colocate --update-weight-transport distributed", "same job"),
    "experts": Case(FULL + "--moe-token-dispatcher-type flex --moe-enable-deepep", "same job"),
    "DeepEP alone": Case(FULL + "--moe-enable-deepep", "same job"),
    "two nodes shared": Case(
        FULL.replace("--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4", "--actor-num-nodes 2")
        + "--colocate",
        "same job but for",
        "colocate",
    ),
    "a reward of one's own": Case(
        FULL.replace("--rm-type math", "--custom-rm-path my.rewards.score") + "--metadata-key info",
        "same job but for",
        "custom-rm-path",
    ),
    "only the environment knows": Case(
        FULL.replace("--hf-checkpoint /m", "--hf-checkpoint ${BASE_DIR}/m"), "same job but for", "hf-checkpoint"
    ),
    "partial rollouts": Case(FULL + "--partial-rollout", "same job but for", "partial-rollout"),
    "starts elsewhere": Case(FULL + "--load /other --save /mine", "same job but for", "load"),
    "dropout": Case(FULL.replace("--hidden-dropout 0.0", ""), "same job but for", "hidden-dropout"),
    "SFT without its rows": Case(SFT, "same job but for", "num-epoch"),
    "SFT with flags about rollouts": Case(
        SFT
        + "--rollout-max-response-len 9 --eps-clip 0.1 --sglang-mem-fraction-static 0.5 --use-kl-loss --kl-loss-coef 1 "
        "--rollout-max-prompt-len 5 --rm-type math --colocate --dynamic-sampling-filter-path a.b "
        "--rollout-temperature 0.5",
        "same job but for",
        "num-epoch",
    ),
    "flags that need another": Case(FULL + "--tis-clip 3 --kl-loss-coef 0.1 --min-lr 1e-7", "same job"),
    "float16": Case(
        FULL + "--fp16 --sglang-dtype float16 --initial-loss-scale 65536", "same job but for", "fp16 initial-loss-scale"
    ),
    "a loss scale that bfloat16 has no use for": Case(FULL + "--hysteresis 2 --sglang-dtype bfloat16", "same job"),
    "flags of the environment": Case(FULL + "$MORE_FLAGS", "same job but for", "?"),
    "images": Case(FULL + '--multimodal-keys \'{"image": "images"}\'', "other job", "multimodal-keys"),
    "another rollout": Case(FULL + "--rollout-function-path my.own.generate", "other job", "rollout-function-path"),
    "an unknown flag": Case(FULL + "--something-new 1", "other job", "something-new"),
    "a value that is no number": Case(FULL.replace("--lr 1e-6", "--lr fast"), "other job", "lr"),
    "no length": Case(FULL.replace("--num-rollout 10", ""), "other job", "num-rollout"),
    "a policy that learns nothing": Case(FULL + "--eps-clip 0", "other job"),
    "frozen layers": Case(FULL + "--freeze-params-name-list embedding output_layer", "same job"),
    "a nucleus": Case(FULL + "--rollout-top-p 0.9", "same job"),
    "a nucleus and a draft model": Case(
        FULL + "--rollout-top-p 0.9 --sglang-speculative-algorithm NGRAM", "same job but for", "rollout-top-p"
    ),
    "an address that no reward asks": Case(FULL + "--rm-url http://x/score", "same job"),
    "raw rewards": Case(FULL + "--disable-rewards-normalization", "same job"),
    "layers that are trained alone": Case(FULL + "--only-train-params-name-list experts", "same job"),
    "frozen by no regular expression": Case(
        FULL + "--freeze-params-name-list '*norm'", "other job", "freeze-params-name-list"
    ),
}


def script_of(folder: Path, flags: str, program: str = "train.py") -> Path:
    path = folder / "run.sh"
    path.write_text(f"ARGS=(\n  {flags}\n)\nray job submit -- python3 {program} ${{ARGS[@]}}\n")
    return path


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_is_that_of_the_gravest_flag(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    converted = to_scenario(read_script(script_of(tmp_path, case.flags)), "x")
    verdict = verdict_on(converted)
    assert verdict.kind == case.kind, str(verdict)
    assert [left.flag or "?" for left in verdict.decided_by] == case.decided_by.split()
    is_refused = name in ("a policy that learns nothing", "groups of one, which have no advantage")
    assert bool(verdict.refusal) == is_refused, verdict.refusal


def test_check_ends_with_the_verdict_and_its_lines(tmp_path: Path) -> None:
    path = script_of(tmp_path, FULL + "--partial-rollout --load /other")
    result = CliRunner().invoke(app, ["convert", "scenario", str(path), "--check"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "same job but for: --load (line 2), --partial-rollout (line 2)"
    assert "run:" not in result.output
    result = CliRunner().invoke(app, ["convert", "scenario", str(script_of(tmp_path, FULL + "--new 1")), "--check"])
    assert (result.exit_code, result.output.splitlines()[-1]) == (1, "other job: --new (line 2)")


def test_each_flag_that_slime_declares_has_a_counterpart_or_a_reason() -> None:
    declared = [line for line in FLAGS.read_text().splitlines() if not line.startswith("#")]
    assert len(declared) > 200
    known = KNOWN | set(REASONS) | SHAPE_OF_MODEL
    assert [flag for flag in declared if flag not in known and not flag.startswith(TRACKER_PREFIXES)] == []
    assert not set(REASONS) & KNOWN, "one place for each"


def test_defaults_that_decide_what_is_trained_are_written_down_with_both_numbers(tmp_path: Path) -> None:
    flags = BASE + "--advantage-estimator cispo --actor-num-gpus-per-node 2"
    converted = to_scenario(read_script(script_of(tmp_path, flags)), "x")
    taken = {each.key: (each.value, each.ours) for each in converted.taken}
    assert taken == {
        "sampling.samples_per_group": (1, 8),
        "learner.objective.clip_low": (0.2, 1.0),
        "learner.objective.clip_high": (0.2, 4.0),
        "learner.objective.reduction": ("sequence_mean", "token_mean"),
        "learner.objective.normalize_std": (False, True),
        "learner.objective.kl_estimator": ("k1", "k3"),
        "learner.objective.old_logprobs": ("recompute", "engine"),
        "learner.objective.correction": ("none", "tis"),
        "learner.weight_decay": (0.01, 0.0),
        "learner.betas": ([0.9, 0.999], [0.9, 0.95]),
        "learner.lr_schedule": ("linear", "constant"),
        "learner.min_learning_rate_ratio": (0.0, 0.1),
        "engines.slots": (512, 64),
        "engines.start_timeout_s": (1800.0, 120.0),
    }
    document = yaml.safe_load(converted.text)
    for key, (value, _) in taken.items():
        found = document
        for part in key.split("."):
            found = found[part]
        assert found == value, key
    assert "#   learner.weight_decay: 0.01 is Megatron's default; Penstock's default is 0.0\n" in converted.text


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (FULL + "--adam-eps 1e-15", "learner.megatron.optimizer.adam_eps", 1e-15),
        (FULL + "--eps-clip 0 --eps-clip-high 0.3", "learner.objective.clip_low", 0.0),
        (FULL + "--eps-clip 0.1", "learner.objective.clip_high", 0.1),
        (FULL + "--advantage-estimator ppo --lr 3e-6", "learner.objective.critic_learning_rate", 3e-6),
        (FULL + "--advantage-estimator ppo --critic-num-gpus-per-node 2", "learner.critic_ranks", 2),
        (FULL + "--advantage-estimator ppo --critic-num-gpus-per-node 2", "learner.num_ranks", 6),
        (FULL + "--advantage-estimator ppo --critic-num-nodes 2", "learner.critic_ranks", 8),
        (FULL + "--critic-num-nodes 1 --critic-num-gpus-per-node 4", "learner.num_ranks", 4),
        (FULL + "--use-kl-loss --kl-loss-coef 0.1", "learner.objective.kl_estimator", "k3"),
        (FULL + "--global-batch-size 16 --lr-warmup-iters 5", "learner.warmup_steps", 3),
        (FULL + "--colocate", "engines.placement", "colocate"),
        (FULL + "--colocate", "engines.count", 2),
        (FULL + "--colocate", "engines.slots", 512),
        (FULL + "--colocate --rollout-num-gpus 8", "engines.placement", "colocate"),
        (FULL + "--colocate --rollout-num-gpus 8", "engines.count", 4),
        (FULL + "--colocate --actor-num-gpus-per-node 8 --rollout-num-gpus 8", "engines.placement", "colocate"),
        (FULL + "--colocate --actor-num-gpus-per-node 8 --rollout-num-gpus 8", "learner.num_ranks", 8),
        (FULL + "--sglang-server-concurrency 100", "engines.slots", 100),
        (FULL + "--distributed-timeout-minutes 30", "learner.rank_timeout_s", 1800.0),
        (FULL + "--tool-key functions", "data.tools_key", "functions"),
        (FULL + '--apply-chat-template-kwargs \'{"enable_thinking": false}\'', "data.template_arguments",
         {"enable_thinking": False}),
        (FULL + "--rollout-max-prompt-len 100", "data.skip_long_prompts", True),
        (FULL + "--rollout-max-context-len 300", "data.max_prompt_tokens", 299),
        (FULL + "--custom-generate-function-path a.b.c", "model.max_context", 4096),
        (FULL + "--sglang-cuda-graph-bs 1 2", "engines.sglang.cuda_graph_bs_decode", [1, 2]),
        (FULL + "--eval-prompt-data /a.jsonl", "evaluation.datasets", [{"name": "aime", "path": "/a.jsonl"}]),
    ],
)  # fmt: skip
def test_values_are_those_that_slime_would_take(tmp_path: Path, flags: str, key: str, value: object) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(to_scenario(read_script(script_of(tmp_path, flags)), "x").text)
    load_scenario(path)
    found = yaml.safe_load(path.read_text())
    for part in key.split("."):
        found = found[part]
    assert found == value


def test_supervised_training_has_its_length_from_the_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    turn = '{"question": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    rows.write_text(turn * 100)
    flags = SFT.replace("/rows.jsonl", f"{rows}@[0:80]").replace("--label-key answer", "")
    converted = to_scenario(read_script(script_of(tmp_path, flags, "train_async.py")), "sft")
    (tmp_path / "sft.yaml").write_text(converted.text)
    scenario = load_scenario(tmp_path / "sft.yaml")
    learner = scenario.learner
    assert (scenario.run.num_steps, learner.warmup_steps, learner.num_updates) == (30, 3, 1)
    assert (learner.objective.name, learner.objective.reduction) == ("sft", "token_mean")
    assert (learner.lr_schedule, learner.min_learning_rate_ratio) == ("cosine", 0.1)
    assert (scenario.engines.backend, scenario.sampling.samples_per_group) == ("recorded", 1)
    assert (scenario.data.chat_template, scenario.model.max_context) == (True, 4096)
    assert verdict_on(converted).kind == "same job"


def test_rows_that_are_not_here_are_counted_on_and_said(tmp_path: Path) -> None:
    converted = to_scenario(read_script(script_of(tmp_path, SFT)), "sft")
    assert yaml.safe_load(converted.text)["run"]["num_steps"] == 3 * ROWS_ELSEWHERE // 8
    (left,) = [left for left in converted.left if left.flag == "num-epoch"]
    assert left.reason == "/rows.jsonl is not here: 100,000 rows were counted on; set run.num_steps to 3 × rows // 8"


def test_a_node_that_is_shared_takes_as_many_gpus_as_slime_takes(tmp_path: Path) -> None:
    """Eight ranks over four engines of two."""
    flags = FULL + "--colocate --actor-num-gpus-per-node 8 --rollout-num-gpus 8"
    for program, policy in (("train.py", "sync"), ("train_async.py", "one_step_off")):
        path = tmp_path / f"{policy}.yaml"
        converted = to_scenario(read_script(script_of(tmp_path, flags, program)), "x")
        assert "colocate" not in {left.flag for left in converted.left}
        path.write_text(converted.text)
        scenario = load_scenario(path)
        assert scenario.staleness.policy == policy
        (block,) = place(scenario, [NodeGpus("node", 8)]).blocks
        assert block.members == ("engine/0", "engine/1", "engine/2", "engine/3", "learner")


def test_gpus_are_counted_where_the_learner_gets_its_own(tmp_path: Path) -> None:
    flags = (
        FULL.replace("--actor-num-nodes 1", "--actor-num-nodes 4").replace("--rollout-num-gpus 4", "") + "--colocate"
    )
    converted = to_scenario(read_script(script_of(tmp_path, flags)), "x")
    (left,) = [left for left in converted.left if left.flag == "colocate"]
    assert left.reason.endswith("has 16 ranks beside 8 engines of 2: 16 + 16 = 32 GPUs, where slime takes 16")


def test_a_hugging_face_checkpoint_to_load_is_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    converted = to_scenario(read_script(script_of(tmp_path, FULL + f"--load {model}")), "x")
    assert yaml.safe_load(converted.text)["model"]["path"] == str(model)


def test_keys_of_a_file_go_over_the_flags(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("use_tis: true\ntis_clip: 3.0\nnormalize_advantages: false\nmy_level: token\n")
    with (tmp_path / "own.yaml").open("a") as file:
        file.write("num_layers: 36\n")  # of the model's shape, which slime's scripts give as flags
    flags = FULL + "--custom-config-path own.yaml --tis-clip 5 --normalize-advantages"
    converted = to_scenario(read_script(script_of(tmp_path, flags)), "x")
    objective = yaml.safe_load(converted.text)["learner"]["objective"]
    assert (objective["correction"], objective["tis_clip"]) == ("tis", 3.0)
    assert "whiten" not in objective
    assert [left.reason for left in converted.left if left.flag == "normalize-advantages"] == ["own.yaml takes it back"]
    assert [(left.flag, left.file) for left in verdict_on(converted).decided_by] == [("my-level", "own.yaml")]
    gone = to_scenario(read_script(script_of(tmp_path, FULL + "--custom-config-path none.yaml")), "x")
    assert [left.flag for left in verdict_on(gone).decided_by] == ["custom-config-path"]


def test_a_comment_ends_with_its_line_and_holds_no_control_character(tmp_path: Path) -> None:
    converted = to_scenario(read_script(script_of(tmp_path, FULL + "--rm-type $'a\x1b]0;x\x07\nrun: {}'")), "x")
    assert "\x1b" not in converted.text
    assert yaml.safe_load(converted.text)["run"]["name"] == "x"


@pytest.mark.skipif("PENSTOCK_SLIME_CHECKOUT" not in os.environ, reason="PENSTOCK_SLIME_CHECKOUT names no checkout")
def test_slimes_own_scripts_convert_and_load_and_no_flag_is_dropped(tmp_path: Path) -> None:
    checkout = Path(os.environ["PENSTOCK_SLIME_CHECKOUT"])
    scripts = [path for path in sorted(checkout.rglob("*.sh")) if "train.py" in path.read_text()]
    scripts += [path for path in sorted(checkout.rglob("*.sh")) if "train_async.py" in path.read_text()]
    assert len(scripts) >= 46
    for path in scripts:
        script = read_script(path)
        converted = to_scenario(script, "x")
        (tmp_path / "x.yaml").write_text(converted.text)
        load_scenario(tmp_path / "x.yaml")
        assert not [left for left in converted.left if left.reason.startswith("nothing here is known")], path
        noted = {left.flag for left in converted.left}
        document = yaml.safe_load(converted.text)
        for flag in script.flags:
            key = {**KEYS, **SWITCHES}.get(flag.name, (FUNCTIONS.get(flag.name),))[0]
            is_there = has(document, key) if key else flag.name in READ_TOGETHER or is_option(flag.name, document)
            assert flag.name in noted or is_there, (path, flag)


def has(document: object, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(document, dict) or part not in document:
            return False
        document = cast("dict[str, object]", document)[part]
    return True


def is_option(flag: str, document: dict[str, Any]) -> bool:
    """Of the server, or of megatron-core, by its own name."""
    if flag.startswith("sglang-"):
        name = flag.removeprefix("sglang-").replace("-", "_")
        return SGLANG_NAMES.get(name, name) in document["engines"]["sglang"]
    name = flag.removeprefix("no-").replace("-", "_")
    return any(name in document["learner"].get("megatron", {}).get(section, {}) for section in SECTIONS)
