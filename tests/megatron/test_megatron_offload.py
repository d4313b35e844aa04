"""A learner that sleeps between its steps, and an optimizer that is partly on the host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock.backends.learners.checkpoints.record import read_record
from penstock.backends.learners.megatron.checkpoint.dist_format import DistReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from ranks import Ranks

pytestmark = pytest.mark.megatron

# What is read back is compared bit for bit. What is computed again is not: it lies elsewhere in memory or in other
# pieces, and the vector loops of some processors then round the last bit otherwise.
NEAR = {"float32": 1e-5, "bfloat16": 2**-7}
NEAR_WEIGHT = 5e-6
"""As far as any weight may be from transformers' after as many steps; a step moves most of them by 3e-3."""

OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
PLAIN = {"distributed_optimizer": False}
SLEEPS: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "one": ("qwen3", 1, {}, "float32"),
    "one, plain optimizer, bfloat16": ("qwen3", 1, PLAIN, "bfloat16"),
    "data 2": ("qwen3", 2, {}, "float32"),
    "data 2, plain optimizer": ("qwen3", 2, PLAIN, "float32"),
    "data 2 with overlaps": ("qwen3", 2, OVERLAPS, "float32"),
    "data 2 with overlaps, bfloat16": ("qwen3", 2, OVERLAPS, "bfloat16"),
    "tensor 2": ("qwen3", 2, {"tensor_parallel": 2}, "float32"),
    "tensor 2, bfloat16": ("qwen3", 2, {"tensor_parallel": 2}, "bfloat16"),
    "pipeline 2, tied": ("qwen3 tied", 2, {"pipeline_parallel": 2}, "float32"),
    "virtual pipeline with overlaps": (
        "qwen3", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2, **OVERLAPS}, "float32",
    ),
    "expert 2": ("qwen3_moe", 2, {"expert_parallel": 2}, "float32"),
    "on the host": (
        "qwen3", 1,
        {"optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}}, "bfloat16",
    ),
}  # fmt: skip


ALIKE = ("data 2", "data 2 with overlaps", "data 2, plain optimizer", "tensor 2")
"""Each of these is half of another case."""


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in SLEEPS]
)
def test_a_learner_that_slept_wakes_with_the_very_same_bits_and_trains_on(
    case: str, ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    family, num_ranks, keys, precision = SLEEPS[case]
    folder = str(tiny_family(family))
    for found in ranks(num_ranks).run("offload_cases:slept", folder, keys, num_ranks, precision):
        for sleep in found["sleeps"]:
            assert sleep["woken_differs"] == 0
            assert sleep["left"] == 0, "storage of weights, gradients and optimizer has gone"
            assert sleep["size_bytes"] >= sleep["wanted_bytes"] > 0
            assert sleep["live_asleep"] <= sleep["live_before"] - sleep["wanted_bytes"], "nothing else holds it"
            assert sleep["gradients"] == 0.0
            assert sleep["host_differs"] == 0, "a checkpoint reads the same values asleep"
        awake, slept = found["figures"]
        np.testing.assert_allclose(slept, awake, rtol=NEAR[precision])
        for one, other in zip(*found["ends"], strict=True):
            np.testing.assert_allclose(other, one, rtol=NEAR[precision], atol=NEAR_WEIGHT)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_an_optimizer_on_the_host_steps_as_one_that_is_not(
    fraction: float, ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    folder = str(tiny_family("qwen3"))
    moved = {**OVERLAPS, "optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}}
    whole = ranks(2).run("offload_cases:offloaded", folder, OVERLAPS, 2, "bfloat16")
    found = ranks(2).run("offload_cases:offloaded", folder, moved, 2, "bfloat16")
    for one, other in zip(whole, found, strict=True):
        assert other["kinds"] == {"HybridDeviceOptimizer"} != one["kinds"]
        np.testing.assert_allclose(other["figures"], one["figures"], rtol=NEAR["bfloat16"])
        for expected, weight in zip(one["weights"], other["weights"], strict=True):
            np.testing.assert_allclose(weight, expected, rtol=NEAR["bfloat16"], atol=NEAR_WEIGHT)
    shares = [sum(rank["host_share"] for rank in found) / 2, whole[0]["host_share"]]
    assert shares[0] == pytest.approx(fraction, abs=0.3)
    assert shares[1] == 0.0


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen3", OVERLAPS),
        ("qwen3", PLAIN),
        ("qwen3 tied", {"tensor_parallel": 2}),
        ("qwen3_moe", {"expert_parallel": 2}),
    ],
)
def test_a_checkpoint_that_is_asked_for_asleep_is_the_one_of_the_learner_awake(
    family: str, keys: dict[str, Any], ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    paths = ranks(2).run("offload_cases:saved_twice", str(tiny_family(family)), str(tmp_path), keys, 2)[0]
    for folder in ("policy", "reference"):
        awake, asleep = (DistReader(_folder(Path(path), folder)) for path in paths)
        assert awake.tensors.keys() == asleep.tensors.keys()
        assert any("exp_avg" in name for name in awake.tensors) == (folder == "policy")
        for name in awake.tensors:
            assert torch.equal(awake.read(name), asleep.read(name)), name


def _folder(checkpoint: Path, name: str) -> Path:
    if name == "policy":
        return checkpoint / name
    reference = read_record(checkpoint, version=int(checkpoint.name.rpartition("-")[2])).reference
    assert reference is not None
    return checkpoint.parent / reference.folder / "policy"
