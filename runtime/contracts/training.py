"""Contracts of the hooks around the training: every case is laid out as a learner lays it out, and what the function
returns goes through the checks of a run."""

# Tensor.backward and torch.from_numpy are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import torch

from penstock.backends.learners.batch.sequences import read_groups
from penstock.backends.learners.batch.updates import whole_batch
from penstock.backends.learners.hooks.batches import (
    CONVERSION,
    POSTPROCESS,
    ROLLOUT_LOG,
    STEP_LOG,
    checked_figures,
    checked_rewards,
    checked_sequence,
    rewarded_groups,
)
from penstock.backends.learners.hooks.objective import (
    ADVANTAGE,
    IMPORTANCE,
    REDUCTION,
    checked_importance,
    checked_weights,
)
from penstock.backends.learners.hooks.protocols import (
    AdvantageInput,
    ConversionInput,
    GroupRewards,
    ImportanceInput,
    ReductionInput,
    RolloutLog,
    StepLog,
)
from penstock.backends.learners.objectives.open import checked_function
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.training.metrics import batch_metrics
from penstock.backends.learners.training.step import BatchTokens, Predictions, Scores, StepTokens
from penstock.backends.processes.hook_calling import Hook, checked_tensor
from penstock.backends.weights.renamed import NAMES, new_names
from penstock.messages.errors import UserFault
from penstock.runtime.contracts.cases import VERSION, cases
from penstock.runtime.contracts.checks import check_same, unchanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.learners.batch.sequences import TrainBatch
    from penstock.backends.learners.objectives.protocol import PolicyTokens
    from penstock.messages.samples import Group
    from penstock.runtime.contracts.cases import Case
    from penstock.runtime.contracts.checks import Checks

OPTIONS: Final = objective("grpo", old_logprobs="recompute")
LOSS: Final = "learner.objective.name"
CPU: Final = torch.device("cpu")
WEIGHT_NAMES: Final = (
    "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_norm.weight",
    "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.experts.3.down_proj.weight",
    "model.layers.0.input_layernorm.weight", "model.layers.10.self_attn.q_proj.weight",
    "model.layers.10.mlp.gate.weight", "model.norm.weight", "lm_head.weight",
)  # fmt: skip


def check_postprocess(checks: Checks) -> None:
    """Of rewards."""
    hook = _loaded(checks, POSTPROCESS)
    if hook is None:
        return

    def check(case: Case) -> None:
        batch = _batch(case.groups)
        for group, samples, places in rewarded_groups(batch):
            given = GroupRewards(tuple(batch.rewards[places].tolist()), samples, group, VERSION)
            count = len(places)
            _twice(hook, given, partial(checked_rewards, hook, count=count, group=group))

    _each_case(checks, check)


def check_advantage(checks: Checks) -> None:
    """Of advantages."""
    hook = _loaded(checks, ADVANTAGE)
    if hook is None:
        return

    def check(case: Case) -> None:
        given = _advantage_input(case.groups)
        count = len(given.positions)
        _twice(
            lambda each: hook(each, OPTIONS),
            given,
            lambda returned: checked_tensor(hook, returned, count=count, axis="trained tokens"),
        )

    _each_case(checks, check)


def check_reduction(checks: Checks) -> None:
    """Of ``learner.objective.reduction_function``: a weight for each token, the same each time it is asked."""
    hook = _loaded(checks, REDUCTION)
    if hook is None:
        return

    def check(case: Case) -> None:
        batch = _batch(case.groups)
        sizes = torch.from_numpy(batch.tokens_per_sample())
        given = ReductionInput(sizes, torch.from_numpy(batch.group_ids), torch.from_numpy(batch.rewards), VERSION)
        found = _twice(
            lambda each: hook(each, OPTIONS), given, lambda returned: checked_weights(hook, returned, len(sizes))
        )
        if not bool((cast("torch.Tensor", found) * sizes).sum() > 0):
            raise UserFault("gave every token the weight 0, so nothing is learnt")

    _each_case(checks, check)


def check_importance(checks: Checks) -> None:
    """Of importance weights."""
    hook = _loaded(checks, IMPORTANCE)
    if hook is None:
        return

    def check(case: Case, *, distance: float) -> None:
        tokens = _policy_tokens(case.groups, distance=distance)
        given = ImportanceInput(
            logprobs=tokens.logprobs.detach(),
            old_logprobs=tokens.logprobs.detach(),
            rollout_logprobs=tokens.rollout_logprobs,
            advantages=tokens.advantages,
            staleness=tokens.staleness,
            samples=tokens.samples,
        )
        count = len(given.logprobs)
        _twice(lambda each: hook(each, OPTIONS), given, lambda returned: checked_importance(hook, returned, count))

    _each_case(checks, partial(check, distance=0.1))
    case = cases()[0]
    checks.run("learner and engine agree exactly", lambda: check(case, distance=0.0))
    checks.run("learner and engine are 30 nats apart", lambda: check(case, distance=30.0))


def check_loss(checks: Checks) -> None:
    """Of the whole loss."""
    hook = _loaded(checks, LOSS)
    if hook is None:
        return
    function = checked_function(hook, LOSS)

    def check(case: Case, *, distance: float = 0.1) -> None:
        found: list[torch.Tensor] = []
        for _ in range(2):
            tokens = _policy_tokens(case.groups, distance=distance)
            kept = tokens._replace(logprobs=tokens.logprobs.detach(), entropy=tokens.entropy.detach())
            terms = function(tokens, OPTIONS)
            terms.loss.backward()  # type: ignore[no-untyped-call]
            now = tokens._replace(logprobs=tokens.logprobs.detach(), entropy=tokens.entropy.detach())
            unchanged((kept, now), lambda _: None)
            if not all(map(_equal, kept, now)):
                raise UserFault("changed what it was given; work on a copy")
            found.append(_gradient(tokens))
            found.append(terms.loss.detach())
        check_same(found[:2], found[2:])

    _each_case(checks, check)
    case = cases()[0]
    checks.run("learner and engine are 30 nats apart", lambda: check(case, distance=30.0))


def check_conversion(checks: Checks) -> None:
    """Of sequences."""
    hook = _loaded(checks, CONVERSION)
    if hook is None:
        return

    def check(case: Case) -> str | None:
        batch = _batch(case.groups)
        samples = [
            (sample, group) for group in batch.groups for sample in (*group.samples, *(None for _ in group.counted))
        ]
        num_left = 0
        for sequence in batch.sequences:
            sample, group = samples[sequence.sample]
            assert sample is not None, "a sample that was dropped has no sequence"
            given = ConversionInput(sequence, sequence.part, sample, group, VERSION)
            _twice(hook, given, partial(checked_sequence, hook, given=sequence, sample=sample))
            left = checked_sequence(hook, hook(given), sequence, sample)
            num_left += 0 if left is None else len(left.trained)
        dropped = batch.num_trained_tokens - num_left
        return f"leaves out {dropped} of {batch.num_trained_tokens} tokens" if dropped else None

    _each_case(checks, check)


def check_rollout_log(checks: Checks) -> None:
    """Of figures of what was generated."""
    hook = _loaded(checks, ROLLOUT_LOG)
    if hook is not None:
        _each_case(
            checks, lambda case: _check_figures(hook, RolloutLog(VERSION, case.groups, batch_metrics(case.groups)))
        )


def check_step_log(checks: Checks) -> None:
    """Of figures of what was trained."""
    hook = _loaded(checks, STEP_LOG)
    if hook is None:
        return
    trained = {"train/loss": 0.1, "train/grad_norm": 1.0, "train/entropy_loss": 0.7, "train/num_updates": 1.0}

    def check(case: Case) -> None:
        _check_figures(hook, StepLog(VERSION, case.groups, {**batch_metrics(case.groups), **trained}, 1.5))

    _each_case(checks, check)
    checks.run("a batch without any trained token", lambda: _check_figures(hook, StepLog(VERSION, (), {}, 0.1)))


def check_weight_names(checks: Checks) -> None:
    """Of the function that renames weights: as many names as weights, the same whether they come together or apart."""
    hook = _loaded(checks, NAMES)
    if hook is None:
        return
    checks.run(
        "ten weights get ten names", lambda: check_same(new_names(hook, WEIGHT_NAMES), new_names(hook, WEIGHT_NAMES))
    )
    checks.run("each weight by itself", lambda: check_same(*(_names_apart(hook) for _ in range(2))))


def _names_apart(hook: Hook[object]) -> dict[str, str]:
    """A name that depends on what came before differs from those that come together."""
    together = new_names(hook, WEIGHT_NAMES)
    apart = {name: new_names(hook, [name])[name] for name in reversed(WEIGHT_NAMES)}
    if together != {name: apart[name] for name in WEIGHT_NAMES}:
        raise UserFault("gave a weight another name when others came before it; make it a function of the name")
    return together


def _loaded(checks: Checks, key: str) -> Hook[object] | None:
    hooks: list[Hook[object]] = []
    checks.run("it can be loaded", lambda: hooks.append(Hook(checks.spec, key)))
    return hooks[0] if hooks else None


def _each_case(checks: Checks, check: Callable[[Case], str | None]) -> None:
    for case in cases():
        checks.run(case.name, partial(check, case))


def _twice(call: Callable[[object], object], given: object, checked: Callable[[object], object]) -> object:
    """What a call returned, as the run would take it, if it changes nothing and says the same again."""
    first = checked(unchanged(given, call))
    check_same(first, checked(call(given)))
    return first


def _check_figures(hook: Hook[object], given: RolloutLog | StepLog) -> None:
    checked_figures(hook, unchanged(given, hook), given.figures)


def _batch(groups: tuple[Group, ...]) -> TrainBatch:
    return read_groups(groups, min_token_version=0)


def _advantage_input(groups: tuple[Group, ...]) -> AdvantageInput:
    batch = _batch(groups)
    positions = torch.from_numpy(np.concatenate([sequence.positions for sequence in batch.sequences]))
    known = _known(groups)
    return known.advantage_input(positions, None, torch.full_like(known.rollout, 0.25))


def _known(groups: tuple[Group, ...]) -> BatchTokens:
    return BatchTokens(_batch(groups), OPTIONS, Predictions(), version=VERSION, device=CPU)


def _policy_tokens(groups: tuple[Group, ...], *, distance: float) -> PolicyTokens:
    """Of one step, with the learner's log-probs so far from the engine's, up and down in turn."""
    known = _known(groups)
    update = whole_batch(_batch(groups))
    signs = torch.where(torch.arange(len(known.rollout)) % 2 == 0, 1.0, -1.0)
    logprobs = (known.rollout + distance * signs).clamp(max=-1e-4) if distance else known.rollout.clone()
    entropy = torch.full_like(logprobs, 0.7)
    scores = Scores(logprobs.requires_grad_(), entropy.requires_grad_(), reference=known.rollout - 0.2, hidden=None)
    return StepTokens(known, update, [update.sequences], is_only_step=True).tokens(slice(None), scores)


def _gradient(tokens: PolicyTokens) -> torch.Tensor:
    gradient = tokens.logprobs.grad
    if gradient is None:
        raise UserFault("gave a loss that does not depend on tokens.logprobs; nothing would be learnt")
    if not bool(gradient.isfinite().all()):
        raise UserFault("gave a loss whose gradient with respect to tokens.logprobs is not finite")
    return gradient.clone()


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    return True
