"""What a scenario may say about megatron-core's experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.backends.learners.megatron.layout.config_fields import ConfigFieldError
from penstock.backends.learners.megatron.layout.moe_options import check_experts, given_losses
from penstock.backends.learners.megatron_options import MegatronOptions

if TYPE_CHECKING:
    from penstock.backends.learners.megatron_options import ConfigValue

KIND, COEFFICIENT = "moe_router_load_balancing_type", "moe_aux_loss_coeff"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {KIND: "none"},
        {"moe_enable_deepep": True, "moe_token_dispatcher_type": "flex"},
        {KIND: "seq_aux_loss", COEFFICIENT: 0.01, "moe_z_loss_coeff": 0.001},
        {KIND: ["seq_aux_loss", "global_aux_loss"], COEFFICIENT: [0.01, 0.02]},
    ],
)
def test_losses_with_a_coefficient_each_are_taken(fields: dict[str, ConfigValue]) -> None:
    check_experts(MegatronOptions(transformer=fields))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({KIND: "sinkhorn"}, "'sinkhorn' is not possible here: the learner would choose other experts"),
        ({KIND: "aux_loss"}, "aux_loss does nothing without a moe_aux_loss_coeff above 0"),
        ({COEFFICIENT: 0.1}, "does nothing with moe_router_load_balancing_type: none"),
        ({KIND: ["aux_loss"], COEFFICIENT: 0.1}, "is a list where moe_aux_loss_coeff is one"),
        ({KIND: ["aux_loss", "seq_aux_loss"], COEFFICIENT: [0.1]}, "needs a coefficient"),
        ({KIND: ["aux_loss", "aux_loss"], COEFFICIENT: [0.1, 0.2]}, "each once"),
        ({"moe_expert_capacity_factor": 1.0}, "the learner would choose other experts than the engine"),
        ({"moe_input_jitter_eps": 0.1}, "the learner would choose other experts than the engine"),
        ({"moe_enable_deepep": True, "moe_token_dispatcher_type": "alltoall"}, "moe_token_dispatcher_type: flex only"),
        ({"moe_enable_routing_replay": True}, "use learner.megatron.router_replay"),
    ],
)
def test_what_would_do_something_else_or_nothing_is_refused(fields: dict[str, ConfigValue], text: str) -> None:
    with pytest.raises(ConfigFieldError, match=text.replace("(", r"\(")):
        check_experts(MegatronOptions(transformer=fields))


def test_a_fused_choice_cannot_be_replayed() -> None:
    with pytest.raises(ConfigFieldError, match="moe_router_fusion"):
        check_experts(MegatronOptions(router_replay=True, transformer={"moe_router_fusion": True}))


def test_losses_that_are_switched_off_are_not_given() -> None:
    off: dict[str, ConfigValue] = {KIND: "none", COEFFICIENT: 0.0, "moe_z_loss_coeff": None}
    assert given_losses(MegatronOptions(transformer=off)) == []
    assert given_losses(MegatronOptions(transformer={"moe_z_loss_coeff": 0.1})) == ["moe_z_loss_coeff"]
