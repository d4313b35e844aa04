"""A mixture of experts over two processes: divided matrices, and attention on a part of the requests each.

Divided experts (``ep_size``) are not among them: on a CPU the pinned server looks up an expert that is elsewhere by
index −1 and dies with the first request (``moe_forward_native``).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from running_server import run_server, settings_for
from test_tensor_parallel import greedy, ready

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.backends.engines.options import OptionValue
    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
VARIABLES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}
LAYOUTS: dict[str, dict[str, OptionValue]] = {
    "tensor": {"tp_size": 2},
    "attention": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_divided_mixture_makes_the_tokens_of_one_process(
    layout: str, environment: SglangEnvironment, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model("qwen3_moe")
    divided = replace(settings_for(environment, model, tmp_path, LAYOUTS[layout]), environment=VARIABLES)

    async def run(address: str) -> None:
        async with ready(divided) as [two]:
            names = [process.name for process in two.processes]
            assert sum(name.startswith("scheduler") for name in names) == 2, names
            assert await greedy(two.address) == await greedy(address)

    (tmp_path / "one").mkdir()
    with run_server(environment, model, tmp_path / "one") as one:
        asyncio.run(run(one.address))
