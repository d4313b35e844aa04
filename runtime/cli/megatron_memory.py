"""What a rank of a Megatron learner needs, as a dry run prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.learners.megatron.layout.layout import layout_of
from penstock.runtime.cli.tables import aligned, bytes_text
from penstock.runtime.preflight.gpu_memory import DEFAULT_GPU_GB, GB, megatron_stages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.backends.learners.megatron.layout.layout import Layout
    from penstock.backends.learners.megatron.layout.memory import MemoryEstimate
    from penstock.runtime.preflight.gpu_memory import LearnerPart
    from penstock.runtime.run.node_plan import NodePlan
    from penstock.runtime.scenario import Scenario

UNCOUNTED: Final = 0.1
"""What libraries, and the gaps between blocks, take besides: a rule of thumb, of the estimate."""


def memory_lines(
    scenario: Scenario, architecture: Architecture, ranks: LearnerPart, nodes: NodePlan | None, gpu_gb: float | None
) -> Iterator[str]:
    """The estimate for the fullest of some ranks, part by part, against the memory of a GPU."""
    learner = scenario.learner
    layout = layout_of(learner.megatron, ranks.num_ranks)
    precision = learner.megatron.precision or scenario.model.dtype
    tokens = max(learner.max_tokens_per_micro_batch, scenario.model.max_context)
    stages = megatron_stages(scenario, architecture, ranks)
    fullest = max(stages, key=lambda estimate: estimate.total)
    of_stage = f" (one of stage {fullest.stage})" if layout.pipeline > 1 else ""
    yield f"memory: the fullest rank{ranks.whose}{of_stage}, with micro-batches of {tokens} tokens"
    parts = _parts(scenario, layout, fullest, precision)
    rows = [(f"  {name}", bytes_text(size), note) for name, size, note in parts if size]
    has_gpu = nodes is not None or gpu_gb is not None
    rows.append(("  in all", bytes_text(fullest.total), _of_gpu(fullest.total, gpu_gb) if has_gpu else ""))
    yield from aligned(rows)
    if has_gpu:
        yield from _advice(scenario, layout, fullest, gpu_gb or DEFAULT_GPU_GB)
    else:
        per_stage = layout.ranks_per_stage
        size = bytes_text(sum(stage.total for stage in stages) * per_stage)
        yield f"  {size} of this machine for all ranks{ranks.whose}"


def _parts(scenario: Scenario, layout: Layout, found: MemoryEstimate, precision: str) -> Iterator[tuple[str, int, str]]:
    options = scenario.learner.megatron
    over = layout.data * layout.context if options.distributed_optimizer else 1
    kept = "moments" if precision == "float32" else "float32 weights and moments"
    shared = f", divided over {over} ranks" if over > 1 else ""
    if layout.expert_data != over and options.distributed_optimizer and (layout.expert > 1 or layout.expert_data > 1):
        shared += f" (of experts over {layout.expert_data})" if layout.expert * layout.expert_tensor > 1 else ""
    yield "weights", found.weights, precision
    yield "gradients", found.gradients, "float32" if options.ddp.get("grad_reduce_in_fp32", True) else precision
    yield "optimizer", found.optimizer, kept + shared
    yield "reference", found.reference, "the policy as it was, for the KL"
    yield "critic", found.critic, "its weights, gradients and optimizer"
    yield "activations", found.activations, "" if options.recompute == "none" else f"recompute: {options.recompute}"
    yield "logits", found.logits, "of one micro-batch"
    yield "on the host", found.on_host, "of the optimizer; not in the sum"


def _of_gpu(total: int, gpu_gb: float | None) -> str:
    gb = gpu_gb or DEFAULT_GPU_GB
    how = "" if gpu_gb else " (--gpu-memory)"
    return f"{total / (gb * GB):.0%} of a GPU's {gb:g} GB{how}"


def _advice(scenario: Scenario, layout: Layout, found: MemoryEstimate, gpu_gb: float) -> Iterator[str]:
    share = found.total / (gpu_gb * GB)
    if share * (1 + UNCOUNTED) <= 1:
        return
    verdict = "does not fit" if share > 1 else "tight: libraries and gaps take about a tenth more"
    options = scenario.learner.megatron
    tries: list[str] = []
    if found.activations > found.total / 4 and options.recompute != "full":
        tries.append("recompute: full")
    if found.logits > found.total / 8 or (found.activations > found.total / 4 and options.recompute == "full"):
        tries.append("a smaller max_tokens_per_micro_batch, or a larger context_parallel or tensor_parallel")
    if found.optimizer + found.critic > found.total / 4 and not options.optimizer.get("optimizer_cpu_offload"):
        tries.append("more ranks, or optimizer_cpu_offload")
    if not tries or found.weights + found.gradients > found.total / 2:
        tries.append("a larger tensor_parallel, pipeline_parallel or expert_parallel")
    yield f"  {verdict}; what helps here: {'; '.join(tries)}"
