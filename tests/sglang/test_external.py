"""Servers that run already: attached to, compared with the scenario, cleaned of what others left, and taken over."""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from conformance_bench import EngineBench, response_logprobs, tokens_of
from transformers import AutoModelForCausalLM

from penstock.backends.engines.options import EnginesOptions
from penstock.backends.engines.served.base.http import ServerHttp
from penstock.backends.engines.served.sglang.control import PauseMode, SglangControl
from penstock.backends.engines.served.sglang.opening import ADMIN_KEY_VARIABLE
from penstock.messages.arrays import floats_view
from penstock.messages.errors import UserFault
from penstock.messages.local import WeightsSwapped
from penstock.messages.samples import Cancelled
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from running_server import RunningServer
    from transformers import PreTrainedModel

pytestmark = pytest.mark.sglang

PROMPT = [11, 12, 13, 14, 15, 16]


@pytest.fixture
def attach(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[Callable[..., EngineBench]]:
    """An engine that is the shared server; afterwards the server has the weights that it was started with."""
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, server.admin_api_key)
    benches: list[EngineBench] = []

    def open_bench(model_folder: Path | None = None, dtype: str = "float32") -> EngineBench:
        options = EnginesOptions(
            backend="sglang", slots=8, progress_tokens=8, start_timeout_s=60.0, addresses=(server.address,)
        )
        bench = EngineBench(
            "sglang", model_folder or server.model_folder, tmp_path / str(len(benches)), options=options, dtype=dtype
        )
        benches.append(bench)
        return bench

    yield open_bench
    for bench in benches:
        bench.close()
    control(server, "load")


def control(server: RunningServer, what: str) -> None:
    """Something that another worker would do, from outside."""

    async def do() -> None:
        http = ServerHttp(server.address, admin_api_key=server.admin_api_key)
        calls = SglangControl(http)
        try:
            match what:
                case "load":
                    await calls.update_from_disk(str(server.model_folder), version="default", flush=True)
                case "pause":
                    await calls.pause(PauseMode.IN_PLACE)
                case _:
                    await calls.begin_update()
        finally:
            await http.close()

    asyncio.run(do())


def load(folder: Path) -> PreTrainedModel:
    """In float32; ``from_pretrained`` leaves it in evaluation mode."""
    return cast("PreTrainedModel", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def is_served(bench: EngineBench, model: PreTrainedModel) -> bool:
    """Whether a response has the log-probs of this model."""
    part = bench.ended(PROMPT).part
    expected = response_logprobs(model, PROMPT, tokens_of(part))
    return max(abs(a - b) for a, b in zip(floats_view(part.logprobs), expected, strict=True)) < 2e-5


def test_a_server_that_runs_already_serves_what_it_is_given_and_outlives_its_engine(
    attach: Callable[..., EngineBench], server: RunningServer, tiny_model: Callable[..., Path]
) -> None:
    other = load(tiny_model(seed=1))
    bench = attach()
    bench.serve(other)
    assert is_served(bench, other)
    bench.close()
    assert not server.handle.ended.done()


def test_weights_that_change_after_they_were_checked_are_noticed_in_the_server(
    attach: Callable[..., EngineBench], tiny_model: Callable[..., Path]
) -> None:
    bench = attach()
    manifest = bench.stage(load(tiny_model(seed=1)))
    with (Path(manifest.location) / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\x3f")
    bench.apply(manifest, UpdateMode.DRAIN)
    assert bench.hear(WeightsSwapped).digest != manifest.digest


@pytest.mark.parametrize("left", ["pause", "session"])
def test_what_a_worker_left_that_died_is_ended_by_the_one_that_takes_over(
    attach: Callable[..., EngineBench], server: RunningServer, tiny_model: Callable[..., Path], left: str
) -> None:
    control(server, left)
    model = load(tiny_model(seed=1))
    bench = attach()
    bench.serve(model)
    assert is_served(bench, model)


def test_requests_of_a_worker_that_died_are_aborted_by_the_one_that_takes_over(
    attach: Callable[..., EngineBench], server: RunningServer
) -> None:
    model = load(server.model_folder)
    first = attach()
    first.serve(model)
    keys = [first.generate([*PROMPT, 20 + place]) for place in range(4)]
    first.advanced(keys[0])
    second = attach()
    second.serve(model)
    assert is_served(second, model)
    outcomes = [ended.outcome for ended in first.ends(*keys)]
    assert not any(isinstance(outcome, Cancelled) for outcome in outcomes), "nobody asked this one for it"


def test_a_server_of_another_kind_is_refused_with_the_differences(
    attach: Callable[..., EngineBench], tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(UserFault) as refused:
        attach(tiny_model("llama"), dtype="bfloat16")
    assert "it runs Qwen3ForCausalLM, and the scenario's model is LlamaForCausalLM" in str(refused.value)
    assert "its --dtype is float32, and model.dtype is bfloat16" in str(refused.value)
