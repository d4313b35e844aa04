"""What engines ask the learner's weight service, and what it answers.

Invariants:

* A request is ``[id, request]`` on the wire and its answer ``[id, reply, *data]``. Bytes of tensors and payloads for a
  server travel as frames of their own behind the reply, so they are neither encoded nor copied by us.
* Nothing here is ever unpickled by us; payloads are opaque.
* The location in a manifest holds the key with which the service admits whoever got the manifest. It appears in no
  error and no log; :attr:`ServiceAddress.endpoint` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from penstock.backends.weights.protocol import WeightFetchError
from penstock.messages.base import UNREADABLE, Value

if TYPE_CHECKING:
    from penstock.messages.weights import WeightManifest

MAX_REQUEST_BYTES: Final = 8 << 20
"""Of one frame that a service takes, also from whoever has not shown the key yet; it cuts the connection of a peer that
announces more. A ``Pack`` of 50,000 tensors is smaller."""
MAX_READ_BYTES: Final = 16 << 20
MAX_REPLY_BYTES: Final = 128 << 20
"""Of one frame that an engine takes: a bucket sent by value has at most 64 MiB, before it is spelled as text."""

GroupBackend = Literal["gloo", "nccl"]


class ServiceAddress(Value, frozen=True, kw_only=True):
    """The location of a manifest of a pushed transport."""

    endpoint: str
    """``tcp://10.0.0.7:40123``"""
    server_key: str
    """Public key of the service, Z85; nobody else can pose as it."""
    client_public: str
    client_secret: str
    """Secret key that admits a client."""


class PublishId(Value, frozen=True, array_like=True):
    """Which weights are meant."""

    learner_epoch: int
    version: int
    publish: int


class Libraries(Value, frozen=True, kw_only=True):
    """What has to fit between two processes of one group."""

    torch: str
    nccl: str = ""
    """Empty where there is none."""


# --- requests -----------------------------------------------------------------------------------------------------


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What an engine asks for."""


class Describe(Request, frozen=True, kw_only=True):
    """The table of one publish; answered by ``Described``."""

    publish: PublishId


class ReadDigests(Request, frozen=True, kw_only=True):
    """What the digest of one publish is made of; answered by ``Piece`` and one frame: the SHA-256 of each
    ``PIECE_BYTES`` of the tensor file, one after the other."""

    publish: PublishId


class Read(Request, frozen=True, kw_only=True):
    """Bytes of the tensor file; answered by ``Piece`` and one frame."""

    publish: PublishId
    start: int
    size_bytes: int


class ReadChanges(Request, frozen=True, kw_only=True):
    """Bytes of the tensor file for who has those of another publish; answered by ``Changed`` and one frame, or by
    ``Piece`` where that publish is not held any more, has another size, or nearly everything has changed."""

    publish: PublishId
    since: PublishId
    start: int
    """Even."""
    size_bytes: int


AnyRead = ReadDigests | Read | ReadChanges
"""What an engine is asked that passes weights on; it knows no digests."""


class Join(Request, frozen=True, kw_only=True):
    """Begin a process group with the ranks of one server; answered by ``Joining`` as soon as its store listens.

    It ends the groups that this engine began before: their server or their EngineWorker is gone."""

    group: str
    engine: str
    num_ranks: int
    """Of the server; the learner is one more, and rank 0."""
    backend: GroupBackend
    timeout_s: float
    """For the ranks to come together, and for each broadcast."""


class Broadcast(Request, frozen=True, kw_only=True):
    """Send bytes of the tensor file to a group; answered by ``Sent`` when they are sent. In order within a group."""

    group: str
    publish: PublishId
    start: int
    size_bytes: int


class Leave(Request, frozen=True, kw_only=True):
    """End a group, also one that is in the middle of a broadcast; answered by ``Left``."""

    group: str


class PackedTensor(Value, frozen=True, array_like=True):
    """One tensor of a payload."""

    name: str
    dtype: str
    """As safetensors calls it: ``F32``."""
    shape: tuple[int, ...]
    size_bytes: int


class Pack(Request, frozen=True, kw_only=True):
    """Bytes of the tensor file in the form that a server's ``/update_weights_from_tensor`` takes; answered by
    ``Packed`` and one frame for each rank."""

    publish: PublishId
    start: int
    tensors: tuple[PackedTensor, ...]
    """They follow one another from ``start`` on."""
    num_ranks: int
    by_handle: bool
    """Handles of device memory (CUDA IPC) instead of the values."""


AnyRequest = Describe | ReadDigests | Read | ReadChanges | Join | Broadcast | Leave | Pack

# --- replies ------------------------------------------------------------------------------------------------------


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the service answers."""


class Described(Reply, frozen=True, kw_only=True):
    """The first bytes of the tensor file are the table."""

    header: bytes
    digest: str
    libraries: Libraries
    device: str
    """Where the snapshot lies: ``cpu`` or ``cuda``."""
    not_finite: str = ""
    """A tensor with a value that is not finite; empty when there is none."""


class Piece(Reply, frozen=True, kw_only=True):
    """The bytes are in the next frame."""


class Changed(Reply, frozen=True, kw_only=True):
    """What has changed is in the next frame, as :mod:`~penstock.backends.weights.changes` writes it."""

    num_words: int


class Joining(Reply, frozen=True, kw_only=True):
    """Where the store of the group listens."""

    address: str
    port: int


class Sent(Reply, frozen=True, kw_only=True):
    """The bytes are on their way to every rank; whether they arrived, the server's own answer says."""


class Left(Reply, frozen=True, kw_only=True):
    """The group takes nothing more."""


class Packed(Reply, frozen=True, kw_only=True):
    """The payloads are in the next frames, one a rank."""


class Refused(Reply, frozen=True, kw_only=True):
    """It cannot be done, and why."""

    story: str


AnyReply = Described | Piece | Changed | Joining | Sent | Left | Packed | Refused


def location_of(address: ServiceAddress) -> str:
    """The location of a manifest."""
    return msgspec.json.encode(address).decode()


def address_in(manifest: WeightManifest) -> ServiceAddress:
    """The service that a manifest names.

    Raises:
        WeightFetchError: its location is none of a weight service.
    """
    try:
        return service_at(manifest.location)
    except WeightFetchError:
        raise WeightFetchError(
            f"the manifest of version {manifest.version} names the transport {manifest.transport} and no weight service"
        ) from None


def service_at(location: str) -> ServiceAddress:
    """The service at a location of a manifest or of a source.

    Raises:
        WeightFetchError: it is no location of a weight service.
    """
    try:
        return msgspec.json.decode(location, type=ServiceAddress)
    except UNREADABLE:
        raise WeightFetchError("a location names no weight service") from None


def publish_of(manifest: WeightManifest) -> PublishId:
    """The weights that a manifest describes."""
    return PublishId(manifest.learner_epoch, manifest.version, manifest.publish)
