"""The one hook of a run for chaos: where an actor announces its inbox, it may announce a way through the controller.

Without ``PENSTOCK_CHAOS_SOCKET`` in the environment nothing of this happens. With it, the process tells the endpoint
and the keys of its inbox to whoever listens on that Unix socket, which has to be in a folder of the same user, and
announces the endpoint that it gets back.

```
process ── Rerouted, msgpack, then nothing more ──► controller
process ◄── Address, msgpack ────────────────────── controller
```
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.processes.curve import KeyPair
from penstock.messages.base import UNREADABLE, Value
from penstock.runtime.hosts.processes.control import Address

if TYPE_CHECKING:
    from penstock.runtime.hosts.processes.boot import Boot

SOCKET_VARIABLE: Final = "PENSTOCK_CHAOS_SOCKET"
"""Path of the controller's socket; set by ``penstock chaos`` for the run that it starts."""
TIMEOUT_S: Final = 20.0


class Rerouted(Value, frozen=True, kw_only=True):
    """An inbox, for somebody who is to stand before it."""

    address: Address
    client_keys: KeyPair | None
    """Of the run: whoever stands before the inbox has to admit peers, and to be admitted."""


def announced_address(boot: Boot, own: Address) -> Address:
    """What a process announces as the address of its inbox: its own, but under chaos.

    Raises:
        RuntimeError: there is a controller, and it cannot be reached.
    """
    path = os.environ.get(SOCKET_VARIABLE)
    if path is None:
        return own
    if Path(path).stat().st_uid != os.getuid():
        raise RuntimeError(f"{SOCKET_VARIABLE}: {path} belongs to somebody else, and keys go through it")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(TIMEOUT_S)
            line.connect(path)
            line.sendall(msgspec.msgpack.encode(Rerouted(address=own, client_keys=boot.client_keys)))
            line.shutdown(socket.SHUT_WR)
            return msgspec.msgpack.decode(read_all(line), type=Address)
    except (OSError, *UNREADABLE) as error:
        raise RuntimeError(f"{SOCKET_VARIABLE}: the controller at {path} does not answer: {error}") from error


def read_all(line: socket.socket) -> bytes:
    """What the other end sends until it closes its half."""
    data = b""
    while more := line.recv(4096):
        data += more
    return data
