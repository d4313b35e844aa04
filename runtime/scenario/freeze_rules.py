"""What ``learner.freeze`` and ``learner.train_only`` cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.learners.spec import is_modelled
from penstock.backends.learners.training.freezing import wrong_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


def freeze_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """Rules that are broken: the key to change, and the reason."""
    learner = s.learner
    for key, patterns in (("freeze", learner.freeze), ("train_only", learner.train_only)):
        if not patterns:
            continue
        if is_modelled(learner):
            yield ("learner", key), "a simulated learner has no weights to freeze; remove it"
        if learner.lora is not None:
            yield (
                ("learner", key),
                "learner.lora trains adapters and none of the weights; choose their matrices by "
                "learner.lora.target_modules, and remove this",
            )
        for pattern in patterns:
            if reason := wrong_pattern(pattern):
                yield ("learner", key), reason
    if learner.freeze and learner.train_only:
        yield ("learner", "train_only"), "says what learner.freeze says, the other way round; remove one of them"
