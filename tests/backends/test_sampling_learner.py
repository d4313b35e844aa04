"""What the learner makes of samples that count and are not trained, and of tokens that are older than their sample."""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import pytest
import torch
from learner_cases import make_groups
from transformers import AutoModelForCausalLM, Qwen3Config

from penstock.backends.checkpoint.make import SYMBOLS
from penstock.backends.learners.batch.sequences import read_groups
from penstock.backends.learners.options import LearnerOptions, ObjectiveOptions
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.messages.errors import UserFault
from penstock.messages.samples import CountedSample, Group, Sample, SampleEnd, TerminalState, VersionSpan

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 2
ROWS = ((1.0, 0.0, 0.25), (0.5, 0.5, 0.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=len(SYMBOLS) + 2, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0,
        bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)  # type: ignore[no-untyped-call]  # it has no types
    return path


def counted(group: Group, *indices: int) -> Group:
    """The group as the Filter makes it when these samples are dropped after its statistics."""
    dropped = [sample for sample in group.samples if sample.key.index in indices]
    return msgspec.structs.replace(
        group,
        samples=tuple(sample for sample in group.samples if sample.key.index not in indices),
        ended=tuple(SampleEnd(key=s.key, state=TerminalState.FILTERED, cause="why") for s in dropped),
        counted=tuple(CountedSample(s.key.index, cast("float", s.reward)) for s in dropped),
    )


def without_loss(sample: Sample) -> Sample:
    """The same sample, none of whose tokens is trained."""
    parts = tuple(msgspec.structs.replace(part, loss_mask=bytes(part.num_tokens)) for part in sample.parts)
    return msgspec.structs.replace(sample, parts=parts)


def gradient(folder: Path, groups: tuple[Group, ...], *, estimator: str = "grpo") -> dict[str, torch.Tensor]:
    model = PackedModel.load(folder, dtype="float32", device=torch.device("cpu"))
    options = LearnerOptions(objective=msgspec.convert({"name": estimator}, ObjectiveOptions))
    trainer = PolicyTrainer(model, options, temperature=1.0, num_steps=10, reference=None, check_stop=lambda: None)
    trainer.accumulate(read_groups(groups, min_token_version=0), version=VERSION)
    named = model.model.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_a_counted_sample_is_one_whose_tokens_are_all_masked(folder: Path, estimator: str) -> None:
    first, second = make_groups(ROWS)
    masked = tuple(without_loss(sample) if sample.key.index == 1 else sample for sample in first.samples)
    expected = gradient(folder, (msgspec.structs.replace(first, samples=masked), second), estimator=estimator)
    found = gradient(folder, (counted(first, 1), second), estimator=estimator)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-7), name


def test_dropped_before_the_statistics_it_makes_another_gradient(folder: Path) -> None:
    first, second = make_groups(ROWS)
    after = counted(first, 1)
    before = msgspec.structs.replace(after, counted=())
    found = (gradient(folder, (before, second)), gradient(folder, (after, second)))
    assert any(not torch.allclose(found[0][name], found[1][name]) for name in found[0])


def test_rewards_of_counted_samples_stand_among_those_of_their_group() -> None:
    first, second = make_groups(ROWS)
    batch = read_groups((counted(first, 0, 2), second), min_token_version=0)
    assert batch.rewards.tolist() == [0.0, 1.0, 0.25, 0.5, 0.5, 0.0]
    assert batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert [sequence.sample for sequence in batch.sequences] == [0, 3, 4, 5]
    assert batch.tokens_per_sample().tolist() == [4, 0, 0, 3, 4, 5]


def test_tokens_older_than_their_sample_are_masked_and_counted_as_such() -> None:
    groups = make_groups(ROWS)  # the first token of each is of version 0, the others of version 1
    whole = read_groups(groups, min_token_version=0)
    masked = read_groups(groups, min_token_version=0, mask_old_tokens=True)
    assert masked.num_trained_tokens == whole.num_trained_tokens - 6
    assert (masked.num_masked_tokens, whole.num_masked_tokens) == (6, 0)
    assert all(set(sequence.versions.tolist()) == {1} for sequence in masked.sequences)
    assert np.array_equal(masked.rewards, whole.rewards)


def test_the_newest_version_is_that_of_all_parts_of_a_sample() -> None:
    (group,) = make_groups(((1.0, 0.0),))
    sample = group.samples[0]
    old = msgspec.structs.replace(sample.parts[0], spans=(VersionSpan(0, 3),))
    both = msgspec.structs.replace(sample, parts=(old, sample.parts[0]))
    batch = read_groups(
        (msgspec.structs.replace(group, samples=(both, group.samples[1])),), min_token_version=0, mask_old_tokens=True
    )
    assert [len(sequence.trained) for sequence in batch.sequences] == [2, 3]


def test_the_bound_of_the_batch_masks_as_well() -> None:
    groups = make_groups(ROWS)
    batch = read_groups(groups, min_token_version=2, mask_old_tokens=True)
    assert (batch.num_trained_tokens, batch.sequences) == (0, ())


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_named_with_its_sample(reward: float) -> None:
    with pytest.raises(UserFault, match=r"with a reward of (nan|inf), which must be finite; mend the reward function"):
        read_groups(make_groups(((1.0, reward),)), min_token_version=0)
