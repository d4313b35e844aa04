"""What ``learner.lora`` cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.engines.spec import some_can
from penstock.backends.learners.spec import is_modelled
from penstock.backends.protocol import Capability
from penstock.backends.weights.spec import AUTO, TRANSPORTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


def lora_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """Rules that are broken: the key to change, and the reason."""
    if s.learner.lora is None:
        return
    if is_modelled(s.learner):
        yield ("learner", "lora"), "a simulated learner has no weights to adapt; remove the block"
    if s.learner.lora.publish == "adapter":
        yield from _published_alone(s)
    if s.learner.objective.critic == "own":
        yield (
            ("learner", "objective", "critic"),
            "own would train a whole second model beside the adapters of learner.lora; set critic: shared, which adds "
            "a head to the adapted model, or remove learner.lora",
        )
    if s.learner.num_ranks > 1 and s.learner.parallel == "fsdp" and s.engines.placement == "colocate":
        yield (
            ("learner", "parallel"),
            "a checkpoint of a learner that sleeps is put together from what lies on the host, and adapters cannot be "
            "added to shares of a matrix there; set learner.parallel: ddp with learner.lora and engines.placement: "
            "colocate, or learner.num_ranks: 1",
        )
    if s.learner.objective.reference_every is not None:
        yield (
            ("learner", "objective", "reference_every"),
            "the reference of learner.lora is the model without its adapters, which takes no second copy and cannot "
            "move; remove one of them",
        )


def _published_alone(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """What adapters that are published as such cannot be combined with; engines that cannot take them say so."""
    publish: KeyPath = ("learner", "lora", "publish")
    if not some_can(s.engines, Capability.HOLDS_WEIGHTS):
        yield publish, f"{s.engines.backend} engines hold no weights that adapters could be beside; remove it"
        return
    transport = s.weights.transport
    if transport != AUTO and not TRANSPORTS.spec(transport).keeps_bases:
        kept = " or ".join(TRANSPORTS.having(lambda spec: spec.keeps_bases))
        yield (
            ("weights", "transport"),
            f"{transport} does not keep the model that adapters belong to (learner.lora.publish: adapter); set it to "
            f"{AUTO}, or to {kept}",
        )
    if s.weights.names_function is not None:
        yield (
            ("weights", "names_function"),
            "names whole weights, and learner.lora.publish: adapter sends what stands beside them; remove one of them",
        )
    if s.engines.quantization is not None:
        yield (
            publish,
            "engines with engines.quantization compute with a model in FP8, which is quantized anew from each version "
            "with its adapters added in; set it to merged",
        )
