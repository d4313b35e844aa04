"""Several optimizer steps a batch, and PPO with a critic: as a plain loop over single sequences does it, however the
tokens are packed.

Weights and gradients are in float64, so that what AdamW makes of a gradient can be compared. The architecture computes
its norms in float32 all the same, which is what the bounds leave room for.
"""

# Transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
import torch
from test_torch_learner_objectives import (
    TEMPERATURE,
    VERSION,
    PlainSample,
    make_groups,
    plain_loss,
    plain_model,
    plain_samples,
    random_policy,
)

from penstock.backends.device_memory import ParkedMemory
from penstock.backends.learners.batch.sequences import read_groups
from penstock.backends.learners.batch.updates import divide_batch
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.messages.arrays import tokens_view

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.backends.learners.options import ObjectiveOptions
    from penstock.messages.samples import Group

CPU = torch.device("cpu")
SEED = 5
RATE = 1e-3
Weights = dict[str, torch.Tensor]

DECOUPLED: dict[str, Any] = {"old_logprobs": "recompute"}
SEVERAL: dict[str, dict[str, Any]] = {
    "engine": {"name": "dapo"},
    "decoupled": {"name": "grpo", **DECOUPLED},
    "a3po": {"name": "dapo", "old_logprobs": "interpolate"},
    "gspo": {"name": "gspo", **DECOUPLED, "clip_low": 0.02, "clip_high": 0.02},
    "opsm": {"name": "dapo", **DECOUPLED, "opsm_delta": 1e-3},
    "dppo": {"name": "dppo", **DECOUPLED, "clip_low": 1e-3, "clip_high": 1e-3},
    "dr_grpo": {"name": "dr_grpo", "constant_tokens": 40, "kl_coef": 0.1},
}
CRITICS: dict[str, dict[str, Any]] = {
    "own": {"name": "ppo"},
    "own, KL, discounts, whitened": {
        "name": "ppo", "kl_coef": 0.05, "discount": 0.97, "gae_lambda": 0.9, "whiten": True, "value_clip": 0.05,
    },
    "own, decoupled": {"name": "ppo", **DECOUPLED, "gae_lambda": 0.95},
    "vapo": {"name": "vapo", "gae_length_alpha": 0.3, "kl_coef": 0.05, "kl_in": "reward", "kl_estimator": "k1"},
    "shared": {"name": "ppo", "critic": "shared", "value_coef": 0.5, "gae_lambda": 0.95},
    "shared, coupled": {"name": "ppo", "critic": "shared", "policy_loss": "gspo", "reduction": "sequence_mean"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_policy(tmp_path_factory.mktemp("model"))


@dataclass
class Learner:
    """A trainer in float64; its critic, where it has one, does not start at 0."""

    model: PackedModel
    trainer: PolicyTrainer

    def train(self, groups: tuple[Group, ...], version: int, *, min_token_version: int = 0) -> dict[str, float]:
        result = self.trainer.train(groups, version=version, min_token_version=min_token_version)
        return {m.name: m.value for m in result.metrics if not m.name.startswith("perf/")}

    def weights(self) -> Weights:
        """Of policy and critic."""
        policy = {name: parameter.detach().clone() for name, parameter in self.model.model.named_parameters()}
        return policy | {name: tensor.detach().clone() for name, tensor in critic_weights(self.trainer).items()}


def critic_weights(trainer: PolicyTrainer) -> Weights:
    return {name: tensor for name, tensor in trainer.state().items() if name.startswith("critic/weight/")}


def loaded(folder: Path, *, scale: float = 1.0) -> PackedModel:
    model = PackedModel.load(folder, dtype="float32", device=CPU)
    model.model.double()
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.mul_(scale)
    return model


def make_learner(folder: Path, options: ObjectiveOptions, *, max_tokens: int = 64, **keys: int) -> Learner:
    model = loaded(folder)
    trainer = PolicyTrainer(
        model,
        LearnerOptions(
            max_tokens_per_micro_batch=max_tokens,
            objective=options,
            learning_rate=RATE,
            max_grad_norm=1e9,
            **keys,  # type: ignore[arg-type]  # num_updates and num_passes
        ),
        temperature=TEMPERATURE,
        num_steps=10,
        reference=loaded(folder, scale=1.1) if options.kl_coef else None,
        check_stop=lambda: None,
        seed=SEED,
    )
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, tensor in critic_weights(trainer).items():
            tensor.add_(
                torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype) * (0.3 if "head" in name else 0.1)
            )
    return Learner(model, trainer)


def difference(actual: Weights, expected: Weights, before: Weights) -> float:
    """Relative to how far the weights have moved."""
    apart = sum(float((actual[name] - tensor).square().sum()) for name, tensor in expected.items())
    moved = sum(float((before[name] - tensor).square().sum()) for name, tensor in expected.items())
    return math.sqrt(apart / moved)


# --- the plain loop -----------------------------------------------------------------------------------------------


def doubled(model: PreTrainedModel) -> PreTrainedModel:
    return model.double()


def plain_steps(
    folder: Path, groups: tuple[Group, ...], options: ObjectiveOptions, num_updates: int, num_passes: int
) -> tuple[Weights, list[float]]:
    """Whole groups, step by step: the weights at the end, and the loss of each step."""
    model, reference = doubled(plain_model(folder)), doubled(plain_model(folder, scale=1.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    with torch.no_grad():
        opening = plain_samples(groups, model, reference, options)
        plain_loss(opening, options)  # for the advantages of the whole batch
    batch = read_groups(groups, min_token_version=0)
    losses: list[float] = []
    for index in range(num_passes):
        draw = random.Random(f"updates {SEED} {VERSION} {index}")
        for update in divide_batch(batch, num_updates, by_sample=False, draw=draw):
            firsts = {sequence.first for sequence in update.sequences}
            chosen = {int(batch.group_ids[s.sample]) for s in batch.sequences if s.first in firsts}
            now = plain_samples(groups, model, reference, options)
            part = [with_opening(s, o) for s, o in zip(now, opening, strict=True) if s.group in chosen]
            advantages = [s.advantage for s in part]
            loss = plain_loss_of(part, advantages, options)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses


def with_opening(now: PlainSample, opening: PlainSample) -> PlainSample:
    now.old, now.advantage = opening.old, opening.advantage
    return now


def plain_loss_of(part: list[PlainSample], advantages: list[Tensor], options: ObjectiveOptions) -> Tensor:
    # The groups are whole, so their advantages are those of the batch.
    loss = plain_loss(part, options)
    for sample, advantage in zip(part, advantages, strict=True):
        torch.testing.assert_close(sample.advantage, advantage)
    return loss


@pytest.mark.parametrize("case", SEVERAL)
def test_several_steps_are_those_of_a_plain_loop(case: str, folder: Path) -> None:
    options = objective(**SEVERAL[case])
    groups = make_groups(3, plain_model(folder))
    learner = make_learner(folder, options, num_updates=2, num_passes=2)
    before = learner.weights()
    figures = learner.train(groups, VERSION + 1)
    expected, losses = plain_steps(folder, groups, options, 2, 2)
    assert figures["train/num_updates"] == len(losses) == 4
    assert min(losses) - 1e-6 <= figures["train/loss"] <= max(losses) + 1e-6
    assert difference(learner.weights(), expected, before) < 1e-4


@pytest.mark.parametrize("case", [*SEVERAL, *CRITICS])
def test_several_steps_do_not_depend_on_micro_batches(case: str, folder: Path) -> None:
    options = objective(**(SEVERAL | CRITICS)[case])
    groups = make_groups(4, plain_model(folder))
    whole = make_learner(folder, options, max_tokens=4096, num_updates=2, num_passes=2)
    before = whole.weights()
    expected = whole.train(groups, VERSION + 1)
    for max_tokens in (16, 64):
        learner = make_learner(folder, options, max_tokens=max_tokens, num_updates=2, num_passes=2)
        assert learner.train(groups, VERSION + 1) == pytest.approx(expected, rel=1e-4, abs=1e-7)
        assert difference(learner.weights(), whole.weights(), before) < 1e-5


@pytest.mark.parametrize("case", ["decoupled", "gspo", "own, decoupled"])
@pytest.mark.parametrize("max_tokens", [16, 4096])
def test_the_first_step_of_a_batch_is_at_a_distance_of_exactly_zero(case: str, max_tokens: int, folder: Path) -> None:
    options = objective(**(SEVERAL | CRITICS)[case])
    learner = make_learner(folder, options, max_tokens=max_tokens, num_updates=2, num_passes=2)
    figures = learner.train(make_groups(5, plain_model(folder)), VERSION + 1)
    assert figures["train/first_ppo_kl"] == 0.0
    assert figures["train/ppo_kl"] != 0.0
    assert figures["train/grad_norm_max"] >= figures["train/grad_norm"] > 0


def test_the_order_of_a_batch_comes_from_seed_and_version(folder: Path) -> None:
    options, groups = objective("dapo"), make_groups(6, plain_model(folder))
    runs = [make_learner(folder, options, num_updates=3) for _ in range(4)]
    for version, learner in zip((4, 4, 5, 6), runs, strict=True):
        learner.train(groups, version)
    weights = [torch.cat([t.flatten() for t in learner.weights().values()]) for learner in runs]
    assert torch.equal(weights[0], weights[1])
    assert not (torch.equal(weights[0], weights[2]) and torch.equal(weights[0], weights[3]))


@pytest.mark.parametrize("case", ["decoupled", "own"])
def test_tokens_that_are_too_old_have_no_part_in_any_step(case: str, folder: Path) -> None:
    options = objective(**(SEVERAL | CRITICS)[case])
    groups, oldest = make_groups(7, plain_model(folder)), 5
    masked = tuple(without_old_tokens(group, oldest) for group in groups)
    by_age, by_mask = (make_learner(folder, options, num_updates=2) for _ in range(2))
    before = by_age.weights()
    figures = by_age.train(groups, VERSION + 1, min_token_version=oldest)
    assert figures == pytest.approx(by_mask.train(masked, VERSION + 1), rel=1e-9)
    assert difference(by_age.weights(), by_mask.weights(), before) < 1e-9
    assert figures["train/num_tokens"] < read_groups(groups, min_token_version=0).num_trained_tokens


def without_old_tokens(group: Group, oldest: int) -> Group:
    samples = []
    for sample in group.samples:
        parts = []
        for part in sample.parts:
            versions = [span.version for span in part.spans for _ in range(span.num_tokens)]
            mask = part.loss_mask or bytes([1] * len(versions))
            kept = bytes(int(bool(m) and v >= oldest) for m, v in zip(mask, versions, strict=True))
            parts.append(msgspec.structs.replace(part, loss_mask=kept))
        samples.append(msgspec.structs.replace(sample, parts=tuple(parts)))
    return msgspec.structs.replace(group, samples=tuple(samples))


# --- the critic ---------------------------------------------------------------------------------------------------


class PlainCritic(torch.nn.Module):
    """Values of single sequences; its weights are named as the learner names those of its critic."""

    def __init__(self, policy: PreTrainedModel, trainer: PolicyTrainer, *, is_shared: bool) -> None:
        super().__init__()
        self.head = torch.nn.Linear(16, 1, dtype=torch.float64)
        trunk: torch.nn.Module = policy.base_model
        if not is_shared:
            self.trunk = copy.deepcopy(trunk)
        self.shared = [] if not is_shared else [trunk]
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(trainer.state()[f"critic/weight/{name}"])

    def values(self, context: list[int], tokens: list[int]) -> Tensor:
        trunk = self.shared[0] if self.shared else self.trunk
        hidden = trunk(torch.tensor([context + tokens])).last_hidden_state[0, len(context) - 1 : -1]
        return cast("Tensor", self.head(hidden))[:, 0]

    def of_samples(self, groups: tuple[Group, ...]) -> list[Tensor]:
        """Of the tokens that are trained, sample by sample."""
        found: list[Tensor] = []
        for group in groups:
            for sample in group.samples:
                values = []
                for part in sample.parts:
                    tokens = list(tokens_view(part.tokens))
                    kept = [i for i, m in enumerate(part.loss_mask or [1] * len(tokens)) if m]
                    values.append(
                        self.values(list(tokens_view(part.context_tokens or group.prompt.tokens)), tokens)[kept]
                    )
                found.append(torch.cat(values))
        return found


def plain_gae(sample: PlainSample, values: Tensor, o: ObjectiveOptions, *, is_critic: bool = False) -> Tensor:
    rewards = [0.0] * len(values)
    if o.kl_coef:
        rewards = [-o.kl_coef * float(a - b) for a, b in zip(sample.old, sample.reference, strict=True)]
    rewards[-1] += sample.reward
    following = [*values[1:].tolist(), 0.0]
    errors = [r + o.discount * n - float(v) for r, n, v in zip(rewards, following, values, strict=True)]
    trace = o.gae_lambda if o.gae_length_alpha is None else max(0.0, 1 - 1 / (o.gae_length_alpha * len(values)))
    if is_critic and o.critic_lambda is not None:
        trace = o.critic_lambda
    decay = o.discount * trace
    return torch.tensor(
        [sum(decay ** (j - i) * e for j, e in enumerate(errors) if j >= i) for i in range(len(errors))],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("case", ["own", "own, KL, discounts, whitened", "vapo", "shared"])
def test_ppo_is_its_formula_on_single_sequences(case: str, folder: Path) -> None:
    options = objective(**CRITICS[case])
    groups = make_groups(8, plain_model(folder))
    learner = make_learner(folder, options, max_tokens=48)
    policy, reference = doubled(plain_model(folder)), doubled(plain_model(folder, scale=1.1))
    critic = PlainCritic(policy, learner.trainer, is_shared=options.critic == "shared")
    samples = plain_samples(groups, policy, reference, options)
    values = critic.of_samples(groups)
    raw = [plain_gae(s, v.detach(), options) for s, v in zip(samples, values, strict=True)]
    targets = [plain_gae(s, v.detach(), options, is_critic=True) for s, v in zip(samples, values, strict=True)]
    returns = [a + v.detach() for a, v in zip(targets, values, strict=True)]
    every = torch.cat(raw)
    white = (every - every.mean()) / every.std() if options.whiten else every
    new, old = torch.cat([s.new for s in samples]), torch.cat([s.old for s in samples])
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    policy_loss = torch.maximum(-ratio * white, -clipped * white).mean()
    value_loss = (torch.cat(values) - torch.cat(returns)).square().mean()
    torch.autograd.backward(policy_loss + (options.value_coef if critic.shared else 1.0) * value_loss)

    figures = learner.trainer.accumulate(read_groups(groups, min_token_version=0), version=VERSION)
    assert figures["train/loss"] == pytest.approx(float(policy_loss.detach()), rel=1e-6, abs=1e-8)
    assert figures["train/value_loss"] == pytest.approx(float(value_loss.detach()), rel=1e-6)
    assert figures["rollout/returns"] == pytest.approx(float(torch.cat(returns).mean()), rel=1e-6)
    expected = {name: parameter.grad for name, parameter in policy.named_parameters()}
    expected |= {f"critic/weight/{name}": parameter.grad for name, parameter in critic.named_parameters()}
    actual = dict(learner.model.model.named_parameters()) | critic_weights(learner.trainer)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name].grad, gradient, rtol=1e-5, atol=1e-7)


def test_the_critic_alone_leaves_the_policy_as_it_is(folder: Path) -> None:
    groups = make_groups(9, plain_model(folder))
    for place in ("own", "shared"):
        learner = make_learner(folder, objective("ppo", critic=place, critic_only_steps=2), num_updates=2)
        before = learner.weights()
        figures = [learner.train(groups, version) for version in (1, 2)]
        after = learner.weights()
        still = {name for name in before if torch.equal(before[name], after[name])}
        assert still == {name for name in before if not name.startswith("critic/")}
        assert figures[1]["train/value_loss"] < figures[0]["train/value_loss"]
        assert "train/loss" not in figures[1]
        assert "train/loss" in learner.train(groups, 3)
        assert not torch.equal(learner.weights()["lm_head.weight"], before["lm_head.weight"])


def test_a_critic_learns_what_the_responses_are_worth(folder: Path) -> None:
    groups = make_groups(10, plain_model(folder))
    learner = make_learner(folder, objective("ppo", critic_only_steps=60, critic_learning_rate=1e-2))
    figures = [learner.train(groups, version) for version in range(1, 61)]
    assert figures[-1]["train/critic-explained_variance"] > 0.9
    assert figures[-1]["train/value_loss"] < figures[0]["train/value_loss"] / 20


def test_the_critic_has_a_learning_rate_and_a_warm_up_of_its_own(folder: Path) -> None:
    groups = make_groups(11, plain_model(folder))
    learner = make_learner(folder, objective("ppo", critic_learning_rate=8e-3, critic_warmup_steps=3))
    rates = [learner.train(groups, version)["train/critic-lr-pg_0"] for version in (1, 2, 3, 4, 5)]
    assert rates == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, 8e-3])
    learner = make_learner(folder, objective("ppo"))
    assert learner.train(groups, 1)["train/critic-lr-pg_0"] == pytest.approx(10 * RATE)


def test_a_fresh_critic_says_nothing(folder: Path) -> None:
    """So the first advantages are the rewards themselves."""
    model = loaded(folder)
    options = LearnerOptions(objective=objective("ppo"))
    trainer = PolicyTrainer(
        model, options, temperature=TEMPERATURE, num_steps=10, reference=None, check_stop=lambda: None
    )
    groups = make_groups(12, plain_model(folder))
    figures = trainer.accumulate(read_groups(groups, min_token_version=0), version=VERSION)
    assert figures["rollout/values"] == 0.0
    assert figures["rollout/advantages"] == pytest.approx(figures["rollout/returns"])


@pytest.mark.parametrize("place", ["own", "shared"])
def test_memory_that_is_parked_takes_the_critic_along(place: str, folder: Path) -> None:
    """What a learner gives up while it sleeps is the model and what the trainer calls its state."""
    groups = make_groups(13, plain_model(folder))
    parked, awake = (make_learner(folder, objective("ppo", critic=place), num_updates=2) for _ in range(2))
    for learner in (parked, awake):
        learner.train(groups, 1)
    state = parked.trainer.state()
    copies = {name: tensor.detach().clone() for name, tensor in state.items()}
    assert {"critic/weight/head.weight", "critic/exp_avg/head.bias"} <= set(state)
    assert any(name.startswith("critic/exp_avg_sq/trunk.") for name in state) == (place == "own")
    memory = ParkedMemory([*parked.model.model.parameters(), *state.values()], keeps_values=True)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in critic_weights(parked.trainer).values())
    # A checkpoint that is taken meanwhile asks again for the state.
    again = parked.trainer.state()
    assert all(torch.equal(memory.on_host(again[name]), copy_) for name, copy_ in copies.items())
    memory.restore()
    assert parked.train(groups, 2) == awake.train(groups, 2)
