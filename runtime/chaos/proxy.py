"""What stands before an inbox under chaos: a byte proxy, and behind it a peer that holds the keys of the run.

```
peers ══TCP══► ByteProxy ══TCP══► FrameProxy ══TCP══► the actor's inbox
             sees ciphertext     sees frames
```

Bytes: a connection can be cut, broken in the middle of a message, or get noise in between. With CURVE none of that
gets past the next handshake; what is tested is that lines heal. Frames: they can be lost, doubled, overtaken, late,
cut short, or followed by noise, from a peer that has every right to speak. What is tested is delivery and decoding.

Invariants:

* What no fault concerns passes unchanged and in order.
* Each proxy has a thread of its own; faults are set from another one, under the lock of :class:`LinkTable`.
* Which peer a connection belongs to is what the kernel says about its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec
import psutil
import zmq

from penstock.messages.base import UNREADABLE
from penstock.messages.wire import Header
from penstock.runtime.chaos.faults import ChaosKind
from penstock.runtime.hosts.processes.links import Links
from penstock.runtime.hosts.processes.wakeup import Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

    from penstock.backends.processes.curve import KeyPair
    from penstock.runtime.hosts.processes.control import Address

CHUNK_BYTES: Final = 65536
MAX_FRAMES_A_TURN: Final = 256
HELD_S: Final = 0.25
"""A frame that nothing overtakes goes on after this time."""
JOIN_S: Final = 5.0
_HEADERS: Final = msgspec.msgpack.Decoder(tuple[int, list[tuple[Header, msgspec.Raw]]])


class LinkFaults:
    """What is wrong with one link now."""

    def __init__(self) -> None:
        self.num_cuts = 0
        self.shares: dict[ChaosKind, float] = {}
        """Share of the frames, or seconds for ``delay``."""

    @property
    def is_cut(self) -> bool:
        return self.num_cuts > 0


class LinkTable:
    """The faults of every directed link of a run, and what they have done."""

    def __init__(self, seed: int) -> None:
        self._lock = threading.Lock()
        self._rng = random.Random(seed)
        self._links: dict[tuple[str, str], LinkFaults] = {}
        self.num_hit: dict[ChaosKind, int] = {}
        """Frames or connections that a fault of this kind has touched."""

    def begin(self, kind: ChaosKind, sender: str, receiver: str, amount: float) -> None:
        """A fault comes."""
        with self._lock:
            link = self._links.setdefault((sender, receiver), LinkFaults())
            if kind is ChaosKind.CUT:
                link.num_cuts += 1
            else:
                link.shares[kind] = link.shares.get(kind, 0.0) + amount

    def end(self, kind: ChaosKind, sender: str, receiver: str, amount: float) -> None:
        """It goes; one that ``restore`` has ended already changes nothing."""
        with self._lock:
            link = self._links.get((sender, receiver))
            if link is None:
                return
            if kind is ChaosKind.CUT:
                link.num_cuts = max(0, link.num_cuts - 1)
            elif (left := link.shares.get(kind, 0.0) - amount) > 1e-9:
                link.shares[kind] = left
            else:
                link.shares.pop(kind, None)

    def restore(self, sender: str, receiver: str) -> None:
        """Nothing is wrong with the link any more."""
        with self._lock:
            self._links.pop((sender, receiver), None)

    def senders_cut_from(self, receiver: str) -> list[str]:
        """Whose connections to this receiver are cut."""
        with self._lock:
            return [s for (s, r), link in self._links.items() if r == receiver and link.is_cut]

    def count(self, kind: ChaosKind) -> None:
        """A fault of this kind has hit something."""
        with self._lock:
            self.num_hit[kind] = self.num_hit.get(kind, 0) + 1

    def hits(self, sender: str, receiver: str) -> dict[ChaosKind, float]:
        """What happens to one frame, drawn: the kinds, and the seconds for ``delay``."""
        with self._lock:
            link = self._links.get((sender, receiver))
            if link is None:
                return {}
            hit = {
                kind: share
                for kind, share in link.shares.items()
                if kind is ChaosKind.DELAY or self._rng.random() < share
            }
            for kind in hit:
                self.num_hit[kind] = self.num_hit.get(kind, 0) + 1
            return hit

    def draw(self, low: int, high: int) -> int:
        """A number from ``low`` to ``high``."""
        with self._lock:
            return self._rng.randint(low, high)

    def noise(self, num_bytes: int) -> bytes:
        """Random bytes."""
        with self._lock:
            return self._rng.randbytes(num_bytes)


class FrameProxy:
    """An inbox that admits the peers of the run, and hands what it hears to the actor's own inbox."""

    def __init__(self, address: Address, keys: KeyPair | None, table: LinkTable) -> None:
        self._actor = address
        self._table = table
        self._stop: Wakeup[None] = Wakeup()
        self._held: deque[tuple[float, bytes]] = deque()
        """Frames to be overtaken, and until when they wait for that."""
        self._late: deque[tuple[float, bytes]] = deque()
        ready = threading.Event()
        self.endpoint = ""
        self.server_key = b""
        self._thread = threading.Thread(
            target=self._run, args=(keys, ready), name=f"frames {address.name}", daemon=True
        )
        self._thread.start()
        ready.wait(JOIN_S)
        assert self.endpoint, f"no inbox for {address.name}"

    def _run(self, keys: KeyPair | None, ready: threading.Event) -> None:
        links = Links(client_keys=keys)
        links.connect(self._actor)
        self.endpoint, self.server_key = links.endpoint, links.server_key
        ready.set()
        links.poller.register(self._stop.fileno(), zmq.POLLIN)
        while True:
            events = dict(links.poller.poll(10 if self._held or self._late else 1000))
            if self._stop.fileno() in events:
                break
            for _, frame in links.receive(MAX_FRAMES_A_TURN):
                self._pass_on(links, frame)
            now_s = time.monotonic()
            for queue in (self._held, self._late):
                while queue and queue[0][0] <= now_s:
                    links.send(self._actor.name, queue.popleft()[1])
        links.close(linger_ms=0)

    def _pass_on(self, links: Links, frame: bytes) -> None:
        hit = self._table.hits(sender_of(frame), self._actor.name)
        name, now_s = self._actor.name, time.monotonic()
        if ChaosKind.DROP in hit:
            return
        if ChaosKind.TRUNCATE in hit:
            frame = frame[: self._table.draw(0, max(0, len(frame) - 1))]
        if ChaosKind.DELAY in hit:
            self._late.append((now_s + hit[ChaosKind.DELAY], frame))
            return
        if ChaosKind.REORDER in hit:
            self._held.append((now_s + HELD_S, frame))
            return
        links.send(name, frame)
        while self._held:  # overtaken by the one that has just left
            links.send(name, self._held.popleft()[1])
        if ChaosKind.DUPLICATE in hit:
            links.send(name, frame)
        if ChaosKind.GARBAGE in hit:
            links.send(name, self._noise(frame))

    def _noise(self, frame: bytes) -> bytes:
        """Noise from the first byte on, or a frame with some bytes changed, which looks right for longer."""
        if self._table.draw(0, 1) or not frame:
            return self._table.noise(self._table.draw(0, 400))
        changed = bytearray(frame)
        for _ in range(self._table.draw(1, 8)):
            changed[self._table.draw(0, len(changed) - 1)] = self._table.draw(0, 255)
        return bytes(changed)

    def close(self) -> None:
        """End the thread and its sockets."""
        self._stop.put(None)
        self._thread.join(JOIN_S)


def sender_of(frame: bytes) -> str:
    """Who says so, in the header of the first event; empty when it cannot be read."""
    try:
        _, items = _HEADERS.decode(frame)
    except UNREADABLE:
        return ""
    return items[0][0].sender if items else ""


class _Connection:
    """Two ends of one TCP connection through the proxy."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near = near
        self.far = far
        peername = near.get_extra_info("peername")
        self.port: int = peername[1] if peername else 0
        self.breaking: ChaosKind | None = None
        """What is to be done to the next bytes from the peer."""

    def abort(self) -> None:
        for end in (self.near, self.far):
            end.transport.abort()


class ByteProxy:
    """Listens before an inbox and passes bytes on. Runs on the event loop of :class:`ByteProxies`."""

    def __init__(self, name: str, endpoint: str, table: LinkTable, pid_of: Callable[[str], int | None]) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.name = name
        self._far = host, int(port)
        self._table = table
        self._pid_of = pid_of
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            connection.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def cut(self, sender: str) -> None:
        """Break the connections of this peer; while its link is cut, later ones are refused as well."""
        for connection in self._of(sender):
            self._table.count(ChaosKind.CUT)
            connection.abort()

    async def break_once(self, sender: str, kind: ChaosKind) -> None:
        """Damage what this peer sends next."""
        for connection in self._of(sender):
            connection.breaking = kind

    def _of(self, sender: str) -> list[_Connection]:
        ports = self._ports_of(sender)
        return [connection for connection in self._connections if connection.port in ports]

    def _ports_of(self, sender: str) -> set[int]:
        """Local ports of this actor's connections to here."""
        pid = self._pid_of(sender)
        if pid is None:
            return set()
        try:
            found = psutil.Process(pid).net_connections("tcp4")
        except psutil.Error:  # it has ended meanwhile
            return set()
        return {one.laddr.port for one in found if one.raddr and one.raddr.port == self.port}

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        port = writer.get_extra_info("peername")[1]
        if any(port in self._ports_of(sender) for sender in self._table.senders_cut_from(self.name)):
            self._table.count(ChaosKind.CUT)
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._far)
        except OSError:  # the actor is gone; its peers shall find that out as they would without a proxy
            writer.transport.abort()
            return
        connection = _Connection(writer, far_writer)
        self._connections.add(connection)
        try:
            await asyncio.gather(
                self._pump(reader, far_writer, connection, is_forward=True),
                self._pump(far_reader, writer, connection, is_forward=False),
            )
        except asyncio.CancelledError:  # by ``stop``; whoever awaits this wants the end, not the exception
            pass
        finally:
            self._connections.discard(connection)
            connection.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: _Connection, *, is_forward: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                breaking = connection.breaking if is_forward else None
                if breaking is not None:
                    connection.breaking = None
                    self._table.count(breaking)
                    data = self._damaged(data, breaking)
                writer.write(data)
                await writer.drain()
                if breaking is ChaosKind.TRUNCATE:
                    break
        connection.abort()

    def _damaged(self, data: bytes, kind: ChaosKind) -> bytes:
        middle = len(data) // 2
        return data[:middle] if kind is ChaosKind.TRUNCATE else data[:middle] + self._table.noise(64) + data[middle:]


class ByteProxies:
    """The byte proxies of a run, on an event loop with a thread of its own."""

    def __init__(self, table: LinkTable, pid_of: Callable[[str], int | None]) -> None:
        self._table = table
        self._pid_of = pid_of
        self._proxies: dict[str, ByteProxy] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bytes", daemon=True)
        self._thread.start()

    def before(self, name: str, endpoint: str) -> str:
        """An endpoint that leads to this one, in place of the one that led to the actor's last incarnation."""
        proxy = ByteProxy(name, endpoint, self._table, self._pid_of)
        self._do(proxy.start())
        last = self._proxies.pop(name, None)
        if last is not None:
            self._do(last.stop())
        self._proxies[name] = proxy
        return f"tcp://127.0.0.1:{proxy.port}"

    def cut(self, sender: str, receiver: str) -> None:
        """Break the connections of the sender to the receiver."""
        if receiver in self._proxies:
            self._do(self._proxies[receiver].cut(sender))

    def break_once(self, sender: str, receiver: str, kind: ChaosKind) -> None:
        """Damage what the sender sends next to the receiver."""
        if receiver in self._proxies:
            self._do(self._proxies[receiver].break_once(sender, kind))

    def close(self) -> None:
        """End every connection and the thread."""
        for proxy in self._proxies.values():
            self._do(proxy.stop())
        self._do(asyncio.sleep(0))  # what aborted connections have left for the loop to do
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)
        self._loop.close()

    def _do(self, work: Coroutine[None, None, None]) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.result(JOIN_S)
