"""What rollout and training in FP8, and speculative decoding, cannot be had with is refused with the key and the
remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.messages.errors import UserFault
from penstock.runtime.scenario.load import load_scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"
EMBEDDED = SCENARIOS / "quickstart.yaml"
SERVED = SCENARIOS / "qwen3_4b_gsm8k_h100.yaml"
TRAINED = SCENARIOS / "qwen3_32b_64gpus.yaml"
FP8 = "engines.quantization=fp8"
COPY = "engines.fp8_model=/models/Qwen3-4B-FP8"
EAGLE = "engines.sglang.speculative_algorithm=EAGLE3"
DRAFT = "engines.sglang.speculative_draft_model_path=/models/Qwen3-4B-eagle3"
SYNC = ("staleness.policy=sync", "staleness.max_staleness=null")
IN_FP8 = "learner.megatron.transformer.fp8=hybrid"


def test_rollout_in_fp8_with_embedded_engines_and_with_servers() -> None:
    embedded = load_scenario(EMBEDDED, [FP8])
    assert (embedded.engines.quantization, embedded.weights.canary_tolerance) == ("fp8", 0.3)
    assert load_scenario(EMBEDDED, []).weights.canary_tolerance == 1e-3
    assert load_scenario(SERVED, [FP8, COPY]).engines.fp8_model == "/models/Qwen3-4B-FP8"


@pytest.mark.parametrize(
    "correction", ["objective.correction=tis", "objective.correction=mis", "objective.correction=icepop"]
)
def test_what_weighs_the_tokens_makes_recomputed_ratios_possible(correction: str) -> None:
    load_scenario(EMBEDDED, [FP8, "learner.objective.old_logprobs=recompute", f"learner.{correction}"])


def test_a_draft_that_is_left_alone_and_one_without_weights() -> None:
    load_scenario(SERVED, [EAGLE, DRAFT])
    load_scenario(SERVED, ["engines.sglang.speculative_algorithm=NGRAM", "weights.transport=auto"])
    backup = "engines.sglang.enable_draft_weights_cpu_backup=true"
    turns = (*SYNC, "engines.placement=colocate", "engines.count=2", "weights.transport=tensor")
    load_scenario(SERVED, [EAGLE, DRAFT, backup, *turns, "learner.parallel=fsdp"])


def test_training_in_fp8() -> None:
    scenario = load_scenario(TRAINED, [IN_FP8, "learner.megatron.transformer.fp8_recipe=blockwise"])
    assert scenario.learner.megatron.transformer["fp8"] == "hybrid"


@pytest.mark.parametrize(
    ("file", "overrides", "said"),
    [
        (EMBEDDED, [COPY], "engines.fp8_model: has no effect without engines.quantization: fp8"),
        (EMBEDDED, ["engines.quantization=int4"], "engines.quantization: .*fp8"),
        (
            EMBEDDED,
            [
                FP8,
                *SYNC,
                "learner.objective.old_logprobs=recompute",
                "learner.objective.correction=none",
            ],
            "engines.quantization: .* nothing weighs their tokens; set learner.objective.correction: tis",
        ),
        (SCENARIOS / "true_on_policy.yaml", [FP8], "engines.quantization: .* with learner.true_on_policy; remove it"),
        (
            SCENARIOS / "simulated_1024_engines.yaml",
            [FP8],
            "simulated engines take no weights in FP8",
        ),
        (SERVED, [FP8], "engines.fp8_model: .*penstock convert MODEL COPY --dtype fp8"),
        (SERVED, [FP8, COPY, "engines.device=cpu"], "engines.device: SGLang computes FP8 on GPUs .* AMX"),
        (SERVED, [FP8, COPY, "engines.sglang.quantization=fp8"], "engines.sglang.quantization: .* remove it"),
        (SERVED, [EAGLE, DRAFT, "weights.transport=disk"], "weights.transport: .* set distributed or tensor"),
        (SERVED, [EAGLE, DRAFT, "weights.transport=auto"], "weights.transport: .* found 'auto'"),
        (SERVED, [EAGLE, "engines.device=cpu"], "speculative_algorithm: SGLang drafts .* CPU build lacks"),
        (
            SERVED,
            [EAGLE, DRAFT, *SYNC, "engines.placement=colocate"],
            "enable_draft_weights_cpu_backup: a server on the learner.s GPUs .* set it to true",
        ),
        (TRAINED, [IN_FP8, "learner.device=cpu"], "transformer.fp8: needs Transformer Engine and a GPU .* found a CPU"),
        (TRAINED, [IN_FP8, "learner.megatron.precision=float32"], "transformer.fp8: .* found float32, set "),
        (TRAINED, [IN_FP8, "learner.megatron.transformer.fp8_param=true"], "fp8_param: weights stay in bfloat16"),
        (TRAINED, [IN_FP8, "learner.megatron.ddp.fp8_param_gather=true"], "fp8_param_gather: weights stay"),
        (TRAINED, ["learner.megatron.transformer.fp8_margin=1"], "fp8_margin: has no effect without"),
        (TRAINED, ["learner.megatron.transformer.fp8=e5m2"], "fp8: 'e5m2' is none of its choices"),
    ],
)
def test_what_cannot_work_is_refused(file: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(UserFault) as raised:
        load_scenario(file, overrides)
    assert re.search(said, " ".join(str(raised.value).split())), str(raised.value)
