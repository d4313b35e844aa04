"""Weights pushed to stock servers: every transport gives the same bits, what does not fit is refused by us, and the
death of either side harms nobody else."""
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import pytest
import torch
from running_server import run_server
from safetensors.torch import load_file

from penstock.backends.engines.served.base.bucket_source import open_source
from penstock.backends.engines.served.base.http import Refused, ServerHttp
from penstock.backends.engines.served.expectation import UnfitWeightsError, check_tensors, expect_model, read_table
from penstock.backends.engines.served.sglang.bucket_push import PushError, ServerGroup, ServerRanks, push_tensors
from penstock.backends.engines.served.sglang.control import PauseMode, SglangControl
from penstock.backends.processes.process_facts import is_running, marked_processes
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.pushing import PushExporter
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
    from pathlib import Path

    from running_server import RunningServer

    from penstock.backends.engines.served.base.launched import ServerEnd
    from penstock.backends.engines.served.sglang.environment import SglangEnvironment
    from penstock.messages.weights import WeightManifest

pytestmark = pytest.mark.sglang

TIMEOUT_S: Final = 60.0
ONE_BUCKET: Final = 1 << 28
MANY_BUCKETS: Final = 50_000
RANKS: Final = ServerRanks("engine-0", tp_size=1, device="cpu")


@pytest.fixture
def exporter() -> Generator[PushExporter]:
    opened = PushExporter("distributed", 1, "127.0.0.1")
    yield opened
    opened.close()


def run(work: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 4 * TIMEOUT_S))


def export(exporter: PushExporter, folder: Path, publish: int = 0) -> WeightManifest:
    return exporter.export(load_file(folder / "model.safetensors"), version=publish, publish=publish, canary=None)


@asynccontextmanager
async def paused(server: RunningServer) -> AsyncGenerator[SglangControl]:
    """The server, paused; continued with the weights that it was started with, unless it has died."""
    http = ServerHttp(server.address, admin_api_key=server.admin_api_key)
    control = SglangControl(http)
    try:
        await control.pause(PauseMode.RETRACT)
        yield control
        if not server.handle.ended.done():
            await control.update_from_disk(str(server.model_folder), version="default", flush=True)
            await control.continue_()
    finally:
        await http.close()


async def loaded(control: SglangControl, folder: Path) -> str:
    """The checksum of a clean load of this folder."""
    await control.update_from_disk(str(folder), version="v", flush=True)
    return (await control.weights_checksum()).overall


async def push(
    transport: str, control: SglangControl, server: RunningServer, manifest: WeightManifest, size: int
) -> None:
    source = await open_source(manifest)
    expected = expect_model(server.model_folder, "float32")
    try:
        if transport == "tensor":
            await push_tensors(
                control, server.address, RANKS, source, expected, bucket_size_bytes=size, flush=True,
                timeout_s=TIMEOUT_S,
            )  # fmt: skip
        else:
            group = ServerGroup(control, RANKS)
            await group.push(source, expected, bucket_size_bytes=size, flush=True, timeout_s=TIMEOUT_S)
            await group.leave(source)
    finally:
        source.close()


@pytest.mark.parametrize("size", [ONE_BUCKET, MANY_BUCKETS])
@pytest.mark.parametrize("transport", ["distributed", "tensor"])
def test_what_was_pushed_is_what_a_clean_load_gives(
    server: RunningServer, tiny_model: Callable[..., Path], exporter: PushExporter, transport: str, size: int
) -> None:
    async def update() -> None:
        async with paused(server) as control:
            wanted = await loaded(control, tiny_model(seed=1))
            assert wanted != await loaded(control, tiny_model(seed=0))
            await push(transport, control, server, export(exporter, tiny_model(seed=1)), size)
            assert (await control.weights_checksum()).overall == wanted

    run(update())


def test_a_group_serves_one_publish_after_the_other(
    server: RunningServer, tiny_model: Callable[..., Path], exporter: PushExporter
) -> None:
    async def update() -> None:
        expected = expect_model(server.model_folder)
        async with paused(server) as control:
            wanted = [await loaded(control, tiny_model(seed=seed)) for seed in (0, 1)]
            group = ServerGroup(control, RANKS)
            for publish in (1, 2, 3):
                source = await open_source(export(exporter, tiny_model(seed=publish % 2), publish))
                await group.push(source, expected, bucket_size_bytes=MANY_BUCKETS, flush=True, timeout_s=TIMEOUT_S)
                assert (await control.weights_checksum()).overall == wanted[publish % 2]
                source.close()
            await group.leave()

    run(update())


def test_a_learner_that_is_replaced_gets_a_group_of_its_own(
    server: RunningServer, tiny_model: Callable[..., Path], exporter: PushExporter
) -> None:
    async def update() -> None:
        expected = expect_model(server.model_folder)
        async with paused(server) as control:
            wanted = await loaded(control, tiny_model(seed=1))
            group = ServerGroup(control, RANKS)
            first = await open_source(export(exporter, tiny_model(seed=0)))
            await group.push(first, expected, bucket_size_bytes=MANY_BUCKETS, flush=True, timeout_s=TIMEOUT_S)
            exporter.close()
            later = PushExporter("distributed", 2, "127.0.0.1")
            second = await open_source(export(later, tiny_model(seed=1)))
            await group.push(second, expected, bucket_size_bytes=MANY_BUCKETS, flush=True, timeout_s=TIMEOUT_S)
            assert (await control.weights_checksum()).overall == wanted
            await group.leave(second)
            for source in (first, second):
                source.close()
            later.close()

    run(update())


def test_a_session_that_was_left_open_is_ended_and_the_update_made(
    server: RunningServer, tiny_model: Callable[..., Path], exporter: PushExporter
) -> None:
    async def update() -> None:
        async with paused(server) as control:
            wanted = await loaded(control, tiny_model(seed=1))
            await control.begin_update()
            await push("tensor", control, server, export(exporter, tiny_model(seed=1)), ONE_BUCKET)
            assert (await control.weights_checksum()).overall == wanted

    run(update())


# --- what does not fit --------------------------------------------------------------------------------------------

WRONG: Final[dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]]] = {
    "shape": (
        lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3, 3)}),
        r"lm_head.weight: expected shape \[512, 64\]",
    ),
    "missing": (lambda tensors: tensors.pop("model.norm.weight"), "they lack model.norm.weight"),
    "unknown": (lambda tensors: tensors.update({"no.such": torch.zeros(2)}), "they have unknown no.such"),
    "dtype": (
        lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].bfloat16()}),
        "model.norm.weight: expected dtype F32, as the server was asked for, found BF16",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("transport", ["distributed", "tensor"])
def test_what_does_not_fit_is_refused_before_the_server_hears_of_it(
    server: RunningServer, tiny_model: Callable[..., Path], exporter: PushExporter, transport: str, what: str
) -> None:
    tensors = load_file(tiny_model(seed=1) / "model.safetensors")
    change, story = WRONG[what]
    change(tensors)
    manifest = exporter.export(tensors, version=0, publish=0, canary=None)

    async def update() -> None:
        async with paused(server) as control:
            before = (await control.weights_checksum()).overall
            with pytest.raises(UnfitWeightsError, match=story):
                await push(transport, control, server, manifest, ONE_BUCKET)
            assert (await control.weights_checksum()).overall == before
            assert not server.handle.ended.done()

    run(update())


def test_a_truncated_file_is_refused_for_a_load_from_disk(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    whole = (tiny_model(seed=1) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole)
    check_tensors(read_table(tmp_path), expect_model(tiny_model(seed=0)))
    for size_bytes in (len(whole) - 1, 100, 4):
        (tmp_path / "model.safetensors").write_bytes(whole[:size_bytes])
        with pytest.raises(WeightFetchError, match="cut short"):
            read_table(tmp_path)


def test_tensors_are_sent_to_no_other_machine(
    server: RunningServer, tiny_model: Callable[..., Path], exporter: PushExporter
) -> None:
    async def update() -> None:
        async with paused(server) as control:
            source = await open_source(export(exporter, tiny_model(seed=1)))
            with pytest.raises(UserFault, match="not on the loopback"):
                await push_tensors(
                    control, "http://10.0.0.7:30000", RANKS, source, expect_model(server.model_folder),
                    bucket_size_bytes=ONE_BUCKET, flush=True, timeout_s=TIMEOUT_S,
                )  # fmt: skip
            source.close()

    run(update())


# --- death --------------------------------------------------------------------------------------------------------


def test_a_learner_that_has_the_weights_no_longer_leaves_the_server_alive(
    server: RunningServer, tiny_model: Callable[..., Path], exporter: PushExporter
) -> None:
    async def update() -> None:
        expected = expect_model(server.model_folder)
        async with paused(server) as control:
            group = ServerGroup(control, RANKS)
            source = await open_source(export(exporter, tiny_model(seed=1)))
            await group.push(source, expected, bucket_size_bytes=MANY_BUCKETS, flush=True, timeout_s=TIMEOUT_S)
            newer = await open_source(export(exporter, tiny_model(seed=0), 1))
            exporter.release(1)
            with pytest.raises(PushError, match=r"version 0 broke off: .* it was released"):
                await group.push(source, expected, bucket_size_bytes=MANY_BUCKETS, flush=True, timeout_s=TIMEOUT_S)
            await group.push(newer, expected, bucket_size_bytes=MANY_BUCKETS, flush=True, timeout_s=TIMEOUT_S)
            assert (await control.weights_checksum()).overall == await loaded(control, tiny_model(seed=0))
            await group.leave(newer)
            for one in (source, newer):
                one.close()

    run(update())


def test_a_learner_that_dies_in_the_middle_leaves_the_server_alive(
    server: RunningServer, tiny_model: Callable[..., Path], exporter: PushExporter
) -> None:
    async def update() -> None:
        expected = expect_model(server.model_folder)
        async with paused(server) as control:
            group = ServerGroup(control, RANKS)
            source = await open_source(export(exporter, tiny_model(seed=1)))
            await group.push(source, expected, bucket_size_bytes=ONE_BUCKET, flush=True, timeout_s=TIMEOUT_S)
            await control.begin_update()
            bucket = load_file(tiny_model(seed=1) / "model.safetensors")
            waiting = asyncio.create_task(
                control.update_from_distributed(
                    list(bucket),
                    ["float32"] * len(bucket),
                    [list(tensor.shape) for tensor in bucket.values()],
                    group=group.name,
                    flush=False,
                    load_format="flattened_bucket",
                    timeout_s=TIMEOUT_S,
                )
            )
            await asyncio.to_thread(exporter.close)
            with pytest.raises(Refused, match="Failed to receive weights"):
                await waiting
            await control.end_update()
            await group.leave()
            source.close()
            assert (await control.weights_checksum()).overall

    run(update())


def test_a_scheduler_that_is_killed_in_the_middle_is_noticed_at_once_and_stops_neither_exporter_nor_the_next_publish(
    environment: SglangEnvironment, tiny_model: Callable[..., Path], exporter: PushExporter, tmp_path: Path
) -> None:
    """With a mixture of experts, which servers fuse: updates of it from single experts' tensors are the same too."""
    folder, owner = tiny_model("qwen3_moe", seed=0), secrets.token_hex(8)

    async def update(server: RunningServer) -> None:
        expected = expect_model(folder)
        async with paused(server) as control:
            wanted = await loaded(control, tiny_model("qwen3_moe", seed=1))
            for transport in ("distributed", "tensor"):
                assert wanted != await loaded(control, folder)
                await push(transport, control, server, export(exporter, tiny_model("qwen3_moe", seed=1)), MANY_BUCKETS)
                assert (await control.weights_checksum()).overall == wanted

            group = ServerGroup(control, RANKS)
            source = await open_source(export(exporter, tiny_model("qwen3_moe", seed=1), 1))
            await group.push(source, expected, bucket_size_bytes=MANY_BUCKETS, flush=True, timeout_s=TIMEOUT_S)
            main, scheduler = (
                next(each for each in server.handle.processes if each.name == name) for name in ("main", "scheduler")
            )
            os.kill(scheduler.pid, signal.SIGSTOP)
            pushing = asyncio.create_task(
                group.push(source, expected, bucket_size_bytes=MANY_BUCKETS, flush=True, timeout_s=TIMEOUT_S)
            )
            await asyncio.wait({pushing}, timeout=1.0)  # so long that it hangs in a call
            assert not pushing.done()
            os.kill(scheduler.pid, signal.SIGKILL)
            ended = await end_of(server)
            assert is_running(main.pid, main.start_ticks)  # it takes seconds to end by itself
            with pytest.raises(PushError, match="version 1 broke off"):
                await pushing
            source.close()
        assert ended.cause == f"the SGLang server died: its scheduler process ({scheduler.pid}) was killed by SIGKILL"
        newer = await open_source(export(exporter, folder, 2))
        assert newer.table
        newer.close()

    with run_server(environment, folder, tmp_path, owner=owner) as server:
        run(update(server))
    assert not marked_processes([f"PENSTOCK_SERVER_OWNER={owner}".encode()])


async def end_of(server: RunningServer) -> ServerEnd:
    """How it ended, once that is known: on the event loop of its own that it has here."""

    async def ending() -> ServerEnd:
        return await asyncio.shield(server.handle.ended)

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ending(), server.handle.ended.get_loop()))
