"""What is said about a batch whose figures cannot be right."""

from __future__ import annotations

import pytest

from penstock.backends.learners.options import LearnerOptions, ObjectiveOptions
from penstock.backends.learners.training.alarms import Alarms

FRESH = "train/fresh_logprob_abs_diff"


def alarms(dtype: str = "float32", **objective: str) -> Alarms:
    return Alarms(LearnerOptions(objective=ObjectiveOptions(**objective)), dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "version", "nats", "is_wrong"),
    [
        ("float32", 1, 0.9e-4, False),
        ("float32", 1, 1.1e-4, True),
        ("float32", 2, 0.9e-3, False),
        ("float32", 2, 1.1e-3, True),
        ("bfloat16", 2, 0.09, False),
        ("bfloat16", 2, 0.11, True),
        ("bfloat16", 1, 0.09, False),
        ("bfloat16", 1, 0.11, True),
    ],
)
def test_engine_and_learner_may_differ_by_rounding_only(
    dtype: str, version: int, nats: float, *, is_wrong: bool
) -> None:
    figures = {FRESH: nats}
    notices = alarms(dtype).hear(figures, version=version)
    assert figures["train/mismatch_alarm"] == is_wrong
    assert len(notices) == is_wrong
    assert all(f"step {version}: " in text and "compare model.dtype" in text for text in notices)


def test_tokens_of_older_weights_say_nothing() -> None:
    figures = {"train/train_rollout_logprob_abs_diff": 3.0}
    assert alarms().hear(figures, version=1) == ()
    assert "train/mismatch_alarm" not in figures


def test_a_batch_that_a_few_tokens_decide_names_what_to_lower() -> None:
    found = alarms()
    assert found.hear({"train/ess_ratio": 0.9}, version=3) == ()
    (text,) = found.hear({"train/ess_ratio": 0.31}, version=4)
    assert "step 4: the batch is worth 31% of its tokens" in text
    assert "learner.learning_rate (1e-06)" in text
    assert "learner.objective.clip_high (0.28)" in text
    assert found.hear({"train/ess_ratio": 0.2}, version=5) == ()
    assert found.hear({}, version=6) == ()


NEAR = {"train/ess_ratio": 0.31, "train/log_ratio_abs": 0.05}


def test_a_few_tokens_of_a_near_policy_are_no_far_policy() -> None:
    found = alarms()
    assert found.hear(NEAR | {"train/heavy_weight": 0.09}, version=3) == (), "they weigh too little to decide"
    (text,) = found.hear(NEAR | {"train/heavy_weight": 0.12}, version=4)
    assert "the policy is near what drew them (0.05 nats a token" in text
    assert "hold 12% of the weight" in text
    assert "learner.objective.dual_clip bounds" in text
    (far,) = found.hear(NEAR | {"train/log_ratio_abs": 0.31, "train/heavy_weight": 0.12}, version=5)
    assert "the policy is far from what drew them" in far
    (text,) = alarms(policy_loss="cispo").hear(NEAR | {"train/heavy_weight": 0.12}, version=1)
    assert "dual_clip" not in text


def test_a_likelihood_has_no_ratio_that_a_few_tokens_could_decide() -> None:
    found = alarms(policy_loss="likelihood")
    assert found.hear({"train/ess_ratio": 0.31}, version=4) == ()


def test_the_same_is_said_once_until_it_has_been_well() -> None:
    found = alarms()
    said = [len(found.hear({FRESH: nats}, version=v)) for v, nats in enumerate((0.5, 0.5, 1e-6, 0.5, 0.4), start=1)]
    assert said == [1, 0, 0, 1, 0]


@pytest.mark.parametrize("old_logprobs", ["recompute", "interpolate"])
def test_a_policy_that_has_moved_before_its_first_step_is_named(old_logprobs: str) -> None:
    (text,) = alarms(old_logprobs=old_logprobs).hear({"train/ppo_kl": -2e-8}, version=1)
    assert "train/ppo_kl is -2e-08" in text
    assert alarms(old_logprobs=old_logprobs).hear({"train/ppo_kl": 0.9e-8}, version=1) == ()
    assert alarms(old_logprobs=old_logprobs).hear({"train/ppo_kl": 0.2}, version=2) == ()


def test_of_several_updates_the_first_has_not_moved() -> None:
    figures = {"train/ppo_kl": 0.3, "train/first_ppo_kl": 0.0, "train/kl_loss": 0.2, "train/num_updates": 4.0}
    assert alarms(old_logprobs="recompute").hear(figures, version=1) == ()


def test_a_ratio_to_the_engine_is_no_distance_of_the_policy_from_itself() -> None:
    assert alarms(old_logprobs="engine").hear({"train/ppo_kl": 1e-6}, version=1) == ()


def test_a_reference_that_is_not_the_policy_is_named() -> None:
    (text,) = alarms().hear({"train/kl_loss": 1e-7, "train/num_updates": 1.0}, version=1)
    assert "train/kl_loss is 1e-07" in text
    assert alarms().hear({"train/kl_loss": 1e-9, "train/num_updates": 1.0}, version=1) == ()
    assert alarms("bfloat16").hear({"train/kl_loss": 1e-4, "train/num_updates": 1.0}, version=1) == ()
