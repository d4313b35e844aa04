"""One publish, as the EngineWorker sees it at the learner's weight service: its table, and orders to send it.

Fetching weights that are pushed is to connect and to check the table, for nothing can be staged on a server. Then the
service is told to send bytes to the server's process group, or to make a payload that this process passes on.

Invariants:

* The table has the manifest's size, and the service holds the digest of the manifest.
* An answer belongs to the request with its id, so several requests may be open at once.
* Payloads are opaque here: never unpickled, only passed on.

| waits for | who ends it |
|---|---|
| a request for its answer | the service; the end of the connection; its own deadline |
| the reading task | ``close`` |
"""

# zmq.asyncio is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from penstock.backends.engines.served.expectation import TensorSpec, UnfitWeightsError, check_tensors, table_of
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.pulled import BROKEN, configure, story_of_the_break
from penstock.backends.weights.service_messages import (
    MAX_REQUEST_BYTES,
    AnyReply,
    Broadcast,
    Describe,
    Described,
    Join,
    Joining,
    Leave,
    Left,
    Libraries,
    Pack,
    Packed,
    PackedTensor,
    Refused,
    Sent,
    address_in,
    publish_of,
)
from penstock.backends.weights.tensor_file import DTYPE_NAMES, parse_header
from penstock.messages.base import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.engines.served.expectation import Expectation
    from penstock.backends.weights.buckets import Bucket
    from penstock.backends.weights.service_messages import AnyRequest, GroupBackend, ServiceAddress
    from penstock.backends.weights.tensor_file import Layout
    from penstock.messages.weights import WeightManifest

OPEN_S: Final = 30.0
LEAVE_S: Final = 5.0

ReplyT = TypeVar("ReplyT")

_requests: Final = msgspec.msgpack.Encoder()
_replies: Final = msgspec.msgpack.Decoder(AnyReply)


class ServiceError(WeightFetchError):
    """The learner's weight service does not do what it was asked for, does not answer, or has gone."""


class _Answer(NamedTuple):
    reply: AnyReply
    data: tuple[bytes, ...]


class ServiceLine:
    """A connection to a weight service. Belongs to the event loop it was made in."""

    def __init__(self, address: ServiceAddress) -> None:
        self._endpoint = address.endpoint
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket, address)  # type: ignore[arg-type]  # the same options
        self._monitor = self._socket.get_monitor_socket(BROKEN)
        self._socket.connect(address.endpoint)
        self._waiting: dict[bytes, asyncio.Future[_Answer]] = {}
        self._num_asked = 0
        self._broken = ""
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    async def ask(self, request: AnyRequest, kind: type[ReplyT], timeout_s: float) -> tuple[ReplyT, tuple[bytes, ...]]:
        """One request and its answer.

        Raises:
            ServiceError: refused, no answer in time, or no service.
        """
        what = f"{type(request).__name__} to the weight service at {self._endpoint}"
        if self._broken:
            raise ServiceError(f"{what}: {self._broken}")
        body = _requests.encode(request)
        if len(body) > MAX_REQUEST_BYTES:
            raise ServiceError(
                f"{what}: {len(body)} bytes, and the service takes {MAX_REQUEST_BYTES}; smaller buckets "
                "have fewer tensors"
            )
        self._num_asked += 1
        request_id = self._num_asked.to_bytes(8, "little")
        answered = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send_multipart([request_id, body])
                answer = await answered
        except TimeoutError:
            raise ServiceError(f"{what}: no answer in {timeout_s:g} s") from None
        finally:
            self._waiting.pop(request_id, None)
        if isinstance(answer.reply, Refused):
            raise ServiceError(f"{what}: {answer.reply.story}")
        if not isinstance(answer.reply, kind):
            raise ServiceError(f"{what}: answered with {type(answer.reply).__name__}")
        return answer.reply, answer.data

    def close(self) -> None:
        """Whoever still waits for an answer gets an error."""
        for task in self._tasks:
            task.cancel()
        self._break("the connection was closed")
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            answered = self._waiting.get(frames[0])
            if answered is None or answered.done() or len(frames) < 2:
                continue
            try:
                answered.set_result(_Answer(_replies.decode(frames[1]), tuple(frames[2:])))
            except UNREADABLE as error:
                answered.set_exception(ServiceError(f"an answer that nobody knows: {error}"))

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            self._break(story_of_the_break(int(event)))

    def _break(self, story: str) -> None:
        """ZeroMQ would connect again, and to whom? What was asked is lost either way."""
        self._broken = self._broken or story
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(ServiceError(f"the weight service at {self._endpoint}: {story}"))


class PublishSource:
    """One publish at its service."""

    def __init__(self, manifest: WeightManifest, line: ServiceLine, described: Described, layout: Layout) -> None:
        self.manifest = manifest
        self.layout = layout
        self.libraries: Libraries = described.libraries
        """Of the learner's process."""
        self.device = described.device
        """Where the snapshot lies: ``cpu`` or ``cuda``."""
        self.service_key = address_in(manifest).server_key
        """Names the incarnation of the service; groups that another one began are lost."""
        self._publish = publish_of(manifest)
        self._not_finite = described.not_finite
        self._line = line

    @property
    def table(self) -> Mapping[str, TensorSpec]:
        """Name → dtype and shape, further names of shared tensors among them."""
        return table_of(self.layout)

    def check(self, expected: Expectation) -> None:
        """Raise unless a server with this model can load these.

        Raises:
            UnfitWeightsError: it names what does not fit, or a tensor with values that are not finite.
        """
        check_tensors(self.table, expected)
        if self._not_finite:
            raise UnfitWeightsError(f"{self._not_finite} holds values that are not finite: the learner has diverged")

    async def join(
        self, group: str, *, engine: str, num_ranks: int, backend: GroupBackend, timeout_s: float
    ) -> Joining:
        """Have the service begin a process group; the server may join when this returns."""
        request = Join(group=group, engine=engine, num_ranks=num_ranks, backend=backend, timeout_s=timeout_s)
        return (await self._line.ask(request, Joining, timeout_s))[0]

    async def broadcast(self, group: str, bucket: Bucket, timeout_s: float) -> None:
        """Have the bucket sent to a group; returns when it is sent."""
        request = Broadcast(group=group, publish=self._publish, start=bucket.start, size_bytes=bucket.size_bytes)
        await self._line.ask(request, Sent, timeout_s)

    async def pack(self, bucket: Bucket, *, num_ranks: int, by_handle: bool, timeout_s: float) -> tuple[bytes, ...]:
        """The bucket as payloads for a server, one a rank."""
        tensors = tuple(
            PackedTensor(tensor.name, DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.size_bytes)
            for tensor in bucket.tensors
        )
        request = Pack(
            publish=self._publish, start=bucket.start, tensors=tensors, num_ranks=num_ranks, by_handle=by_handle
        )
        _, payloads = await self._line.ask(request, Packed, timeout_s)
        if len(payloads) != num_ranks:
            raise ServiceError(f"expected {num_ranks} payloads, one a rank, got {len(payloads)}")
        return payloads

    async def leave(self, group: str) -> None:
        """Have the service end a group."""
        await self._line.ask(Leave(group=group), Left, LEAVE_S)

    def close(self) -> None:
        """Let go of the connection; groups stay."""
        self._line.close()


async def open_source(manifest: WeightManifest, timeout_s: float = OPEN_S) -> PublishSource:
    """Connect to the service of a manifest and read the table of its publish.

    Raises:
        WeightFetchError: there is no such service, it has these weights no longer, or they are not the manifest's.
    """
    line = ServiceLine(address_in(manifest))
    try:
        described, _ = await line.ask(Describe(publish=publish_of(manifest)), Described, timeout_s)
        if described.digest != manifest.digest:
            raise WeightFetchError(
                f"the weight service holds version {manifest.version}, publish {manifest.publish}, with the digest "
                f"{described.digest[:16]}… and the manifest says {manifest.digest[:16]}…"
            )
        layout = parse_header(memoryview(described.header))
        if layout.size_bytes != manifest.size_bytes:
            raise WeightFetchError(
                f"the table of version {manifest.version} describes {layout.size_bytes} bytes, and the manifest says "
                f"{manifest.size_bytes}"
            )
    except BaseException:
        line.close()
        raise
    return PublishSource(manifest, line, described, layout)
