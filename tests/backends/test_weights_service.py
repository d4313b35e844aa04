"""The transports that push, without a server: the service, its keys, process groups with real peers, and pulling."""
# pyright: reportUnknownVariableType=false, reportPrivateUsage=false

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import signal
import socket
from typing import TYPE_CHECKING

import group_peer
import msgspec
import pytest
import torch
import zmq
from safetensors.torch import load_file

from penstock.backends.checkpoint.make import make_model
from penstock.backends.engines.served.base.bucket_source import ServiceError, ServiceLine, open_source
from penstock.backends.engines.served.expectation import UnfitWeightsError, expect_model
from penstock.backends.weights import pulled
from penstock.backends.weights.buckets import plan_buckets
from penstock.backends.weights.protocol import WeightExportError, WeightFetchError
from penstock.backends.weights.pushing import PushExporter
from penstock.backends.weights.service_messages import (
    MAX_REQUEST_BYTES,
    Describe,
    Described,
    Pack,
    Packed,
    PackedTensor,
    Read,
    address_in,
    location_of,
    publish_of,
)
from penstock.backends.weights.shared_memory import SharedMemoryExporter
from penstock.backends.weights.tensor_file import lay_out
from penstock.backends.weights.transports import open_exporter, open_fetcher
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.weights import Canary

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator
    from pathlib import Path

    from penstock.backends.engines.served.base.bucket_source import PublishSource
    from penstock.backends.weights.service_messages import Joining
    from penstock.messages.weights import WeightManifest

CANARY = Canary(tokens=pack_tokens([1, 2]), logprobs=pack_floats([-0.5]))
TIMEOUT_S = 120.0
LARGE = 4_000_003
HANG_S = 8.0
"""After which a group gives a hanging peer up; its peer has joined well before on a busy machine, too."""


@pytest.fixture(params=["distributed", "tensor", "network"])
def exporter(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[PushExporter]:
    opened = open_exporter(request.param, run_id="run", learner_epoch=1, folder=tmp_path)
    assert isinstance(opened, PushExporter)
    yield opened
    opened.close()


@pytest.fixture
def pusher() -> Generator[PushExporter]:
    opened = PushExporter("distributed", 1, "127.0.0.1")
    yield opened
    opened.close()


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(7, 5, generator=generator)
    return {
        "model.embed_tokens.weight": table,
        "model.norm.weight": torch.randn(5, generator=generator).to(torch.bfloat16),
        "large": torch.randn(LARGE, generator=generator),
        "steps": torch.arange(6, dtype=torch.int64).reshape(2, 3),
        "empty": torch.empty(0, 4),
        "across": torch.randn(4, 6, generator=generator).t(),
        "lm_head.weight": table,
    }


def export(exporter: PushExporter, version: int = 0, seed: int = 0) -> WeightManifest:
    return exporter.export(weights(seed), version=version, publish=version, canary=CANARY)


def run(work: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


class Peer:
    """A process that joins a group of the service as a server's rank does."""

    def __init__(self, group: str, rank: int, num_ranks: int, sizes: list[int]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.rendezvous"])
        self._line, its = context.Pipe()
        words = (its, group, rank, 1 + num_ranks, sizes)
        self.process = context.Process(target=group_peer.join_and_receive, args=words, daemon=True)
        self.process.start()
        its.close()

    async def join(self, joining: Joining) -> None:
        self._line.send((joining.address, joining.port))
        assert await self.line() == "joined"

    async def line(self) -> str:
        assert await asyncio.to_thread(self._line.poll, TIMEOUT_S)
        return str(self._line.recv())

    def go_on(self) -> None:
        self._line.send(None)

    def end(self) -> None:
        self.process.kill()
        self.process.join(TIMEOUT_S)
        self._line.close()


async def peer_of(source: PublishSource, engine: str, sizes: list[int], timeout_s: float = TIMEOUT_S) -> Peer:
    peer = Peer(engine, 1, 1, sizes)
    assert await peer.line() == "ready"  # its imports do not count against the deadline of the group
    await peer.join(await source.join(engine, engine=engine, num_ranks=1, backend="gloo", timeout_s=timeout_s))
    return peer


# --- pulling ------------------------------------------------------------------------------------------------------


def test_an_embedded_engine_pulls_exactly_what_was_exported(exporter: PushExporter) -> None:
    manifest = export(exporter, version=4)
    fetched = open_fetcher().fetch(manifest)
    assert fetched.tensors.keys() == weights().keys()
    for name, tensor in weights().items():
        assert fetched.tensors[name].dtype == tensor.dtype
        assert torch.equal(fetched.tensors[name], tensor), name
    assert fetched.tensors["lm_head.weight"].data_ptr() == fetched.tensors["model.embed_tokens.weight"].data_ptr()
    assert fetched.digest == manifest.digest == fetched.digest_now()
    assert (manifest.version, manifest.publish, manifest.learner_epoch, manifest.canary) == (4, 4, 1, CANARY)


def test_the_digest_is_that_of_every_other_transport(pusher: PushExporter, tmp_path: Path) -> None:
    shared = SharedMemoryExporter("run", 1, tmp_path).export(weights(), version=0, publish=0, canary=None)
    assert (export(pusher).digest, export(pusher).size_bytes) == (shared.digest, shared.size_bytes)


def test_a_release_keeps_the_newest_and_what_is_not_below_it(pusher: PushExporter) -> None:
    manifests = [export(pusher, version) for version in range(3)]
    pusher.release(1)
    with pytest.raises(WeightFetchError, match=r"version 0, publish 0 .* not held here: it was released"):
        open_fetcher().fetch(manifests[0])
    open_fetcher().fetch(manifests[1])
    pusher.release(100)
    with pytest.raises(WeightFetchError, match="released"):
        open_fetcher().fetch(manifests[1])
    assert open_fetcher().fetch(manifests[2]).digest == manifests[2].digest


def test_a_publish_of_the_same_version_again_replaces_nothing(pusher: PushExporter) -> None:
    first = pusher.export(weights(0), version=5, publish=0, canary=None)
    second = pusher.export(weights(1), version=5, publish=1, canary=None)
    assert open_fetcher().fetch(first).digest != open_fetcher().fetch(second).digest


def test_a_manifest_that_promises_other_bytes_is_refused(pusher: PushExporter) -> None:
    manifest = msgspec.structs.replace(export(pusher), digest="0" * 64)
    with pytest.raises(WeightFetchError, match="were changed on the way"):
        open_fetcher().fetch(manifest)
    with pytest.raises(WeightFetchError, match="the manifest says 0000000000000000"):
        run(_open(manifest))


def test_a_learner_that_has_ended_is_heard_of_at_once(pusher: PushExporter) -> None:
    manifest = export(pusher)

    async def ask() -> None:
        source = await open_source(manifest)
        asked = asyncio.create_task(source.join("g", engine="e", num_ranks=1, backend="gloo", timeout_s=TIMEOUT_S))
        await asked
        waits = asyncio.create_task(source.broadcast("g", plan_buckets(source.layout, 1)[0], TIMEOUT_S))
        await asyncio.sleep(0)
        await asyncio.to_thread(pusher.close)
        with pytest.raises(ServiceError, match=r"has ended|broke"):
            await waits
        source.close()

    run(ask())


def test_weights_that_are_not_finite_are_refused_before_a_server_hears_of_them(
    pusher: PushExporter, tmp_path: Path
) -> None:
    make_model("xs", tmp_path, seed=0)
    tensors = load_file(tmp_path / "model.safetensors")
    fit = pusher.export(tensors, version=0, publish=0, canary=None)
    tensors["model.norm.weight"][3] = torch.nan
    unfit = pusher.export(tensors, version=1, publish=1, canary=None)

    async def check() -> None:
        for manifest in (fit, unfit):
            source = await open_source(manifest)
            try:
                source.check(expect_model(tmp_path))
            finally:
                source.close()

    with pytest.raises(UnfitWeightsError, match=r"model\.norm\.weight holds values that are not finite"):
        run(check())


# --- keys ---------------------------------------------------------------------------------------------------------


async def _open(manifest: WeightManifest) -> None:
    (await open_source(manifest)).close()


def test_a_client_without_the_secret_of_the_manifest_is_refused(pusher: PushExporter) -> None:
    manifest = export(pusher)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    other = msgspec.structs.replace(address_in(manifest), client_public=public, client_secret=secret)
    stranger = msgspec.structs.replace(manifest, location=location_of(other))
    with pytest.raises(WeightFetchError, match="refused the key"):
        open_fetcher().fetch(stranger)
    with pytest.raises(WeightFetchError, match="refused the key"):
        run(_open(stranger))
    assert pusher._service._zap.num_refused >= 2
    run(_open(manifest))


def test_a_request_on_a_line_that_was_refused_before_it_does_not_wait_for_ever(pusher: PushExporter) -> None:
    manifest = export(pusher)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    other = msgspec.structs.replace(address_in(manifest), client_public=public, client_secret=secret)
    with zmq.Context() as context:
        line = pulled.open_line(context, other)
        assert line.monitor.poll(int(TIMEOUT_S * 1000))
        line.socket.sndtimeo = int(TIMEOUT_S * 1000)  # of a request that waits
        asked = Read(publish=publish_of(manifest), start=0, size_bytes=1)
        for _ in range(line.socket.sndhwm + 1):  # the line may be taken away a moment after the monitor has said so
            line.ask(b"0", asked)
        assert "refused the key" in pulled.story_of_the_break(line.event())
        context.destroy(linger=0)


def test_a_service_that_poses_as_the_learners_is_not_talked_to(pusher: PushExporter) -> None:
    manifest = export(pusher)
    other = PushExporter("distributed", 1, "127.0.0.1")
    try:
        posing = msgspec.structs.replace(
            address_in(export(other)), server_key=address_in(manifest).server_key,
            client_public=address_in(manifest).client_public, client_secret=address_in(manifest).client_secret,
        )  # fmt: skip
        with pytest.raises(WeightFetchError, match=r"broke|refused"):
            run(_open(msgspec.structs.replace(manifest, location=location_of(posing))))
    finally:
        other.close()


def test_whoever_announces_more_than_a_request_is_cut_off_before_it_is_read(pusher: PushExporter) -> None:
    host, _, port = address_in(export(pusher)).endpoint.removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    size_bytes = 6 * MAX_REQUEST_BYTES
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as stranger:
        stranger.sendall(greeting + b"\x06" + size_bytes.to_bytes(8, "big"))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            stranger.sendall(bytes(size_bytes))  # more than any buffer between the two ends takes


def test_a_request_that_the_service_would_cut_off_is_refused_before_it_is_sent(pusher: PushExporter) -> None:
    tensors = tuple(
        PackedTensor(name=f"{number}".rjust(2000), dtype="F32", shape=(1,), size_bytes=4) for number in range(5000)
    )

    async def ask() -> None:
        line = ServiceLine(address_in(manifest))
        request = Pack(publish=publish_of(manifest), start=0, tensors=tensors, num_ranks=1, by_handle=False)
        with pytest.raises(ServiceError, match=rf"and the service takes {MAX_REQUEST_BYTES}; smaller buckets"):
            await line.ask(request, Packed, TIMEOUT_S)
        await line.ask(Describe(publish=publish_of(manifest)), Described, TIMEOUT_S)  # the line still stands
        line.close()

    manifest = export(pusher)
    run(ask())


def test_an_answer_of_more_than_an_engine_takes_cuts_the_connection(
    pusher: PushExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = export(pusher)
    monkeypatch.setattr(pulled, "MAX_REPLY_BYTES", 1 << 20)
    with pytest.raises(WeightFetchError, match="connection to the learner's weight service broke"):
        open_fetcher().fetch(manifest)


def test_no_error_shows_the_secret(pusher: PushExporter) -> None:
    manifest = export(pusher)
    pusher.close()
    with pytest.raises(WeightFetchError) as raised:
        open_fetcher().fetch(manifest)
    assert "has ended" in str(raised.value)
    assert address_in(manifest).client_secret not in str(raised.value)


def test_an_address_that_is_not_this_machines_is_refused() -> None:
    with pytest.raises(WeightExportError, match=r"cannot listen at 203\.0\.113\.9"):
        PushExporter("distributed", 1, "203.0.113.9")


# --- groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_size_bytes", [1, 1_000_000, 1 << 30])
def test_a_group_gets_every_byte_in_order(pusher: PushExporter, bucket_size_bytes: int) -> None:
    manifest = export(pusher)
    file = lay_out(weights())

    async def send() -> None:
        source = await open_source(manifest)
        buckets = plan_buckets(source.layout, bucket_size_bytes)
        assert sum(bucket.size_bytes for bucket in buckets) == file.size_bytes - len(file.header)
        expected = [_bytes_of(weights(), [tensor.name for tensor in bucket.tensors]) for bucket in buckets]
        peer = await peer_of(source, "engine-0", [bucket.size_bytes for bucket in buckets])
        try:
            sending = [asyncio.create_task(source.broadcast("engine-0", bucket, TIMEOUT_S)) for bucket in buckets]
            for data in expected:
                peer.go_on()
                assert await peer.line() == hashlib.sha256(data).hexdigest()
            await asyncio.gather(*sending)
        finally:
            peer.end()
        source.close()

    run(send())


def _bytes_of(tensors: dict[str, torch.Tensor], names: list[str]) -> bytes:
    return b"".join(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name in names)


def test_several_ranks_of_one_server_get_the_same(pusher: PushExporter) -> None:
    manifest = export(pusher)

    async def send() -> None:
        source = await open_source(manifest)
        bucket = plan_buckets(source.layout, 1 << 30)[0]
        peers = [Peer("g", rank, 2, [bucket.size_bytes]) for rank in (1, 2)]
        try:
            assert [await peer.line() for peer in peers] == ["ready"] * 2
            joining = await source.join("g", engine="e", num_ranks=2, backend="gloo", timeout_s=TIMEOUT_S)
            await asyncio.gather(*(peer.join(joining) for peer in peers))
            for peer in peers:
                peer.go_on()
            await source.broadcast("g", bucket, TIMEOUT_S)
            assert len({await peer.line() for peer in peers}) == 1
        finally:
            for peer in peers:
                peer.end()
        source.close()

    run(send())


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_hangs_in_the_middle_stops_neither_learner_nor_others(
    pusher: PushExporter, death: signal.Signals
) -> None:
    manifest = export(pusher)

    async def send() -> None:
        source = await open_source(manifest)
        bucket = plan_buckets(source.layout, 1 << 30)[0]
        dying = await peer_of(source, "dying", [bucket.size_bytes] * 2, timeout_s=HANG_S)
        living = await peer_of(source, "living", [bucket.size_bytes] * 2)
        try:
            sent = asyncio.create_task(source.broadcast("dying", bucket, TIMEOUT_S))
            assert dying.process.pid is not None
            os.kill(dying.process.pid, death)
            # While that one is broken or stuck, the learner publishes and the other server is served.
            second = await asyncio.to_thread(export, pusher, 1, 1)
            newer = await open_source(second)
            for one in (source, newer):
                living.go_on()
                await one.broadcast("living", bucket, TIMEOUT_S)
                assert len(await living.line()) == 64
            with pytest.raises(ServiceError, match="process group of dying is broken"):
                await sent
            with pytest.raises(ServiceError, match="process group of dying is broken"):
                await source.broadcast("dying", bucket, TIMEOUT_S)
            newer.close()
        finally:
            dying.end()
            living.end()
        source.close()

    run(send())


def test_ranks_that_never_come_end_a_group_at_its_deadline(pusher: PushExporter) -> None:
    manifest = export(pusher)

    async def wait() -> None:
        source = await open_source(manifest)
        await source.join("g", engine="e", num_ranks=1, backend="gloo", timeout_s=1.0)
        with pytest.raises(ServiceError, match="did not answer for 1 s"):
            await source.broadcast("g", plan_buckets(source.layout, 1)[0], TIMEOUT_S)
        source.close()

    run(wait())


def test_a_new_group_of_an_engine_ends_its_old_one(pusher: PushExporter) -> None:
    manifest = export(pusher)

    async def again() -> None:
        source = await open_source(manifest)
        bucket = plan_buckets(source.layout, 1 << 30)[0]
        old = await peer_of(source, "engine-0", [bucket.size_bytes])
        new = Peer("new", 1, 1, [bucket.size_bytes])
        try:
            assert await new.line() == "ready"
            joining = await source.join("new", engine="engine-0", num_ranks=1, backend="gloo", timeout_s=TIMEOUT_S)
            with pytest.raises(ServiceError, match="there is no process group engine-0"):
                await source.broadcast("engine-0", bucket, TIMEOUT_S)
            await new.join(joining)
            new.go_on()
            await source.broadcast("new", bucket, TIMEOUT_S)
            assert len(await new.line()) == 64
        finally:
            old.end()
            new.end()
        source.close()

    run(again())


def test_an_order_that_cannot_be_met_does_not_break_the_group(pusher: PushExporter) -> None:
    manifest = export(pusher)

    async def order() -> None:
        source = await open_source(manifest)
        bucket = plan_buckets(source.layout, 1 << 30)[0]
        peer = await peer_of(source, "engine-0", [bucket.size_bytes])
        try:
            with pytest.raises(ServiceError, match=r"bytes 1 to \d+ were asked for, and version 0 has \d+"):
                await source.broadcast("engine-0", bucket._replace(start=1, size_bytes=1 << 40), TIMEOUT_S)
            peer.go_on()
            await source.broadcast("engine-0", bucket, TIMEOUT_S)
            assert len(await peer.line()) == 64
        finally:
            peer.end()
        source.close()

    run(order())


def test_nccl_without_a_gpu_is_refused_with_the_reason(pusher: PushExporter) -> None:
    manifest = export(pusher)

    async def join() -> None:
        source = await open_source(manifest)
        with pytest.raises(ServiceError, match="no GPU or no NCCL"):
            await source.join("g", engine="e", num_ranks=1, backend="nccl", timeout_s=TIMEOUT_S)
        source.close()

    if not torch.cuda.is_available():
        run(join())


# --- payloads -----------------------------------------------------------------------------------------------------


def test_a_payload_by_value_holds_the_bucket_and_not_the_snapshot(pusher: PushExporter) -> None:
    manifest = export(pusher)

    async def pack() -> None:
        source = await open_source(manifest)
        small = plan_buckets(source.layout, 1)[-1]
        payloads = await source.pack(small, num_ranks=2, by_handle=False, timeout_s=TIMEOUT_S)
        assert payloads[0] == payloads[1]
        assert small.size_bytes < len(payloads[0]) < 4096
        with pytest.raises(ServiceError, match="does not lie on a GPU"):
            await source.pack(small, num_ranks=1, by_handle=True, timeout_s=TIMEOUT_S)
        source.close()

    run(pack())
