"""The hooks around the training of a batch: rewards and sequences before it, figures before and after it.

Invariants:

* What is trained is what the model made with weights that are recent enough, or less; whatever a conversion says.
* Tokens that a conversion leaves out are counted as masked, so that the books of tokens balance.
"""

# torch.from_numpy and NumPy's tolist are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import torch

from penstock.backends.learners.batch.sequences import TrainSequence
from penstock.backends.learners.hooks.agreement import check_agreement
from penstock.backends.learners.hooks.objective import hook_at
from penstock.backends.learners.hooks.protocols import ConversionInput, GroupRewards, RolloutLog, StepLog
from penstock.backends.learners.hooks.sequence_check import sequence_problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.backends.learners.batch.sequences import TrainBatch
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.backends.processes.hook_calling import Hook
    from penstock.messages.samples import Group, Sample

POSTPROCESS: Final = "learner.objective.postprocess_function"
CONVERSION: Final = "learner.conversion_function"
ROLLOUT_LOG: Final = "learner.rollout_log_function"
STEP_LOG: Final = "learner.step_log_function"


class BatchHooks:
    """Those of one rank."""

    def __init__(self, options: LearnerOptions, workers: WorkerGroup) -> None:
        """
        Raises:
            UserCodeError: one cannot be loaded.
        """
        self._workers = workers
        self._postprocess = _found(options.objective.postprocess_function, POSTPROCESS)
        self._conversion = _found(options.conversion_function, CONVERSION)
        self._rollout_log = _found(options.rollout_log_function, ROLLOUT_LOG)
        self._step_log = _found(options.step_log_function, STEP_LOG)

    def prepared(self, batch: TrainBatch, *, version: int) -> TrainBatch:
        """The batch as it is trained.

        Raises:
            UserCodeError: a hook failed, returned what cannot be used, or not the same on every rank.
        """
        if self._postprocess is not None:
            batch = postprocessed(self._postprocess, batch, version=version)
            check_agreement(
                self._workers, torch.from_numpy(batch.rewards), f"{POSTPROCESS}: the rewards that it returned"
            )
        if self._conversion is not None:
            batch = converted(self._conversion, batch, version=version)
            check_agreement(self._workers, _content(batch), f"{CONVERSION}: the sequences that it returned")
        return batch

    def figures_of(self, batch: TrainBatch) -> dict[str, float]:
        """Of the rewards as they are trained on, where they were changed."""
        rewarded = [place for _, _, places in rewarded_groups(batch) for place in places]
        if self._postprocess is None or not rewarded:
            return {}
        return {"rollout/rewards": float(batch.rewards[rewarded].mean())}

    def log_rollout(self, groups: Sequence[Group], figures: Mapping[str, float], *, version: int) -> dict[str, float]:
        """What the user adds; empty on every rank but the first."""
        if self._rollout_log is None or not self._workers.is_first:
            return {}
        returned = self._rollout_log(RolloutLog(version, tuple(groups), dict(figures)))
        return checked_figures(self._rollout_log, returned, figures)

    def log_step(
        self, groups: Sequence[Group], figures: Mapping[str, float], *, version: int, step_time_s: float
    ) -> dict[str, float]:
        """Likewise, after the training."""
        if self._step_log is None or not self._workers.is_first:
            return {}
        returned = self._step_log(StepLog(version, tuple(groups), dict(figures), step_time_s))
        return checked_figures(self._step_log, returned, figures)


def postprocessed(hook: Hook[object], batch: TrainBatch, *, version: int) -> TrainBatch:
    """The batch with the rewards that the hook makes of each group's.

    Raises:
        UserCodeError: it failed, or returned something else than as many finite numbers.
    """
    rewards = batch.rewards.copy()
    for group, samples, places in rewarded_groups(batch):
        given = tuple(float(reward) for reward in rewards[places])
        returned = hook(GroupRewards(given, samples, group, version))
        rewards[places] = checked_rewards(hook, returned, len(places), group)
    return batch._replace(rewards=rewards)


def converted(hook: Hook[object], batch: TrainBatch, *, version: int) -> TrainBatch:
    """The batch with the sequences that the hook makes of its own.

    Raises:
        UserCodeError: it failed, or returned what cannot be trained.
    """
    samples = _by_number(batch)
    kept: list[TrainSequence] = []
    contexts: dict[bytes, int] = {}
    num_trained = 0
    for sequence in batch.sequences:
        sample, group = samples[sequence.sample]
        assert sample is not None, "a sample that was dropped has no sequence"
        returned = hook(ConversionInput(sequence, sequence.part, sample, group, version))
        own = checked_sequence(hook, returned, sequence, sample)
        if own is None:
            continue
        context = own.tokens[: own.num_context].tobytes()
        number = contexts.setdefault(context, len(contexts))
        kept.append(own._replace(prompt=number, sample=sequence.sample, first=num_trained, part=sequence.part))
        num_trained += len(own.trained)
    num_left_out = batch.num_trained_tokens - num_trained
    return batch._replace(sequences=tuple(kept), num_masked_tokens=batch.num_masked_tokens + num_left_out)


def checked_sequence(
    hook: Hook[object], returned: object, given: TrainSequence, sample: Sample
) -> TrainSequence | None:
    """What a hook made of a sequence; None: nothing of it is trained.

    Raises:
        UserCodeError: it cannot be trained.
    """
    if returned is None:
        return None
    if not isinstance(returned, TrainSequence):
        raise hook.fault(
            f"returned {type(returned).__name__} for sample {sample.key}; expected a TrainSequence, made with "
            "given.sequence._replace(…), or None"
        )
    if problem := sequence_problem(returned, given):
        raise hook.fault(f"returned a sequence for sample {sample.key} {problem}")
    return returned if len(returned.trained) else None


def _found(spec: str | None, key: str) -> Hook[object] | None:
    return None if spec is None else hook_at(spec, key)


def _by_number(batch: TrainBatch) -> list[tuple[Sample | None, Group]]:
    """Of each sample of the batch; None: one of which only the reward is left."""
    return [(sample, group) for group in batch.groups for sample in (*group.samples, *(None for _ in group.counted))]


def rewarded_groups(batch: TrainBatch) -> Iterator[tuple[Group, tuple[Sample, ...], list[int]]]:
    """Each group with rewards, its samples that have one, and where all its rewards stand in the batch."""
    start = 0
    for group in batch.groups:
        own = [(start + index, sample) for index, sample in enumerate(group.samples) if sample.reward is not None]
        start += len(group.samples)
        places = [place for place, _ in own] + list(range(start, start + len(group.counted)))
        start += len(group.counted)
        if places:
            yield group, tuple(sample for _, sample in own), places


def _content(batch: TrainBatch) -> torch.Tensor:
    """What is trained, as one vector ``[X]``."""
    parts = [
        np.concatenate([s.tokens, s.trained, np.nan_to_num(s.rollout_logprobs), [s.sample, s.is_imitated]])
        for s in batch.sequences
    ]
    return torch.from_numpy(np.concatenate([np.zeros(0), *parts]))


def checked_rewards(hook: Hook[object], returned: object, count: int, group: Group) -> list[float]:
    """What a hook made of the rewards of a group.

    Raises:
        UserCodeError: it is no list of so many finite numbers.
    """
    what = f"group {group.group_id}"
    values = returned.tolist() if isinstance(returned, np.ndarray | torch.Tensor) else returned
    if isinstance(values, str) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        raise hook.fault(f"returned {type(returned).__name__} for {what}; expected a list of {count} numbers")
    found = list(cast("Sequence[object]", values))
    if len(found) != count:
        raise hook.fault(
            f"returned {len(found)} numbers for {what}; expected {count}, one for each reward it was given"
        )
    numbers: list[float] = []
    for index, value in enumerate(found):
        plain = value.item() if isinstance(value, np.generic | torch.Tensor) and value.ndim == 0 else value
        if not isinstance(plain, int | float) or not math.isfinite(plain):
            raise hook.fault(f"returned {plain!r} at place {index} for {what}; expected a finite number")
        numbers.append(float(plain))
    return numbers


def checked_figures(hook: Hook[object], returned: object, known: Mapping[str, float]) -> dict[str, float]:
    """What a hook adds to what is known.

    Raises:
        UserCodeError: it is no dictionary of finite numbers by new names.
    """
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise hook.fault(
            f"returned {type(returned).__name__}; expected a dictionary of numbers by metric name, or None"
        )
    figures: dict[str, float] = {}
    for name, value in cast("Mapping[object, object]", returned).items():
        plain = value.item() if isinstance(value, np.generic | torch.Tensor) and value.ndim == 0 else value
        if not isinstance(name, str) or not name:
            raise hook.fault(f"returned a figure with the name {name!r}; expected text, such as 'rollout/my_figure'")
        if name in known:
            raise hook.fault(f"returned '{name}', which Penstock reports itself; give yours another name")
        if not isinstance(plain, int | float) or not math.isfinite(plain):
            raise hook.fault(f"returned {plain!r} as '{name}'; expected a finite number")
        figures[name] = float(plain)
    return figures
