"""Engine and learner that compute different models are told of, and others are not, however weights are taken over.

A real engine draws samples across a change of weights and a real learner trains them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import pytest
import torch
from engine_cases import VOCAB_SIZE, Case, make_case, open_engine, weights_of

from penstock.backends.engines.torch.requests import Ended, GenerationRequest, Running
from penstock.backends.engines.torch.sampling import Sampler
from penstock.backends.engines.torch.stopping import EndReason
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.messages.arrays import pack_tokens
from penstock.messages.samples import Completed, Group, Prompt, Reward, Sample, SampleKey
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CPU = torch.device("cpu")
NUM_GROUPS, GROUP_SIZE, MAX_TOKENS = 4, 4, 24
BEFORE, TRAINED = 1, 2
"""Versions that the engine serves: what was trained before, and what is trained now."""
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case("qwen3_tied", tmp_path_factory.mktemp("before"), seed=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case("qwen3_tied", tmp_path_factory.mktemp("trained"))


class Drawn(NamedTuple):
    """How an engine draws the samples of a batch."""

    mode: UpdateMode
    change: Callable[[dict[str, torch.Tensor]], None] = lambda weights: None
    """What goes wrong on the way to the engine."""
    temperature: float = 1.0
    dtype: str = "float32"


def draw(before: Case, trained: Case, how: Drawn, seed: int) -> tuple[Group, ...]:
    """A batch of which the first samples were begun with the weights ``before``."""
    chance = random.Random(seed)
    sampler = Sampler(temperature=how.temperature)
    engine = open_engine(before, version=BEFORE, num_slots=6, sampler=sampler, dtype=getattr(torch, how.dtype))
    prompts = [pack_tokens(chance.randrange(2, VOCAB_SIZE) for _ in range(6)) for _ in range(NUM_GROUPS)]
    wanted = {
        (group, index): GenerationRequest(
            tag=(group, index),
            prompt=prompts[group],
            seed=1000 * seed + GROUP_SIZE * group + index,
            max_new_tokens=chance.randint(4, MAX_TOKENS),
        )
        for group in range(NUM_GROUPS)
        for index in range(GROUP_SIZE)
    }
    ended: list[Ended] = []
    first = list(wanted.values())[:8]
    for request in first:
        engine.submit(request)
    for _ in range(chance.randint(1, 12)):
        ended += engine.step().ended
    while how.mode is UpdateMode.DRAIN and (engine.num_running or engine.num_queued):
        ended += engine.step().ended
    cut = engine.interrupt() if how.mode is UpdateMode.INTERRUPT else []
    weights = weights_of(trained.model)
    how.change(weights)
    engine.load(weights, TRAINED)
    for end in cut:
        request = wanted[cast("tuple[int, int]", end.tag)]
        early = engine.submit(replace(request, prefix=end.part))
        assert early is None
    for request in list(wanted.values())[8:]:
        engine.submit(request)
    while engine.num_running or engine.num_queued:
        ended += engine.step().ended
    assert {end.reason for end in ended} == {EndReason.LENGTH}
    parts = {end.tag: end.part for end in ended}
    return tuple(
        Group(
            group_id=group,
            prompt=Prompt(row=group, epoch=0, tokens=prompts[group]),
            samples=tuple(
                Sample(
                    key=SampleKey(group, index),
                    parts=(parts[group, index],),
                    outcome=Completed(reward=Reward(value=float(index % 2))),
                )
                for index in range(GROUP_SIZE)
            ),
        )
        for group in range(NUM_GROUPS)
    )


def heard(
    trained: Case, groups: tuple[Group, ...], dtype: str = "float32"
) -> tuple[Mapping[str, float], tuple[str, ...]]:
    """The figures and notices of the step that trains these."""
    trainer = PolicyTrainer(
        PackedModel.load(trained.folder, dtype=dtype, device=CPU),
        LearnerOptions(),
        temperature=1.0,
        num_steps=10,
        reference=None,
        check_stop=lambda: None,
    )
    result = trainer.train(groups, version=TRAINED + 1, min_token_version=0)
    return {metric.name: metric.value for metric in result.metrics}, result.notices


@pytest.mark.parametrize("mode", UpdateMode)
def test_an_engine_that_computes_the_same_model_raises_no_alarm(before: Case, trained: Case, mode: UpdateMode) -> None:
    mixed: list[float] = []
    for seed in range(7):
        figures, notices = heard(trained, draw(before, trained, Drawn(mode), seed))
        assert figures["train/fresh_logprob_abs_diff"] < 1e-5
        assert figures["train/mismatch_alarm"] == 0
        assert notices == ()
        mixed.append(figures.get("train/mixed_logprob_abs_diff", 0.0))
    if mode is UpdateMode.IN_FLIGHT:  # drawn over a cache of other weights: why only whole samples can be compared
        assert max(mixed) > 0.1
    else:
        assert max(mixed) < 1e-5


def _one_norm(weights: dict[str, torch.Tensor]) -> None:
    weights[NORM][::8] *= 1.3


@pytest.mark.parametrize("mode", UpdateMode)
@pytest.mark.parametrize("fault", ["a norm", "a position", "the temperature"])
def test_a_mismatch_of_two_hundredths_of_a_nat_is_named(
    before: Case, trained: Case, mode: UpdateMode, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = Drawn(mode)
    if fault == "a norm":
        how = Drawn(mode, change=_one_norm)
    elif fault == "the temperature":
        how = Drawn(mode, temperature=1.03)
    else:
        right = cast("property", vars(Running)["first_position"]).fget
        assert right is not None
        monkeypatch.setattr(Running, "first_position", property(lambda running: right(running) + 1))
    groups = draw(before, trained, how, seed=0)
    monkeypatch.undo()
    figures, notices = heard(trained, groups)
    nats = figures["train/fresh_logprob_abs_diff"]
    assert 0.005 < nats < 0.06
    assert figures["train/mismatch_alarm"] == 1
    (text,) = (notice for notice in notices if "the engine computes another model than the learner" in notice)
    assert f"differ by {nats:.3g} nats a token" in text
    assert f"on the {figures['train/fresh_tokens']:.0f} tokens of samples that the trained weights have made" in text
    assert ("at 1.03 times the learner's temperature" in text) == (fault == "the temperature")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", UpdateMode)
def test_in_16_bits_a_wrong_temperature_is_named_and_rounding_is_not(
    before: Case, trained: Case, mode: UpdateMode, dtype: str
) -> None:
    for seed in range(2):
        right, notices = heard(trained, draw(before, trained, Drawn(mode, dtype=dtype), seed), dtype)
        assert (right["train/mismatch_alarm"], notices) == (0, ())
        assert right["train/fresh_logprob_abs_diff"] < {"bfloat16": 0.02, "float16": 0.0025}[dtype]
        warm = draw(before, trained, Drawn(mode, temperature=1.03, dtype=dtype), seed)
        wrong, (text,) = heard(trained, warm, dtype)
        assert wrong["train/fresh_logprob_abs_diff"] < 0.05  # of which rounding alone may be as much in a large model
        assert wrong["train/mismatch_alarm"] == 1
        assert "at 1.03 times the learner's temperature" in text
