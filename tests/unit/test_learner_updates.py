"""A batch divided into optimizer steps: nothing lost, nothing twice, groups whole, even, and the same every time."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from penstock.backends.learners.batch.sequences import TrainBatch, TrainSequence, demonstration_sequence
from penstock.backends.learners.batch.updates import Update, divide_batch
from penstock.backends.learners.objectives.mismatch import (
    FRESH_COUNT,
    FRESH_DIFFERENCE,
    FRESH_SUM,
    PRODUCTS,
    SQUARES,
    SURPRISES,
    TEMPERATURE_SHARE,
    TEMPERATURE_SLOPE,
)
from penstock.backends.learners.objectives.objective import (
    DISTANCE_SUM,
    HEAVY_SUM,
    SQUARE_SUM,
    TOKEN_SUM,
    WEIGHT_SUM,
)
from penstock.backends.learners.training.batch_trainer import TrainedUpdate, joined_figures


def make_batch(draw: random.Random, *, num_groups: int) -> TrainBatch:
    """Groups of 1 to 5 samples in a mixed order; a sample has no part, one or two."""
    owners = [group for group in range(num_groups) for _ in range(draw.randint(1, 5))]
    draw.shuffle(owners)
    sequences: list[TrainSequence] = []
    first = 0
    for sample in range(len(owners)):
        for _ in range(draw.choice((0, 1, 1, 1, 2))):
            made = demonstration_sequence([1, 2], [3] * draw.randint(1, 60), sample=sample)
            sequences.append(made._replace(first=first))
            first += len(made.trained)
    return TrainBatch(
        sequences=tuple(sequences),
        rewards=np.zeros(len(owners)),
        group_ids=np.asarray(owners, dtype=np.int64) * 7 + 3,
        num_masked_tokens=0,
    )


def owners_of(batch: TrainBatch, update: Update) -> list[int]:
    """The sample in the batch of each sequence of an update."""
    samples = {sequence.first: sequence.sample for sequence in batch.sequences}
    return [samples[sequence.first] for sequence in update.sequences]


@pytest.mark.parametrize("by_sample", [False, True])
def test_each_sequence_is_in_one_update_with_its_sample_and_its_group(*, by_sample: bool) -> None:
    draw = random.Random(1)
    for _ in range(200):
        batch = make_batch(draw, num_groups=draw.randint(1, 12))
        updates = divide_batch(batch, draw.randint(1, 6), by_sample=by_sample, draw=draw)
        places = [place for update in updates for s in update.sequences for place in s.places.tolist()]
        assert sorted(places) == list(range(batch.num_trained_tokens))
        unit_of = np.arange(len(batch.rewards)) if by_sample else batch.group_ids
        seen: Counter[int] = Counter()
        for update in updates:
            owners = owners_of(batch, update)
            seen.update({int(unit_of[owner]) for owner in owners})
            # The parts of an episode have one number, those of different samples another.
            pairs = set(zip(owners, (s.sample for s in update.sequences), strict=True))
            assert len(pairs) == len(set(owners)) == len({number for _, number in pairs})
            assert max(number for _, number in pairs) < update.num_samples
            assert update.tokens_per_sample().sum() == update.num_tokens
        assert set(seen.values()) <= {1}


def test_every_sample_counts_in_one_update_also_without_a_trained_token() -> None:
    draw = random.Random(2)
    for _ in range(100):
        batch = make_batch(draw, num_groups=8)
        updates = divide_batch(batch, 2, by_sample=False, draw=draw)
        if len(updates) == 2:
            assert sum(update.num_samples for update in updates) == len(batch.rewards)


@pytest.mark.parametrize("by_sample", [False, True])
def test_updates_differ_by_no_more_than_the_largest_of_what_stays_whole(*, by_sample: bool) -> None:
    draw = random.Random(3)
    for _ in range(300):
        batch, num_updates = make_batch(draw, num_groups=draw.randint(6, 20)), draw.randint(2, 6)
        updates = divide_batch(batch, num_updates, by_sample=by_sample, draw=draw)
        keys = np.arange(len(batch.rewards)) if by_sample else batch.group_ids
        sizes: Counter[int] = Counter()
        for sequence in batch.sequences:
            sizes[int(keys[sequence.sample])] += len(sequence.trained)
        loads = [update.num_tokens for update in updates] + [0] * (num_updates - len(updates))
        assert max(loads) - min(loads) <= max(sizes.values())


def test_the_division_is_that_of_the_random_numbers_and_another_pass_has_another() -> None:
    batch = make_batch(random.Random(4), num_groups=12)

    def division(seed: str) -> list[list[int]]:
        return [owners_of(batch, u) for u in divide_batch(batch, 4, by_sample=False, draw=random.Random(seed))]

    assert division("a") == division("a")
    assert len({str(division(str(seed))) for seed in range(5)}) == 5


def test_fewer_groups_than_updates_make_fewer_updates() -> None:
    batch = make_batch(random.Random(5), num_groups=3)
    assert len(divide_batch(batch, 8, by_sample=False, draw=random.Random(0))) == 3


def update_with(num_tokens: int, num_samples: int) -> Update:
    made = demonstration_sequence([1], [3] * num_tokens, sample=0)
    return Update((made,), num_samples)


def totals(value: float, *, ppo_kl: float, tokens: float) -> dict[str, float]:
    return {
        "train/loss": value,
        "train/pg_clipfrac": value,
        "train/grad_norm": value,
        "train/ppo_kl": ppo_kl,
        "train/train_rollout_logprob_abs_diff": value,
        WEIGHT_SUM: tokens,
        SQUARE_SUM: tokens,
        TOKEN_SUM: tokens,
        DISTANCE_SUM: value * tokens,
        HEAVY_SUM: 0.0,
        FRESH_SUM: value,
        FRESH_COUNT: 1.0,
        SQUARES: value**2,
        PRODUCTS: 2 * value,
        SURPRISES: 4.0,
    }


def test_figures_of_a_batch_are_means_over_its_steps_as_the_loss_weighs() -> None:
    for reduction, loss, share in (
        ("token_mean", 5.5, 5.5),
        ("sequence_mean", 4.0, 4.0),
        ("constant", 4.0, 5.5),
    ):
        trained = (
            TrainedUpdate(update_with(10, 5), totals(1.0, ppo_kl=0.0, tokens=10.0)),
            TrainedUpdate(update_with(30, 5), totals(7.0, ppo_kl=0.4, tokens=30.0)),
        )
        found = joined_figures(trained, reduction)  # type: ignore[arg-type]  # a literal of each name
        assert found["train/loss"] == pytest.approx(loss)
        assert found["train/pg_clipfrac"] == pytest.approx(share)
        assert found["train/grad_norm"] == 4.0
        assert found["train/grad_norm_max"] == 7.0
        assert found["train/num_updates"] == 2.0
        assert found["train/ess_ratio"] == 1.0
        assert found["train/log_ratio_abs"] == 5.5  # under the weights that each token met
        # Later steps compare the engine with weights that it never had.
        assert found["train/train_rollout_logprob_abs_diff"] == found[FRESH_DIFFERENCE] == 1.0
        assert (found[TEMPERATURE_SLOPE], found[TEMPERATURE_SHARE]) == (0.5, 1.0)
        assert found["train/first_ppo_kl"] == 0.0


def test_the_figures_of_one_step_are_its_own() -> None:
    found = joined_figures([TrainedUpdate(update_with(3, 1), totals(0.1, ppo_kl=0.3, tokens=3.0))], "token_mean")
    assert found["train/loss"] == 0.1
    assert found["train/num_updates"] == 1.0
    assert not {"train/grad_norm_max", "train/first_ppo_kl"} & set(found)
