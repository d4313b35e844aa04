"""What rollout in FP8 needs of the rest of a scenario; what it needs of each kind of engine that kind says itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.spec import some_can
from penstock.backends.learners.objectives.spec import loss_of
from penstock.backends.learners.objectives.validity import weighs_tokens
from penstock.backends.protocol import Capability

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

Broken = tuple["KeyPath", str]
KEY: Final[KeyPath] = ("engines", "quantization")
COPY: Final[KeyPath] = ("engines", "fp8_model")


def low_precision_rules(s: Scenario) -> Iterator[Broken]:
    """Rules that are broken: the key to change, and the reason."""
    if s.engines.quantization is None:
        if s.engines.fp8_model is not None:
            yield COPY, "has no effect without engines.quantization: fp8; set that, or remove this one"
        return
    if not some_can(s.engines, Capability.HOLDS_WEIGHTS):
        yield KEY, f"{s.engines.backend} engines hold no weights that could be quantized; remove it"
        return
    if s.learner.true_on_policy:
        yield KEY, "rounds the weights of engines, which are the learner's with learner.true_on_policy; remove it"
    objective = s.learner.objective
    if loss_of(objective).has_ratio and not weighs_tokens(objective):
        yield (
            KEY,
            "engines draw from other weights than the learner trains, and nothing weighs their tokens; set "
            "learner.objective.correction: tis, icepop or mis, or old_logprobs: engine",
        )
