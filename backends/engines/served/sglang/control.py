"""The control calls of one SGLang server, typed, each with its deadline.

Invariants:

* ``success: false`` is a :class:`Refused`, also inside a 200.
* Nothing is left to a default of the server that aborts or flushes: pauses name their mode, updates say whether they
  flush, a new version string does not abort.
* Nothing is retried here: a call whose outcome is unknown (``CutOff``, ``TimedOut``) may have been carried out.

What the server does not check, so that callers must before they call: an unknown parameter name is accepted and
dropped; a wrong shape, a truncated file, and a release of memory while requests run each end the server.

Every wait is for the server's answer, and ends with the call's own deadline.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, TypeVar

import msgspec

from penstock.backends.engines.served.base.health import Check
from penstock.backends.engines.served.base.http import BadReply, Refused, ServerBusy, quoted
from penstock.backends.engines.served.sglang import control_wire as wire
from penstock.backends.engines.served.sglang.server_facts import Loads, ModelInfo, ServerInfo, WeightChecksums
from penstock.messages.base import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.backends.engines.served.base.http import ServerHttp

ANSWER_S: Final = 10.0
"""For calls that the server answers out of hand, unless it hangs."""
UPDATE_S: Final = 300.0
PROFILE_S: Final = 120.0
"""To write a trace."""
FLUSH_MARGIN_S: Final = 5.0
HTTP_UNAVAILABLE: Final = 503

ReplyT = TypeVar("ReplyT")


class PauseMode(StrEnum):
    """What a pause does to running requests."""

    ABORT = "abort"
    """They end with what they have."""
    RETRACT = "retract"
    """They go back to the queue and lose their KV; the cache may be flushed."""
    IN_PLACE = "in_place"
    """They stop where they are and keep their KV; an abort is answered only after the pause."""


class CacheNotFlushed(Refused):
    """Requests run or wait. After an update the new weights *are* in, with KV of the old ones in the cache."""


class SessionAlreadyOpen(Refused):
    """A weight-update session is open, perhaps one that another worker left behind: end it."""


class NoOpenSession(Refused):
    """No weight-update session is open."""


_REFUSALS: Final[tuple[tuple[str, type[Refused]], ...]] = (
    ("cache was not flushed", CacheNotFlushed),
    ("Flush cache failed", CacheNotFlushed),
    ("Timed out waiting for idle state", CacheNotFlushed),
    ("session is already open", SessionAlreadyOpen),
    ("no weight-update session is open", NoOpenSession),
    ("must run between begin_weight_update", NoOpenSession),
)
"""How the pinned version of SGLang words its refusals."""


class GroupMember(NamedTuple):
    """Where a server joins a group for weights."""

    master_address: str
    master_port: int
    rank_offset: int
    """Of the server's first rank; the sender is rank 0."""
    world_size: int
    name: str
    backend: str


_ENCODER: Final = msgspec.json.Encoder()


class SglangControl:
    """Everything but generation. Every method raises :class:`CallError` of the kind that happened."""

    questions: ClassVar[Mapping[Check, str]] = {Check.FRONT: "/ready", Check.SCHEDULER: "/server_info"}

    def __init__(self, http: ServerHttp) -> None:
        self._http = http
        self._selector = wire.TARGET
        """Of the session that is open."""

    # --- questions --------------------------------------------------------------------------------------------

    async def server_info(self, timeout_s: float = ANSWER_S) -> ServerInfo:
        """Asked of the scheduler, so a hang of it shows here; answered while paused."""
        return ServerInfo.of(await self._get("/server_info", wire.InfoReply, timeout_s))

    async def model_info(self, timeout_s: float = ANSWER_S) -> ModelInfo:
        """Answered by the front end alone. After an update that was refused for its flush, its version is stale."""
        return ModelInfo.of(await self._get("/model_info", wire.ModelReply, timeout_s))

    async def loads(self, timeout_s: float = ANSWER_S) -> Loads:
        """Answered by the front end from the scheduler's last report, also when that hangs."""
        return Loads.of(await self._get("/v1/loads", wire.LoadsReply, timeout_s))

    async def ask(self, check: Check, timeout_s: float) -> bool:
        """Ask a part; whether it says that generation is paused.

        ``/health`` would show no hang surely: any message that reaches the main process makes it answer 200, and while
        requests run the scheduler answers it past the detokenizer (seen on SGLang 0.5.23).
        """
        try:
            await self._http.call("GET", self.questions[check], timeout_s=timeout_s)
        except ServerBusy as error:
            if check is Check.FRONT and error.status == HTTP_UNAVAILABLE:
                return True
            raise
        return False

    async def weights_checksum(self, timeout_s: float = UPDATE_S) -> WeightChecksums:
        """Of the weights in memory; answered while paused."""
        reply = await self._post("/weights_checker", wire.CheckerBody("checksum"), wire.ChecksumReply, timeout_s)
        if not reply.success:
            raise Refused(f"/weights_checker: {reply.message}", 200)
        return WeightChecksums.of(reply)

    # --- requests ---------------------------------------------------------------------------------------------

    async def try_request(self, rid: str, timeout_s: float) -> None:
        """Have one token generated."""
        await self._http.call("POST", "/generate", _ENCODER.encode(wire.TrialBody(rid, rid)), timeout_s=timeout_s)

    async def abort(self, rid: str, timeout_s: float = ANSWER_S) -> None:
        """End one request. Answered alike for an unknown one; the request itself says when it has ended."""
        await self._tell("/abort_request", wire.AbortBody(rid=rid), timeout_s)

    async def abort_all(self, timeout_s: float = ANSWER_S) -> None:
        """End every request."""
        await self._tell("/abort_request", wire.AbortBody(abort_all=True), timeout_s)

    async def pause(self, mode: PauseMode, timeout_s: float = ANSWER_S) -> None:
        """Stop generating. Requests sent meanwhile wait. Idempotent."""
        await self._tell("/pause_generation", wire.PauseBody(mode), timeout_s)

    async def continue_(self, timeout_s: float = ANSWER_S) -> None:
        """Go on generating, whoever paused it. Idempotent."""
        await self._tell("/continue_generation", wire.Empty(), timeout_s)

    async def freeze_gc(self, timeout_s: float = ANSWER_S) -> None:
        """Have its processes leave what they have built so far out of garbage collection. The server does so itself
        after its start, but calls the port that it was given, and 0 is none."""
        await self._tell("/freeze_gc", wire.Empty(), timeout_s)

    async def flush_cache(self, wait_s: float = 0.0) -> None:
        """Forget every cached prefix, waiting so long for requests to end.

        Raises:
            CacheNotFlushed: some run or wait.
        """
        await self._tell("/flush_cache", wire.Empty(), wait_s + FLUSH_MARGIN_S, {"timeout": f"{wait_s:g}"})

    # --- weights ----------------------------------------------------------------------------------------------

    async def begin_update(self, timeout_s: float = UPDATE_S, *, with_draft: bool = False) -> None:
        """Open the session that updates from tensors and from a group need. ``with_draft``: what drafts for the model
        takes its tensors out of these as well, by their names.

        Raises:
            SessionAlreadyOpen: there is one.
        """
        self._selector = wire.WITH_DRAFT if with_draft else wire.TARGET
        await self._tell("/begin_weight_update", wire.BeginBody(self._selector), timeout_s)

    async def end_update(self, timeout_s: float = UPDATE_S) -> None:
        """Close the session, whoever opened it.

        Raises:
            NoOpenSession: there is none.
        """
        await self._tell("/end_weight_update", wire.Empty(), timeout_s)

    async def update_from_disk(
        self, path: str, *, version: str | None, flush: bool, timeout_s: float = UPDATE_S
    ) -> None:
        """Load a checkpoint. Unless paused it waits until nothing runs; it needs no session.

        Raises:
            CacheNotFlushed: the new weights are in, but requests stood in the way of the flush.
        """
        await self._tell("/update_weights_from_disk", wire.DiskBody(path, version, flush), timeout_s)

    async def update_from_tensor(
        self,
        serialized: Sequence[str],
        *,
        load_format: str | None,
        flush: bool,
        version: str | None = None,
        timeout_s: float = UPDATE_S,
    ) -> None:
        """Load tensors out of the request, or out of shared memory that it names: base64, one for each tp rank."""
        body = wire.TensorBody(serialized, load_format, flush, version, selector=self._selector)
        await self._tell("/update_weights_from_tensor", body, timeout_s)

    async def init_group(self, member: GroupMember, timeout_s: float = UPDATE_S) -> None:
        """Join a process group; answered when every rank has joined."""
        body = wire.GroupBody(
            member.master_address,
            member.master_port,
            member.rank_offset,
            member.world_size,
            member.name,
            member.backend,
        )
        await self._tell("/init_weights_update_group", body, timeout_s)

    async def destroy_group(self, name: str, timeout_s: float = ANSWER_S) -> None:
        """Leave a process group; refused if the server knows none of the name."""
        await self._tell("/destroy_weights_update_group", wire.GroupNameBody(name), timeout_s)

    async def update_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group: str,
        flush: bool,
        load_format: str | None = None,
        version: str | None = None,
        timeout_s: float = UPDATE_S,
    ) -> None:
        """Receive these tensors, in this order, from rank 0 of the group, which sends them meanwhile."""
        body = wire.DistributedBody(names, dtypes, shapes, group, version, flush, load_format, selector=self._selector)
        await self._tell("/update_weights_from_distributed", body, timeout_s)

    async def update_weight_version(self, version: str, timeout_s: float = ANSWER_S) -> None:
        """Name the weights that are loaded; running requests go on."""
        await self._tell("/update_weight_version", wire.VersionBody(version, abort_all_requests=False), timeout_s)

    async def load_adapter(self, name: str, folder: str, timeout_s: float = UPDATE_S) -> None:
        """Load an adapter from a folder as ``peft`` writes it, for requests that name it; others go on."""
        await self._tell("/load_lora_adapter", wire.AdapterBody(name, folder), timeout_s)

    async def unload_adapter(self, name: str, timeout_s: float = UPDATE_S) -> None:
        """Let go of an adapter, once the last request that named it has ended."""
        await self._tell("/unload_lora_adapter", wire.AdapterBody(name), timeout_s)

    # --- memory -----------------------------------------------------------------------------------------------

    async def release_memory(self, tags: Sequence[str] | None = None, timeout_s: float = UPDATE_S) -> None:
        """Give device memory up (``weights``, ``kv_cache``, ``cuda_graph``; None: all). Ends the server unless it is
        idle."""
        await self._tell("/release_memory_occupation", wire.TagsBody(tags), timeout_s)

    async def resume_memory(self, tags: Sequence[str] | None = None, timeout_s: float = UPDATE_S) -> None:
        """Take device memory again; what was in it is gone."""
        await self._tell("/resume_memory_occupation", wire.TagsBody(tags), timeout_s)

    # --- profiles ---------------------------------------------------------------------------------------------

    async def start_profile(
        self, folder: str, *, num_passes: int, activities: Sequence[str], stacks: bool, timeout_s: float = PROFILE_S
    ) -> None:
        """Have the server's processes profile their next forward passes; the traces are in a folder of its machine."""
        await self._tell("/start_profile", wire.ProfileBody(folder, num_passes, activities, stacks), timeout_s)

    async def stop_profile(self, timeout_s: float = PROFILE_S) -> None:
        """End the profile before its last pass and write it; refused if none runs."""
        await self._tell("/stop_profile", wire.Empty(), timeout_s)

    # --- plumbing ---------------------------------------------------------------------------------------------

    async def _get(self, path: str, kind: type[ReplyT], timeout_s: float) -> ReplyT:
        return _decoded(await self._http.call("GET", path, timeout_s=timeout_s), kind, path)

    async def _post(self, path: str, body: msgspec.Struct, kind: type[ReplyT], timeout_s: float) -> ReplyT:
        data = await self._http.call("POST", path, _ENCODER.encode(body), timeout_s=timeout_s)
        return _decoded(data, kind, path)

    async def _tell(
        self, path: str, body: msgspec.Struct, timeout_s: float, params: Mapping[str, str] | None = None
    ) -> None:
        """A call that answers with nothing, with text, or with whether it succeeded."""
        try:
            data = await self._http.call("POST", path, _ENCODER.encode(body), timeout_s=timeout_s, params=params)
        except Refused as error:
            raise _refusal(error.message, error.status) from error
        if data.startswith(b"{"):
            ack = _decoded(data, wire.Ack, path)
            if not ack.success:
                raise _refusal(f"{path}: {ack.message or ack.error_message}", 200)


def _refusal(message: str, status: int) -> Refused:
    for words, kind in _REFUSALS:
        if words in message:
            return kind(message, status)
    return Refused(message, status)


def _decoded(data: bytes, kind: type[ReplyT], path: str) -> ReplyT:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise BadReply(f"cannot read the answer to {path} ({error}): {quoted(data)}") from error
