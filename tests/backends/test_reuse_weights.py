"""A group that is trained again (``staleness.reuse``) is weighed by how far the policy has moved from the one that drew
it: the weights of its tokens equal the closed form, computed by a plain transformers model."""

# Transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from learner_cases import make_groups, open_learner, train_command
from transformers import AutoModelForCausalLM

from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.recording_options import DumpOptions
from penstock.backends.learners.step_dumps import DumpedSequence, read_step
from penstock.messages.arrays import pack_floats, tokens_view
from penstock.messages.commands import OpenLearner, PublishWeights
from penstock.messages.local import BatchTrained, LearnerOpened, WeightsPublished

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.messages.samples import Group, Sample

CLIP_LOW, CLIP_HIGH, TIS_CLIP = 0.05, 0.1, 1.1


def plain_logprobs(model: Any, group: Group, sample: Sample) -> NDArray[np.float64]:  # noqa: ANN401 - transformers
    prompt, tokens = tokens_view(group.prompt.tokens).tolist(), tokens_view(sample.parts[0].tokens).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].double()
    every = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    return every[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()


def drawn_by(model: Any) -> tuple[Group, ...]:  # noqa: ANN401 - transformers
    """Groups with the log-probs that this model gives their tokens: it is the behaviour policy."""
    groups: list[Group] = []
    for group in make_groups():
        samples: list[Sample] = []
        for sample in group.samples:
            part = msgspec.structs.replace(
                sample.parts[0], logprobs=pack_floats(plain_logprobs(model, group, sample).tolist())
            )
            samples.append(msgspec.structs.replace(sample, parts=(part,)))
        groups.append(msgspec.structs.replace(group, samples=tuple(samples)))
    return tuple(groups)


def trained_twice(folder: Path, run: Path, **keys: Any) -> tuple[list[DumpedSequence], list[DumpedSequence], Any]:  # noqa: ANN401
    """The tokens of both uses, and the model that the second one finds."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # it comes in evaluation mode
    groups = drawn_by(model)
    options: dict[str, Any] = {
        "learning_rate": 2e-2,
        "objective": objective("dapo", **keys),
        "dump": DumpOptions(first_step=1),
    }
    learner = open_learner(folder, run / "checkpoints", LearnerOptions(**options))
    learner.ask(OpenLearner(), LearnerOpened)
    learner.ask(train_command(1, groups=groups), BatchTrained)
    learner.ask(PublishWeights(version=1, publish=1), WeightsPublished)
    learner.ask(train_command(2, groups=groups), BatchTrained)
    learner.close()
    model.load_state_dict(learner.weights.published[-1], strict=False)
    return read_step(run, 1), read_step(run, 2), (model, groups)


def test_the_second_use_has_the_ratio_to_the_behaviour_policy_and_its_clip(model_folder: Path, tmp_path: Path) -> None:
    first, second, (model, groups) = trained_twice(model_folder, tmp_path, clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
    samples = [(group, sample) for group in groups for sample in group.samples]
    num_tokens = sum(len(row.tokens) for row in second)
    weights: list[float] = []
    for early, late, (group, sample) in zip(first, second, samples, strict=True):
        behaviour = np.frombuffer(sample.parts[0].logprobs, dtype="<f4").astype(np.float64)
        np.testing.assert_allclose(early.figures["ratios"], 1.0, atol=1e-4)
        closed = np.exp(plain_logprobs(model, group, sample) - behaviour)
        np.testing.assert_allclose(late.figures["ratios"], closed, rtol=1e-4)
        advantages = late.figures["advantages"]
        clipped = np.clip(closed, 1 - CLIP_LOW, 1 + CLIP_HIGH)
        losses = np.maximum(-advantages * closed, -advantages * clipped) / num_tokens
        np.testing.assert_allclose(late.figures["losses"], losses, rtol=1e-3, atol=1e-7)
        weights += closed.tolist()
    assert min(weights) < 1 - CLIP_LOW, "the policy has moved far enough for the clip to be seen"
    assert max(weights) > 1 + CLIP_HIGH


def test_with_recomputed_log_probs_the_truncated_weight_is_the_closed_form(model_folder: Path, tmp_path: Path) -> None:
    keys = {"old_logprobs": "recompute", "correction": "tis", "tis_clip": TIS_CLIP}
    _, second, (model, groups) = trained_twice(model_folder, tmp_path, **keys)
    num_tokens = sum(len(row.tokens) for row in second)
    samples = [(group, sample) for group in groups for sample in group.samples]
    weights: list[float] = []
    for late, (group, sample) in zip(second, samples, strict=True):
        behaviour = np.frombuffer(sample.parts[0].logprobs, dtype="<f4").astype(np.float64)
        closed = np.exp(plain_logprobs(model, group, sample) - behaviour)
        losses = -late.figures["advantages"] * np.minimum(closed, TIS_CLIP) / num_tokens
        np.testing.assert_allclose(late.figures["losses"], losses, rtol=1e-3, atol=1e-7)
        weights += closed.tolist()
    assert max(weights) > TIS_CLIP
    assert min(weights) < 0.95
