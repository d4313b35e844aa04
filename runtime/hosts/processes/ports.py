"""What the supervisor needs of the world, and what it tells it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from penstock.messages.training import RunFinished
from penstock.runtime.hosts.processes.boot import ProcessEnd
from penstock.runtime.shell.engine_scaling import ScalingSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from penstock.messages.evaluation import EvaluationFinished
    from penstock.messages.training import ActorReported, FailuresCounted, StepReported
    from penstock.messages.waits import WaitsReported
    from penstock.runtime.hosts.processes.boot import Boot
    from penstock.runtime.hosts.processes.control import ProcessStarted
    from penstock.runtime.hosts.processes.job import DriverJob
    from penstock.runtime.hosts.processes.prepare_process import PreparationProcess
    from penstock.runtime.run.gpu_needs import NodeGpus
    from penstock.runtime.run.placement import Placement

FIRST_EPOCH: Final = 1


class EndedProcess(msgspec.Struct, frozen=True):
    """``run`` of a process is over: it returned, or the process is gone."""

    name: str
    epoch: int
    end: ProcessEnd | None
    """None when the process is gone."""


class Launcher(Protocol):
    """Who starts and kills processes."""

    def fileno(self) -> int:
        """Readable when ``ended`` has something to tell."""
        ...

    def launch(self, boot: Boot) -> None:
        """Start a process; returns at once."""
        ...

    def announced(self, process: ProcessStarted) -> None:
        """A process is there: have ready what it takes to kill it."""
        ...

    def is_local(self, process: ProcessStarted) -> bool:
        """Whether this process is on this machine, where ``/proc`` shows it."""
        ...

    def kill(self, name: str, epoch: int, process: ProcessStarted | None) -> None:
        """Kill a process, whatever state it is in."""
        ...

    def reserve(self, name: str) -> None:
        """This actor is to be started: ask for what it takes of a machine, where that is not the run's from the start.
        Returns at once."""
        ...

    def lacks(self, name: str) -> str:
        """What has to come before an actor that :meth:`reserve` was called for can be launched, as ``a node with 2
        GPUs``; empty where nothing has to."""
        ...

    def end_left(self, name: str) -> None:
        """Nobody comes after this engine, which was just killed: end the servers that it and those before it have left
        to a successor, on whatever machine, and then give back what was reserved for it. Returns at once."""
        ...

    def end_whole(self, name: str, process: ProcessStarted) -> Sequence[Future[list[int]]]:
        """Kill a process, and have everything end that it has started, on whatever machine. Returns at once.

        Returns:
            For each machine, once nothing of it is left there: the processes that could not be ended, if any.
        """
        ...

    def make_spare(self) -> None:
        """Everybody is there, with what he had to load: have a process ready that the next replacement can take over.
        Said again and again; one is enough."""
        ...

    def ended(self) -> list[EndedProcess]:
        """Whose ``run`` is over since the last call."""
        ...

    def broken(self) -> str:
        """Why no process can be started any more; empty while all is well."""
        ...


class ProcessHost(Protocol):
    """Where the processes of a run live: Ray, or this machine alone."""

    @property
    def phase(self) -> str:
        """What ``start`` does, for the terminal."""
        ...

    @property
    def node_host(self) -> str:
        """Address of this machine that every process of the run can reach. Known once it has started."""
        ...

    @property
    def is_embedded(self) -> bool:
        """Whether all processes are on this machine."""
        ...

    def prepare(self, job: DriverJob) -> PreparationProcess:
        """Begin what a run needs before its actors start. May be called before ``start``."""
        ...

    def start(self) -> None:
        """Takes seconds; for the main thread.

        Raises:
            UserFault: it could not be started.
        """
        ...

    def nodes(self) -> list[NodeGpus]:
        """The living nodes with the GPUs that are free on them, this one first."""
        ...

    def launcher(self, placement: Placement) -> Launcher:
        """Who starts and kills the processes.

        Raises:
            UserFault: the GPUs of the placement are not to be had.
        """
        ...

    def stop(self) -> object:
        """End it, and every process of the run with it."""
        ...


class RunSink(Protocol):
    """Who is told what happens: the terminal, metrics, logs."""

    def on_step(self, report: StepReported) -> None:
        """A step was recorded."""
        ...

    def on_evaluation(self, finished: EvaluationFinished) -> None:
        """An evaluation is done."""
        ...

    def on_report(self, report: ActorReported) -> None:
        """An actor says what it does."""
        ...

    def on_actor(self, name: str, epoch: int, state: str) -> None:
        """``starting``, ``up``, ``lost`` or ``ended``."""
        ...

    def on_notice(self, name: str, text: str, *, is_warning: bool = False) -> None:
        """An actor has something to tell people."""
        ...

    def on_failures(self, counted: FailuresCounted) -> None:
        """Samples have failed, for these reasons."""
        ...

    def on_lost(self, name: str, cause: str) -> None:
        """An actor was given up, and why."""
        ...

    def on_waits(self, report: WaitsReported) -> None:
        """An actor says what it has waited for too long."""
        ...

    def on_slow(self, name: str, turn_s: float) -> None:
        """The loop of an actor has been busy with one turn for so long."""
        ...

    def on_stopping(self, limit_s: float) -> None:
        """The run is to end, and waits this long at most for the checkpoint that it can be resumed from."""
        ...

    def on_turn(self) -> None:
        """Called several times a second."""
        ...


class OutcomeKind(StrEnum):
    """How a run ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    USER_ERROR = "user_error"
    DIVERGED = "diverged"
    ABANDONED = "abandoned"
    """Whoever started the run is gone; nobody waits for a last word."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run."""

    kind: OutcomeKind
    story: str
    signal: int | None = None
    finished: RunFinished | None = None
    """The Buffer's last word, if it could still be heard."""


class SupervisorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one run is supervised."""

    names: tuple[str, ...]
    """Every actor, in the order in which they are started."""
    heartbeat_timeout_s: float
    max_restarts: int
    first_epoch: int = FIRST_EPOCH
    shares_devices: frozenset[str] = frozenset()
    """Actors on devices that others take in turns with them."""
    leave_timeout_s: float = 30.0
    """How long an engine that is to leave may take to hand everything back."""
    gpu_timeout_s: float = 900.0
    """How long an engine that is to join may wait for what the launcher lacks."""
    fewest_engines: int | None = None
    """That are left when others are lost for good; None: all have to be there from the start to the end."""
    scaling: ScalingSettings | None = None
    """``engines.scale: by_bound``; None: nobody but an operator changes the engines."""
    stop_timeout_s: float = 30.0
    """How long the last checkpoint may take once the run is to end."""
