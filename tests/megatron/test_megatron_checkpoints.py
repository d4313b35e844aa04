"""Distributed checkpoints: what is saved in one layout is gone on with in another, and what cannot be is said."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from ranks import Ranks

from penstock.backends.learners.checkpoints.folder import CheckpointFolder
from penstock.backends.learners.checkpoints.record import CheckpointError, read_record
from penstock.backends.learners.megatron.checkpoint.dist_format import METADATA_FILE, DistReader
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.snapshot import take_snapshot
from penstock.backends.learners.torch.trainer import PolicyTrainer

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.megatron

Layout = tuple[int, dict[str, Any]]

FROZEN: dict[str, Any] = {"learner": {"freeze": ("embed_tokens", r"layers\.0\.")}}
RESHARDED: list[tuple[str, Layout, list[Layout]]] = [
    (
        "qwen3 tied",
        (2, {"tensor_parallel": 2}),
        [(2, {"tensor_parallel": 2}), (1, {}), (2, {"pipeline_parallel": 2}), (2, {})],
    ),
    (
        "qwen3",
        (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
        [(1, {"vocab_multiple": 8}), (2, {"tensor_parallel": 2})],
    ),
    ("qwen3", (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}), [(1, {})]),
    (
        "qwen3_moe",
        (2, {"expert_parallel": 2}),
        [
            (4, {"expert_parallel": 4}),
            (4, {"expert_parallel": 2, "pipeline_parallel": 2}),
            (2, {"tensor_parallel": 2, "expert_parallel": 2}),
            (1, {}),
        ],
    ),
    ("qwen3_moe", (1, {}), [(2, {"expert_parallel": 2})]),
    ("deepseek_v3", (2, {"tensor_parallel": 2, "expert_parallel": 2}), [(2, {"pipeline_parallel": 2})]),
    ("qwen3", (2, {"tensor_parallel": 2, "distributed_optimizer": False}), [(1, {"distributed_optimizer": False})]),
    ("qwen3", (2, {"tensor_parallel": 2, **FROZEN}), [(1, FROZEN)]),
]
SAME = 5e-7
"""After one more step; another division adds up in another order."""
OTHER = 1e-4
"""By less than this no step differs that an optimizer makes which has seen nothing."""


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.parametrize(("family", "saved_in", "loaded_in"), RESHARDED)
def test_the_next_step_after_loading_is_that_of_the_run_that_went_on_whatever_the_layout(
    family: str,
    saved_in: Layout,
    loaded_in: list[Layout],
    ranks: Callable[[int], Ranks],
    tiny_family: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    model, (num_ranks, keys) = str(tiny_family(family)), saved_in
    path, weights, after = ranks(num_ranks).run("resharding_cases:saved", model, str(tmp_path), keys, num_ranks)[0]
    for num_ranks, keys in loaded_in:
        found, found_after, _ = ranks(num_ranks).run("resharding_cases:gone_on", model, path, keys, num_ranks)[0]
        assert largest_difference(found, weights) == 0.0
        assert largest_difference(found_after, after) < SAME, (num_ranks, keys)
    assert largest_difference(weights, after) > OTHER, "a step that is saved with what trained on would not show"


@pytest.mark.slow  # bfloat16 on a CPU
@pytest.mark.parametrize("distributed", [True, False])
def test_the_float32_weights_behind_a_model_of_bfloat16_are_gone_on_with(
    distributed: bool, ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    model, keys = str(tiny_family("qwen3")), {"precision": "bfloat16", "distributed_optimizer": distributed}
    same = keys | {"tensor_parallel": 2}
    path, weights, after = ranks(2).run("resharding_cases:saved", model, str(tmp_path), same, 2)[0]
    found, found_after, _ = ranks(2).run("resharding_cases:gone_on", model, path, same, 2)[0]
    assert largest_difference(found, weights) == 0.0
    assert largest_difference(found_after, after) == 0.0
    _, found_after, _ = ranks(1).run("resharding_cases:gone_on", model, path, keys, 1)[0]
    assert largest_difference(found_after, after) < 4e-3, "the last bit of a weight"


def test_the_reference_lies_on_disk_once_and_comes_back(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    model, keys = str(tiny_family("qwen3")), {"pipeline_parallel": 2}
    path, _, _ = ranks(2).run("resharding_cases:saved", model, str(tmp_path), keys, 2, True)[0]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["reference", "version-0000001", "version-0000002"]
    records = [read_record(tmp_path / f"version-000000{version}", version=version) for version in (1, 2)]
    assert records[0].reference == records[1].reference
    assert records[1].backend == "megatron"
    assert records[1].megatron is not None
    assert records[1].megatron.optimizer_steps == {"policy": 2}
    assert (records[1].canary, records[1].trained_tokens) == ((3, 1, 4), 123)
    weights, _, reference = ranks(1).run("resharding_cases:gone_on", model, path, {}, 1, True)[0]
    wanted = ranks(1).run("resharding_cases:weights_in", model, model, {}, 1)[0]
    assert largest_difference(reference, wanted) == 0.0
    assert largest_difference(weights, wanted) > OTHER


def test_megatron_core_itself_reads_what_is_written(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    for family, num_ranks, keys in (("qwen3", 2, {"tensor_parallel": 2}), ("qwen3_moe", 2, {"expert_parallel": 2})):
        model = str(tiny_family(family))
        path, weights, _ = ranks(num_ranks).run(
            "resharding_cases:saved", model, str(tmp_path / family), keys, num_ranks
        )[0]
        found = ranks(1).run("resharding_cases:loaded_by_megatron", model, path, {}, 1)[0]
        assert largest_difference(found, weights) == 0.0


def test_an_optimizer_that_is_divided_otherwise_starts_anew_or_is_refused(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    model, keys = str(tiny_family("qwen3")), {"distributed_optimizer": False}
    path, weights, after = ranks(1).run("resharding_cases:saved", model, str(tmp_path), keys, 1)[0]
    fresh = {"learner": {"optimizer": "fresh"}}
    found, found_after, _ = ranks(1).run("resharding_cases:gone_on", model, path, fresh, 1)[0]
    assert largest_difference(found, weights) == 0.0
    assert largest_difference(found_after, after) > OTHER
    same = keys | fresh
    found, found_after, _ = ranks(1).run("resharding_cases:gone_on", model, path, same, 1)[0]
    assert largest_difference(found_after, after) == 0.0, "what can be gone on with is"
    refused = ranks(1).run("resharding_cases:refusal", model, path, 2, {}, 1)[0]
    assert re.search(r"distributed_optimizer false, so .* learner\.optimizer=fresh", refused)


def test_a_checkpoint_of_the_torch_learner_is_refused_or_gives_its_weights(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_family("qwen3")
    path = torch_checkpoint(folder, tmp_path)
    fresh = {"learner": {"optimizer": "fresh"}}
    weights, _, _ = ranks(2).run("resharding_cases:gone_on", str(folder), path, fresh | {"tensor_parallel": 2}, 2)[0]
    wanted = ranks(1).run("resharding_cases:weights_in", str(folder), str(folder), {}, 1)[0]
    assert largest_difference(weights, wanted) == 0.0
    refused = ranks(1).run("resharding_cases:refusal", str(folder), path, 2, {}, 1)[0]
    assert re.search(r"the torch learner wrote it, so .* learner\.optimizer=fresh", refused)


def torch_checkpoint(folder: Path, target: Path) -> str:
    model = PackedModel.load(folder, dtype="float32", device=torch.device("cpu"))
    trainer = PolicyTrainer(
        model, LearnerOptions(), temperature=1.0, num_steps=9, reference=None, check_stop=lambda: None
    )
    snapshot = take_snapshot(model, trainer, None, version=2, dtype="float32", trained_tokens=0, canary=(1,))
    return str(CheckpointFolder(target, epoch=1, tokenizer_source=folder).write(snapshot))


def test_a_rank_that_is_killed_while_it_saves_leaves_the_checkpoint_before(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    model, keys = str(tiny_family("qwen3")), {"tensor_parallel": 2}
    doomed = Ranks(2)
    try:
        with pytest.raises((EOFError, ConnectionError, AssertionError)):
            doomed.run("resharding_cases:killed_while_saving", model, str(tmp_path), keys, 2)
    finally:
        doomed.close()
    assert [entry.name for entry in tmp_path.iterdir() if not entry.name.startswith(".")] == ["version-0000000"]
    assert read_record(tmp_path / "version-0000000", version=0).version == 0
    assert not ranks(1).run("resharding_cases:refusal", model, str(tmp_path / "version-0000000"), 0, {}, 1)[0]
    path, _, _ = ranks(1).run("resharding_cases:saved", model, str(tmp_path), {}, 1)[0]
    assert [entry.name for entry in tmp_path.iterdir()] == [Path(path).name], "what was left has gone"


class Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


def test_nothing_is_executed_that_a_checkpoint_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(Command()))
    with pytest.raises(CheckpointError, match="describes no tensor"):
        DistReader(tmp_path)
    assert not (tmp_path / "executed").exists()
    pickle.loads((tmp_path / METADATA_FILE).read_bytes())
    assert (tmp_path / "executed").exists(), "it would have been"
