"""The process of one actor: :func:`run_process` blocks the main thread until the process is to end.

Invariants:

* It runs on the main thread: a SIGTERM then raises ``SystemExit`` in it, and backends close.
* The inbox is bound and announced before anything heavy is imported, so that the supervisor knows the process.
* Every exception becomes the :class:`~penstock.runtime.hosts.processes.boot.ProcessEnd` that is returned, with its
  traceback in the log of the incarnation. Nothing is unpickled on the way.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.backends.ledger.protocol import LedgerStoreError, StaleEpochError
from penstock.backends.processes import process_facts as processes
from penstock.messages.errors import DISK_FULL_STORY, DivergedError, UserFault, is_disk_full
from penstock.messages.names import LEARNER, SUPERVISOR, is_engine
from penstock.messages.wire import Header, encode_pack
from penstock.runtime.hosts.processes.actor_log import open_log
from penstock.runtime.hosts.processes.boot import VISIBLE_DEVICES, Boot, EndKind, ProcessEnd
from penstock.runtime.hosts.processes.control import Address, ProcessStarted
from penstock.runtime.hosts.processes.freed_memory import keep_freed_memory
from penstock.runtime.hosts.processes.heartbeat import Heartbeat, Pulse
from penstock.runtime.hosts.processes.job import ACTOR_VARIABLE, run_variables
from penstock.runtime.hosts.processes.links import Links
from penstock.runtime.hosts.processes.loop import ActorLoop, RunClock
from penstock.runtime.hosts.processes.rerouting import announced_address
from penstock.runtime.run.plan import log_name
from penstock.runtime.safe_text import log_to_stderr

if TYPE_CHECKING:
    from types import FrameType

    from penstock.backends.processes.remote_ranks import RemoteRanks
    from penstock.runtime.observability.event_observer import EventObserver
    from penstock.runtime.observability.recording import Recording
    from penstock.runtime.observability.span_collector import SpanCollector
    from penstock.runtime.observability.spans import AttributeValue
    from penstock.runtime.observability.stages import StageRecorder

SPAN_CLOSE_S: Final = 1.0
RARE_COLLECTIONS: Final = (20_000, 50, 100)
"""Of an actor that has no tensors. Messages cannot contain themselves, so the collector finds next to nothing; what it
walks through are leases and groups."""

_log: Final = logging.getLogger(__name__)


def run_process(boot: Boot, *, node_id: str, node_host: str, remote_ranks: RemoteRanks | None = None) -> ProcessEnd:
    """Run one incarnation on this thread, which must be the main one, until it ends.

    Args:
        boot: who it is, and of which run.
        node_id: of this node, as the host calls it.
        node_host: by which other nodes reach this one.
        remote_ranks: other nodes that are there for this actor's further processes; None where there are none.
    """
    # A node of somebody else's Ray has not inherited them.
    os.environ.update({**run_variables(boot.run_id, boot.run_folder), ACTOR_VARIABLE: boot.name})
    _open_log(boot)
    _settle_in()
    with ExitStack() as stack:
        links = Links(client_keys=boot.client_keys, host=boot.host or node_host)
        stack.callback(links.close)
        pulse = Pulse()
        stack.callback(Heartbeat(boot, pulse).stop)
        _announce(boot, links, node_id)
        try:
            return ProcessEnd(kind=_run_actor(boot, links, pulse, remote_ranks))
        except Exception as error:  # the edge of the process: whatever it is, the supervisor hears the story
            traceback.print_exc()
            return story_of(error)


def _run_actor(boot: Boot, links: Links, pulse: Pulse, remote_ranks: RemoteRanks | None) -> EndKind:
    began_s, clock = time.monotonic(), RunClock(boot.started_unix_s)
    with ExitStack() as stack:
        gc.disable()  # what is imported stays, so collecting meanwhile finds nothing, for a tenth of the time
        recording = _open_recording(boot, stack, clock)
        observer = _open_event_log(boot, stack, clock, recording)
        loop = ActorLoop(boot, links, pulse, clock, observer, remote_ranks, recording)
        stack.callback(loop.close)
        gc.collect()
        gc.freeze()  # modules and the model are there to stay; walking them costs milliseconds
        gc.enable()
        if not is_engine(boot.name) and boot.name != LEARNER:
            gc.set_threshold(*RARE_COLLECTIONS)
        keep_freed_memory()
        times = time.monotonic() - began_s, time.process_time()
        _log.info("%s: %s", VISIBLE_DEVICES, os.environ.get(VISIBLE_DEVICES, "not set"))
        _log.info("%s %d is built after %.1f s; the process has used %.2f s of CPU", boot.name, boot.epoch, *times)
        return loop.run()


def _announce(boot: Boot, links: Links, node_id: str) -> None:
    links.connect(boot.supervisor)
    started = ProcessStarted(
        address=announced_address(boot, Address(boot.name, boot.epoch, links.endpoint, links.server_key)),
        pid=os.getpid(),
        start_ticks=processes.start_ticks_of(os.getpid()),
        node_id=node_id,
    )
    links.send(SUPERVISOR, encode_pack([(Header(boot.name, boot.epoch, 0, 0, 0), started)]))


def story_of(error: Exception) -> ProcessEnd:
    """What the supervisor is told of the error that has ended an actor."""
    if isinstance(error, StaleEpochError):
        return ProcessEnd(kind=EndKind.SUPERSEDED, error=f"another process drives this run: {error}")
    if isinstance(error, LedgerStoreError):
        return ProcessEnd(kind=EndKind.LEDGER_FAILED, error=str(error))
    if is_disk_full(error):
        return ProcessEnd(kind=EndKind.DISK_FULL, error=f"{DISK_FULL_STORY} ({error})")
    if isinstance(error, UserFault):
        kind = EndKind.DIVERGED if isinstance(error, DivergedError) else EndKind.USER_ERROR
        return ProcessEnd(kind=kind, error=str(error).strip())
    line = str(error).strip().partition("\n")[0]
    return ProcessEnd(
        kind=EndKind.CRASHED,
        error=f"{type(error).__name__}: {line}".rstrip(": "),
        traceback="".join(traceback.format_exception(error)),
    )


def _open_log(boot: Boot) -> None:
    """Everything that this process prints goes to the log of its incarnation."""
    open_log(Path(boot.run_folder) / log_name(boot.name, boot.epoch))
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


def _open_recording(boot: Boot, stack: ExitStack, clock: RunClock) -> Recording | None:
    if not boot.records:
        return None
    from penstock.runtime.observability.recording import Recording

    recording = Recording(
        Path(boot.run_folder), boot.name, boot.epoch, now_s=clock.now_s, segment_bytes=boot.segment_bytes
    )
    stack.callback(recording.close)
    return recording


def _open_event_log(boot: Boot, stack: ExitStack, clock: RunClock, recording: Recording | None) -> EventObserver:
    """What watches the shell: the event log of this incarnation and its recording, of a Learner the log of weights, and
    the traces where they are on."""
    from penstock.runtime.observability.event_observer import EventObserver
    from penstock.runtime.observability.trackers import EventLog, event_file
    from penstock.runtime.observability.weights_log import WeightsLog

    log = EventLog(event_file(Path(boot.run_folder), boot.name, boot.epoch), segment_bytes=boot.segment_bytes)
    stack.callback(log.close)
    stages = _open_traces(boot, stack)
    weights = None
    if boot.name == LEARNER:
        weights = WeightsLog(Path(boot.run_folder))
        stack.callback(weights.close)
    return EventObserver(
        log,
        name=boot.name,
        epoch=boot.epoch,
        now_s=time.monotonic,
        offset_s=clock.offset_s,
        stages=stages,
        weights=weights,
        recording=recording,
    )


def _open_traces(boot: Boot, stack: ExitStack) -> StageRecorder | None:
    if not boot.trace_salt:
        return None
    from penstock.runtime.observability.span_export import SpanExporterThread
    from penstock.runtime.observability.span_file import SpanFile, actor_attributes
    from penstock.runtime.observability.spans import SpanRecorder
    from penstock.runtime.observability.stages import StageRecorder
    from penstock.runtime.observability.trace_ids import TraceIds
    from penstock.runtime.observability.traces import span_file

    recorder, resource = SpanRecorder(), actor_attributes(boot.name, boot.epoch)
    path = span_file(Path(boot.run_folder), boot.name, boot.epoch)
    file = SpanFile(path, resource, segment_bytes=boot.segment_bytes)
    exporter = SpanExporterThread(recorder, file, collector=_open_collector(boot, resource))
    exporter.start()
    stack.callback(exporter.close, SPAN_CLOSE_S)
    return StageRecorder(recorder, TraceIds(boot.trace_salt, boot.trace_fraction))


def _open_collector(boot: Boot, resource: dict[str, AttributeValue]) -> SpanCollector | None:
    if boot.otlp_endpoint is None:
        return None
    from penstock.runtime.observability.span_collector import SpanCollector, otlp_exporter  # here, as it brings the SDK

    return SpanCollector(otlp_exporter(boot.otlp_endpoint), resource)
