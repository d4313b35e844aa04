"""The torch learner through its commands: open, warm-start, train, publish, save, close, fail."""

# Transformers and safetensors are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from learner_cases import RunningLearner, demonstrations, make_groups, open_learner, train_command
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.backends.devices import choose_device
from penstock.backends.learners.options import LearnerOptions, ObjectiveOptions, WarmStartOptions
from penstock.messages.arrays import floats_view, tokens_view
from penstock.messages.commands import (
    LearnerCommand,
    OpenLearner,
    PublishWeights,
    ReleaseWeights,
    SaveCheckpoint,
)
from penstock.messages.errors import UserFault
from penstock.messages.local import BatchTrained, CheckpointWritten, LearnerOpened, WeightsPublished
from penstock.messages.samples import Completed, Group, Sample, SampleKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


@pytest.fixture
def launch(model_folder: Path, tmp_path: Path) -> Iterator[Callable[..., RunningLearner]]:
    """Starts learners and closes them at the end."""
    running: list[RunningLearner] = []

    def start(options: LearnerOptions | None = None, **how: Any) -> RunningLearner:  # noqa: ANN401 - handed on
        running.append(open_learner(model_folder, tmp_path / "checkpoints", options, **how))
        return running[-1]

    yield start
    for learner in running:
        learner.close()


def figures_of(event: BatchTrained) -> dict[str, float]:
    return {metric.name: metric.value for metric in event.metrics}


def plain_logprobs(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Of tokens 1, 2, … under transformers' own attention."""
    said, ids = plain_distributions(folder, tokens), torch.tensor(list(tokens))
    return said.gather(1, ids[1:, None])[:, 0]


def plain_distributions(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probs of the whole vocabulary after each token but the last ``[T − 1, V]``, under the same."""
    model = cast("Any", AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"))
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        return cast("torch.Tensor", model(ids).logits[0, :-1].log_softmax(-1))


def test_a_step_reports_what_the_batch_was_and_what_it_did(launch: Callable[..., RunningLearner]) -> None:
    learner = launch()
    assert learner.ask(OpenLearner(), LearnerOpened).version == 0
    trained = learner.ask(train_command(), BatchTrained)
    figures = figures_of(trained)
    assert (trained.version, trained.num_trained_tokens, trained.num_masked_tokens) == (1, 19, 0)
    assert figures["rollout/raw_reward"] == pytest.approx(0.4)
    assert figures["rollout/response_len/mean"] == pytest.approx(19 / 5)
    assert (figures["rollout/response_len/min"], figures["rollout/response_len/max"]) == (3, 5)
    assert figures["rollout/response_len/median"] == 4
    assert figures["rollout/truncated_ratio"] == pytest.approx(0.4)
    assert figures["train/num_tokens"] == 19
    assert figures["train/lr-pg_0"] == 1e-3
    assert figures["train/grad_norm"] > 0
    assert figures["perf/actor_train_tok_per_s"] == pytest.approx(29 / figures["perf/actor_train_time"])
    expected = {"loss", "pg_loss", "pg_clipfrac", "ppo_kl", "ois", "entropy_loss", "train_rollout_logprob_abs_diff"}
    assert {f"train/{name}" for name in expected} <= figures.keys()
    assert learner.gauge("learner/trained_tokens") == 19
    assert learner.gauge("learner/step_time_s") > 0


def test_the_mismatch_is_that_of_transformers_and_the_engine(
    launch: Callable[..., RunningLearner], model_folder: Path
) -> None:
    learner = launch()
    learner.ask(OpenLearner(), LearnerOpened)
    figures = figures_of(learner.ask(train_command(), BatchTrained))
    differences: list[torch.Tensor] = []
    for group in make_groups():
        for sample in group.samples:
            prompt, tokens = tokens_view(group.prompt.tokens), tokens_view(sample.parts[0].tokens)
            own = plain_logprobs(model_folder, [*prompt, *tokens])[len(prompt) - 1 :]
            differences.append(own - torch.tensor(list(floats_view(sample.parts[0].logprobs))))
    together = torch.cat(differences)
    assert figures["train/train_rollout_logprob_abs_diff"] == pytest.approx(float(together.abs().mean()), abs=1e-5)
    assert figures["train/ois"] == pytest.approx(float(together.exp().mean()), abs=1e-5)


def test_training_raises_the_likelihood_of_what_was_rewarded(
    launch: Callable[..., RunningLearner], tmp_path: Path, model_folder: Path
) -> None:
    learner = launch(LearnerOptions(learning_rate=3e-3, objective=ObjectiveOptions(old_logprobs="recompute")))
    learner.ask(OpenLearner(), LearnerOpened)
    for version in range(1, 9):
        learner.ask(train_command(version, groups=make_groups(((1.0, 0.0),))), BatchTrained)
    saved = learner.ask(SaveCheckpoint(version=8), CheckpointWritten).path
    good, bad = (sample.parts[0] for sample in make_groups(((1.0, 0.0),))[0].samples)
    for part, sign in ((good, 1), (bad, -1)):
        tokens = [10, 11, *tokens_view(part.tokens)]
        before, after = plain_logprobs(model_folder, tokens)[1:], plain_logprobs(tmp_path / saved, tokens)[1:]
        assert sign * float(after.sum() - before.sum()) > 0.5


def test_tokens_of_old_versions_are_masked_and_counted(launch: Callable[..., RunningLearner]) -> None:
    learner = launch()
    learner.ask(OpenLearner(), LearnerOpened)
    trained = learner.ask(train_command(min_token_version=1), BatchTrained)
    assert (trained.num_trained_tokens, trained.num_masked_tokens) == (14, 5)


def test_a_batch_without_trained_tokens_changes_nothing(launch: Callable[..., RunningLearner]) -> None:
    learner = launch()
    learner.ask(OpenLearner(), LearnerOpened)
    learner.ask(PublishWeights(version=0, publish=0), WeightsPublished)
    trained = learner.ask(train_command(min_token_version=9), BatchTrained)
    assert (trained.num_trained_tokens, trained.num_masked_tokens) == (0, 19)
    assert "train/loss" not in figures_of(trained)
    learner.ask(PublishWeights(version=1, publish=1), WeightsPublished)
    before, after = learner.weights.published
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_kl_to_the_reference_is_zero_before_the_first_step_and_not_after(launch: Callable[..., RunningLearner]) -> None:
    learner = launch(LearnerOptions(learning_rate=1e-2, objective=ObjectiveOptions(kl_coef=0.1)))
    learner.ask(OpenLearner(), LearnerOpened)
    first = figures_of(learner.ask(train_command(1), BatchTrained))
    second = figures_of(learner.ask(train_command(2), BatchTrained))
    assert abs(first["train/kl_loss"]) < 1e-8
    assert second["train/kl_loss"] > 1e-4


def test_importance_weights_are_reported_when_old_logprobs_are_recomputed(
    launch: Callable[..., RunningLearner],
) -> None:
    learner = launch(LearnerOptions(objective=ObjectiveOptions(old_logprobs="recompute", tis_clip=0.5)))
    learner.ask(OpenLearner(), LearnerOpened)
    figures = figures_of(learner.ask(train_command(), BatchTrained))
    assert figures["train/tis"] > 0
    assert 0 < figures["train/tis_clipfrac"] <= 1
    assert figures["train/ppo_kl"] == 0


def test_the_same_seed_and_batches_give_the_same_weights(launch: Callable[..., RunningLearner]) -> None:
    options = LearnerOptions(learning_rate=1e-3, warm_start=WarmStartOptions(path="x", num_steps=3, batch_size=2))
    weights: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        learner = launch(options, demonstrations=demonstrations(), seed=4)
        learner.ask(OpenLearner(), LearnerOpened)
        for version in (1, 2):
            learner.ask(train_command(version), BatchTrained)
        learner.ask(PublishWeights(version=2, publish=0), WeightsPublished)
        weights.append(learner.weights.published[0])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_warm_start_learns_the_demonstrations_and_reports_progress(launch: Callable[..., RunningLearner]) -> None:
    block = WarmStartOptions(path="x", num_steps=60, batch_size=4, learning_rate=1e-2, warmup_steps=5)
    learner = launch(LearnerOptions(warm_start=block), demonstrations=demonstrations())
    assert learner.ask(OpenLearner(), LearnerOpened).version == 0
    assert learner.gauge("learner/warm_start_fraction") == 1.0
    assert learner.gauge("learner/warm_start_loss") < 0.2


def test_warm_start_and_demonstrations_go_together(launch: Callable[..., RunningLearner]) -> None:
    with pytest.raises(UserFault, match="has no rows"):
        launch(LearnerOptions(warm_start=WarmStartOptions(path="lines:0")), demonstrations=[])
    with pytest.raises(ValueError, match="not set"):
        launch(demonstrations=demonstrations())


def test_published_weights_and_canary_are_those_of_the_model(
    launch: Callable[..., RunningLearner], model_folder: Path
) -> None:
    learner = launch()
    learner.ask(OpenLearner(), LearnerOpened)
    manifest = learner.ask(PublishWeights(version=0, publish=7), WeightsPublished).manifest
    assert (manifest.version, manifest.publish) == (0, 7)
    plain = cast("Any", AutoModelForCausalLM.from_pretrained(model_folder))
    expected = dict(plain.named_parameters())
    assert learner.weights.published[0].keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in learner.weights.published[0].items())
    canary = learner.weights.canaries[0]
    tokens = list(tokens_view(canary.tokens))
    assert len(tokens) == 32
    own = torch.tensor(list(floats_view(canary.logprobs)))
    torch.testing.assert_close(
        own, plain_distributions(model_folder, tokens)[:, tokens].flatten(), atol=1e-5, rtol=1e-5
    )


def test_the_canary_keeps_its_tokens_and_follows_the_weights(launch: Callable[..., RunningLearner]) -> None:
    learner = launch(LearnerOptions(learning_rate=1e-2))
    learner.ask(OpenLearner(), LearnerOpened)
    learner.ask(PublishWeights(version=0, publish=0), WeightsPublished)
    learner.ask(train_command(), BatchTrained)
    learner.ask(PublishWeights(version=1, publish=1), WeightsPublished)
    first, second = learner.weights.canaries
    assert first.tokens == second.tokens
    assert first.logprobs != second.logprobs


def test_release_reaches_the_exporter(launch: Callable[..., RunningLearner]) -> None:
    learner = launch()
    learner.ask(OpenLearner(), LearnerOpened)
    learner.backend.execute(ReleaseWeights(below_version=3))
    learner.ask(PublishWeights(version=0, publish=0), WeightsPublished)
    assert learner.weights.released == [3]


def test_a_checkpoint_loads_in_transformers_with_its_tokenizer(launch: Callable[..., RunningLearner]) -> None:
    learner = launch(LearnerOptions(learning_rate=1e-2))
    learner.ask(OpenLearner(), LearnerOpened)
    learner.ask(train_command(), BatchTrained)
    learner.ask(PublishWeights(version=1, publish=0), WeightsPublished)
    path = learner.ask(SaveCheckpoint(version=1), CheckpointWritten).path
    loaded = dict(cast("Any", AutoModelForCausalLM.from_pretrained(path)).named_parameters())
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in learner.weights.published[0].items())
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer("dbaB=")["input_ids"]) == "dbaB="


def test_saving_again_gives_the_same_checkpoint_and_leaves_nothing_else(
    launch: Callable[..., RunningLearner], tmp_path: Path
) -> None:
    leftover = tmp_path / "checkpoints" / ".version-0000000.partial"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    learner = launch()
    learner.ask(OpenLearner(), LearnerOpened)
    first, again = (learner.ask(SaveCheckpoint(version=0), CheckpointWritten) for _ in range(2))
    assert first == again
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["version-0000000"]


@pytest.mark.parametrize("command", [train_command(2), PublishWeights(version=1, publish=0), SaveCheckpoint(version=3)])
def test_a_command_for_another_version_fails(launch: Callable[..., RunningLearner], command: LearnerCommand) -> None:
    error = launch().error(OpenLearner(), command)
    assert isinstance(error, ValueError)
    assert "and it is at 0" in str(error)


def test_a_command_before_open_fails(launch: Callable[..., RunningLearner]) -> None:
    assert "before OpenLearner" in str(launch().error(train_command()))


def test_a_sample_without_reward_fails_by_its_name(launch: Callable[..., RunningLearner]) -> None:
    group = make_groups()[0]
    sample = Sample(key=SampleKey(0, 9), parts=group.samples[0].parts, outcome=Completed())
    unscored = Group(group_id=0, prompt=group.prompt, samples=(sample,))
    error = launch().error(OpenLearner(), train_command(groups=(unscored,)))
    assert "sample 0/9 came to the learner without a reward" in str(error)


def test_a_reward_that_is_no_number_stops_before_the_weights_change(launch: Callable[..., RunningLearner]) -> None:
    learner = launch()
    learner.ask(OpenLearner(), LearnerOpened)
    learner.ask(PublishWeights(version=0, publish=0), WeightsPublished)
    error = learner.error(train_command(groups=make_groups(((math.nan, 0.0),))))
    assert "sample 0/0 came to the learner with a reward of nan" in str(error)
    assert "mend the reward function" in str(error)


def test_closing_ends_a_long_warm_start(launch: Callable[..., RunningLearner]) -> None:
    block = WarmStartOptions(path="x", num_steps=1_000_000, batch_size=4)
    learner = launch(LearnerOptions(warm_start=block), demonstrations=demonstrations())
    learner.backend.execute(OpenLearner())
    learner.close()


def test_bfloat16_keeps_steps_that_are_too_small_for_it(launch: Callable[..., RunningLearner]) -> None:
    """Steps of 1e-4 on weights around 1 vanish in bfloat16 one by one and must add up all the same."""
    learner = launch(LearnerOptions(learning_rate=1e-4), dtype="bfloat16")
    learner.ask(OpenLearner(), LearnerOpened)
    learner.ask(PublishWeights(version=0, publish=0), WeightsPublished)
    for version in range(1, 101):
        learner.ask(train_command(version), BatchTrained)
    learner.ask(PublishWeights(version=100, publish=1), WeightsPublished)
    before, after = (weights["model.norm.weight"] for weights in learner.weights.published)
    assert before.dtype == torch.bfloat16
    assert torch.equal(before, torch.ones_like(before))
    assert float((after - before).abs().max()) > 0


def test_bfloat16_computes_nearly_what_float32_does(launch: Callable[..., RunningLearner]) -> None:
    norms: list[float] = []
    for dtype in ("float32", "bfloat16"):
        learner = launch(dtype=dtype)
        learner.ask(OpenLearner(), LearnerOpened)
        norms.append(figures_of(learner.ask(train_command(), BatchTrained))["train/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


def test_a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("cpu", "learner.device") == torch.device("cpu")
    with pytest.raises(UserFault, match="this process may see"):
        choose_device("cuda:99", "learner.device")
    with pytest.raises(UserFault, match=r"learner\.device: must be auto, cpu, cuda or cuda:N; found 'tpu'"):
        choose_device("tpu", "learner.device")
