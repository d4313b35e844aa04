"""What a config.json says, in the terms of megatron-core, and what of it is refused; without megatron-core."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from penstock.backends.learners.megatron.bridge.architecture import Architecture, decode_architecture
from penstock.backends.learners.megatron.bridge.families import FAMILIES
from penstock.backends.learners.megatron.bridge.unbuilt import UNBUILT
from penstock.backends.learners.megatron.bridge.weight_map import mtp_copies, num_weights, parameters_of
from penstock.backends.learners.megatron.layout.layout import LayoutError, check_layout, layout_of
from penstock.backends.learners.megatron.layout.memory import Extras, estimate_memory, estimate_stages
from penstock.backends.learners.megatron.layout.model_config import Fields, transformer_fields, with_options
from penstock.backends.learners.megatron_options import MegatronOptions, MtpOptions
from penstock.messages.errors import UserFault

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "max_position_embeddings": 163840, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
YARN: dict[str, Any] = DEEPSEEK_V3["rope_scaling"]


def architecture(**changed: object) -> Architecture:
    return decode_architecture(msgspec.json.encode(DEEPSEEK_V3 | changed), "config.json")


def fields(model: Architecture, *, is_cpu: bool = True) -> Fields:
    options = MegatronOptions()
    return transformer_fields(model, layout_of(options, 1), options, precision="bfloat16", is_cpu=is_cpu)


def test_all_weights_of_deepseek_v3_are_mapped() -> None:
    parameters = list(parameters_of(architecture()))
    assert sum(p.num_elements for p in parameters if not p.is_buffer) == 671_026_404_352
    biases = [p for p in parameters if p.is_buffer]
    assert sum(p.num_elements for p in biases) == 58 * 256
    assert biases[0].name == "decoder.layers.3.mlp.router.expert_bias"


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("qwen3_next", "Qwen3-Next .*gated delta nets.*It would take: .*packed sequences"),
        ("qwen3_5_moe", "Qwen3.5 .*gated delta nets"),
        ("minimax_m2", "MiniMax-M2 .*norms of queries and keys over all heads"),
        ("mimo", "MiMo-7B .*config.json says qwen2"),
        ("mimo_v2_flash", "MiMo-V2-Flash .*sinks"),
        ("gpt_oss", "GPT-OSS .*MXFP4"),
        ("bert", "has no family for model_type 'bert'; there are qwen2, "),
    ],
)
def test_families_that_are_not_built_say_what_it_would_take(model_type: str, text: str) -> None:
    with pytest.raises(UserFault, match=rf"config\.json: .*{text}") as refused:
        architecture(model_type=model_type)
    assert ("Use learner.backend: torch" in str(refused.value)) == (model_type in ("bert", "minimax_m2"))
    assert not set(UNBUILT) & set(FAMILIES)


def test_a_kimi_k2_is_a_deepseek_v3() -> None:
    kimi, deepseek = architecture(model_type="kimi_k2", num_hidden_layers=5), architecture(num_hidden_layers=5)
    assert list(parameters_of(kimi)) == list(parameters_of(deepseek))
    assert fields(kimi) == fields(deepseek)


def test_layers_of_a_glm_that_have_experts_are_those_that_are_said() -> None:
    lite: dict[str, Any] = {"model_type": "glm4_moe_lite", "num_hidden_layers": 4, "first_k_dense_replace": None}
    for said, wanted in (
        ({}, (False, True, True, True)),
        ({"first_k_dense_replace": 2}, (False, False, True, True)),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, (True, False, True, True)),
    ):
        experts = architecture(**lite | said).experts
        assert experts is not None
        assert experts.layers == wanted


def test_layers_that_predict_further_tokens_are_named_as_they_are_published() -> None:
    published = architecture(num_nextn_predict_layers=2)
    found = published.with_mtp()
    policy, both = list(parameters_of(published)), list(parameters_of(found))
    assert both[: len(policy)] == policy
    names = {tensor.name for parameter in both[len(policy) :] for tensor in parameter.tensors}
    assert {name.split(".")[2] for name in names} == {"61", "62"}
    of_one = {name.removeprefix("model.layers.62.") for name in names if name.startswith("model.layers.62.")}
    of_last = {t.name.removeprefix("model.layers.60.") for p in policy for t in p.tensors if ".layers.60." in t.name}
    around = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    assert of_one == of_last | around
    copies = mtp_copies(found)
    assert copies["model.layers.61.shared_head.head.weight"] == "lm_head.weight"
    assert not (set(copies) & names)
    assert not mtp_copies(published)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0"),
        ({"tie_word_embeddings": True}, "whose output head is its embedding"),
        ({"model_type": "qwen3", "attention_bias": False}, "models of qwen3 have no layers that predict further"),
    ],
)
def test_layers_that_are_not_there_are_not_trained(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserFault, match=rf"learner\.megatron\.mtp: .*{said}.*; remove the key"):
        with_options(architecture(**{"rope_scaling": None} | changed), MegatronOptions(mtp=MtpOptions()))


def test_stages_are_not_written_out_beside_layers_that_predict_further_tokens() -> None:
    options = MegatronOptions(pipeline_parallel=2, transformer={"pipeline_model_parallel_layout": "Et*30|t*31mL"})
    with pytest.raises(LayoutError, match=r"with learner\.megatron\.mtp the stages cannot be written out"):
        check_layout(layout_of(options, 2), architecture().with_mtp(), options.transformer)


def test_neither_a_reference_nor_a_critic_has_layers_that_predict_further_tokens() -> None:
    plain = MegatronOptions(tensor_parallel=8, pipeline_parallel=8, expert_parallel=8)
    trained = msgspec.structs.replace(plain, mtp=MtpOptions())
    layout, extras = layout_of(plain, 128), Extras(has_reference=True, has_own_critic=True)
    model = architecture(num_hidden_layers=64)
    alone, beside = (
        estimate_stages(model, layout, options, precision="bfloat16", max_tokens=1, extras=extras)
        for options in (plain, trained)
    )
    assert (alone[-1].reference, alone[-1].critic) == (beside[-1].reference, beside[-1].critic)
    assert beside[-1].weights > alone[-1].weights
    assert beside[:-1] == alone[:-1]


def test_the_experts_of_a_layer_are_counted_by_one() -> None:
    model = architecture()
    assert num_weights(model) == sum(parameter.num_elements for parameter in parameters_of(model))


def test_without_a_query_rank_queries_are_made_of_the_hidden_state() -> None:
    names = {name for p in parameters_of(architecture(q_lora_rank=None)) for name, _ in p.tensors}
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not any("q_a_" in name or "q_b_" in name for name in names)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, r"its weights are quantized \(fp8\)"),
        ({"rope_interleave": False}, "rope_interleave is false"),
        ({"norm_topk_prob": False}, "norm_topk_prob is false"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok 6 is not twice topk_group 4"),
        ({"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "num_experts_per_tok is 1"),
        ({"rope_scaling": YARN | {"truncate": False}}, "truncate is false"),
        ({"rope_scaling": YARN | {"type": "linear"}}, "rope_type is 'linear'"),
        ({"kv_lora_rank": None}, "needs kv_lora_rank"),
        ({"n_group": None}, "needs n_group"),
        ({"n_group": 7}, "n_group 7 does not divide the 256 experts"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_what_megatron_core_would_compute_otherwise_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(UserFault, match=text):
        architecture(**changed)


def test_groups_that_limit_nothing_are_no_groups() -> None:
    experts = architecture(n_group=4, topk_group=4, num_experts_per_tok=6).experts
    assert experts is not None
    assert (experts.num_groups, experts.groups_per_token) == (None, None)


@pytest.mark.parametrize(
    ("changed", "queries", "scores"),
    [
        # What turned queries and keys, and what scores, are multiplied by: with both factors given …
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, (0.1 * math.log(40) + 1) ** 2),
        ({"mscale": 0.5, "mscale_all_dim": 2.0}, (0.05 * math.log(40) + 1) / (0.2 * math.log(40) + 1), None),
        # … with one of them, which then says nothing of queries and keys …
        ({"mscale": 0.5, "mscale_all_dim": None}, 0.1 * math.log(40) + 1, 1.0),
        ({"mscale": None, "mscale_all_dim": 2.0}, 0.1 * math.log(40) + 1, (0.2 * math.log(40) + 1) ** 2),
        # … and with the result.
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.5}, 1.5, None),
    ],
)
def test_factors_of_yarn_are_those_of_the_checkpoint(
    changed: dict[str, Any], queries: float, scores: float | None
) -> None:
    found = fields(architecture(rope_scaling=YARN | changed))
    mscale, of_all = found["mscale"], found["mscale_all_dim"]
    assert isinstance(mscale, float)
    assert isinstance(of_all, float)

    def factor(coefficient: float) -> float:
        return 0.1 * coefficient * math.log(40) + 1

    assert factor(mscale) / factor(of_all) == pytest.approx(queries)
    if scores is not None:
        assert factor(of_all) ** 2 == pytest.approx(scores)


def test_biases_that_experts_are_chosen_by_stay_unless_the_scenario_says_otherwise() -> None:
    options = MegatronOptions(transformer={"moe_router_bias_update_rate": 1e-3})
    model = architecture()
    assert fields(model)["moe_router_bias_update_rate"] == 0.0
    found = transformer_fields(model, layout_of(options, 1), options, precision="bfloat16", is_cpu=True)
    assert found["moe_router_bias_update_rate"] == 1e-3


def test_rotary_kernels_are_used_only_where_they_turn_what_the_model_turns() -> None:
    assert fields(architecture(), is_cpu=False)["apply_rope_fusion"] is True
    assert fields(architecture(rope_scaling=None), is_cpu=False)["apply_rope_fusion"] is False


def test_shared_experts_have_to_be_divisible() -> None:
    options = MegatronOptions(tensor_parallel=64)
    with pytest.raises(LayoutError, match="shared experts have 96 channels"):
        check_layout(layout_of(options, 64), architecture(moe_intermediate_size=96))


def test_latent_attention_takes_the_memory_of_its_shares() -> None:
    model = architecture(first_k_dense_replace=61)
    options = MegatronOptions(tensor_parallel=8)
    found = estimate_memory(model, layout_of(options, 8), options, precision="bfloat16", max_tokens=4096)
    of_attention = 2 * 128 * (192 + 128) // 8 + (2 * (1536 + 512) + 64) // 8
    per_layer = 4 * 7168 // 8 + of_attention + 3 * 18432 // 8
    assert found.activations == 2 * 4096 * 61 * per_layer
