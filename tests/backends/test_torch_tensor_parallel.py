"""Ranks that compute together: loss, gradient, what is published and checkpoints are those of one rank."""

# Transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoint_cases import VERSION, digests_of, load_and_train, train_and_save
from checkpoint_cases import Division as Spread
from learner_cases import make_groups
from sharded_load_cases import first_step, refusal, train_and_publish
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

from penstock.backends.learners.batch.sequences import read_groups
from penstock.backends.learners.checkpoints.record import STATE_FOLDER
from penstock.backends.learners.checkpoints.shards import Division
from penstock.backends.learners.checkpoints.state import load_state
from penstock.backends.learners.torch.collectives import Collectives
from penstock.backends.learners.torch.rounds import MicroBatch, Rounds, padding_micro_batch
from penstock.backends.learners.worker_group.workers import SOLO

if TYPE_CHECKING:
    from pathlib import Path

    from rank_cases import Ranks
    from transformers import PreTrainedConfig

AutoModel: Any = AutoModelForCausalLM  # transformers' factories have no types
pytestmark = pytest.mark.long_run
NUM_RANKS = 6

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
ONE_HEAD: dict[str, Any] = SIZES | {"num_key_value_heads": 1}
CASES: dict[str, Any] = {
    "qwen3, tied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "mistral, untied": MistralConfig(**SIZES, tie_word_embeddings=False),
    "gemma3, a scaled embedding": Gemma3TextConfig(**SIZES, head_dim=8),
    "phi3, fused matrices": Phi3Config(**SIZES, tie_word_embeddings=False),
}
"""37 tokens and 22 columns: neither is divided evenly."""


def saved(folder: Path, config: object) -> Path:
    torch.manual_seed(5)
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_one_rank(case: str, tmp_path: Path, ranks: Ranks) -> None:
    """Two ranks that compute together, alone and beside two others, with which they share the weights out."""
    folder = saved(tmp_path, CASES[case])
    (alone,) = ranks.run(1, first_step, folder)
    for num_ranks in (2, 4):
        for found in ranks.run(num_ranks, first_step, folder, None, 2):
            assert found.figures == pytest.approx(alone.figures, abs=1e-5, rel=1e-5)
            assert alone.gradient.abs().max() > 1e-3
            torch.testing.assert_close(found.gradient, alone.gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "objective_name"),
    [("qwen3, tied", "gspo"), ("mistral, untied", "ppo"), ("gemma3, a scaled embedding", "grpo")],
)
def test_steps_and_what_is_published_are_those_of_one_rank(
    case: str, objective_name: str, tmp_path: Path, ranks: Ranks
) -> None:
    """With a loss whose tokens hang together, and with a critic on the policy's trunk."""
    folder = saved(tmp_path, CASES[case])
    (alone,) = ranks.run(1, train_and_publish, folder, 1, objective_name)
    assert all(step["train/grad_norm"] > 0.05 for step in alone.metrics), "clipped"
    for num_ranks in (2, 4):
        first, *others = ranks.run(num_ranks, train_and_publish, folder, 2, objective_name)
        for found, expected in zip(first.metrics, alone.metrics, strict=True):
            figures = {name: value for name, value in expected.items() if name.startswith("train/")}
            assert {name: found[name] for name in figures} == pytest.approx(figures, abs=1e-5, rel=1e-4)
        assert first.published.keys() == alone.published.keys()
        for name, tensor in alone.published.items():
            torch.testing.assert_close(first.published[name], tensor, rtol=1e-4, atol=2e-5)
        assert not any(other.published for other in others)
        assert all(other.metrics[-1]["train/grad_norm"] == first.metrics[-1]["train/grad_norm"] for other in others)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Qwen3Config(**ONE_HEAD, head_dim=8), "1 key-value heads, which it does not divide"),
        (Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2), "(packed_colwise) that the torch"),
        (StableLmConfig(**SIZES), "ships no plan by which StableLmForCausalLM"),
    ],
    ids=["heads", "experts", "no plan"],
)
def test_what_cannot_be_divided_is_refused_by_the_key(
    config: PreTrainedConfig, said: str, tmp_path: Path, ranks: Ranks
) -> None:
    folder = saved(tmp_path, config)
    for told in ranks.run(2, refusal, folder, 2):
        assert told.startswith("learner.tensor_parallel: 2, and ")
        assert said in told


@pytest.mark.parametrize("tensor_dim", [0, 1, None])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_parts_of_parts_are_the_whole_once(num_shards: int, tensor_dim: int | None) -> None:
    for rows in (1, 2, 7, 16, 37):
        division, count = Division(num_shards, 2, tensor_dim), torch.zeros(rows, 5)
        for rank in filter(division.is_counted, range(num_shards * 2 + 2)):
            count[division.place((rows, 5), rank)] += 1
        assert torch.equal(count, torch.ones(rows, 5))


def test_a_rank_without_memory_ends_the_learner_with_what_to_lower() -> None:
    """Nobody else can take part for it in what a block has left."""

    def work(_: MicroBatch) -> None:
        raise torch.OutOfMemoryError

    spare = padding_micro_batch(read_groups(make_groups(), min_token_version=0).sequences[0])
    rounds = Rounds(SOLO, Collectives(()), lambda: None, can_recover=False)
    with pytest.raises(MemoryError, match=r"lower learner\.max_tokens_per_micro_batch.*learner\.shard_size"):
        rounds.run("some", [spare], spare, work)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("source"), CASES["qwen3, tied"])


TOGETHER = {
    "1": Spread(1),
    "2 fsdp": Spread(2),
    "2": Spread(2, tensor_parallel=2),
    "2 over 2": Spread(4, tensor_parallel=2),
    "2 over 3": Spread(6, tensor_parallel=2),
}


@pytest.mark.parametrize(
    ("writer", "dtype", "readers"),
    [
        ("1", "float32", ("2 over 3",)),
        ("2", "float32", ("1", "2 fsdp")),
        ("2 over 2", "bfloat16", ("2", "2 fsdp", "2 over 2")),
    ],
)
def test_what_ranks_wrote_together_any_other_reads_bit_for_bit(
    writer: str, dtype: str, readers: tuple[str, ...], ranks: Ranks, source: Path, tmp_path: Path
) -> None:
    """Weights, optimizer, critic and reference; and what the next step says."""
    division = TOGETHER[writer]
    told = ranks.run(division.num_ranks, train_and_save, source, tmp_path, division, dtype)
    written, loss = told[0]
    assert all(other == (written, loss) for other in told)
    path = tmp_path / f"version-000000{VERSION}"
    state = load_state(path / STATE_FOLDER, is_wanted=lambda name: not name.startswith("random/"))
    assert digests_of(state) == {name: digest for name, digest in written.items() if not name.startswith("model/")}
    model = AutoModel.from_pretrained(path, dtype="auto")
    loaded = {f"model/{name}": parameter for name, parameter in model.named_parameters()}
    assert digests_of(loaded) == {name: digest for name, digest in written.items() if name.startswith("model/")}
    for reader in (TOGETHER[name] for name in readers):
        answers = ranks.run(reader.num_ranks, load_and_train, path, reader, dtype)
        for digests, continued, _ in answers:
            assert digests == written, reader
            # In bfloat16 what a rank adds to a sum is rounded before it is added.
            assert continued == pytest.approx(loss, abs=1e-6 if dtype == "float32" else 1e-2), reader
        if reader.num_ranks > 1:
            for name in ("down_proj", "up_proj"):
                key = f"exp_avg/model.layers.0.mlp.{name}.weight"
                assert sum(sizes[key] for _, _, sizes in answers) == state[key].numel(), "each reads its part only"
