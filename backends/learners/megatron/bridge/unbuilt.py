"""Families of models that are known and not built on megatron-core here: what is missing, and what it would take."""

from __future__ import annotations

from typing import Final, NamedTuple


class Unbuilt(NamedTuple):
    """Why the Megatron learner has no such family."""

    models: str
    missing: str
    """What their layers have that our tables and layers have not."""
    takes: str
    """What building them would take."""
    has_torch: bool = False
    """Whether the torch learner trains them (``tests/backends/test_torch_learner_families.py``)."""


_QWEN3_NEXT: Final = (
    "three of four layers are gated delta nets, the fourth has a gate on attention's output, and shared experts have a "
    "gate",
    "megatron-core's gated delta net, whose kernels are for GPUs, and one of ours to compare it with; rules for those "
    "tensors; packed sequences and context parallelism through its recurrent state",
)
_QWEN35: Final = Unbuilt("Qwen3.5", *_QWEN3_NEXT)
_MIMO: Final = (
    "sliding windows in most layers with sinks in their softmax, and values narrower than keys",
    "windows and sinks by layer in the attention of packed sequences, on GPUs and in ours for the CPU",
)

UNBUILT: Final[dict[str, Unbuilt]] = {
    "qwen3_next": Unbuilt("Qwen3-Next", *_QWEN3_NEXT),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN35),
    "minimax_m2": Unbuilt(
        "MiniMax-M2",
        "norms of queries and keys over all heads together, a sigmoid router without shared experts or groups, and "
        "experts named w1, w2, w3",
        "a norm whose sum runs over the tensor-parallel ranks, and a table of its names",
        has_torch=True,
    ),
    "mimo": Unbuilt(
        "MiMo-7B",
        "a Qwen2 whose own code comes with the checkpoint, so that there is nothing in transformers to compare it with",
        "a copy whose config.json says qwen2 and Qwen2ForCausalLM, with which it is one",
    ),
    **dict.fromkeys(("mimo_v2", "mimo_v2_flash"), Unbuilt("MiMo-V2-Flash", *_MIMO)),
    "gpt_oss": Unbuilt(
        "GPT-OSS",
        "sinks in the softmax, windows in every second layer, biases of attention, router and experts, a clamped gate, "
        "and experts in MXFP4",
        "attention with sinks and windows, biases and the gate in the grouped experts, and a reader of MXFP4 blocks",
    ),
}
"""By ``model_type`` of ``config.json``."""


def why_unbuilt(model_type: str, built: str) -> str:
    """One sentence about a ``model_type`` that no family has; ``built`` names those that are there."""
    found = UNBUILT.get(model_type)
    if found is None:
        return (
            f"the Megatron learner has no family for model_type '{model_type}'; there are {built}. Use "
            "learner.backend: torch, which takes decoders of transformers and refuses those that cannot be packed"
        )
    story = (
        f"{found.models} (model_type '{model_type}') is not built for the Megatron learner, which has {built}. "
        f"Missing: {found.missing}. It would take: {found.takes}"
    )
    return f"{story}. Use learner.backend: torch, which has it" if found.has_torch else story
