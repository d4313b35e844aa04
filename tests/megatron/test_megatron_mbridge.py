"""An independent check of names and layouts: what mbridge, a converter of others, makes of the same checkpoints."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ranks import Ranks

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(importlib.util.find_spec("mbridge") is None, reason="needs mbridge"),
]


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen2", {"tensor_parallel": 2}),
        ("qwen3 tied", {"pipeline_parallel": 2}),
        ("llama", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
        ("qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 2}),
        ("deepseek_v3", {"tensor_parallel": 2, "expert_parallel": 2}),
        ("deepseek_v3 plain", {"pipeline_parallel": 2}),
    ],
)
def test_mbridge_fills_every_parameter_with_the_same(
    family: str, keys: dict[str, Any], ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    for wrong, count in ranks(2).run("mbridge_cases:differing", str(tiny_family(family)), keys, 2):
        assert not wrong
        assert count > 10
