"""The learner's end of the process group of one server: rank 0, from which weights are broadcast to the server's ranks.

Each server has a group of its own, with a thread of its own here. A server that dies or hangs in the middle of an
update therefore stops neither the learner nor another server; its thread ends with an error when the peer's connection
breaks, or at the deadline. What it costs: the learner sends the weights once for each server, so the time of a publish
over a network grows with their number. A chain or tree of servers, each of which passes on what it got, would be the
way beyond, at the price of tying their lives together.

How the two sides find each other is given by what SGLang does (``init_weights_update_group``): a TCP store at an
address that we name, and in it the keys of the group under ``<group>``, ``<group>/`` and the device, in this order.
The group is made from torch's classes directly. torch's default group is not needed, and not touched where there is
one: a learner over several GPUs has its own.

The store and the data of a group travel in the clear and without authentication, as everything of torch.distributed
does; only control goes through the encrypted service. The network between learner and servers has to be trusted.

| waits for | who ends it |
|---|---|
| the thread, for the next request | ``broadcast``, or ``close`` with the end mark |
| the thread, for the ranks to come together | the last of them; at the latest the group's timeout |
| the thread, for a broadcast | the slowest rank, its death (gloo), or the group's timeout |

NCCL is written after torch's interface and unmeasured: it was never run on a GPU.
"""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from penstock.backends.weights.service_messages import Joining, Refused, Sent

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.backends.weights.service_messages import AnyReply, Broadcast, Join
    from penstock.backends.weights.snapshots import Snapshot

Answer = Callable[["AnyReply"], None]
"""Sends a reply to whoever asked; from any thread."""

MAX_UNDER_WAY: Final = 2
"""Broadcasts at once: while one is sent the next is brought to the device."""
GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
NCCL_WATCHDOGS: Final = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")

_environment_lock: Final = threading.Lock()


class _Order(NamedTuple):
    """One broadcast that was asked for."""

    snapshot: Snapshot
    request: Broadcast
    answer: Answer


class _UnderWay(NamedTuple):
    """One broadcast that was begun."""

    work: Any
    data: torch.Tensor
    """Kept until it is sent."""
    order: _Order


class UpdateGroup:
    """The group of one server. Its methods return at once; the thread answers."""

    def __init__(self, join: Join, host: str, device: torch.device, answer: Answer) -> None:
        """Begin to bring the ranks together.

        Args:
            join: What was asked for.
            host: This machine's address as the servers see it.
            device: The learner's.
            answer: Of the request to join.
        """
        self.name = join.group
        self.engine = join.engine
        self._join = join
        self._host = host
        self._device = device
        self._timeout = timedelta(seconds=join.timeout_s)
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._group: Any = None
        self._is_closed = threading.Event()
        self._story = ""
        self._thread = threading.Thread(target=self._run, args=(answer,), name=f"weights-{join.engine}", daemon=True)
        self._thread.start()

    def broadcast(self, snapshot: Snapshot, request: Broadcast, answer: Answer) -> None:
        """Send these bytes after those that were asked for before."""
        self._orders.put(_Order(snapshot, request, answer))

    def close(self) -> None:
        """Take nothing more and break off what is under way, as far as the backend can."""
        self._is_closed.set()
        group = self._group
        if group is not None and self._join.backend == "nccl":
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                group.abort()
        self._orders.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread after ``close``; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, answer: Answer) -> None:
        try:
            store = self._listen(answer)
            if store is not None:
                self._group = self._come_together(store)
                self._serve()
        except RuntimeError as error:  # whatever torch.distributed has to say: DistError and its kin
            self._story = self._broken(error)
        self._refuse_the_rest()
        self._group = None  # waits for what gloo still has under way; torch lets the other threads run meanwhile
        self._refuse_the_rest()

    def _listen(self, answer: Answer) -> TCPStore | None:
        """The store, and the word where it is; None where this machine cannot have such a group."""
        if self._join.backend == "nccl" and not (dist.is_nccl_available() and self._device.type == "cuda"):
            self._story = "the learner has no GPU or no NCCL; with a server on GPUs it shares the backend gloo"
            answer(Refused(story=self._story))
            return None
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, 0), family=family, backlog=128)
        except OSError as error:
            self._story = f"the learner cannot listen at {self._host}: {error.strerror}"
            answer(Refused(story=self._story))
            return None
        port = int(listener.getsockname()[1])
        try:
            store = TCPStore(
                self._host, port, None, is_master=True, timeout=self._timeout, wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )  # fmt: skip
        except RuntimeError as error:
            answer(Refused(story=f"the store of the group could not be made: {_first_line(error)}"))
            raise
        answer(Joining(address=self._host, port=port))
        return store

    def _come_together(self, store: TCPStore) -> Any:  # noqa: ANN401 - the backends have no common type that mypy knows
        join = self._join
        device = "cpu" if join.backend == "gloo" else "cuda"
        keys = PrefixStore(f"{device}/", PrefixStore(f"{join.group}/", PrefixStore(join.group, store)))
        if join.backend == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # it has one
            options._timeout = self._timeout
            options._devices = [_gloo_device(self._host)]
            return dist.ProcessGroupGloo(keys, 0, join.num_ranks + 1, options)
        torch.cuda.set_device(self._device)
        options = dist.ProcessGroupNCCL.Options()
        options.global_ranks_in_group = []
        options._timeout = self._timeout
        with _errors_do_not_end_the_process():
            return dist.ProcessGroupNCCL(keys, 0, join.num_ranks + 1, options)

    def _serve(self) -> None:
        under_way: deque[_UnderWay] = deque()
        order: _Order | None = None
        try:
            while not self._is_closed.is_set():
                try:
                    order = self._orders.get(block=not under_way)
                except Empty:
                    self._finish(under_way)
                    continue
                if order is None:
                    return
                under_way.append(self._begin(order))
                order = None
                if len(under_way) >= MAX_UNDER_WAY:
                    self._finish(under_way)
        except RuntimeError as error:
            left = [begun.order for begun in under_way] + ([order] if order is not None else [])
            for unsent in left:
                unsent.answer(Refused(story=self._broken(error)))
            raise

    def _begin(self, order: _Order) -> _UnderWay:
        data = order.snapshot.slice(order.request.start, order.request.size_bytes)
        if self._join.backend == "gloo":
            data = data.cpu()
        elif data.device.type == "cpu":
            data = data.to(self._device, non_blocking=True)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        return _UnderWay(self._group.broadcast([data], options), data, order)

    def _finish(self, under_way: deque[_UnderWay]) -> None:
        """Wait for the oldest; it stays in the queue if it fails."""
        oldest = under_way[0]
        oldest.work.wait(self._timeout)
        under_way.popleft()
        oldest.order.answer(Sent())

    def _broken(self, error: RuntimeError) -> str:
        return (
            f"the process group of {self.engine} is broken: the server died, did not answer for "
            f"{self._join.timeout_s:g} s, or left ({_first_line(error)})"
        )

    def _refuse_the_rest(self) -> None:
        story = self._story or f"the process group {self.name} has ended"
        while True:
            # A request that comes later finds the group gone from the service's books.
            try:
                order = self._orders.get_nowait()
            except Empty:
                return
            if order is not None:
                order.answer(Refused(story=story))

    @property
    def has_ended(self) -> bool:
        """Whether nothing can be sent any more."""
        return bool(self._story) or not self._thread.is_alive()

    @property
    def story(self) -> str:
        """Why it ended, if it did so by itself."""
        return self._story


def _gloo_device(host: str) -> Any:  # noqa: ANN401 - see above
    if os.environ.get(GLOO_INTERFACE) or host.startswith("127.") or host == "::1":
        return dist.ProcessGroupGloo.create_default_device()
    # Debian gives a machine's own name an address of the loopback; no other machine could come back to that.
    return dist.ProcessGroupGloo.create_device(hostname=host)


@contextlib.contextmanager
def _errors_do_not_end_the_process() -> Generator[None]:
    """By default watchdogs of torch end the whole process when an NCCL operation fails or takes too long: the learner
    would die with a server. The constructor reads these."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in NCCL_WATCHDOGS}
        os.environ.update(dict.fromkeys(NCCL_WATCHDOGS, "0"))
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
