"""Loss, gradient and weights do not depend on how a batch is packed, on its micro-batches, or on ranks: against a
padded batch in one process."""

# Transformers and torch.distributed are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import logging
import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from learner_cases import Heard
from rank_cases import CPU, Ranks
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from penstock.backends.learners.batch.sequences import demonstration_sequence, read_groups
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.objectives.validity import needs_reference
from penstock.backends.learners.options import LearnerOptions, WarmStartOptions
from penstock.backends.learners.step_dumps import read_step
from penstock.backends.learners.torch.attention import PACKED_ATTENTION
from penstock.backends.learners.torch.fused import fuse
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.parallel import (
    is_sharded,
    parallelize,
    replica,
    transformer_blocks,
    whole,
)
from penstock.backends.learners.torch.publishing import GatheredWeights
from penstock.backends.learners.torch.sharded_load import load_divided
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.learners.torch.warm_start import warm_start
from penstock.backends.learners.worker_group.workers import SOLO
from penstock.messages.arrays import pack_floats, pack_tokens, tokens_view
from penstock.messages.errors import UserFault
from penstock.messages.samples import Completed, Group, Part, Prompt, Reward, Sample, SampleKey, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backends.learners.batch.packing import PackedTokens
    from penstock.backends.learners.worker_group.workers import WorkerGroup

AutoModel: Any = AutoModelForCausalLM  # transformers' factories have no types
pytestmark = pytest.mark.long_run

VOCAB = 40
VERSION = 6
NUM_BATCHES = 50
TOLERANCE = 1e-6
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS: dict[str, Any] = {"head_dim": 8, "moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2}
ARCHITECTURES = {
    "tied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "untied": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS),
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dapo": {"name": "dapo"},
    "grpo with KL": {"name": "grpo", "old_logprobs": "recompute", "kl_coef": 0.1, "entropy_coef": 0.01},
    "gspo": {"name": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    "opsm": {"name": "dapo", "opsm_delta": 1e-3},
    "mis": {
        "name": "dapo", "old_logprobs": "interpolate", "correction": "mis",
        "mis": {"level": "sequence", "mode": "clip", "normalize": True, "reject_level": "geometric"},
    },
    "ppo": {"name": "ppo", "whiten": True, "kl_coef": 0.05, "gae_lambda": 0.9},
    "ppo, shared and coupled": {"name": "ppo", "critic": "shared", "policy_loss": "gspo"},
    "reinforce": {"name": "reinforce_plus_plus", "discount": 0.97, "kl_coef": 0.05, "kl_in": "reward"},
    "dr_grpo": {"name": "dr_grpo", "constant_tokens": 50},
    "dpo": {"name": "dpo", "dpo_pairs": "all"},
    "kto": {"name": "kto"},
    "rejection sampling": {"name": "rejection_sampling", "kl_coef": 0.1},
}  # fmt: skip


class Case(NamedTuple):
    """Batches that are trained with one objective and one architecture."""

    objective: str
    architecture: str
    seeds: tuple[int, ...]


class Found(NamedTuple):
    """What came of one batch."""

    figures: dict[str, float]
    gradient: NDArray[np.float64]
    """Of policy and critic, all weights end to end."""


Key = tuple[str, str, int]
"""Objective, architecture and seed."""
CASES = [
    Case(name, list(ARCHITECTURES)[index % 3], tuple(range(index, NUM_BATCHES, len(OBJECTIVES))))
    for index, name in enumerate(OBJECTIVES)
]
"""Fifty batches, each once."""
CROSS_PRODUCT = [Case(name, architecture, (1, 2, 3)) for name in OBJECTIVES for architecture in ARCHITECTURES]


def some_of(cases: list[Case], every: int) -> list[Case]:
    fewer = [case._replace(seeds=case.seeds[index % every :: every]) for index, case in enumerate(cases)]
    return [case for case in fewer if case.seeds]


COPIES: dict[str, Any] = {"parallel": "fsdp", "shard_size": 2}
SOME = some_of(CASES, 2)
"""Half of them, of every objective; the others at night."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, config in ARCHITECTURES.items():
        torch.manual_seed(5)
        AutoModel.from_config(config).save_pretrained(path / name)
    return path


# --- batches ------------------------------------------------------------------------------------------------------


def make_batch(seed: int, longest: int = 100) -> tuple[Group, ...]:
    """Groups of uneven sizes and lengths, with loss masks, several versions, and samples of two parts."""
    draw = random.Random(f"batch {seed}")
    groups: list[Group] = []
    for group_id in range(draw.randint(1, 4)):
        prompt = Prompt(row=0, epoch=0, tokens=some_tokens(draw, draw.randint(2, 12)))
        samples: list[Sample] = []
        for index in range(draw.randint(2, 5)):
            parts = [make_part(draw, longest, context=False)]
            if draw.random() < 0.3:
                parts.append(make_part(draw, longest, context=True))
            outcome = Completed(reward=Reward(value=draw.random()))
            samples.append(Sample(key=SampleKey(group_id, index), parts=tuple(parts), outcome=outcome))
        groups.append(Group(group_id=group_id, prompt=prompt, samples=tuple(samples)))
    return tuple(groups)


def make_part(draw: random.Random, longest: int, *, context: bool) -> Part:
    length = min(longest, 2 + int(draw.lognormvariate(2.3, 0.8)))
    old = draw.randint(0, length - 1)
    return Part(
        tokens=some_tokens(draw, length),
        logprobs=pack_floats(min(0.0, draw.gauss(-3.7, 0.3)) for _ in range(length)),
        spans=(VersionSpan(4, old), VersionSpan(5, length - old)),
        loss_mask=bytes([*(draw.randint(0, 1) for _ in range(length - 1)), 1]) if draw.random() < 0.5 else b"",
        context_tokens=some_tokens(draw, draw.randint(1, 15)) if context else b"",
    )


def some_tokens(draw: random.Random, count: int) -> bytes:
    return pack_tokens(draw.randrange(2, VOCAB) for _ in range(count))


# --- ranks --------------------------------------------------------------------------------------------------------


def learner_options(name: str, **keys: object) -> LearnerOptions:
    return msgspec.convert({"objective": objective(**OBJECTIVES[name]), **keys}, LearnerOptions)


def loaded(folder: Path, kind: type[PackedModel] = PackedModel) -> PackedModel:
    """In float64, so that what is compared is no rounding."""
    model = kind.load(folder, dtype="float32", device=CPU)
    if model.model.get_experts_implementation()[""] == "grouped_mm":
        model.model.set_experts_implementation("batched_mm")  # the other has no float64
    model.model.double()
    return model


@dataclass
class Learner:
    """A trainer on one rank."""

    model: PackedModel
    trainer: PolicyTrainer

    @classmethod
    def open(cls, workers: WorkerGroup, model: PackedModel, options: LearnerOptions) -> Learner:
        """Its reference and its critic differ from the policy."""
        parallelize(model, workers, options)
        fuse(model, workers, options)
        assert is_sharded(model.model) == (not workers.is_alone and options.parallel == "fsdp")
        reference = None
        if needs_reference(options.objective):
            reference = replica(model, workers, options)
            shift(dict(reference.model.named_parameters()), 0.9)
            reference.model.requires_grad_(requires_grad=False)
        trainer = PolicyTrainer(
            model, options, temperature=0.8, num_steps=10, reference=reference, check_stop=lambda: None, workers=workers
        )
        learner = cls(model, trainer)
        shift(learner.critic(), 1.1)
        return learner

    def critic(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.trainer.state().items() if name.startswith("critic/weight/")}

    def weights(self) -> dict[str, Tensor]:
        return {**dict(self.model.model.named_parameters()), **self.critic()}

    def gradient(self) -> NDArray[np.float64]:
        """All of it, on every rank; it is forgotten."""
        gradients = [(weight, weight.grad) for weight in self.weights().values()]
        flat = [whole(torch.zeros_like(w) if g is None else g).reshape(-1) for w, g in gradients]
        for weight, _ in gradients:
            weight.grad = None
        self.trainer.forget_gradients()
        return torch.cat(flat).double().numpy()


@torch.no_grad()
def shift(weights: dict[str, Tensor], scale: float) -> None:
    for name, weight in weights.items():
        weight.mul_(scale).add_(0.05 if "head." in name else 0.0)


def gradients_of(
    workers: WorkerGroup, folder: Path, cases: list[Case], keys: dict[str, Any], kind: type[PackedModel] = PackedModel
) -> dict[Key, Found]:
    """Of every batch of every case."""
    found: dict[Key, Found] = {}
    for case in cases:
        learner = Learner.open(
            workers, loaded(folder / case.architecture, kind), learner_options(case.objective, **keys)
        )
        for seed in case.seeds:
            batch = read_groups(make_batch(seed), min_token_version=5 if seed % 4 == 0 else 0)
            figures = learner.trainer.accumulate(batch, version=VERSION)
            found[case.objective, case.architecture, seed] = Found(figures, learner.gradient())
    return found


class PaddedModel(PackedModel):
    """Runs micro-batches as padded rows through transformers' own attention."""

    def _logits(self, packed: PackedTokens) -> Tensor:
        self.model.set_attn_implementation("eager")
        seen = torch.arange(packed.rows.shape[1])[None] < torch.from_numpy(packed.lengths)[:, None]
        rows = torch.from_numpy(packed.rows)
        ids = torch.where(seen, torch.from_numpy(packed.input_ids)[rows], 0)
        logits = self.model(input_ids=ids, attention_mask=seen.long(), use_cache=False).logits
        self.model.set_attn_implementation(PACKED_ATTENTION)
        self._asked = packed
        return self._trained(logits)

    def _trained(self, rows: Tensor) -> Tensor:
        """``[B, P, …]`` → ``[T, …]``."""
        flat = rows.flatten(0, 1)[torch.from_numpy(self._asked.places)]
        return flat[torch.from_numpy(self._asked.predicted_at)]

    @contextmanager
    def _head_inputs(self, *, is_wanted: bool) -> Generator[list[Tensor]]:
        with super()._head_inputs(is_wanted=is_wanted) as taken:
            yield taken
        taken[:] = [self._trained(rows)[None] for rows in taken]


def assert_same(found: dict[Key, Found], expected: dict[Key, Found]) -> None:
    assert found
    for key, one in found.items():
        other = expected[key]
        assert one.figures.keys() == other.figures.keys()
        for name, value in other.figures.items():
            assert one.figures[name] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), name
        scale = float(np.abs(other.gradient).max())
        assert scale > 0
        assert float(np.abs(one.gradient - other.gradient).max()) <= TOLERANCE * scale


def of_padded(folder: Path, cases: list[Case]) -> dict[Key, Found]:
    """Padded, in one micro-batch, in one process."""
    return gradients_of(SOLO, folder, cases, {"max_tokens_per_micro_batch": 100_000}, PaddedModel)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[Key, Found]:
    return of_padded(folder, SOME)


@pytest.mark.parametrize("max_tokens", [64, 100_000])
def test_packed_or_padded_many_micro_batches_or_one(max_tokens: int, folder: Path, expected: dict[Key, Found]) -> None:
    found = gradients_of(SOLO, folder, SOME, {"max_tokens_per_micro_batch": max_tokens})
    assert found.keys() == expected.keys()
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("num_ranks", "division", "every"),
    [
        (2, {"parallel": "ddp"}, 2),
        (2, {"parallel": "fsdp"}, 2),
        (4, COPIES, 2),
        pytest.param(3, {"parallel": "fsdp"}, 3, marks=pytest.mark.slow),
    ],
    ids=["2 ddp", "2 fsdp", "2 copies over 2", "3 fsdp"],
)
def test_one_rank_or_several(
    num_ranks: int, division: dict[str, Any], every: int, folder: Path, ranks: Ranks, expected: dict[Key, Found]
) -> None:
    keys = {"max_tokens_per_micro_batch": 64, **division}
    for found in ranks.run(num_ranks, gradients_of, folder, some_of(SOME, every), keys):
        assert_same(found, expected)


@pytest.fixture(scope="module")
def expected_of_fifty(folder: Path) -> dict[Key, Found]:
    return of_padded(folder, CASES)


# Half of the batches are packed in CI, and every objective is divided by ranks there.
@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [64, 100_000])
@pytest.mark.parametrize(
    ("num_ranks", "parallel"), [(1, "fsdp"), (2, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp")]
)  # fmt: skip
def test_fifty_batches_on_one_rank_or_several(
    num_ranks: int, parallel: str, max_tokens: int, folder: Path, ranks: Ranks, expected_of_fifty: dict[Key, Found]
) -> None:
    keys = {"max_tokens_per_micro_batch": max_tokens, "parallel": parallel}
    for found in ranks.run(num_ranks, gradients_of, folder, CASES, keys):
        assert found.keys() == expected_of_fifty.keys()
        assert_same(found, expected_of_fifty)


@pytest.fixture(scope="module")
def padded(folder: Path) -> dict[Key, Found]:
    """As ``expected``, of the cross product."""
    return gradients_of(SOLO, folder, CROSS_PRODUCT, {"max_tokens_per_micro_batch": 100_000}, PaddedModel)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "parallel"), [(1, "fsdp"), (2, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp")])
def test_every_objective_with_every_architecture(
    num_ranks: int, parallel: str, folder: Path, ranks: Ranks, padded: dict[Key, Found]
) -> None:
    keys = {"max_tokens_per_micro_batch": 48, "parallel": parallel}
    for found in ranks.run(num_ranks, gradients_of, folder, CROSS_PRODUCT, keys):
        assert_same(found, padded)


# --- training -----------------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """What came of some steps."""

    figures: list[dict[str, float]]
    weights: NDArray[np.float64]
    max_tokens: int
    log: list[str]


class Limit(NamedTuple):
    """Memory for that many inputs and no more."""

    max_inputs: int
    rank: int
    """That has it; the others have plenty."""
    place: str
    """Where it ends: in the forward or in the backward pass."""


def impose(limit: Limit, model: PackedModel) -> None:
    """As on a GPU: in the middle of a block an allocation fails, with what has been computed before in memory."""
    block: Any = transformer_blocks(model.model)[1]

    def run_out(values: Tensor) -> None:
        if values.shape[-2] > limit.max_inputs:
            raise torch.OutOfMemoryError(f"{values.shape[-2]} inputs")

    def forward(_module: object, _inputs: object, output: tuple[Tensor, ...]) -> None:
        # Behind the MLP in the backward pass, so that there are gradients of this block already.
        if limit.place == "forward":
            run_out(output[0])
        elif output[0].requires_grad:
            output[0].register_hook(run_out)  # type: ignore[no-untyped-call]

    block.self_attn.register_forward_hook(forward)


def train(
    workers: WorkerGroup, folder: Path, name: str, keys: dict[str, Any], longest: int = 100, limit: Limit | None = None
) -> Trained:
    """Three batches."""
    options = learner_options(name, learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, **keys)
    model = loaded(folder)
    heard = Heard()
    logging.getLogger("penstock.backends.learners.training.micro_batch_size").addHandler(heard)
    learner = Learner.open(workers, model, options)
    if limit is not None and limit.rank == workers.rank:
        impose(limit, model)
    found: list[dict[str, float]] = []
    for version in (1, 2, 3):
        result = learner.trainer.train(make_batch(100 + version, longest), version=version, min_token_version=0)
        found.append({m.name: m.value for m in result.metrics if not m.name.startswith("perf/")})
    logging.getLogger("penstock.backends.learners.training.micro_batch_size").removeHandler(heard)
    weights = torch.cat([whole(weight).reshape(-1) for weight in learner.weights().values()])
    return Trained(found, weights.double().numpy(), learner.trainer.max_tokens_per_micro_batch, heard.lines)


def assert_trained_alike(found: Trained, expected: Trained) -> None:
    for one, other in zip(found.figures, expected.figures, strict=True):
        assert one == pytest.approx(other, abs=TOLERANCE, rel=1e-5)
    assert float(np.abs(found.weights - expected.weights).max()) <= TOLERANCE


SEVERAL: dict[str, Any] = {"max_tokens_per_micro_batch": 64, "num_updates": 2, "num_passes": 2}


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("grpo with KL", "fsdp"),
        ("ppo", "ddp"),
        # The gradient of its critic is compared above, and its shards are trained as those of a shared one are.
        pytest.param("ppo", "fsdp", marks=pytest.mark.slow),
        ("ppo, shared and coupled", "fsdp"),
    ],
)
def test_three_steps_on_two_ranks_leave_the_weights_of_one(
    name: str, parallel: str, folder: Path, ranks: Ranks
) -> None:
    alone = train(SOLO, folder / "tied", name, SEVERAL)
    for found in ranks.run(2, train, folder / "tied", name, {**SEVERAL, "parallel": parallel}):
        assert_trained_alike(found, alone)


def test_three_steps_on_two_copies_over_two_ranks_leave_the_weights_of_one(folder: Path, ranks: Ranks) -> None:
    for architecture in ("untied", "experts"):
        alone = train(SOLO, folder / architecture, "ppo", SEVERAL)
        for found in ranks.run(4, train, folder / architecture, "ppo", {**SEVERAL, **COPIES}):
            assert_trained_alike(found, alone)


LIMITED: dict[str, Any] = {**SEVERAL, "max_tokens_per_micro_batch": 256}
COUPLED, LONGEST = "ppo, shared and coupled", 25


@pytest.fixture(scope="module")
def free(folder: Path) -> Trained:
    """With memory for everything."""
    return train(SOLO, folder / "untied", COUPLED, LIMITED, LONGEST)


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("parallel", ["alone", "ddp", "fsdp"])
def test_a_step_that_ran_out_of_memory_is_that_of_smaller_micro_batches(
    parallel: str, place: str, folder: Path, ranks: Ranks, free: Trained
) -> None:
    limit = Limit(45, rank=0 if parallel == "alone" else 1, place=place)
    if parallel == "alone":
        results = [train(SOLO, folder / "untied", COUPLED, LIMITED, LONGEST, limit)]
    else:
        keys = {**LIMITED, "parallel": parallel}
        results = ranks.run(2, train, folder / "untied", COUPLED, keys, LONGEST, limit)
    for found in results:
        assert_trained_alike(found, free)
        assert found.max_tokens == 32
    assert len(results[0].log) == 1
    assert "learner.max_tokens_per_micro_batch: 32" in results[0].log[0]
    assert not any(found.log for found in (free, *results[1:]))


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_one_copy_that_runs_out_of_memory_leaves_no_other_waiting(place: str, folder: Path, ranks: Ranks) -> None:
    keys: dict[str, Any] = {"max_tokens_per_micro_batch": 256}
    expected = train(SOLO, folder / "untied", COUPLED, keys, LONGEST)
    limit = Limit(45, rank=1, place=place)
    for found in ranks.run(4, train, folder / "untied", COUPLED, {**keys, **COPIES}, LONGEST, limit):
        assert_trained_alike(found, expected)
        assert found.max_tokens < 256


def test_a_sequence_that_does_not_fit_alone_ends_the_run_with_advice(folder: Path) -> None:
    with pytest.raises(MemoryError, match="activation_checkpointing"):
        train(SOLO, folder / "tied", "dapo", {}, limit=Limit(4, rank=0, place="forward"))


# --- what is divided ----------------------------------------------------------------------------------------------


def weights_of(
    workers: WorkerGroup, folder: Path, dtype: str, *, is_replica: bool, shard_size: int | None = None
) -> dict[str, NDArray[np.float32]]:
    """By their names in a checkpoint, as published; in bfloat16 they must be so."""
    options = LearnerOptions(shard_size=shard_size)
    model = load_divided(folder, workers, options, dtype=dtype)
    for _ in range(int(is_replica)):
        model = replica(model, workers, options)
    found = dict(GatheredWeights(model, workers, max_bucket_bytes=1000).tensors())
    assert {str(tensor.dtype) for tensor in found.values()} <= {f"torch.{dtype}"}
    return {name: tensor.float().numpy() for name, tensor in found.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_that_are_divided_are_published_whole(architecture: str, folder: Path, ranks: Ranks) -> None:
    for dtype in ("float32", "bfloat16"):
        (expected,) = ranks.run(1, weights_of, folder / architecture, dtype, is_replica=False)
        for is_replica in (False, True):
            for num_ranks, shard_size in ((2, None), (4, 2)):
                first, *others = ranks.run(
                    num_ranks, weights_of, folder / architecture, dtype, is_replica=is_replica, shard_size=shard_size
                )
                assert first.keys() == expected.keys()
                assert all(np.array_equal(first[name], expected[name]) for name in expected)
                assert not any(others)


class Precision(NamedTuple):
    """Of a model in bfloat16."""

    gradient: NDArray[np.float64]
    trained: set[str]
    """Types of the weights that the optimizer changes."""
    computed: set[str]
    """Types of what a block is given and of the weights that it uses."""


def precision_of(workers: WorkerGroup, folder: Path) -> Precision:
    model = PackedModel.load(folder, dtype="bfloat16", device=CPU)
    learner = Learner.open(workers, model, learner_options("dapo", max_tokens_per_micro_batch=64))
    computed: set[str] = set()

    def look(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        computed.update({str(inputs[0].dtype), *(str(weight.dtype) for weight in module.parameters())})

    transformer_blocks(model.model)[0].register_forward_pre_hook(look)
    learner.trainer.accumulate(read_groups(make_batch(3), min_token_version=0), version=VERSION)
    trained = learner.trainer.trained_weights()
    flat = torch.cat([whole(weight.grad).reshape(-1) for weight in trained if weight.grad is not None])
    return Precision(flat.double().numpy(), {str(weight.dtype) for weight in trained}, computed)


def test_in_bfloat16_weights_and_sums_are_float32(folder: Path, ranks: Ranks) -> None:
    (alone,) = ranks.run(1, precision_of, folder / "tied")
    for found in ranks.run(2, precision_of, folder / "tied"):
        for one in (alone, found):
            assert one.trained == {"torch.float32"}
            assert one.computed == {"torch.bfloat16"}
        apart = np.linalg.norm(found.gradient - alone.gradient) / np.linalg.norm(alone.gradient)
        assert apart < 0.02


def test_activation_checkpointing_computes_blocks_twice_and_nothing_else(folder: Path, ranks: Ranks) -> None:
    keys = {"max_tokens_per_micro_batch": 64}
    cases = [Case("grpo with KL", "untied", (1, 2)), Case("ppo, shared and coupled", "tied", (3,))]
    expected = gradients_of(SOLO, folder, cases, keys)
    again = {**keys, "activation_checkpointing": True}
    assert_same(gradients_of(SOLO, folder, cases, again), expected)
    for found in ranks.run(2, gradients_of, folder, cases, {**again, "parallel": "fsdp"}):
        assert_same(found, expected)
    runs: list[int] = []

    def count(_module: object, _inputs: object) -> None:
        runs[-1] += 1

    for options in (keys, again):
        model = loaded(folder / "untied")
        learner = Learner.open(SOLO, model, learner_options("dapo", **options))
        block: Any = transformer_blocks(model.model)[1]
        runs.append(0)
        block.mlp.register_forward_pre_hook(count)
        learner.trainer.accumulate(read_groups(make_batch(1), min_token_version=0), version=VERSION)
    assert runs[1] == 2 * runs[0] > 0


@pytest.mark.slow
def test_compiled_blocks_compute_the_same(folder: Path, ranks: Ranks) -> None:
    keys = {"max_tokens_per_micro_batch": 64}
    cases = [Case("grpo with KL", "untied", (1, 2)), Case("ppo, shared and coupled", "tied", (3,))]
    expected = gradients_of(SOLO, folder, cases, keys)
    for more in ({}, {"activation_checkpointing": True}):
        assert_same(gradients_of(SOLO, folder, cases, {**keys, "compile": True, **more}), expected)
    for found in ranks.run(2, gradients_of, folder, cases, {**keys, "compile": True, "parallel": "ddp"}):
        assert_same(found, expected)


@pytest.mark.parametrize(("num_ranks", "parallel"), [(1, "fsdp"), (2, "ddp")])
def test_offloading_what_is_not_sharded_is_refused(num_ranks: int, parallel: str, folder: Path) -> None:
    workers = SOLO if num_ranks == 1 else dataclasses.replace(SOLO, num_ranks=num_ranks)
    options = learner_options("dapo", cpu_offload=True, parallel=parallel)
    with pytest.raises(UserFault, match=r"learner\.cpu_offload"):
        parallelize(loaded(folder / "tied"), workers, options)


def demonstrated(workers: WorkerGroup, folder: Path, parallel: str) -> NDArray[np.float64]:
    """Weights after a warm start."""
    draw = random.Random(4)
    rows = [
        demonstration_sequence(
            tokens_view(some_tokens(draw, 3)), tokens_view(some_tokens(draw, draw.randint(1, 30))), sample=index
        )
        for index in range(20)
    ]
    options = learner_options("dapo", parallel=parallel, max_tokens_per_micro_batch=64)
    block = WarmStartOptions(path="rows", num_steps=3, batch_size=7, learning_rate=1e-3)
    model = loaded(folder)
    parallelize(model, workers, options)
    warm_start(
        model,
        rows,
        options,
        block,
        seed=1,
        report=lambda _fraction, _loss: None,
        check_stop=lambda: None,
        workers=workers,
    )
    return torch.cat([whole(weight).reshape(-1) for weight in model.model.parameters()]).double().numpy()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_warm_start_on_two_ranks_is_that_of_one(parallel: str, folder: Path, ranks: Ranks) -> None:
    alone = demonstrated(SOLO, folder / "tied", parallel)
    for found in ranks.run(2, demonstrated, folder / "tied", parallel):
        assert float(np.abs(found - alone).max()) <= TOLERANCE


def write_down(workers: WorkerGroup, folder: Path, run_folder: Path, name: str, kind: type[PackedModel]) -> None:
    """One step with a dump."""
    model, options = loaded(folder, kind), learner_options(name, dump={}, max_tokens_per_micro_batch=64, num_updates=2)
    parallelize(model, workers, options)
    trainer = PolicyTrainer(
        model, options, temperature=0.8, num_steps=10, reference=None, check_stop=lambda: None, workers=workers,
        run_folder=run_folder,
    )  # fmt: skip
    trainer.train(make_batch(1), version=VERSION, min_token_version=5)


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_a_dump_is_the_same_packed_padded_and_over_ranks(ranks: Ranks, folder: Path, tmp_path: Path, name: str) -> None:
    ways: dict[str, tuple[int, type[PackedModel]]] = {
        "packed": (1, PackedModel), "padded": (1, PaddedModel), "ranks": (2, PackedModel),
    }  # fmt: skip
    for way, (num_ranks, kind) in ways.items():
        ranks.run(num_ranks, write_down, folder / "tied", tmp_path / way, name, kind)
    rows = {way: read_step(tmp_path / way, VERSION) for way in ways}
    assert any(row.part for row in rows["packed"]), "an episode is among them"
    assert not all(row.mask.all() for row in rows["packed"])
    for way in ("padded", "ranks"):
        assert [row.key for row in rows[way]] == [row.key for row in rows["packed"]]
        for ours, theirs in zip(rows[way], rows["packed"], strict=True):
            for column, values in theirs.figures.items():
                np.testing.assert_allclose(ours.figures[column], values, rtol=1e-5, atol=1e-6, err_msg=column)


FREEZE: dict[str, Any] = {"freeze": ("embed_tokens", r"layers\.0\.", "q_proj")}


def frozen_run(
    workers: WorkerGroup, folder: Path, architecture: str, dtype: str, keys: dict[str, Any]
) -> tuple[dict[str, NDArray[np.float32]], set[str]]:
    """What is published after two batches; the names of weights of which an optimizer keeps something."""
    options = learner_options("grpo with KL", learning_rate=1e-2, weight_decay=0.1, **keys)
    model = load_divided(folder / architecture, workers, options, dtype=dtype)
    trainer = PolicyTrainer(
        model, options, temperature=0.8, num_steps=10, reference=None, check_stop=lambda: None, workers=workers
    )
    for version in (1, 2):
        trainer.train(make_batch(version), version=version, min_token_version=0)
    weights = GatheredWeights(model, workers)
    published = {name: tensor.float().numpy().copy() for name, tensor in weights.tensors()}
    weights.finish()
    return published, {key.partition("/")[2] for key in trainer.state()}


@pytest.mark.parametrize(("architecture", "dtype"), [("untied", "bfloat16"), ("experts", "float32")])
def test_frozen_weights_are_published_with_the_bits_that_they_had(
    architecture: str, dtype: str, folder: Path, ranks: Ranks
) -> None:
    bare = PackedModel.load(folder / architecture, dtype=dtype, device=CPU).named_tensors()
    before = {name: tensor.float().numpy() for name, tensor in bare.items()}
    kept = {name for name in before if any(text in name for text in ("embed_tokens", "layers.0.", "q_proj"))}
    alone, of_optimizer = frozen_run(SOLO, folder, architecture, dtype, FREEZE)
    assert not {name for name in of_optimizer if any(text in name for text in ("embed_tokens", "layers.0.", "q_proj"))}
    runs = [alone]
    for parallel in ("fsdp", "ddp"):
        answers = ranks.run(2, frozen_run, folder, architecture, dtype, {**FREEZE, "parallel": parallel})
        assert all(state == of_optimizer for _, state in answers)
        runs.append(answers[0][0])
    for published in runs:
        assert published.keys() == before.keys()
        assert {name for name in before if np.array_equal(published[name], before[name])} == kept
        for name, found in published.items():
            assert np.abs(found - alone[name]).max() <= (TOLERANCE if dtype == "float32" else 2e-2), name
