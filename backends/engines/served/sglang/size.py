"""How many GPUs a server takes, and over how many nodes it may lie, read from its options alone. Pure.

A server of the pinned version starts one process for each of ``tp_size × pp_size`` ranks, and ``dp_size`` such sets
of them. Attention data parallelism (``attn_dp_size``, or ``dp_size`` with ``enable_dp_attention``), context, expert and
MoE parallelism all run inside the tensor-parallel ranks and take no GPU more. Over several nodes the ranks are divided
evenly, whole pipeline stages first; several sets (``dp_size``) stay on one node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.spec import EngineSize
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.engines.options import OptionValue

_NAMES: Final = {
    "tp_size": ("tp_size", "tensor_parallel_size"),
    "pp_size": ("pp_size", "pipeline_parallel_size"),
    "dp_size": ("dp_size", "data_parallel_size"),
    "attn_dp_size": ("attn_dp_size", "attention_data_parallel_size"),
    "nnodes": ("nnodes",),
}
"""The server's own names of an option, the first being its usual one."""


def engine_size(options: Mapping[str, OptionValue]) -> EngineSize:
    """GPUs and nodes of a server with these options.

    Raises:
        UserFault: an option is no positive number, or ``nnodes`` does not divide the ranks.
    """
    tp, pp, dp = (_number(options, name) for name in ("tp_size", "pp_size", "dp_size"))
    if options.get("enable_dp_attention") is True and _number(options, "attn_dp_size") == 1:
        dp = 1
    num_gpus = tp * pp * dp
    counts = tuple(count for count in range(1, tp * pp + 1) if _divides(count, tp, pp) and (count == 1 or dp == 1))
    if (asked := _given(options, "nnodes")) is None:
        return EngineSize(num_gpus, counts)
    num_nodes = _number(options, "nnodes")
    if num_nodes not in counts:
        sets = f" × dp_size {dp}, whose sets stay on one node," if dp > 1 else ""
        raise UserFault(
            f"nnodes: tp_size {tp} × pp_size {pp}{sets} cannot be divided over {asked} nodes; "
            f"set it to {' or '.join(map(str, counts))}"
        )
    return EngineSize(num_gpus, (num_nodes,))


def _divides(num_nodes: int, tp: int, pp: int) -> bool:
    """Whole pipeline stages on each node, or each stage over the same whole number of nodes."""
    if num_nodes <= pp:
        return pp % num_nodes == 0
    return num_nodes % pp == 0 and tp % (num_nodes // pp) == 0


def _given(options: Mapping[str, OptionValue], name: str) -> OptionValue:
    return next((options[known] for known in _NAMES[name] if known in options), None)


def _number(options: Mapping[str, OptionValue], name: str) -> int:
    value = _given(options, name)
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserFault(f"{name}: must be a whole number, at least 1; found {value!r}")
    return value
