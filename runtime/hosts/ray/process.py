"""The process of one actor: a Ray actor whose ``run`` blocks the main thread until the process is to end.

Invariants:

* ``run`` is synchronous and on the main thread: Ray's SIGTERM then raises ``SystemExit`` in it, and backends close.
* The inbox is bound and announced before anything heavy is imported, so that the supervisor knows the process.
* Every exception becomes the :class:`~penstock.runtime.hosts.ray.boot.ProcessEnd` that ``run`` returns, with its
  traceback in the log of the incarnation. Nothing is unpickled on the way.

The module must stay importable by name: Ray starts it in another process.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.backends.stores.protocol import LedgerStoreError, StaleEpochError
from penstock.messages.names import SUPERVISOR
from penstock.messages.wire import Envelope, Header, encode_pack
from penstock.runtime.chaos.rerouting import announced_address
from penstock.runtime.errors import DISK_FULL_STORY, UserError, is_disk_full
from penstock.runtime.hosts.ray import processes
from penstock.runtime.hosts.ray.boot import OBSERVING, Boot, EndKind, ProcessEnd, load_wiring, log_name
from penstock.runtime.hosts.ray.control import Address, ProcessStarted
from penstock.runtime.hosts.ray.groups import VISIBLE_DEVICES
from penstock.runtime.hosts.ray.heartbeat import Heartbeat, Pulse
from penstock.runtime.hosts.ray.links import Links
from penstock.runtime.hosts.ray.loop import ActorLoop, RunClock
from penstock.runtime.safe_text import log_to_stderr

if TYPE_CHECKING:
    from types import FrameType

    from penstock.runtime.observability.event_observer import EventObserver
    from penstock.runtime.observability.tracing import TraceObserver

SPAN_CLOSE_S: Final = 1.0
HOLDER_TIMEOUT_S: Final = 60.0

_log: Final = logging.getLogger(__name__)


class ActorProcess:
    """What Ray starts. One process runs one incarnation of one actor, once."""

    def warm_up(self, wiring: str) -> None:
        """Import what whatever actor this becomes needs in any case. What engines and learners run on is left out: it
        takes more memory than one should keep idle."""
        load_wiring(wiring)
        for name in OBSERVING:
            importlib.import_module(name)

    def run(self, boot: bytes, holder: Any = None, num_devices: int | None = None) -> bytes:  # noqa: ANN401
        """Run until the end.

        Args:
            boot: A :class:`~penstock.runtime.hosts.ray.boot.Boot` as msgpack.
            holder: Handle of the :class:`~penstock.runtime.hosts.ray.groups.GpuHolder` whose GPUs this actor uses
                together with others; None where Ray has given it GPUs of its own, or none.
            num_devices: It sees the first so many of them; None means all.

        Returns:
            A :class:`~penstock.runtime.hosts.ray.boot.ProcessEnd` as msgpack.
        """
        import ray  # here, so that tests and benchmarks can run a process without it

        if holder is not None:
            devices = str(ray.get(holder.devices.remote(), timeout=HOLDER_TIMEOUT_S))  # pyright: ignore
            os.environ[VISIBLE_DEVICES] = ",".join(devices.split(",")[:num_devices])
        node_id = str(ray.get_runtime_context().get_node_id())
        node_host = _node_host()
        end = run_process(msgspec.msgpack.decode(boot, type=Boot), node_id=node_id, node_host=node_host)
        return msgspec.msgpack.encode(end)


def _node_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # pyright: ignore


class NodeKiller:
    """Kills processes of another node; a small Ray actor, one a node, because the driver cannot signal them."""

    def kill(self, pid: int, start_ticks: int) -> bool:
        """SIGKILL this very process; False when it is gone."""
        return processes.kill(pid, start_ticks)


def run_process(boot: Boot, *, node_id: str, node_host: str) -> ProcessEnd:
    """Run one incarnation on this thread, which must be the main one, until it ends."""
    _open_log(boot)
    _settle_in()
    with ExitStack() as stack:
        links = Links(client_keys=boot.client_keys, host=boot.host or node_host)
        stack.callback(links.close)
        pulse = Pulse()
        stack.callback(Heartbeat(boot, pulse).stop)
        _announce(boot, links, node_id)
        try:
            return ProcessEnd(kind=_run_actor(boot, links, pulse))
        except Exception as error:  # the edge of the process: whatever it is, the supervisor hears the story
            traceback.print_exc()
            return _story_of(error)


def _run_actor(boot: Boot, links: Links, pulse: Pulse) -> EndKind:
    began_s, clock = time.monotonic(), RunClock(boot.started_unix_s)
    with ExitStack() as stack:
        loop = ActorLoop(boot, links, pulse, clock, _open_event_log(boot, stack, clock))
        stack.callback(loop.close)
        gc.collect()
        gc.freeze()  # modules and the model are there to stay; walking them costs milliseconds
        times = time.monotonic() - began_s, time.process_time()
        _log.info("%s: %s", VISIBLE_DEVICES, os.environ.get(VISIBLE_DEVICES, "not set"))
        _log.info("%s %d is built after %.1f s; the process has used %.1f s of CPU", boot.name, boot.epoch, *times)
        return loop.run()


def _announce(boot: Boot, links: Links, node_id: str) -> None:
    links.connect(boot.supervisor)
    started = ProcessStarted(
        address=announced_address(boot, Address(boot.name, boot.epoch, links.endpoint, links.server_key)),
        pid=os.getpid(),
        start_ticks=processes.start_ticks_of(os.getpid()),
        node_id=node_id,
    )
    links.send(SUPERVISOR, encode_pack([Envelope(Header(boot.name, boot.epoch, 0, 0, 0), started)]))


def _story_of(error: Exception) -> ProcessEnd:
    if isinstance(error, StaleEpochError):
        return ProcessEnd(kind=EndKind.SUPERSEDED, error=f"another process drives this run: {error}")
    if isinstance(error, LedgerStoreError):
        return ProcessEnd(kind=EndKind.LEDGER_FAILED, error=str(error))
    if is_disk_full(error):
        return ProcessEnd(kind=EndKind.DISK_FULL, error=f"{DISK_FULL_STORY} ({error})")
    # Errors that are the user's to mend are subclasses of ValueError of our own; elsewhere a ValueError is a bug.
    is_users = isinstance(error, UserError) or (
        isinstance(error, ValueError) and type(error).__module__.startswith("penstock.")
    )
    message = str(error).strip()
    first_line = message.splitlines()[0] if message else ""
    return ProcessEnd(
        kind=EndKind.USER_ERROR if is_users else EndKind.CRASHED,
        error=message if is_users else f"{type(error).__name__}: {first_line}".rstrip(": "),
        traceback="".join(traceback.format_exception(error)),
    )


def _open_log(boot: Boot) -> None:
    """Everything that this process prints goes to the log of its incarnation."""
    path = Path(boot.run_folder) / log_name(boot.name, boot.epoch)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    log_to_stderr()
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def _settle_in() -> None:
    """Make the process what its backend may expect, and let it end with the raylet that started it."""
    # Ray blocks SIGINT here, and children would inherit that. A handler, unlike SIG_IGN, is not inherited.
    signal.signal(signal.SIGINT, _ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # a line to a peer takes about five descriptors
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    processes.end_with_parent(signal.SIGKILL)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Signals are heard elsewhere."""


def _open_event_log(boot: Boot, stack: ExitStack, clock: RunClock) -> EventObserver:
    """What watches the shell: the event log of this incarnation, and its traces where they are on."""
    from penstock.runtime.observability.event_observer import EventObserver
    from penstock.runtime.observability.trackers import EventLog, event_file

    log = EventLog(event_file(Path(boot.run_folder), boot.name, boot.epoch))
    stack.callback(log.close)
    traces = _open_traces(boot, stack)
    return EventObserver(log, name=boot.name, epoch=boot.epoch, now_s=clock.now_s, inner=traces)


def _open_traces(boot: Boot, stack: ExitStack) -> TraceObserver | None:
    if not boot.trace_salt:
        return None
    from penstock.runtime.observability.span_export import (
        FileSpanExporter,
        SpanExporterThread,
        actor_resource,
        otlp_exporter,
    )
    from penstock.runtime.observability.spans import SpanRecorder
    from penstock.runtime.observability.traces import span_file
    from penstock.runtime.observability.tracing import TraceObserver

    recorder = SpanRecorder()
    exporter = SpanExporterThread(
        recorder,
        FileSpanExporter(span_file(Path(boot.run_folder), boot.name, boot.epoch)),
        resource=actor_resource(boot.name, boot.epoch),
        collector=None if boot.otlp_endpoint is None else otlp_exporter(boot.otlp_endpoint),
    )
    exporter.start()
    stack.callback(exporter.close, SPAN_CLOSE_S)
    return TraceObserver(
        recorder, run_salt=boot.trace_salt, name=boot.name, epoch=boot.epoch, fraction=boot.trace_fraction
    )
