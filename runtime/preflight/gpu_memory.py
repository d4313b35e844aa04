"""Whether a rank of the learner, and an engine, have room on one GPU, before anything is started.

A rank of the torch learner needs of each weight 16 bytes with ``parallel: fsdp`` (float32 weight, gradient and two
moments, shared out over the ranks); where weights are not shared out and ``model.dtype`` has 16 bits, 2 more for the
copy that computes. Activations, logits, and all of the Megatron learner are counted by
:mod:`~penstock.backends.learners.megatron.layout.memory`; the layers of transformers keep twice as much unless they are
compiled, and logits are kept in float32 as well. SGLang's servers have the weights in ``model.dtype``, shared out over
their GPUs, and what ``mem_fraction_static`` leaves for the cache has to hold one sample at least.

Colocated learners and engines are looked at one by one: each sleeps while the other has the GPU. What a learner keeps
then is in the host's memory, without the gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.engines.options import engine_groups
from penstock.backends.engines.spec import ENGINES, ONE_GPU
from penstock.backends.engines.transport_preflight import model_size_bytes
from penstock.backends.learners.compiling import is_compiled
from penstock.backends.learners.megatron.bridge.weight_map import num_weights
from penstock.backends.learners.megatron.layout.layout import layout_of
from penstock.backends.learners.megatron.layout.memory import WEIGHT_BYTES, Extras, MemoryEstimate, estimate_stages
from penstock.backends.learners.megatron_options import MegatronOptions
from penstock.backends.learners.objectives.validity import needs_reference
from penstock.backends.learners.spec import LEARNERS
from penstock.messages.errors import UserFault
from penstock.runtime.scenario.architecture import UnreadableModelError, find_architecture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.engines.options import EngineGroupOptions
    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.runtime.scenario import Scenario

DEFAULT_GPU_GB: Final = 80.0
GB: Final = 1e9
FRACTION: Final = "mem_fraction_static"
COPIES: Final = ("dp_size", "data_parallel_size", "attn_dp_size", "enable_dp_attention", "moe_dp_size", "quantization")
"""Options of a server under which its GPUs do not share the weights evenly."""
SHARED_WEIGHT_BYTES: Final = 16
"""Weight, gradient and two moments in float32."""
GRADIENT_BYTES: Final = 4
PLAIN_LAYERS: Final = 2
"""Of what fused layers keep: norms keep their input in float32 too, gated units each of their products."""


class LearnerPart(NamedTuple):
    """Ranks of the learner that hold the same."""

    what: str
    num_ranks: int
    has_policy: bool
    has_critic: bool
    key: str
    """How many there are."""

    @property
    def whose(self) -> str:
        """As it follows "rank": empty where all are alike."""
        return self.what.removeprefix("a rank")


class Need(NamedTuple):
    """What one GPU has to hold, or to leave for what it is for."""

    key: str
    size_bytes: float
    what: str
    remedy: str
    share: float = 1.0
    """Of the GPU that it may take."""


def memory_outcome(scenario: Scenario, gpu_gb: float | None, *, ok: str, failed: str, left_out: str) -> str:
    """How the needs compare with the memory of a GPU: of the dry run's option, or of the scenario, or else 80 GB, which
    is said to be assumed and refuses nothing."""
    named = gpu_gb or scenario.runtime.gpu_memory_gb
    try:
        found = find_architecture(scenario)
    except UnreadableModelError as error:
        return f"{left_out}: {error}"
    if found is None:
        return f"{left_out}: {scenario.model.path} is not there, and model.config names no copy of its config.json"
    problems = memory_problems(scenario, found.architecture, named or DEFAULT_GPU_GB)
    if not problems:
        return ok
    story = "; ".join(problems)
    return f"{failed}: {story}" if named else f"{left_out}: runtime.gpu_memory_gb names no memory. With 80 GB: {story}"


def memory_problems(scenario: Scenario, architecture: Architecture, gpu_gb: float) -> list[str]:
    """What does not fit into a GPU of so much memory; each with what to do."""
    return [
        f"{need.key}: {need.what} takes about {need.size_bytes / GB:.3g} GB, and of a GPU's {gpu_gb:g} GB it has "
        f"{need.share * gpu_gb:.3g}; {need.remedy}"
        for need in (*needs_on_gpus(scenario, architecture), *fixed_models(scenario))
        if need.size_bytes > need.share * gpu_gb * GB
    ]


def needs_on_gpus(scenario: Scenario, architecture: Architecture) -> Iterator[Need]:
    """Of a rank of the learner on GPUs, and of a GPU of each kind of SGLang server."""
    learner = scenario.learner
    spec = LEARNERS.spec(learner.backend)
    if learner.device.startswith("cuda") and spec.has_known_memory:
        yield from (_need_of(part, scenario, architecture) for part in learner_parts(scenario))
    for index, group in enumerate(engine_groups(scenario.engines)):
        num_gpus = gpus_of_server(group)
        if num_gpus is not None and group.device.startswith("cuda"):
            width = WEIGHT_BYTES[scenario.model.dtype]
            sample = cache_numbers(architecture, num_gpus) * width * scenario.model.max_context
            fraction = group.sglang.get(FRACTION)
            yield Need(
                f"engines.more[{index - 1}]" if index else "engines",
                weight_bytes(scenario, architecture) / num_gpus + sample,
                "one GPU's share of the weights, with the cache of one sample of model.max_context,",
                f"give a server more GPUs (sglang.tp_size), or a larger {FRACTION}",
                fraction if isinstance(fraction, float) else 1.0,
            )


def _need_of(part: LearnerPart, scenario: Scenario, architecture: Architecture) -> Need:
    if LEARNERS.spec(scenario.learner.backend).has_layout:
        size = float(max(stage.total for stage in megatron_stages(scenario, architecture, part)))
        remedy = f"give it more {part.key}, or divide more with learner.megatron (--dry-run shows the parts)"
        return Need("learner", size, part.what, remedy)
    remedy = (
        f"give it more {part.key}, which share the weights with parallel: fsdp (learner.shard_size: null, or larger), "
        "a larger learner.tensor_parallel, or cpu_offload: true"
    )
    return Need("learner", _torch_rank(scenario, architecture, part), part.what, remedy)


def learner_parts(scenario: Scenario) -> list[LearnerPart]:
    """All of its ranks, or those of the policy and those of the critic."""
    learner, key = scenario.learner, "learner.num_ranks"
    apart, has_critic = learner.critic_ranks, learner.objective.critic == "own"
    if not apart:
        return [LearnerPart("a rank", learner.num_ranks, has_policy=True, has_critic=has_critic, key=key)]
    return [
        LearnerPart("a rank of the policy", learner.num_ranks - apart, has_policy=True, has_critic=False, key=key),
        LearnerPart("a rank of the critic", apart, has_policy=False, has_critic=True, key="learner.critic_ranks"),
    ]


def fixed_models(scenario: Scenario) -> Iterator[Need]:
    """Of a reward model on GPUs: its weights alone, by the headers of its files, where these are there."""
    model = scenario.reward_model
    if model is None or not model.device.startswith("cuda"):
        return
    try:
        size = ENGINES.spec(model.backend).size(model)
        size_bytes = model_size_bytes(Path(model.path), model.dtype) / (size or ONE_GPU).num_gpus
    except UserFault:
        return  # what is wrong with them is told by the checks of this machine
    yield Need("reward_model", size_bytes, "its weights", "take a smaller one, dtype: bfloat16, or a larger tp_size")


def megatron_stages(scenario: Scenario, architecture: Architecture, part: LearnerPart) -> list[MemoryEstimate]:
    """What a rank of each stage of a part of a Megatron learner needs."""
    learner = scenario.learner
    return estimate_stages(
        architecture,
        layout_of(learner.megatron, part.num_ranks),
        learner.megatron,
        precision=learner.megatron.precision or scenario.model.dtype,
        max_tokens=max(learner.max_tokens_per_micro_batch, scenario.model.max_context),
        extras=Extras(
            has_policy=part.has_policy,
            has_reference=part.has_policy and needs_reference(learner.objective),
            has_own_critic=part.has_critic,
        ),
    )


def weight_bytes(scenario: Scenario, architecture: Architecture) -> int:
    """Of the whole model, as engines have it."""
    return WEIGHT_BYTES[scenario.model.dtype] * num_weights(architecture)


def gpus_of_server(group: EngineGroupOptions) -> int | None:
    """GPUs of an engine; None where they do not share the weights evenly, or where it has none that we start."""
    spec = ENGINES.spec(group.backend)
    if "sglang" not in spec.keys or group.device == "cpu" or any(key in group.sglang for key in COPIES):
        return None
    try:
        size = spec.size(group)
    except UserFault:
        return None
    return None if size is None else size.num_gpus


def cache_numbers(architecture: Architecture, num_gpus: int) -> float:
    """Numbers in the cache of a GPU for each token."""
    if architecture.latent is not None:  # every GPU has all of the short vectors
        return architecture.num_layers * (architecture.latent.kv_rank + architecture.latent.rope_dim)
    heads = max(1.0, architecture.num_kv_heads / num_gpus)
    return 2 * architecture.num_layers * heads * architecture.head_dim


def sleeping_bytes(scenario: Scenario, architecture: Architecture) -> float:
    """What all ranks of a learner keep in the host's memory in the turns of engines."""
    learner = scenario.learner
    if LEARNERS.spec(learner.backend).has_layout:
        return float(sum(_asleep(scenario, architecture, part) for part in learner_parts(scenario)))
    asleep = SHARED_WEIGHT_BYTES - GRADIENT_BYTES
    return sum(part.num_ranks * _torch_own(scenario, architecture, asleep, part) for part in learner_parts(scenario))


def _asleep(scenario: Scenario, architecture: Architecture, part: LearnerPart) -> int:
    """Of the Megatron learner."""
    stages = megatron_stages(scenario, architecture, part)
    kept = sum(each.weights + each.optimizer + each.reference + each.critic for each in stages)
    return kept * layout_of(scenario.learner.megatron, part.num_ranks).ranks_per_stage


def _torch_own(scenario: Scenario, architecture: Architecture, weight_bytes: int, part: LearnerPart) -> float:
    learner, dtype = scenario.learner, scenario.model.dtype
    is_shared = part.num_ranks > 1 and learner.parallel == "fsdp"
    of_one = learner.shard_size or max(1, part.num_ranks // learner.tensor_parallel)
    num_shares = of_one * learner.tensor_parallel
    copy = WEIGHT_BYTES[dtype] if dtype != "float32" and not is_shared else 0
    trained = WEIGHT_BYTES[dtype] if learner.lora else weight_bytes + copy
    reference = WEIGHT_BYTES[dtype] if needs_reference(learner.objective) and not learner.lora else 0
    held = (trained + reference) * part.has_policy + (weight_bytes + copy) * part.has_critic
    return num_weights(architecture) * held / (num_shares if is_shared else 1)


def _torch_rank(scenario: Scenario, architecture: Architecture, part: LearnerPart) -> float:
    learner, dtype = scenario.learner, scenario.model.dtype
    own = _torch_own(scenario, architecture, SHARED_WEIGHT_BYTES, part)
    stage, logits = _torch_stage(scenario, architecture)
    logits = logits if part.has_policy else 0
    own = 0 if learner.cpu_offload else own
    if not is_compiled(
        learner, is_on_gpu=True, dtype=dtype, num_weights=num_weights(architecture),
        has_experts=architecture.experts is not None, num_ranks=part.num_ranks,
    ):  # fmt: skip
        return own + PLAIN_LAYERS * stage.activations + logits
    width = WEIGHT_BYTES[dtype]
    return own + stage.activations + logits * width / (width + WEIGHT_BYTES["float32"])


def _torch_stage(scenario: Scenario, architecture: Architecture) -> tuple[MemoryEstimate, int]:
    """What a rank keeps of a micro-batch in its layers, and the logits: ranks that compute together have a part each of
    what attention and the matrices make, all of what lies between, and all logits."""
    learner, num_together = scenario.learner, scenario.learner.tensor_parallel
    max_tokens = max(learner.max_tokens_per_micro_batch, scenario.model.max_context)

    def stage(num_ranks: int) -> MemoryEstimate:
        options = MegatronOptions(
            recompute="full" if learner.activation_checkpointing else "none",
            tensor_parallel=num_ranks,
            sequence_parallel=False,
        )
        [found] = estimate_stages(
            architecture,
            layout_of(options, num_ranks),
            options,
            precision=scenario.model.dtype,
            max_tokens=max_tokens,
        )
        return found

    return stage(num_together), stage(1).logits
