"""Our count of ranks, fields and bytes against megatron-core's own."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.backends.learners.megatron.cpu import no_cuda
from penstock.backends.learners.megatron.layout import config_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from ranks import Ranks

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tensor": 2, "pipeline": 2},
        {"context": 2, "expert": 2},
        {"tensor": 2, "expert": 2, "expert_tensor": 2},
        {"pipeline": 2, "expert": 2},
    ],
)
def test_ranks_are_numbered_as_megatron_core_numbers_them(sizes: dict[str, int], ranks: Callable[[int], Ranks]) -> None:
    for ours, theirs in ranks(4).run("layout_cases:place", sizes, 4):
        assert ours == theirs


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen3", {"tensor_parallel": 2, "pipeline_parallel": 2}),
        ("qwen3 tied", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
        ("qwen3_moe mixed", {"tensor_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2}),
        ("qwen3_moe", {"expert_parallel": 4}),
    ],
)
def test_the_estimate_of_weights_is_what_a_rank_of_the_fullest_stage_has(
    family: str, keys: dict[str, Any], ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    answers = ranks(4).run("layout_cases:weight_bytes", str(tiny_family(family)), keys, 4)
    assert answers[0][1] in (answers[0][0], answers[-1][0]), "the first stage or the last is the fullest"


def test_fields_are_passed_through(ranks: Callable[[int], Ranks]) -> None:
    keys = {"ddp": {"check_for_nan_in_grad": True}, "optimizer": {"main_grads_dtype": "float32", "adam_eps": 1e-5}}
    assert ranks(1).run("layout_cases:configured", keys) == [(True, "torch.float32", 1e-5)]


def test_the_list_of_fields_is_that_of_the_installed_version() -> None:
    # Asked here: where the module is collected but not run, megatron-core need not be installed.
    if importlib.metadata.version("megatron-core") != config_fields.MEGATRON_VERSION:
        pytest.skip("the list belongs to the pinned version, and another is being tried")
    script = Path(__file__).with_name("list_config_fields.py")
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=120).stdout
    kept = Path(config_fields.__file__).with_name("config_fields.json").read_text()
    assert json.loads(printed) == json.loads(kept)


def test_ranks_find_no_cuda_and_what_asks_for_it_gets_the_cpu(ranks: Callable[[int], Ranks]) -> None:
    assert not torch.cuda.is_available(), "with CUDA nothing is changed"
    assert ranks(1).run("layout_cases:without_cuda") == [(False, "cpu", "cpu", True)]
    assert type(torch.zeros(1).type()) is str, "this process is as it was"


def test_cuda_is_not_taken_away_after_megatron_core_has_looked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(RuntimeError, match="was imported before"):
        no_cuda.install()
