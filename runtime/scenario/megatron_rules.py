"""What ``learner.backend: megatron`` can be combined with, and how the model can be divided. Needs neither torch nor
megatron-core.

The layout is checked against the model wherever its ``config.json`` or a copy of it is here; on a machine that has
neither it is the learner's ranks that refuse it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.options import take_turns
from penstock.backends.learners.megatron.bridge.architecture import NoMtpLayersError
from penstock.backends.learners.megatron.layout.config_fields import ConfigFieldError, check_config_fields
from penstock.backends.learners.megatron.layout.fp8_options import check_fp8
from penstock.backends.learners.megatron.layout.layout import LayoutError, check_layout, layout_of
from penstock.backends.learners.megatron.layout.model_config import with_options
from penstock.backends.learners.megatron.layout.moe_options import check_experts, given_losses
from penstock.backends.learners.megatron.layout.offload_options import check_cpu_offload, check_sleep
from penstock.backends.learners.megatron_options import MegatronOptions
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.spec import LEARNERS
from penstock.messages.errors import UserFault
from penstock.runtime.scenario.architecture import UnreadableModelError, find_architecture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.backends.learners.megatron.layout.layout import Layout
    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

Broken = tuple["KeyPath", str]
KEY: Final[KeyPath] = ("learner", "megatron")
BACKEND: Final[KeyPath] = ("learner", "backend")
TORCH_ONLY: Final = {
    "parallel": "weights are divided by learner.megatron, and what the optimizer keeps over data-parallel ranks by its "
    "distributed_optimizer",
    "compile": "kernels are Transformer Engine's and what learner.megatron.transformer fuses",
    "activation_checkpointing": "set learner.megatron.recompute: full, which does the same",
    "cpu_offload": "set learner.megatron.optimizer: {optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0} "
    "with precision: bfloat16, which keeps what the optimizer keeps on the host",
    "lora": "it trains all weights; adapters are for learner.backend: torch",
}
"""Keys of the torch learner, each with what there is in its place."""


def megatron_rules(s: Scenario) -> Iterator[Broken]:
    """See :mod:`penstock.runtime.scenario.rules`."""
    learner = s.learner
    if not LEARNERS.spec(learner.backend).has_layout:
        if learner.megatron != MegatronOptions():
            yield KEY, f"has no effect with learner.backend: {learner.backend}; set it to megatron, or remove the block"
        return
    yield from _keys(learner)
    yield from _precision(s)
    yield from _fields(s)
    yield from _overlaps(learner.megatron)
    yield from _replay(s)
    yield from _model(s)


def _precision(s: Scenario) -> Iterator[Broken]:
    options = s.learner.megatron
    precision = options.precision or s.model.dtype
    if precision != "float32" and s.learner.objective.critic == "own" and not options.distributed_optimizer:
        yield (
            (*KEY, "distributed_optimizer"),
            f"a critic of its own has a float32 head on a trunk in {precision}, which megatron-core's other optimizer "
            "cannot save; set it to true",
        )
    if precision != "float16":
        return
    for name in ("check_for_nan_in_grad", "check_for_large_grads"):
        if options.ddp.get(name):
            yield (
                (*KEY, "ddp", name),
                "would end the run at the first gradient that overflows float16, which the loss scale follows; remove "
                "it",
            )


def _keys(learner: LearnerOptions) -> Iterator[Broken]:
    defaults = LearnerOptions()
    for key, instead in TORCH_ONLY.items():
        if getattr(learner, key) != getattr(defaults, key):
            yield ("learner", key), f"is a key of learner.backend: torch; with megatron {instead}; remove it"
    if learner.device not in ("auto", "cpu", "cuda"):
        yield (
            ("learner", "device"),
            f"{learner.device} is one device of this machine, and ranks take those that the run gives them; set it to "
            "cuda, auto or cpu",
        )


def _fields(s: Scenario) -> Iterator[Broken]:
    """With ``auto`` it is seen on the machine itself whether ranks talk over gloo."""
    options, is_cpu = s.learner.megatron, s.learner.device == "cpu"
    try:
        check_config_fields(options, is_cpu=is_cpu)
        check_experts(options)
        check_fp8(options, precision=options.precision or s.model.dtype, is_cpu=is_cpu)
        check_cpu_offload(options, precision=options.precision or s.model.dtype, is_cpu=is_cpu)
        if take_turns(s.engines) and not is_cpu:
            check_sleep(options)
    except ConfigFieldError as error:
        yield (*KEY, error.section, error.name), error.text
    except UserFault as error:
        yield KEY, str(error)


def _overlaps(options: MegatronOptions) -> Iterator[Broken]:
    if not options.overlap_param_gather:
        return
    for key, given in (
        ("distributed_optimizer", options.distributed_optimizer),
        ("overlap_grad_reduce", options.overlap_grad_reduce),
    ):
        if not given:
            yield (
                (*KEY, "overlap_param_gather"),
                f"needs learner.megatron.{key}: true; set it, or set overlap_param_gather to false",
            )


def _replay(s: Scenario) -> Iterator[Broken]:
    if s.learner.megatron.router_replay and not s.engines.record_experts:
        yield (*KEY, "router_replay"), "needs engines.record_experts: true, as nothing would be recorded without it"


def _experts(s: Scenario, architecture: Architecture) -> Iterator[Broken]:
    if architecture.experts is not None:
        return
    for name in given_losses(s.learner.megatron):
        yield (*KEY, "transformer", name), f"is for a model with experts, and {architecture.family.model_type} has none"
    if s.learner.megatron.router_replay:
        yield (*KEY, "router_replay"), f"is for a model with experts, and {architecture.family.model_type} has none"


def _parts(learner: LearnerOptions) -> list[tuple[str, int]]:
    """How many ranks divide a model among them, each after whose they are."""
    num_critics = learner.critic_ranks
    if not 0 < num_critics < learner.num_ranks:  # another rule's to say
        return [("", learner.num_ranks)]
    return [("of the policy", learner.num_ranks - num_critics), ("of the critic (learner.critic_ranks)", num_critics)]


def _check_part(whose: str, layout: Layout, architecture: Architecture, options: MegatronOptions) -> None:
    """
    Raises:
        LayoutError: these ranks cannot divide the model so.
    """
    try:
        check_layout(layout, architecture, options.transformer)
    except LayoutError as error:
        raise LayoutError(f"ranks {whose}: {error}" if whose else str(error)) from error


def _model(s: Scenario) -> Iterator[Broken]:
    learner = s.learner
    try:
        found = find_architecture(s)
        if found is None:
            return
        architecture = with_options(found.architecture, learner.megatron)
        for whose, num_ranks in _parts(learner):
            _check_part(whose, layout_of(learner.megatron, num_ranks), architecture, learner.megatron)
    except UnreadableModelError as error:
        yield error.key, error.text
    except NoMtpLayersError as error:
        yield (*KEY, "mtp"), error.text
    except LayoutError as error:
        yield KEY, str(error)
    except UserFault as error:
        yield BACKEND, str(error)
    else:
        yield from _experts(s, found.architecture)
