"""A relay before a server of this machine, which lets so many bytes a second pass each way, over all connections
together: what a machine's link to the others is."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, Self

import msgspec

from penstock.backends.weights.service_messages import location_of

if TYPE_CHECKING:
    from penstock.backends.weights.service_messages import ServiceAddress
    from penstock.messages.weights import WeightManifest

SLICE_BYTES: Final = 1 << 16


class _Way:
    """One direction of the link."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0
        """When all that has been let in is through."""
        self.num_bytes = 0

    def wait(self, num_bytes: int) -> None:
        """Until these are through as well."""
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + num_bytes / self._bytes_per_s
            self.num_bytes += num_bytes
            due_s = self._free_s
        time.sleep(max(0.0, due_s - time.monotonic()))  # what makes the link slow


class SlowLink:
    """See the module; a context manager."""

    def __init__(self, address: ServiceAddress, bytes_per_s: float) -> None:
        host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
        self._service = (host, int(port))
        self._out, self._in = _Way(bytes_per_s), _Way(bytes_per_s)
        self._listening = socket.create_server(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.location = location_of(msgspec.structs.replace(address, endpoint=endpoint))
        """Of the server as whoever is behind the link reaches it."""

    @property
    def num_bytes(self) -> int:
        """That have passed, both ways."""
        return self._out.num_bytes + self._in.num_bytes

    @property
    def num_bytes_out(self) -> int:
        """That the server has sent."""
        return self._out.num_bytes

    def through(self, manifest: WeightManifest) -> WeightManifest:
        """The manifest as whoever is behind the link would get it."""
        return msgspec.structs.replace(manifest, location=self.location)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                near, _ = self._listening.accept()
                try:
                    far = socket.create_connection(self._service)
                except OSError:  # the server has ended
                    near.close()
                    continue
                for source, target, way in ((near, far, self._in), (far, near, self._out)):
                    threading.Thread(target=self._relay, args=(source, target, way), daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket, way: _Way) -> None:
        with source, target, contextlib.suppress(OSError):
            while data := source.recv(SLICE_BYTES):
                target.sendall(data)
                way.wait(len(data))
            target.shutdown(socket.SHUT_RDWR)
