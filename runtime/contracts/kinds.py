"""Every kind of function that has a contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.runtime.contracts.checks import Checks
    from penstock.runtime.contracts.findings import Begun, Finding


class Kind(NamedTuple):
    """A kind of user function that ``penstock check hook`` can try."""

    key: str
    """Of the scenario that names such a function."""
    is_of: str
    """What the function does, in a few words."""


KINDS: Final[Mapping[str, Kind]] = {
    "reward": Kind("reward.function", "scores one response"),
    "group_reward": Kind("reward.function with reward.per_group", "scores the responses of a group together"),
    "filter": Kind("filter.function", "keeps a group or turns it away"),
    "sample_filter": Kind("filter.sample_function", "keeps a sample or drops it"),
    "all_samples": Kind("filter.all_samples_hook", "is shown every group"),
    "source": Kind("data.source", "makes rows"),
    "priority": Kind("prompt_source.priority", "says which prompts come sooner"),
    "policy": Kind("staleness.policy", "paces and ranks"),
    "routing": Kind("prompt_source.routing", "says which engine gets a sample"),
    "generate": Kind("episode.generate", "plays an episode"),
    "postprocess": Kind("learner.objective.postprocess_function", "changes the rewards of a group"),
    "advantage": Kind("learner.objective.advantage_function", "makes advantages of rewards"),
    "loss": Kind("learner.objective.name", "is the whole loss"),
    "reduction": Kind("learner.objective.reduction_function", "weighs tokens"),
    "importance": Kind("learner.objective.importance_function", "weighs tokens between engine and learner"),
    "conversion": Kind("learner.conversion_function", "changes sequences before they are trained"),
    "rollout_log": Kind("learner.rollout_log_function", "adds figures of what was generated"),
    "step_log": Kind("learner.step_log_function", "adds figures of what was trained"),
    "evaluation_log": Kind("evaluation.log_function", "is told of each evaluation"),
    "weight_names": Kind("weights.names_function", "names weights for engines"),
    "tracker": Kind("observability.trackers[].name", "is told how a run goes"),
}
OTHER_NAMES: Final[Mapping[str, str]] = {
    "reward_postprocess": "postprocess",
    "importance_weights": "importance",
    "objective": "loss",
    "logging": "rollout_log",
    "curriculum": "priority",
    "all_samples_hook": "all_samples",
}


def check_function(
    spec: str,
    kind: str,
    *,
    timeout_s: float,
    reward_key: str | None = None,
    tell: Callable[[Begun | Finding], None] | None = None,
) -> list[Finding]:
    """Every check of a function of this kind (or of one of its other names), in this process, which it may end.

    Args:
        spec: ``file.py:function``.
        kind: one of :data:`KINDS`.
        timeout_s: of each check.
        reward_key: of a reward that returns dictionaries, the entry that is it (``reward.key``).
        tell: is told what begins and what came of it, as it comes.
    """
    from penstock.runtime.contracts.checks import Checks  # with PyTorch

    checks = Checks(spec, timeout_s=timeout_s, reward_key=reward_key, tell=tell)
    _contract(OTHER_NAMES.get(kind, kind))(checks)
    return checks.findings


def _contract(kind: str) -> Callable[[Checks], None]:
    # What a contract needs is imported with it: a filter can be checked without torch.
    if kind == "generate":
        from penstock.runtime.contracts.playing import check_generate

        return check_generate
    if kind == "policy":
        from penstock.runtime.contracts.pacing import check_policy

        return check_policy
    if kind == "routing":
        from penstock.runtime.contracts.routing import check_routing

        return check_routing
    if kind == "source":
        from penstock.runtime.contracts.sourcing import check_source

        return check_source
    if kind == "evaluation_log":
        from penstock.runtime.contracts.tracking import check_evaluation_log

        return check_evaluation_log
    if kind == "tracker":
        from penstock.runtime.contracts.tracking import check_tracker

        return check_tracker
    from penstock.runtime.contracts import judging, training

    return {
        "reward": judging.check_reward,
        "group_reward": judging.check_group_reward,
        "filter": judging.check_filter,
        "sample_filter": judging.check_sample_filter,
        "all_samples": judging.check_all_samples_hook,
        "priority": judging.check_priority,
        "postprocess": training.check_postprocess,
        "advantage": training.check_advantage,
        "loss": training.check_loss,
        "reduction": training.check_reduction,
        "importance": training.check_importance,
        "conversion": training.check_conversion,
        "rollout_log": training.check_rollout_log,
        "step_log": training.check_step_log,
        "weight_names": training.check_weight_names,
    }[kind]
