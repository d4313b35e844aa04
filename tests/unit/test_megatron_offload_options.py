"""Options of sleep and of optimizers on the host: what would do nothing is refused, what is moved is counted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.backends.learners.megatron.bridge.architecture import decode_architecture
from penstock.backends.learners.megatron.layout.config_fields import ConfigFieldError
from penstock.backends.learners.megatron.layout.layout import Layout
from penstock.backends.learners.megatron.layout.memory import estimate_memory
from penstock.backends.learners.megatron.layout.offload_options import (
    check_cpu_offload,
    check_sleep,
    offloaded_fraction,
    offloads_main_weights,
)
from penstock.backends.learners.megatron_options import MegatronOptions

HALF: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}


@pytest.mark.parametrize(
    ("optimizer", "options", "precision", "named", "said"),
    [
        ({"optimizer_offload_fraction": 0.5}, {}, "bfloat16", "optimizer_offload_fraction", "does nothing without"),
        ({"pin_cpu_grads": False}, {}, "bfloat16", "pin_cpu_grads", "does nothing without"),
        ({"optimizer_cpu_offload": True}, {}, "bfloat16", "optimizer_cpu_offload", "above 0 and at most 1"),
        (HALF | {"optimizer_offload_fraction": 1.5}, {}, "bfloat16", "optimizer_cpu_offload", "found 1.5"),
        (HALF, {"distributed_optimizer": False}, "bfloat16", "optimizer_cpu_offload", "distributed_optimizer is true"),
        (HALF, {}, "float32", "optimizer_cpu_offload", "bfloat16; found float32"),
        (HALF | {"decoupled_weight_decay": False}, {}, "bfloat16", "optimizer_cpu_offload", "AdamW"),
        (
            HALF | {"use_torch_optimizer_for_cpu_offload": True},
            {}, "bfloat16", "use_torch_optimizer_for_cpu_offload", "does nothing",
        ),
        (HALF | {"pin_cpu_params": False}, {}, "bfloat16", "pin_cpu_params", "whatever it says"),
    ],
)  # fmt: skip
def test_what_would_do_nothing_is_refused(
    optimizer: dict[str, Any], options: dict[str, Any], precision: str, named: str, said: str
) -> None:
    with pytest.raises(ConfigFieldError, match=said) as found:
        check_cpu_offload(MegatronOptions(optimizer=optimizer, **options), precision=precision, is_cpu=False)
    assert str(found.value).startswith(f"learner.megatron.optimizer.{named}: ")


def test_what_can_be_trained_with_is_let_pass() -> None:
    options = MegatronOptions(optimizer=HALF | {"overlap_cpu_optimizer_d2h_h2d": True})
    check_cpu_offload(options, precision="bfloat16", is_cpu=True)
    check_cpu_offload(MegatronOptions(optimizer={"adam_eps": 1e-5}), precision="float32", is_cpu=True)
    assert offloaded_fraction(options) == 0.5
    assert offloaded_fraction(MegatronOptions(optimizer={"optimizer_offload_fraction": 0.5})) == 0.0
    assert not offloads_main_weights(options)


def test_what_needs_transformer_engine_is_refused_without_it() -> None:
    options = MegatronOptions(optimizer=HALF | {"use_precision_aware_optimizer": True})
    assert offloads_main_weights(options)
    check_cpu_offload(options, precision="bfloat16", is_cpu=False)
    with pytest.raises(ConfigFieldError, match="needs Transformer Engine"):
        check_cpu_offload(options, precision="bfloat16", is_cpu=True)


@pytest.mark.parametrize(
    "options",
    [
        {"ddp": {"nccl_ub": True}},
        {"ddp": {"use_megatron_fsdp": True}},
        {"transformer": {"enable_cuda_graph": True}},
        {"transformer": {"cuda_graph_impl": "local"}},
    ],
)
def test_what_keeps_addresses_does_not_sleep(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigFieldError, match="a learner that sleeps"):
        check_sleep(MegatronOptions(**options))


def test_the_rest_sleeps() -> None:
    check_sleep(MegatronOptions(ddp={"nccl_ub": False}, transformer={"cuda_graph_impl": "none"}))


def test_the_estimate_leaves_main_weights_where_megatron_core_leaves_them() -> None:
    config = {
        "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    }  # fmt: skip
    architecture = decode_architecture(msgspec.json.encode(config), "a test")

    def estimated(optimizer: dict[str, Any]) -> tuple[int, int]:
        options = MegatronOptions(optimizer=optimizer)
        found = estimate_memory(architecture, Layout(num_ranks=1), options, precision="bfloat16", max_tokens=64)
        return found.optimizer, found.on_host

    count = estimated({})[0] // 12
    assert estimated({}) == (12 * count, 0)
    assert estimated(HALF) == (8 * count, 8 * count), "half of the moments; on the host main weights and gradients too"
    assert estimated(HALF | {"use_precision_aware_optimizer": True}) == (6 * count, 8 * count)
