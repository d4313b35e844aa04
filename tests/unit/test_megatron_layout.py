"""Layouts, forms of weights, options and memory of the Megatron learner, as far as they need no megatron-core."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from penstock.backends.learners.megatron.bridge.architecture import (
    Architecture,
    decode_architecture,
)
from penstock.backends.learners.megatron.bridge.families import Form
from penstock.backends.learners.megatron.bridge.forms import Division, blocks, part_shape
from penstock.backends.learners.megatron.bridge.weight_map import padded_vocab_size, parameters_of
from penstock.backends.learners.megatron.layout.config_fields import (
    MEGATRON_VERSION,
    ConfigFieldError,
    check_config_fields,
    pinned_version,
)
from penstock.backends.learners.megatron.layout.layout import Layout, LayoutError, check_layout, layout_of
from penstock.backends.learners.megatron.layout.memory import estimate_memory
from penstock.backends.learners.megatron_options import MegatronOptions
from penstock.messages.errors import UserFault

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rope_theta": 1000000,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip


def architecture(config: dict[str, Any] = QWEN3_8B, **changed: object) -> Architecture:
    return decode_architecture(msgspec.json.encode(config | changed), "config.json")


@pytest.mark.parametrize(("config", "num_parameters"), [(QWEN3_8B, 8_190_735_360), (QWEN3_30B_A3B, 30_532_122_624)])
def test_all_weights_of_a_model_are_mapped(config: dict[str, Any], num_parameters: int) -> None:
    assert sum(parameter.num_elements for parameter in parameters_of(architecture(config))) == num_parameters


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"model_type": "gpt2"}, "no family for model_type 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
    ],
)
def test_a_model_that_would_be_computed_otherwise_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(UserFault, match=text):
        architecture(**changed)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize(
    ("form", "shapes"),
    [
        (Form.WHOLE, [(8,)]),
        (Form.ROWS, [(8, 3), (8, 3)]),
        (Form.COLUMNS, [(3, 8)]),
        (Form.FUSED_ROWS, [(16, 3)]),
        (Form.QKV, [(16, 3), (4, 3), (4, 3)]),
        (Form.QKV, [(16,), (4,), (4,)]),
        (Form.VOCABULARY, [(13, 3)]),
    ],
)
def test_the_parts_of_all_ranks_hold_each_tensor_once(
    form: Form, shapes: list[tuple[int, ...]], num_shards: int
) -> None:
    division = Division(num_shards=num_shards, num_kv_heads=2, padded_vocab_size=16)
    seen = [[0] * max(shape) for shape in shapes]
    for shard in range(num_shards):
        shape = part_shape(form, shapes, division)
        filled: set[int] = set()
        for block in blocks(form, shapes, shard, division):
            own = range(block.place, block.place + block.length)
            assert filled.isdisjoint(own)
            assert own.stop <= shape[block.axis]
            filled.update(own)
            for place in range(block.start, block.start + block.length):
                seen[block.tensor][place] += 1
    times = num_shards if form is Form.WHOLE else 1
    for counts, shape in zip(seen, shapes, strict=True):
        assert counts[: shape[1 if form is Form.COLUMNS else 0]] == [times] * shape[1 if form is Form.COLUMNS else 0]


def test_a_vocabulary_is_filled_up_the_same_for_all_usual_layouts() -> None:
    sizes = {padded_vocab_size(151669, multiple=128, num_tensor=tensor) for tensor in (1, 2, 4, 8, 16)}
    assert sizes == {151680}
    assert padded_vocab_size(101, multiple=1, num_tensor=4) == 104


def test_every_rank_has_one_place_and_every_part_a_holder() -> None:
    layout = Layout(num_ranks=48, tensor=4, pipeline=2, context=2, expert=2, expert_tensor=3, sequence_parallel=True)
    places = [layout.place(rank) for rank in range(48)]
    assert len({(p.tensor, p.context, p.data, p.stage) for p in places}) == 48
    for rank, place in enumerate(places):
        if place.context == place.data == 0:
            assert layout.holder(place.stage, place.tensor, None) == rank
    for stage in range(2):
        for expert in range(2):
            for shard in range(3):
                place = places[layout.holder(stage, shard, expert)]
                assert (place.stage, place.expert_tensor, place.expert) == (stage, shard, expert)


@pytest.mark.parametrize(
    ("config", "num_ranks", "keys", "reason", "nearest"),
    [
        (QWEN3_8B, 8, {"tensor_parallel": 3}, "does not divide 8 ranks", "tensor 4 × data 2"),
        (QWEN3_8B, 8, {"pipeline_parallel": 8}, "36 layers, which pipeline_parallel 8", "pipeline 4 × data 2"),
        (QWEN3_8B, 64, {"tensor_parallel": 64}, "32 attention heads", "tensor 32 × data 2"),
        (QWEN3_8B, 8, {"expert_parallel": 2}, "the model has no experts", "data 8"),
        (QWEN3_8B, 4, {"virtual_pipeline": 2}, "needs a pipeline_parallel above 1", "data 4"),
        (
            QWEN3_8B,
            4,
            {"pipeline_parallel": 2, "virtual_pipeline": 4},
            "pipeline_parallel 2 × virtual_pipeline 4 does not divide",
            "pipeline 2 × virtual_pipeline 3 × data 2",
        ),
        (
            QWEN3_30B_A3B,
            48,
            {"expert_parallel": 48},
            "128 experts, which expert_parallel 48",
            "expert 16 × data 48",
        ),
        (
            QWEN3_30B_A3B,
            8,
            {"tensor_parallel": 2, "sequence_parallel": False},
            "needs sequence_parallel",
            "tensor 2 × data 4, with sequence_parallel",
        ),
    ],
)
def test_an_impossible_layout_names_the_reason_and_the_nearest_possible_one(
    config: dict[str, Any], num_ranks: int, keys: dict[str, Any], reason: str, nearest: str
) -> None:
    layout = layout_of(MegatronOptions(**keys), num_ranks)
    with pytest.raises(LayoutError, match=reason) as raised:
        check_layout(layout, architecture(config))
    assert nearest in str(raised.value)


def test_the_nearest_layout_of_many_ranks_is_found_quickly() -> None:
    options = MegatronOptions(tensor_parallel=8, pipeline_parallel=5, expert_parallel=8)
    with pytest.raises(LayoutError, match="the nearest possible layout of 128 ranks is tensor 8 × pipeline 4"):
        check_layout(layout_of(options, 128), architecture(QWEN3_30B_A3B))


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"transformer": {"moe_z_loss_coef": 1e-3}}, "did you mean 'moe_z_loss_coeff'?"),
        ({"transformer": {"bucket_size": 1}}, "it belongs under learner.megatron.ddp"),
        ({"transformer": {"num_layers": 2}}, "it follows from the model's config.json"),
        ({"transformer": {"mtp_num_layers": 1}}, "use learner.megatron.mtp"),
        ({"transformer": {"tensor_model_parallel_size": 2}}, "use learner.megatron.tensor_parallel"),
        ({"optimizer": {"lr": 1.0}}, "use learner.learning_rate"),
        ({"optimizer": {"adam_eps": "small"}}, 'takes a number; found "small"'),
        ({"optimizer": {"exp_avg_dtype": "bf16"}}, "'bf16' is none of its choices; did you mean 'bfloat16'?"),
        ({"transformer": {"moe_token_dispatcher_type": "alltoal"}}, "did you mean 'alltoall'?"),
        ({"transformer": {"init_method": "x"}}, "takes an object of Python"),
        ({"transformer": {"batch_p2p_comm": True}}, "must be false on a CPU"),
        ({"transformer": {"deallocate_pipeline_outputs": True}}, "must be false on a CPU"),
        ({"virtual_pipeline": 2, "overlap_p2p": False}, "overlap_p2p: must be true on a CPU"),
    ],
)
def test_what_megatron_core_would_not_take_is_refused_with_what_to_do(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(UserFault) as raised:
        check_config_fields(MegatronOptions(**keys), is_cpu=True)
    assert text in str(raised.value)


def test_what_is_wrong_over_gloo_only_is_right_on_gpus() -> None:
    options = MegatronOptions(
        transformer={"batch_p2p_comm": True, "deallocate_pipeline_outputs": True, "moe_z_loss_coeff": 1e-3},
        ddp={"bucket_size": None},
        optimizer={"exp_avg_dtype": "bfloat16"},
    )
    check_config_fields(options, is_cpu=False)
    with pytest.raises(ConfigFieldError, match="batch_p2p_comm"):
        check_config_fields(options, is_cpu=True)


def test_the_list_of_fields_is_that_of_the_pinned_version() -> None:
    assert pinned_version() == MEGATRON_VERSION


def test_the_memory_of_a_rank_is_what_its_shares_take() -> None:
    options = MegatronOptions(tensor_parallel=4, vocab_multiple=1)
    dense = architecture()
    found = estimate_memory(dense, layout_of(options, 8), options, precision="bfloat16", max_tokens=8192)
    whole = sum(parameter.num_elements for parameter in parameters_of(dense))
    norms = sum(math.prod(p.shapes[0]) for p in parameters_of(dense) if p.form is Form.WHOLE)
    share = (whole - norms) // 4 + norms
    assert (found.weights, found.gradients, found.optimizer) == (2 * share, 4 * share, 12 * (share // 2))
    assert found.logits == 2 * 8192 * (151936 // 4) * (2 + 4)
    per_layer = 4 * 4096 // 4 + 2 * (32 + 8) * 128 // 4 + 3 * 12288 // 4
    assert found.activations == 2 * 8192 * 36 * per_layer


def test_recomputing_and_dividing_take_less() -> None:
    model = architecture(QWEN3_30B_A3B)

    def total(**keys: Any) -> int:  # noqa: ANN401 - of different types
        options = MegatronOptions(**keys)
        return estimate_memory(model, layout_of(options, 32), options, precision="bfloat16", max_tokens=16384).total

    plain = total(expert_parallel=8)
    assert total(expert_parallel=8, recompute="full") < plain
    assert total(expert_parallel=8, tensor_parallel=2) < plain
    assert total(expert_parallel=8, pipeline_parallel=2) < plain
    assert total(expert_parallel=8, context_parallel=2) < plain
    assert total(expert_parallel=8, distributed_optimizer=False) > plain
