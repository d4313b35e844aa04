"""What the driver and its zygote tell each other: one JSON message a packet, on a socket pair of packets.

```
driver ── Warm, then Fork (with descriptors) and Kill ──► zygote
driver ◄── Gone ── zygote
```

Invariants:

* Whatever is large (a boot, a job, the last word of a process) travels in a file of memory whose descriptor the packet
  carries, so no packet is ever cut and nobody blocks because nobody reads.
"""

from __future__ import annotations

import os
import socket
from enum import StrEnum
from typing import Final

import msgspec

from penstock.messages.base import Value

MAX_PACKET_BYTES: Final = 1 << 16


class ChildKind(StrEnum):
    """What a forked process does."""

    ACTOR = "actor"
    """Its descriptors: the boot to read, the file that its last word is written to."""
    PREPARATION = "preparation"
    """Its descriptors: the job to read, the pipe that its words are written to."""


class Warm(Value, frozen=True, tag=True):
    """Import these modules, in this order."""

    first: tuple[str, ...]
    """Before anything is forked."""
    later: tuple[str, ...] = ()
    """Before anything is forked that waits for all."""


class Fork(Value, frozen=True, kw_only=True, tag=True):
    """Start a process."""

    number: int
    """Names it from here on."""
    kind: ChildKind
    title: str
    """What ``ps`` shows of it, cut at 15 bytes by the kernel."""
    devices: str | None = None
    """Its ``CUDA_VISIBLE_DEVICES``. Such a process is a fresh interpreter: what is forked must not touch CUDA."""
    is_early: bool = False
    """It needs only the modules that come first, and does not wait for those that come later."""


class Kill(Value, frozen=True, tag=True):
    """SIGKILL, if it is still there."""

    number: int


class Gone(Value, frozen=True):
    """A process has ended, and is reaped. How, it has written down itself, unless it was killed."""

    number: int


Order = Warm | Fork | Kill


def memory_file(data: bytes = b"") -> int:
    """A descriptor of a file in memory with this content, to be read from its start."""
    descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    return descriptor


def content_of(descriptor: int) -> bytes:
    """Everything that such a file holds."""
    parts: list[bytes] = []
    while part := os.pread(descriptor, 1 << 20, sum(map(len, parts))):
        parts.append(part)
    return b"".join(parts)


def send(end: socket.socket, message: Order | Gone, descriptors: tuple[int, ...] = ()) -> None:
    """Send one packet."""
    data = msgspec.json.encode(message)
    assert len(data) < MAX_PACKET_BYTES, "what is large belongs into a memory file"
    socket.send_fds(end, [data], descriptors)
