"""What an objective asks of the models, before and in a step, by its options alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.learners.objectives.spec import loss_of

if TYPE_CHECKING:
    from penstock.backends.learners.options import LearnerOptions, ObjectiveOptions


def couples_tokens(options: ObjectiveOptions) -> bool:
    """Whether the loss of a token depends on the log-probs of others, so that all must be known first."""
    return (
        loss_of(options).couples_tokens
        or options.importance_function is not None
        or options.opsm_delta is not None
        or (options.correction == "mis" and options.old_logprobs != "engine")
    )


def rewards_need_kl(options: ObjectiveOptions) -> bool:
    """Whether advantages depend on log-probs of the policy and of the reference."""
    return options.kl_in == "reward" and options.kl_coef != 0.0 and not loss_of(options).is_function


def advantages_need_policy(options: ObjectiveOptions) -> bool:
    """Whether advantages depend on log-probs of the policy that opens a batch."""
    return rewards_need_kl(options) or (options.opd_kl_coef != 0.0 and options.old_logprobs != "engine")


def asks_policy(options: LearnerOptions) -> bool:
    """Whether anything depends on log-probs of the policy that opens a batch."""
    is_moving = options.num_updates * options.num_passes > 1
    return advantages_need_policy(options.objective) or (is_moving and options.objective.old_logprobs != "engine")
