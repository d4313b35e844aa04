"""Sends a publish to one SGLang server: by the server's process group, or in the body of calls.

Invariants:

* Names, shapes and dtypes were checked before the first call (``PublishSource.check``); nothing else would.
* The caller has paused the server and continues it. The update runs in a session of the server, which is ended
  whatever happens; after an error the server's weights are partly new and must be loaded whole before it serves.
* Buckets are sent in one order, one call at a time: two calls at once could arrive in the other order, and layers of
  one shape would then be taken for one another without a word. While the server loads a bucket, the next one is
  already ordered from the service.
* The version is not named here, and the cache is flushed with the last bucket at most.

| waits for | who ends it |
|---|---|
| each call and each order | the server, the service, or the deadline ``timeout_s`` |
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import uuid
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.checkpoint.layers_beyond import predicting_layers
from penstock.backends.engines.served.base.bucket_source import ServiceError
from penstock.backends.engines.served.base.http import CallError
from penstock.backends.engines.served.expectation import HEAD
from penstock.backends.engines.served.sglang.control import GroupMember, NoOpenSession, SessionAlreadyOpen
from penstock.backends.engines.transport_preflight import check_libraries
from penstock.backends.weights.buckets import plan_buckets
from penstock.backends.weights.builtin import check_loopback
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection

    from penstock.backends.engines.served.base.bucket_source import PublishSource
    from penstock.backends.engines.served.expectation import Expectation
    from penstock.backends.engines.served.sglang.control import SglangControl
    from penstock.backends.weights.buckets import Bucket
    from penstock.backends.weights.service_messages import GroupBackend, Libraries

FLATTENED: Final = "flattened_bucket"
"""How SGLang calls tensors that come as one run of bytes."""
MAX_BY_VALUE_BYTES: Final = 64 << 20
"""Of a bucket in the body of a call, where it is base64 in JSON and held several times."""
CLEAN_UP_S: Final = 5.0

_log: Final = logging.getLogger(__name__)


class PushError(RuntimeError):
    """An update broke off. The server's weights are partly new, or it has died."""


class ServerRanks(NamedTuple):
    """Of what a server consists, for a group with it."""

    engine: str
    """Name of the engine; the service ends what it knows of earlier servers of it."""
    tp_size: int
    pp_size: int = 1
    dp_size: int = 1
    device: str = "cuda"
    """``cpu`` or ``cuda``"""
    libraries: Libraries | None = None
    """Of the server's environment, where it is known."""
    drafts_from_model: bool = False
    """Whether the server drafts with layers of the model's own checkpoint."""


class ServerGroup:
    """The process group of one server, over its updates. It is begun with the first update, and again after an error or
    when the learner was replaced."""

    def __init__(self, control: SglangControl, ranks: ServerRanks) -> None:
        """For a server.

        Raises:
            UserFault: it is laid out so that it cannot be in a group.
        """
        _check_layout(ranks, "distributed")
        self._control = control
        self._ranks = ranks
        self._name = ""
        self._service_key = ""

    @property
    def name(self) -> str:
        """Of the group; empty when there is none."""
        return self._name

    async def push(
        self,
        source: PublishSource,
        expected: Expectation,
        *,
        bucket_size_bytes: int,
        flush: bool,
        timeout_s: float,
    ) -> None:
        """Send every tensor.

        Raises:
            UnfitWeightsError: the server's model does not take these; it was not touched.
            UserFault: the libraries of both sides do not fit; likewise.
            PushError: it broke off; the group is gone on both sides.
        """
        source.check(expected)
        buckets = _plan(source, expected, bucket_size_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                await self._join(source, timeout_s)
                async with _session(self._control, timeout_s, with_draft=reaches_draft(self._ranks, source.table)):
                    try:
                        await self._send(source, buckets, flush=flush, timeout_s=timeout_s)
                    except BaseException:
                        # Before the session is ended: a server that waits for a broadcast hears nothing else.
                        with contextlib.suppress(ServiceError):
                            await source.leave(self._name)
                        raise
        except (CallError, ServiceError, TimeoutError) as error:
            await self.leave(source)
            raise PushError(_story(source, error, timeout_s)) from error
        except BaseException:
            await self.leave(source)
            raise

    async def leave(self, source: PublishSource | None = None) -> None:
        """End the group on both sides, as far as they can still be reached."""
        name, self._name = self._name, ""
        if not name:
            return
        if source is not None and source.service_key == self._service_key:
            with contextlib.suppress(ServiceError):
                await source.leave(name)
        with contextlib.suppress(CallError):
            await self._control.destroy_group(name, CLEAN_UP_S)

    async def _join(self, source: PublishSource, timeout_s: float) -> None:
        if self._name and self._service_key == source.service_key:
            return
        await self.leave()
        ranks = self._ranks
        backend: GroupBackend = "nccl" if ranks.device == "cuda" and source.device == "cuda" else "gloo"
        if story := check_libraries(source.libraries, ranks.libraries, backend):
            _log.info("%s: %s", ranks.engine, story)
        name = f"penstock-{uuid.uuid4().hex[:16]}"
        joining = await source.join(
            name, engine=ranks.engine, num_ranks=ranks.tp_size, backend=backend, timeout_s=timeout_s
        )
        self._name, self._service_key = name, source.service_key
        member = GroupMember(joining.address, joining.port, 1, 1 + ranks.tp_size, name, backend)
        await self._control.init_group(member, timeout_s)

    async def _send(self, source: PublishSource, buckets: tuple[Bucket, ...], *, flush: bool, timeout_s: float) -> None:
        ordered: list[asyncio.Task[None]] = []

        def order(index: int) -> None:
            if index < len(buckets):
                ordered.append(asyncio.create_task(source.broadcast(self._name, buckets[index], timeout_s)))

        try:
            order(0)
            for index, bucket in enumerate(buckets):
                order(index + 1)
                if ordered[index].done():
                    ordered[index].result()  # what was not sent must not be waited for
                call = asyncio.create_task(
                    self._receive(bucket, flush=flush and index == len(buckets) - 1, timeout_s=timeout_s)
                )
                await _both(ordered[index], call)
        finally:
            for task in ordered:
                task.cancel()
            await asyncio.gather(*ordered, return_exceptions=True)

    async def _receive(self, bucket: Bucket, *, flush: bool, timeout_s: float) -> None:
        await self._control.update_from_distributed(
            [tensor.name for tensor in bucket.tensors],
            [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.tensors],
            [tensor.shape for tensor in bucket.tensors],
            group=self._name,
            flush=flush,
            load_format=FLATTENED,
            timeout_s=timeout_s,
        )


async def push_tensors(
    control: SglangControl,
    url: str,
    ranks: ServerRanks,
    source: PublishSource,
    expected: Expectation,
    *,
    bucket_size_bytes: int,
    flush: bool,
    timeout_s: float,
) -> None:
    """Send every tensor in the body of calls: by handle between processes of one machine's GPUs, by value else.

    By handle is unmeasured: it was never run on a GPU.

    Raises:
        UserFault: the server is on another machine, or laid out so that it takes no tensors.
        UnfitWeightsError: its model does not take these; it was not touched.
        PushError: it broke off.
    """
    check_loopback(url)
    _check_layout(ranks, "tensor")
    source.check(expected)
    by_handle = ranks.device == "cuda" and source.device == "cuda"
    size_bytes = bucket_size_bytes if by_handle else min(bucket_size_bytes, MAX_BY_VALUE_BYTES)
    buckets = _plan(source, expected, size_bytes)

    async def pack(bucket: Bucket) -> list[str]:
        payloads = await source.pack(bucket, num_ranks=ranks.tp_size, by_handle=by_handle, timeout_s=timeout_s)
        return [base64.b64encode(payload).decode() for payload in payloads]

    try:
        with_draft = reaches_draft(ranks, source.table)
        async with asyncio.timeout(timeout_s), _session(control, timeout_s, with_draft=with_draft):
            packing = asyncio.create_task(pack(buckets[0]))
            try:
                for index in range(len(buckets)):
                    payloads = await packing
                    is_last = index == len(buckets) - 1
                    if not is_last:
                        packing = asyncio.create_task(pack(buckets[index + 1]))
                    await control.update_from_tensor(
                        payloads, load_format=FLATTENED, flush=flush and is_last, timeout_s=timeout_s
                    )
            finally:
                packing.cancel()
                await asyncio.gather(packing, return_exceptions=True)
    except (CallError, ServiceError, TimeoutError) as error:
        raise PushError(_story(source, error, timeout_s)) from error


def reaches_draft(ranks: ServerRanks, names: Collection[str]) -> bool:
    """Whether tensors of these names are for what drafts for the model as well: where it is made of layers that predict
    further tokens, and these are among them. One from a folder of its own would take matrices of the model for its own,
    by their names."""
    return ranks.drafts_from_model and bool(predicting_layers(names))


def _check_layout(ranks: ServerRanks, transport: str) -> None:
    if ranks.pp_size > 1 or ranks.dp_size > 1:
        # The ranks of a group are counted by tp_rank alone, so those of two stages would claim the same place.
        raise UserFault(
            f"weights.transport is {transport}, which SGLang offers to servers without pipeline and data parallelism, "
            f"and this one has pp_size {ranks.pp_size} and dp_size {ranks.dp_size}; set weights.transport: disk"
        )


def _plan(source: PublishSource, expected: Expectation, bucket_size_bytes: int) -> tuple[Bucket, ...]:
    """Further names of shared tensors are sent where the server's model has them as tensors of their own."""
    aliases = [name for name in source.layout.aliases if not (name == HEAD and expected.tied_head)]
    return plan_buckets(source.layout, bucket_size_bytes, aliases)


@contextlib.asynccontextmanager
async def _session(control: SglangControl, timeout_s: float, *, with_draft: bool) -> AsyncGenerator[None]:
    """A weight-update session of the server."""
    try:
        await control.begin_update(timeout_s, with_draft=with_draft)
    except SessionAlreadyOpen:  # left by an EngineWorker that died in the middle
        await control.end_update(timeout_s)
        await control.begin_update(timeout_s, with_draft=with_draft)
    try:
        yield
    except BaseException:
        with contextlib.suppress(CallError):
            await control.end_update(CLEAN_UP_S)
        raise
    with contextlib.suppress(NoOpenSession):
        await control.end_update(timeout_s)


async def _both(ordered: asyncio.Task[None], call: asyncio.Task[None]) -> None:
    """Wait for both, or for the first that fails: the other would wait for it in vain."""
    try:
        done, _ = await asyncio.wait({ordered, call}, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


def _story(source: PublishSource, error: BaseException, timeout_s: float) -> str:
    story = str(error) or f"not done in {timeout_s:g} s"
    return f"the update to version {source.manifest.version} broke off: {story}"
