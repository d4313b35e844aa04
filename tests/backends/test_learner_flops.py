"""Operations of a step, against torch's own count of what it multiplies."""

# torch and transformers are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DeepseekV3Config, GPT2Config, Qwen3Config, Qwen3MoeConfig

from penstock.backends.learners.batch.packing import pack
from penstock.backends.learners.batch.sequences import TrainSequence, demonstration_sequence
from penstock.backends.learners.torch.speed import shape_of
from penstock.backends.learners.training.flops import (
    BFLOAT16_PEAKS_TFLOPS,
    Matrices,
    ModelShape,
    Speed,
    Work,
    causal_pairs,
    forward_flops,
    peak_tflops,
    training_flops,
)
from penstock.messages.samples import Media

LENGTH = 24
SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
CONFIGS = {
    "dense, tied": Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=8),
    "names of its own": GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1),
    "latent attention, a shared expert, one dense layer": DeepseekV3Config(
        **(SMALL | {"num_key_value_heads": 4}), **EXPERTS, n_routed_experts=8, n_shared_experts=1, n_group=2,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=12, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=12,
    ),
}  # fmt: skip


def made(config: Any) -> Any:  # noqa: ANN401 - of transformers
    # Written out as matrix products, which are what is counted.
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]  # likewise


@pytest.mark.parametrize("name", CONFIGS)
def test_operations_are_those_that_torch_counts(name: str) -> None:
    model = made(CONFIGS[name])
    ids = torch.randint(0, 96, (1, LENGTH))
    with FlopCounterMode(display=False) as forward:
        logits = model(ids, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    shape = shape_of(model)
    assert shape is not None
    # What is written out multiplies every token with every other; the count is of those that it sees.
    unseen = shape.pair * (LENGTH**2 - causal_pairs(LENGTH)) * len(shape.windows)
    work = Work(num_inputs=LENGTH, num_trained=LENGTH, sequences=((0, LENGTH),))
    assert forward_flops(shape, work) + unseen == forward.get_total_flops()
    assert training_flops(shape, work) + 3 * unseen == forward.get_total_flops() + backward.get_total_flops()


def test_weights_that_stay_as_they_are_need_no_gradient() -> None:
    model = made(CONFIGS["dense, tied"])
    whole = shape_of(model)
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    frozen = shape_of(model)
    assert whole is not None
    assert frozen is not None
    assert whole.layers.training == 3 * whole.layers.every
    assert frozen.layers.training == 2 * whole.layers.every


def test_experts_of_which_it_is_not_said_how_many_a_token_meets_are_not_guessed() -> None:
    model = made(Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=8))
    model.config.num_experts_per_tok = 0
    assert shape_of(model) is None


def test_a_window_bounds_what_a_token_sees() -> None:
    for length, window in ((1, 1), (5, 2), (7, 7), (9, 20)):
        seen = sum(1 for here in range(length) for there in range(here + 1) if here - there < window)
        assert causal_pairs(length, window) == seen


def test_what_samples_share_is_counted_once() -> None:
    def sequence(context: int, response: list[int], prompt: int) -> TrainSequence:
        made = demonstration_sequence(range(context), response, sample=0)
        return made._replace(prompt=prompt)

    responses = ([1, 2, 3, 4], [1, 2, 7], [8, 9])
    work = Work.of([*(sequence(5, response, 0) for response in responses), sequence(3, [1, 2], 1)])
    assert work.num_trained == 11
    assert work.num_inputs == 5 + (3 + 0 + 1) + (3 + 1)  # the last token of a response is no input
    pairs = [(here, there) for length in (8, 7, 6, 4) for here in range(length) for there in range(here + 1)]
    again = [(here, there) for shared in (7, 5) for here in range(shared) for there in range(here + 1)]
    assert work.num_pairs(None) == len(pairs) - len(again)


def test_a_response_with_an_image_shares_its_context_alone() -> None:
    """The same token may stand for another image, or for none."""
    plain = demonstration_sequence(range(5), [1, 2, 3, 4], sample=0)
    shown = plain._replace(media=(Media(kind="image", reference="", digest="d", at=6, num_tokens=1),))
    assert Work.of([plain, plain]).sequences[1] == (8, 8)
    for pair, starts in (([plain, shown], [8]), ([shown, plain], [5]), ([shown, shown], [5, 8])):
        assert Work.of(pair).sequences[1] == (5, 8)
        packed = pack(pair)
        assert len(packed.input_ids) == 8 + 3
        assert [(look.start, look.context_start, look.media[0].at) for look in packed.looks] == [
            (start, 0, 1) for start in starts
        ]


def test_tokens_and_operations_a_second_and_their_share_of_the_peak() -> None:
    shape = ModelShape(layers=Matrices(10.0, 10.0), head=Matrices(2.0, 2.0), pair=0.0, windows=())
    sequences = [demonstration_sequence(np.arange(3).tolist(), [1, 2], sample=0)]
    operations = 2 * 3 * (4 * 10.0 + 2 * 2.0)  # two passes, three times the forward pass
    figures = Speed(shape, peak_tflops=1e-9, num_ranks=2, num_passes=2).figures(sequences, 0.5)
    assert figures["perf/actor_train_tok_per_s"] == 10
    assert figures["perf/actor_train_tflops"] == pytest.approx(operations / 0.5 / 2 / 1e12)
    assert figures["perf/mfu"] == pytest.approx(operations / 0.5 / 2 / 1e3)
    unknown = Speed(shape, peak_tflops=None, num_ranks=1, num_passes=1).figures(sequences, 0.5)
    assert "perf/mfu" not in unknown
    assert "perf/actor_train_tflops" not in Speed(None, None, 1, 1).figures(sequences, 0.5)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 311.8),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A10G", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_a_peak_is_that_of_the_data_sheet_or_none(device: str, peak: float | None) -> None:
    assert peak_tflops(device, "bfloat16") == peak
    assert peak_tflops(device, "float32") is None


def test_a_longer_name_is_looked_for_before_one_that_it_contains() -> None:
    names = list(BFLOAT16_PEAKS_TFLOPS)
    for index, name in enumerate(names):
        assert not any(f" {before} " in f" {name} " for before in names[:index]), name
