"""The embedded engine and the learner give every token the same bits, over steps that move the weights; and a learner
with one kernel that is not the engine's is found out at its first step."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest
import torch
from engine_cases import VOCAB_SIZE, Case, make_case
from torch import nn
from torch.nn import functional
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.engines.torch.requests import Ended, GenerationRequest
from penstock.backends.engines.torch.sampling import Sampler
from penstock.backends.learners.options import LearnerOptions, ObjectiveOptions
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.learners.training.exactness import LARGEST_DIFFERENCE, InexactError
from penstock.messages.arrays import pack_tokens
from penstock.messages.errors import UserFault
from penstock.messages.samples import Completed, Group, Prompt, Reward, Sample, SampleKey

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
CONTEXT, NUM_GROUPS, GROUP_SIZE = 140, 4, 3
TEMPERATURE = 0.8


class Pair:
    """An engine and a learner of one model, each with its own copy of the weights."""

    def __init__(self, case: Case, *, is_exact: bool = True, **options: object) -> None:
        settings = EngineSettings(
            num_slots=5,
            max_context=CONTEXT,
            sampler=Sampler(temperature=TEMPERATURE),
            learner_model=case.folder if is_exact else None,
        )
        self.engine = TorchEngine(read_model_config(case.folder), settings)
        self.model = PackedModel.load(case.folder, dtype="float32", device=CPU)
        self.model.compute_as_engine(CONTEXT)
        given = {"true_on_policy": True, "learning_rate": 1e-2, "max_tokens_per_micro_batch": 200} | options
        self.trainer = PolicyTrainer(
            self.model,
            LearnerOptions(**given),  # type: ignore[arg-type]
            temperature=TEMPERATURE,
            num_steps=10,
            reference=None,
            check_stop=lambda: None,
        )

    def step(self, version: int) -> dict[str, float]:
        """Draw a batch with the weights as they are and train it."""
        self.engine.load(self.model.named_tensors(), version - 1)
        groups = drawn(self.engine, seed=version)
        result = self.trainer.train(groups, version=version, min_token_version=version - 1)
        return {metric.name: metric.value for metric in result.metrics}


def drawn(engine: TorchEngine, seed: int) -> tuple[Group, ...]:
    """A batch of very different lengths; some of its samples were interrupted and went on from their prefix."""
    chance = random.Random(seed)
    lengths = [chance.choice((1, 5, 33, 70)) for _ in range(NUM_GROUPS)]
    prompts = [[chance.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    wanted = {
        (group, index): GenerationRequest(
            tag=(group, index),
            prompt=pack_tokens(prompts[group]),
            seed=1000 * seed + GROUP_SIZE * group + index,
            max_new_tokens=chance.choice((1, 2, 9, 30, 61)),
        )
        for group in range(NUM_GROUPS)
        for index in range(GROUP_SIZE)
    }
    ended: list[Ended] = []
    for request in wanted.values():
        engine.submit(request)
    for _ in range(7):
        ended += engine.step().ended
    for cut in engine.interrupt():
        engine.submit(replace(wanted[cast("tuple[int, int]", cut.tag)], prefix=cut.part))
    while engine.num_running or engine.num_queued:
        ended += engine.step().ended
    parts = {end.tag: end.part for end in ended}
    return tuple(
        Group(
            group_id=group,
            prompt=Prompt(row=group, epoch=0, tokens=pack_tokens(prompts[group])),
            samples=tuple(
                Sample(
                    key=SampleKey(group, index),
                    parts=(parts[group, index],),
                    outcome=Completed(reward=Reward(value=float(index))),
                )
                for index in range(GROUP_SIZE)
            ),
        )
        for group in range(NUM_GROUPS)
    )


@pytest.mark.parametrize("name", ["qwen3_untied", "qwen2_tied", "llama_untied"])
def test_no_token_differs_while_the_weights_move(name: str, tmp_path: Path) -> None:
    pair = Pair(make_case(name, tmp_path))
    before = pair.model.named_tensors()["model.norm.weight"].clone()
    for version in (1, 2, 3):
        figures = pair.step(version)
        assert figures[LARGEST_DIFFERENCE] == 0.0
        assert figures["train/fresh_logprob_abs_diff"] == 0.0
        assert figures["train/grad_norm"] > 0
    assert not torch.equal(before, pair.model.named_tensors()["model.norm.weight"])


def test_a_loss_that_couples_tokens_compares_them_too(case: Case) -> None:
    pair = Pair(case, objective=ObjectiveOptions(name="gspo", policy_loss="gspo"))
    assert pair.step(1)[LARGEST_DIFFERENCE] == 0.0
    _other_norms(pair)
    with pytest.raises(InexactError, match="step 2"):
        pair.step(2)


def _other_norms(pair: Pair) -> None:
    """The same norm, by a division and not by the reciprocal of the root."""

    class Norm(Qwen3RMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            root = (hidden_states.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
            return self.weight * (hidden_states / root)

    for module in pair.model.model.modules():
        if isinstance(module, Qwen3RMSNorm):
            module.__class__ = Norm


def _other_attention(pair: Pair) -> None:
    pair.model.num_places = None  # the learner's usual one, of padded rows at once


def _other_products(pair: Pair) -> None:
    """Everything by float64 products, rounded once."""

    def linear(self: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows.double(), self.weight.double()).float()

    for module in pair.model.model.modules():
        if isinstance(module, nn.Linear):
            module.forward = linear.__get__(module)  # type: ignore[method-assign]


@pytest.mark.parametrize("plant", [_other_norms, _other_attention, _other_products])
def test_one_other_kernel_in_the_learner_stops_the_first_step(case: Case, plant: object) -> None:
    pair = Pair(case)
    plant(pair)  # type: ignore[operator]
    said = r"step 1: .* differ at [\d,]+ of [\d,]+ trained tokens, by up to \S+ nats: sample \d/\d, token \d+ .* says -"
    with pytest.raises(InexactError, match=said) as raised:
        pair.step(1)
    assert isinstance(raised.value, UserFault)


def test_the_fast_engine_is_not_the_learner_to_the_bit(case: Case) -> None:
    with pytest.raises(InexactError, match="step 1"):
        Pair(case, is_exact=False).step(1)


def test_the_largest_difference_is_named_with_its_token(case: Case) -> None:
    pair = Pair(case)
    pair.engine.load(pair.model.named_tensors(), 0)
    groups = drawn(pair.engine, seed=1)
    sample = max(groups[2].samples, key=lambda each: each.parts[0].num_tokens)
    values = torch.frombuffer(bytearray(sample.parts[0].logprobs), dtype=torch.float32).clone()
    values[5] += 0.25
    part = msgspec.structs.replace(sample.parts[0], logprobs=values.numpy().tobytes())
    changed = msgspec.structs.replace(sample, parts=(part,))
    samples = tuple(changed if each is sample else each for each in groups[2].samples)
    batch = (*groups[:2], msgspec.structs.replace(groups[2], samples=samples), groups[3])
    with pytest.raises(InexactError, match=rf"differ at 1 of .* by up to 0\.25 nats: sample {sample.key}, token 5 "):
        pair.trainer.train(batch, version=1, min_token_version=0)


def test_a_model_with_experts_is_refused(tmp_path: Path) -> None:
    folder = make_case("qwen3_moe", tmp_path).folder
    with pytest.raises(UserFault, match=r"true_on_policy: Qwen3MoeForCausalLM has experts"):
        PackedModel.load(folder, dtype="float32", device=CPU).compute_as_engine(CONTEXT)
