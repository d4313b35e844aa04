"""Weights on their way out: through the real transports, and the same whatever the layout."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.weights.disk import DiskExporter
from penstock.backends.weights.segments import sweep
from penstock.backends.weights.transports import open_fetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ranks import Ranks

    from penstock.messages.weights import WeightManifest

pytestmark = pytest.mark.megatron

OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
TRANSPORTS = ["disk", "shared_memory"]
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "one": ("qwen3", 1, {}, "float32"),
    "tensor 2": ("qwen3", 2, {"tensor_parallel": 2}, "float32"),
    "pipeline 2": ("qwen3", 2, {"pipeline_parallel": 2}, "float32"),
    "virtual pipeline": ("qwen3", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2}, "float32"),
    "context 2": ("qwen3", 2, {"context_parallel": 2}, "float32"),
    "data 2": ("qwen3", 2, {}, "float32"),
    "data 2 with overlaps": ("qwen3", 2, OVERLAPS, "float32"),
    "data 2 with overlaps, bfloat16": ("qwen3", 2, OVERLAPS, "bfloat16"),
    "tied, pipeline 2": ("qwen3 tied", 2, {"pipeline_parallel": 2}, "float32"),
    "expert 2": ("qwen3_moe", 2, {"expert_parallel": 2}, "float32"),
    "tensor 2 pipeline 2": ("qwen3", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}, "float32"),
    "tensor 2 data 2 with overlaps": ("qwen3", 4, {"tensor_parallel": 2, **OVERLAPS}, "float32"),
    "tensor 2 expert 2 pipeline 2": (
        "qwen3_moe", 4, {"tensor_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2}, "float32",
    ),
}  # fmt: skip


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"test{uuid.uuid4().hex[:12]}"
    yield name
    sweep(name)


@pytest.mark.parametrize("case", LAYOUTS)
def test_engines_read_what_the_torch_learner_would_have_published(
    case: str, ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path, run_id: str
) -> None:
    family, num_ranks, keys, precision = LAYOUTS[case]
    folder = tiny_family(family)
    answers = ranks(num_ranks).run(
        "publishing_cases:published", str(folder), keys, num_ranks, precision, TRANSPORTS, str(tmp_path), run_id
    )
    model = PackedModel.load(folder, dtype=precision, device=torch.device("cpu"))
    wanted = model.named_tensors()
    expected = DiskExporter(tmp_path / "torch", 1).export(wanted, version=0, publish=1, canary=None)
    manifests: list[WeightManifest] = answers[0][0]
    assert [manifest.transport for manifest in manifests] == TRANSPORTS
    for manifest in manifests:
        assert (manifest.digest, manifest.size_bytes) == (expected.digest, expected.size_bytes)
        fetched = open_fetcher().fetch(manifest)
        assert fetched.digest == expected.digest
        assert fetched.tensors.keys() == wanted.keys()
        for name, tensor in fetched.tensors.items():
            assert torch.equal(tensor, wanted[name]), name
        fetched.close()
    assert all(not manifests for manifests, _ in answers[1:]), "the first rank alone has them"


def test_weights_published_right_after_a_step_with_overlaps_are_those_without(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path, run_id: str
) -> None:
    folder = str(tiny_family("qwen3"))
    digests = [
        ranks(2).run("publishing_cases:published", folder, keys, 2, "float32", ["disk"], str(place), run_id, 2)[0][0][0]
        for keys, place in ((OVERLAPS, tmp_path / "overlaps"), ({}, tmp_path / "plain"))
    ]
    untrained = ranks(2).run(
        "publishing_cases:published", folder, OVERLAPS, 2, "float32", ["disk"], str(tmp_path), run_id
    )[0][0][0]
    assert digests[0].digest == digests[1].digest != untrained.digest


def test_each_phase_says_its_time_and_bytes(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path, run_id: str
) -> None:
    folder = tiny_family("qwen3")
    answers = ranks(2).run(
        "publishing_cases:published", str(folder), {"tensor_parallel": 2}, 2, "float32", ["disk"], str(tmp_path), run_id
    )
    figures: dict[str, float] = answers[0][1][0]
    manifest: WeightManifest = answers[0][0][0]
    data_bytes = sum(tensor.nbytes for tensor in open_fetcher().fetch(manifest).tensors.values())
    assert figures["learner/publish_bytes"] == data_bytes
    assert 0.4 * data_bytes < figures["learner/publish_received_bytes"] < 0.6 * data_bytes, "the other half is here"
    phases = ("sync", "canary", "wait", "merge", "write")
    times = [figures[f"learner/publish_{phase}_time_s"] for phase in phases]
    assert all(time_s >= 0.0 for time_s in times)
    assert sum(times) == pytest.approx(figures["learner/publish_time_s"], abs=1e-6)
    assert answers[1][1][0]["learner/publish_received_bytes"] == 0.0


def test_ranks_part_though_a_transport_carries_nothing(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path, run_id: str
) -> None:
    folder = str(tiny_family("qwen3"))
    layout = {"pipeline_parallel": 2}
    answers = ranks(2).run(
        "publishing_cases:published", folder, layout, 2, "float32", ["none", "disk"], str(tmp_path), run_id
    )
    assert [manifest.transport for manifest in answers[0][0]] == ["none", "disk"]
    assert open_fetcher().fetch(answers[0][0][1]).tensors
