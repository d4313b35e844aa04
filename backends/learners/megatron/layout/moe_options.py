"""Which fields of megatron-core's experts a scenario may set, and which go together.

Invariants:

* What would make the learner choose otherwise than the engine does is refused, and so is what megatron-core would take
  and then do nothing with.
* Nothing here imports megatron-core or torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.learners.megatron.layout.config_fields import KEY, ConfigFieldError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.backends.learners.megatron_options import ConfigValue, MegatronOptions

KIND: Final = "moe_router_load_balancing_type"
COEFFICIENT: Final = "moe_aux_loss_coeff"
Z_LOSS: Final = "moe_z_loss_coeff"
LOSS_FIELDS: Final = (KIND, COEFFICIENT, Z_LOSS)
KINDS: Final = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
_OTHER_CHOICES: Final = "the learner would choose other experts than the engine"
_REFUSED: Final[Mapping[str, str]] = {
    "moe_expert_capacity_factor": _OTHER_CHOICES,
    "moe_pad_expert_input_to_capacity": "it is for moe_expert_capacity_factor, with which " + _OTHER_CHOICES,
    "moe_token_drop_policy": "it is for moe_expert_capacity_factor, with which " + _OTHER_CHOICES,
    "moe_input_jitter_eps": _OTHER_CHOICES,
    "moe_router_force_load_balancing": _OTHER_CHOICES,
    "moe_enable_routing_replay": f"use {KEY}.router_replay",
}


def check_experts(options: MegatronOptions) -> None:
    """Check what a scenario says about experts.

    Raises:
        ConfigFieldError: the first thing that is wrong.
    """
    if problem := next(_problems(options), None):
        raise ConfigFieldError("transformer", *problem)


def given_losses(options: MegatronOptions) -> list[str]:
    """Fields of auxiliary losses that are set to something."""
    return [name for name in LOSS_FIELDS if options.transformer.get(name) not in (None, "none", 0, 0.0)]


def _problems(options: MegatronOptions) -> Iterator[tuple[str, str]]:
    given = options.transformer
    for name, reason in _REFUSED.items():
        if given.get(name) not in (None, False):
            yield name, f"cannot be set: {reason}"
    if given.get("moe_enable_deepep") and given.get("moe_token_dispatcher_type") != "flex":
        yield "moe_enable_deepep", "megatron-core takes it with moe_token_dispatcher_type: flex only; set that as well"
    if options.router_replay and given.get("moe_router_fusion"):
        yield "moe_router_fusion", f"its kernel takes no choice of experts, which {KEY}.router_replay gives; remove it"
    yield from _loss_problems(given.get(KIND, "none"), given.get(COEFFICIENT, 0.0))


def _loss_problems(kinds: ConfigValue, coefficients: ConfigValue) -> Iterator[tuple[str, str]]:
    if isinstance(kinds, list) != isinstance(coefficients, list):
        yield KIND, f"is a list where {COEFFICIENT} is one, with as many items; found {kinds} and {coefficients}"
        return
    named = kinds if isinstance(kinds, list) else [kinds]
    values = coefficients if isinstance(coefficients, list) else [coefficients]
    if len(named) != len(values) or len({str(name) for name in named}) != len(named):
        yield KIND, f"needs a coefficient in {COEFFICIENT} for each, and each once; found {kinds} and {coefficients}"
        return
    for name, value in zip(named, values, strict=True):
        if name not in KINDS:
            yield KIND, f"'{name}' is not possible here: {_OTHER_CHOICES}; there are {', '.join(KINDS)}"
        elif name == "none" and value:
            yield COEFFICIENT, f"does nothing with {KIND}: none; set that to one of {', '.join(KINDS[1:])}"
        elif name != "none" and not value:
            yield KIND, f"{name} does nothing without a {COEFFICIENT} above 0"
