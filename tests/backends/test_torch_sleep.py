"""The embedded engine and the torch learner asleep: what they hold, and that they go on as if they had not slept."""

# Transformers and safetensors are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine_cases import largest_error, make_case, open_engine, random_tokens, request, run_all, weights_of
from test_torch_learner_resume import CASES, assert_same_bits, save, train

from penstock.backends.engines.torch.requests import RequestError
from penstock.backends.learners.training import command_worker
from penstock.messages.commands import OpenLearner, PublishWeights, SleepLearner, Train, WakeLearner
from penstock.messages.local import LearnerOpened, LearnerSlept, LearnerWoken, WeightsPublished

if TYPE_CHECKING:
    from pathlib import Path

    from learner_cases import RunningLearner

PROMPT = random_tokens(6, seed=3)


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_untied", "qwen3_moe"])
def test_an_engine_that_slept_computes_with_the_weights_that_it_is_given(name: str, tmp_path: Path) -> None:
    case, other = make_case(name, tmp_path / "one"), make_case(name, tmp_path / "other", seed=1)
    engine = open_engine(case, max_context=64)
    run_all(engine, [request(index, PROMPT, 20) for index in range(6)])
    size_bytes = engine.sleep()
    assert size_bytes > sum(tensor.nbytes for tensor in weights_of(case.model).values())
    assert engine.sleep() == size_bytes
    engine.load(weights_of(other.model), 1)
    for ended in run_all(engine, [request(index, PROMPT, 20) for index in range(6)]).values():
        assert largest_error(other, PROMPT, ended.part) < 2e-5
    assert engine.sleep() == size_bytes


def test_an_engine_with_requests_does_not_sleep_and_one_that_sleeps_takes_none(tmp_path: Path) -> None:
    engine = open_engine(make_case("qwen3_tied", tmp_path), max_context=64)
    engine.submit(request(0, PROMPT, 20))
    with pytest.raises(RuntimeError, match="was to sleep while 1 request is open"):
        engine.sleep()
    engine.interrupt()
    engine.sleep()
    with pytest.raises(RequestError, match="no weights"):
        engine.submit(request(1, PROMPT, 20))


# --- the learner ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_a_learner_that_sleeps_between_steps_is_the_one_that_does_not_bit_for_bit(
    name: str, model_folder: Path, tmp_path: Path, opened: list[RunningLearner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device with memory of its own; the checkpoint is written asleep."""
    case = CASES[name]
    straight = case.open(model_folder, tmp_path / "straight")
    straight.ask(OpenLearner(), LearnerOpened)
    expected, expected_path = train(straight, 1, 3), save(straight, 3)

    monkeypatch.setattr(command_worker, "SEPARATE_MEMORY", ("cpu",))
    sleeper = case.open(model_folder, tmp_path / "sleeper")
    opened += (straight, sleeper)
    sleeper.ask(OpenLearner(), LearnerOpened)
    found: list[dict[str, float]] = []
    for version in (1, 2, 3):
        found += train(sleeper, version, version)
        sleeper.ask(SleepLearner(), LearnerSlept)
        if version < 3:
            sleeper.ask(WakeLearner(), LearnerWoken)
    assert found == expected
    assert_same_bits(expected_path, save(sleeper, 3))
    sleeper.ask(WakeLearner(), LearnerWoken)
    straight.ask(PublishWeights(3, 0), WeightsPublished)
    manifests = [learner.ask(PublishWeights(3, 1), WeightsPublished).manifest for learner in (straight, sleeper)]
    assert manifests[0].digest == manifests[1].digest
    assert manifests[0].canary == manifests[1].canary


@pytest.mark.parametrize(
    ("commands", "match"),
    [
        ((SleepLearner(), Train(version=1, groups=(), min_token_version=0)), "Train came to a learner that sleeps"),
        ((SleepLearner(), PublishWeights(0, 0)), "PublishWeights came to a learner that sleeps"),
        ((WakeLearner(),), "WakeLearner came to a learner that is awake"),
    ],
)
def test_what_needs_the_device_is_refused_asleep(
    commands: tuple[SleepLearner | WakeLearner | Train | PublishWeights, ...],
    match: str,
    model_folder: Path,
    tmp_path: Path,
    opened: list[RunningLearner],
) -> None:
    learner = CASES["plain"].open(model_folder, tmp_path)
    opened.append(learner)
    learner.ask(OpenLearner(), LearnerOpened)
    assert match in str(learner.error(*commands))
