"""A mixture of experts over two processes.

What the pinned server cannot do on a CPU is not here: with divided experts (``ep_size``) it looks up an expert that is
elsewhere by index −1 (``moe_forward_native``), and with data-parallel attention it asks its attention for what that has
not (``get_cpu_graph_seq_len_fill_value``). Either dies with the first request.
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

    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
VARIABLES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}


def test_a_mixture_over_two_processes_makes_the_tokens_of_one(
    environment: SglangEnvironment, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model("qwen3_moe")
    divided = replace(settings_for(environment, model, tmp_path, {"tp_size": 2}), environment=VARIABLES)

    async def run(address: str) -> None:
        async with ready(divided) as [two]:
            names = [process.name for process in two.processes]
            assert sum(name.startswith("scheduler") for name in names) == 2, names
            assert await greedy(two.address) == await greedy(address)

    (tmp_path / "one").mkdir()
    with run_server(environment, model, tmp_path / "one") as one:
        asyncio.run(run(one.address))
