"""Tensor parallelism: neighbouring ranks compute with a model together, by the plan that transformers ships with it.

Each of them has some heads of attention, some columns of the matrices between, and some of the vocabulary. What a block
makes of its input is added up over them twice, in each direction; between, all have the same numbers. The logits are
brought together, so that each has those of the whole vocabulary (``[T, V]`` of a micro-batch).

Invariants:

* Ranks of a group run the same micro-batches, and find the same log-probs and figures, to the bit.
* A weight that the plan does not name is the same on all of them, as is its gradient.
* Tied weights stay one.
* A plan is followed as a whole or the model is refused.
"""

# torch and transformers are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from transformers import PreTrainedModel
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

STYLES: Final[Mapping[str, int | None]] = {
    "colwise": 0,
    "colwise_gather_output": 0,
    "colwise_rep": 0,
    "embedding_rowwise": 0,
    "rowwise": 1,
    "rowwise_split_input": 1,
    "rowwise_rep": 1,
    "replicated_with_grad_allreduce": None,
    "replicate": None,
}
"""Of transformers, and the dimension along which each divides a matrix; None: it does not."""
PROJECTIONS: Final = ("q_proj", "k_proj", "qkv_proj", "query_key_value")
"""What attention's heads come from."""
KEY: Final = "learner.tensor_parallel"


def plan_of(root: nn.Module, size: int) -> dict[str, str]:
    """Module or parameter → how it is divided, a parameter before its module; nothing for what is no model of
    transformers, such as a critic's head.

    Raises:
        UserFault: there is no plan, or it cannot be followed.
    """
    if not isinstance(root, PreTrainedModel):
        return {}
    rules, kind, plan = root.tp_plan or {}, type(root).__name__, dict[str, str]()
    if getattr(root.config, "vision_config", None) is not None:
        raise UserFault(f"{KEY}: {size}, and {kind} sees images, which ranks do not look at together; set it to 1")
    for name, module in root.named_modules():
        style = rules.get(replace_layer_number_by_wildcard(name))
        for weight, _ in module.named_parameters(recurse=False):
            path = f"{name}.{weight}" if name else weight
            own = rules.get(replace_layer_number_by_wildcard(path), style)
            if own is not None:
                plan[path] = own
        if style is not None:
            plan[name] = style
    if not any(".layers." in f".{name}" for name in plan):
        raise UserFault(
            f"{KEY}: {size}, and transformers ships no plan by which {kind} could be divided so; set it to 1, and "
            "share the weights out over more ranks (learner.num_ranks, with learner.parallel: fsdp)"
        )
    unknown = {name: style for name, style in plan.items() if style not in STYLES}
    if unknown:
        name, style = next(iter(unknown.items()))
        raise UserFault(
            f"{KEY}: {size}, and the plan of {kind} divides {name} in a way ({style}) that the torch learner does not "
            "follow, as for experts; set it to 1, or learner.backend: megatron"
        )
    _check_heads(root, plan, size)
    return plan


def _check_heads(root: PreTrainedModel, plan: Mapping[str, str], size: int) -> None:
    if not any(style == "colwise" and name.endswith(PROJECTIONS) for name, style in plan.items()):
        return  # all ranks have all heads
    config = root.config.get_text_config()
    heads = {"attention heads": config.num_attention_heads}
    heads["key-value heads"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for what, count in heads.items():
        if count % size:
            raise UserFault(
                f"{KEY}: {size}, and {type(root).__name__} has {count} {what}, which it does not divide; set it to a "
                f"divisor of {count}"
            )


def divide(root: nn.Module, within: str, plan: dict[str, str], mesh: DeviceMesh) -> None:
    """Give each rank of the mesh its part of a module that all have whole, or without memory.

    Args:
        root: what the names of the plan begin at.
        within: name of a module in it; nothing else is divided. Empty: everything that is left.
        plan: see :func:`plan_of`; what has been done is taken out of it.
        mesh: the ranks that compute together.
    """
    if not plan:
        return
    own = {name: plan.pop(name) for name in list(plan) if not within or f"{name}.".startswith(f"{within}.")}
    shared: dict[int, list[str]] = {}
    for name, weight in root.named_parameters(remove_duplicate=False):
        shared.setdefault(id(weight), []).append(name)
    ties = [names for names in shared.values() if len(names) > 1 and own.keys() & set(names)]
    for first, *others in ties:
        found = {name: STYLES[own[name]] if name in own else None for name in (first, *others)}
        if len(set(found.values())) > 1:
            told = ", ".join(f"{name} ({own.get(name, 'whole')})" for name in found)
            raise UserFault(
                f"{KEY}: the plan of {type(root).__name__} divides one weight in two ways: {told}; set it to 1"
            )
    again = {name for _, *others in ties for name in others}
    apply_tensor_parallelism(root, mesh, {name: style for name, style in own.items() if name not in again})
    for first, *others in ties:
        for name in others:
            module, _, key = name.rpartition(".")
            root.get_submodule(module).register_parameter(key, root.get_parameter(first))
