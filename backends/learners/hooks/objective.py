"""The hooks of ``learner.objective``: advantages, reduction, importance weights."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, cast

import torch

from penstock.backends.learners.hooks.protocols import ImportanceWeights
from penstock.backends.processes.hook_calling import Hook, checked_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.hooks.protocols import AdvantageInput, ImportanceInput, ReductionInput
    from penstock.backends.learners.options import ObjectiveOptions

ADVANTAGE: Final = "learner.objective.advantage_function"
REDUCTION: Final = "learner.objective.reduction_function"
IMPORTANCE: Final = "learner.objective.importance_function"


@cache
def hook_at(spec: str, key: str) -> Hook[object]:
    """The function that a scenario names under a key.

    Raises:
        UserCodeError: it cannot be loaded.
    """
    return Hook(spec, key)


def load_objective_hooks(options: ObjectiveOptions) -> None:
    """Load all that there are, so that what is wrong with a file is told before anything is trained.

    Raises:
        UserCodeError: one cannot be loaded.
    """
    for spec, key in (
        (options.advantage_function, ADVANTAGE),
        (options.reduction_function, REDUCTION),
        (options.importance_function, IMPORTANCE),
    ):
        if spec is not None:
            hook_at(spec, key)


def advantages_by(spec: str, given: AdvantageInput, options: ObjectiveOptions) -> Tensor:
    """What the user's function makes of the rewards of a batch: float64 ``[N]``.

    Raises:
        UserCodeError: it failed, or returned something else.
    """
    hook = hook_at(spec, ADVANTAGE)
    returned = hook(given, options)
    return checked_tensor(hook, returned, count=len(given.positions), axis="trained tokens").cpu().double()


def reduction_by(spec: str, given: ReductionInput, options: ObjectiveOptions) -> Tensor:
    """The weight of each token of a sample, by the user's function: float32 ``[S]``.

    Raises:
        UserCodeError: it failed, or returned something else.
    """
    hook = hook_at(spec, REDUCTION)
    return checked_weights(hook, hook(given, options), len(given.tokens_per_sample)).cpu().float()


def importance_by(spec: str, given: ImportanceInput, options: ObjectiveOptions) -> ImportanceWeights:
    """The factor of each token's loss, by the user's function; float32, on the device of what it is given. A step
    without tokens on this rank needs none.

    Raises:
        UserCodeError: it failed, or returned something else.
    """
    count = len(given.logprobs)
    if not count:
        return ImportanceWeights(torch.zeros_like(given.logprobs), {})
    hook = hook_at(spec, IMPORTANCE)
    weights, values = checked_importance(hook, hook(given, options), count)
    return ImportanceWeights(
        weights.to(given.logprobs), {name: value.to(given.logprobs) for name, value in values.items()}
    )


def checked_weights(hook: Hook[object], returned: object, count: int) -> Tensor:
    """What a reduction returned for so many samples.

    Raises:
        UserCodeError: it is something else than weights.
    """
    return checked_tensor(hook, returned, count=count, axis="samples of the step", least=0.0)


def checked_importance(hook: Hook[object], returned: object, count: int) -> ImportanceWeights:
    """What a function for importance weights returned for so many tokens.

    Raises:
        UserCodeError: it is something else than weights, and figures by name.
    """
    given = returned if isinstance(returned, ImportanceWeights) else ImportanceWeights(cast("Tensor", returned), {})
    checked = checked_tensor(hook, given.weights, count=count, axis="trained tokens", least=0.0)
    values: dict[str, Tensor] = {}
    for name, value in given.figures.items():
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]  # of the user's
            raise hook.fault(f"returned a figure with the name {name!r}; expected text, such as 'train/my_weight'")
        values[name] = checked_tensor(hook, value, count=count, axis=f"trained tokens, of '{name}'")
    return ImportanceWeights(checked, values)
