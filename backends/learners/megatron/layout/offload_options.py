"""Which options of megatron-core go with a learner that sleeps, and with an optimizer that is partly on the host.

Invariants:

* What megatron-core would take and then do nothing with is refused, with the key that is missing.
* Nothing here imports megatron-core or torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.learners.megatron.layout.config_fields import KEY, ConfigFieldError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.backends.learners.megatron.layout.config_fields import Section
    from penstock.backends.learners.megatron_options import ConfigValue, MegatronOptions

OFFLOAD: Final = "optimizer_cpu_offload"
FRACTION: Final = "optimizer_offload_fraction"
PRECISION_AWARE: Final = "use_precision_aware_optimizer"

_ADDRESSES: Final = "it has the addresses of weights or gradients, which come back at others"
_AWAKE_ONLY: Final[Mapping[tuple[Section, str], str]] = {
    ("ddp", "nccl_ub"): _ADDRESSES,
    ("ddp", "use_megatron_fsdp"): "its buffers are not those that are given up",
    ("ddp", "use_custom_fsdp"): "its buffers are not those that are given up",
    ("transformer", "enable_cuda_graph"): _ADDRESSES,
    ("transformer", "external_cuda_graph"): _ADDRESSES,
    ("transformer", "cuda_graph_impl"): _ADDRESSES,
}
"""Fields under which device memory cannot be given up, with the reason."""
_OF_OFFLOAD: Final = (
    FRACTION, "use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads",
    "pin_cpu_params",
)  # fmt: skip
"""Fields that mean something with ``optimizer_cpu_offload`` only."""


def check_sleep(options: MegatronOptions) -> None:
    """Check that a learner can give its device up to engines.

    Raises:
        ConfigFieldError: it could not.
    """
    sections: dict[Section, dict[str, ConfigValue]] = {"ddp": options.ddp, "transformer": options.transformer}
    for (section, name), reason in _AWAKE_ONLY.items():
        if sections[section].get(name) not in (None, False, "none"):
            raise ConfigFieldError(
                section,
                name,
                f"does not go with a learner that sleeps while engines use its devices: {reason}; remove it, or give "
                "learner and engines devices of their own",
            )


def check_cpu_offload(options: MegatronOptions, *, precision: str, is_cpu: bool) -> None:
    """Check what says how much of the optimizer is on the host.

    Args:
        options: of the learner.
        precision: what the model computes in.
        is_cpu: whether there are no GPUs, and so no Transformer Engine.

    Raises:
        ConfigFieldError: it would do nothing, or megatron-core could not train with it.
    """
    if problem := next(_offload_problems(options, precision, is_cpu=is_cpu), None):
        raise ConfigFieldError("optimizer", *problem)


def offloaded_fraction(options: MegatronOptions) -> float:
    """Of what the optimizer keeps, the share that is on the host; of options that were checked."""
    return _number(options.optimizer.get(FRACTION)) if options.optimizer.get(OFFLOAD) else 0.0


def offloads_main_weights(options: MegatronOptions) -> bool:
    """Whether that goes for main weights of a model in bfloat16 too; otherwise these have a second copy there."""
    return bool(options.optimizer.get(PRECISION_AWARE))


def _offload_problems(options: MegatronOptions, precision: str, *, is_cpu: bool) -> Iterator[tuple[str, str]]:
    """Field and text."""
    given = options.optimizer
    if is_cpu and given.get(PRECISION_AWARE):
        yield PRECISION_AWARE, "needs Transformer Engine, which a CPU does not have; remove it"
    if not given.get(OFFLOAD):
        for name in _OF_OFFLOAD:
            if name in given:
                yield name, f"does nothing without {KEY}.optimizer.{OFFLOAD}: true"
        return
    fraction = offloaded_fraction(options)
    if not 0.0 < fraction <= 1.0:
        yield (
            OFFLOAD,
            f"does nothing without {KEY}.optimizer.{FRACTION} above 0 and at most 1, the share of the optimizer that "
            f"is moved to the host; found {fraction:g}",
        )
    if not options.distributed_optimizer:
        yield OFFLOAD, f"megatron-core trains with it only if {KEY}.distributed_optimizer is true"
    if precision != "bfloat16":
        yield OFFLOAD, f"megatron-core trains with it only if {KEY}.precision is bfloat16; found {precision}"
    if given.get("decoupled_weight_decay") is False:
        yield OFFLOAD, f"needs AdamW; remove {KEY}.optimizer.decoupled_weight_decay: false"
    if given.get("use_torch_optimizer_for_cpu_offload"):
        yield "use_torch_optimizer_for_cpu_offload", "megatron-core does nothing with it for AdamW; remove it"
    if given.get("pin_cpu_params") is False:
        yield "pin_cpu_params", "megatron-core pins them whatever it says; remove it"


def _number(value: ConfigValue) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
