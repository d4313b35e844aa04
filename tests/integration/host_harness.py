"""Runs echo actors under a real supervisor on a real host, and lets a test interfere."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import host_echo
import msgspec

from penstock.backends.processes.curve import KeyPair, make_keys
from penstock.backends.processes.process_facts import is_running
from penstock.messages.membership import EnginesWanted
from penstock.messages.names import SUPERVISOR
from penstock.runtime.hosts.local.local_host import LocalHost
from penstock.runtime.hosts.local.warm import EVERY_ACTOR, Modules
from penstock.runtime.hosts.processes.boot import Boot
from penstock.runtime.hosts.processes.control import Address
from penstock.runtime.hosts.processes.links import Links
from penstock.runtime.hosts.processes.ports import Outcome, SupervisorSettings
from penstock.runtime.hosts.processes.signals import Signals
from penstock.runtime.hosts.processes.supervisor import Supervisor
from penstock.runtime.hosts.ray.cluster import RayHost, make_temp_folder
from penstock.runtime.run.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.evaluation import EvaluationFinished
    from penstock.messages.training import ActorReported, FailuresCounted, StepReported
    from penstock.messages.waits import WaitsReported
    from penstock.runtime.hosts.processes.control import ProcessStarted
    from penstock.runtime.hosts.processes.incarnations import Incarnation
    from penstock.runtime.hosts.processes.ports import Launcher, ProcessHost

RUN_TIMEOUT_S = 120.0


HOST = os.environ.get("PENSTOCK_TEST_HOST", "local")
"""``local`` or ``ray``: where the runs of these tests live, unless a test is about one of them."""


def start_host(kind: str = HOST) -> ProcessHost:
    """A host for several runs, whose processes can import the echo actors."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    if kind == "local":
        return LocalHost(Modules((*EVERY_ACTOR, "host_echo")))
    host = RayHost(None, make_temp_folder())
    host.start()
    return host


class Witness:
    """Notes what the supervisor tells, and plays the test's part once in every turn."""

    def __init__(self, run: EchoRun) -> None:
        self.run = run
        self.steps: list[StepReported] = []
        self.reports: dict[str, ActorReported] = {}
        self.states: list[tuple[str, int, str]] = []
        self.losses: list[tuple[str, str]] = []
        self.notices: list[tuple[str, str]] = []
        self.stops: list[float] = []
        self.act: Callable[[EchoRun], None] | None = None
        self.deadline_s = time.monotonic() + RUN_TIMEOUT_S

    def on_step(self, report: StepReported) -> None:
        self.steps.append(report)

    def on_evaluation(self, finished: EvaluationFinished) -> None:
        raise AssertionError(f"evaluation {finished.number}, and nobody asked for one")

    def on_report(self, report: ActorReported) -> None:
        self.reports[report.name] = report

    def on_actor(self, name: str, epoch: int, state: str) -> None:
        self.states.append((name, epoch, state))

    def on_failures(self, counted: FailuresCounted) -> None:
        pass

    def on_notice(self, name: str, text: str, *, is_warning: bool = False) -> None:
        self.notices.append((name, text))

    def on_lost(self, name: str, cause: str) -> None:
        self.losses.append((name, cause))

    def on_waits(self, report: WaitsReported) -> None:
        raise AssertionError(f"{report.name} waits for too long: {report.waits}")

    def on_slow(self, name: str, turn_s: float) -> None:
        raise AssertionError(f"{name} has been in one turn for {turn_s} s")

    def on_stopping(self, limit_s: float) -> None:
        self.stops.append(limit_s)

    def on_turn(self) -> None:
        assert time.monotonic() < self.deadline_s, f"the run hangs: {self.states}, {len(self.steps)} steps"
        if self.act is not None:
            self.act(self.run)


class EchoRun:
    """One run of the echo actors."""

    def __init__(
        self,
        host: ProcessHost,
        folder: Path,
        plan: host_echo.RunPlan,
        *,
        launcher: Launcher | None = None,
        names: tuple[str, ...] = host_echo.NAMES,
        joining: tuple[str, ...] = (),
        encrypt: bool = True,
        heartbeat_timeout_s: float = 10.0,
        max_restarts: int = 10,
        resend_after_s: float = 1.0,
        stop_timeout_s: float = 10.0,
        leave_timeout_s: float = 30.0,
        shares_devices: frozenset[str] = frozenset(),
    ) -> None:
        self.folder = folder
        self.plan = plan
        self.names = names
        self._joining = joining
        self.keys: KeyPair | None = make_keys() if encrypt else None
        self.witness = Witness(self)
        self.launcher: Launcher = launcher or host.launcher(Placement())
        self._resend_after_s = resend_after_s
        self._started_unix_s = time.time()
        self.links = Links(client_keys=self.keys, wakes_on_changes=True)
        self._settings = SupervisorSettings(
            names=names,
            heartbeat_timeout_s=heartbeat_timeout_s,
            max_restarts=max_restarts,
            stop_timeout_s=stop_timeout_s,
            leave_timeout_s=leave_timeout_s,
            shares_devices=shares_devices,
            fewest_engines=1 if joining else None,
        )
        self._is_stopping = False
        self.supervisor: Supervisor | None = None

    def boot_of(self, name: str, epoch: int) -> Boot:
        return Boot(
            run_id=self.folder.name,
            run_folder=str(self.folder),
            started_unix_s=self._started_unix_s,
            name=name,
            epoch=epoch,
            names=(*self.names, *self._joining),
            supervisor=Address(SUPERVISOR, 1, self.links.endpoint, self.links.server_key),
            client_keys=self.keys,
            host="127.0.0.1",
            heartbeat_s=0.2,
            resend_after_s=self._resend_after_s,
            validate=True,
            trace_salt=b"",
            trace_fraction=1.0,
            otlp_endpoint=None,
            wiring="host_echo",
            plan=msgspec.msgpack.encode(self.plan),
        )

    def play(self, act: Callable[[EchoRun], None] | None = None) -> Outcome:
        """Run to the end. ``act`` is called several times a second, on the supervisor's thread."""
        self.witness.act = act
        with Signals() as signals:
            self.supervisor = Supervisor(
                self._settings,
                boot_of=self.boot_of,
                links=self.links,
                launcher=self.launcher,
                sink=self.witness,
                signals=signals,
            )
            try:
                return self.supervisor.run()
            finally:
                self.links.close(linger_ms=0)

    def stop(self) -> None:
        """Ask for the end as a user does, once: the second signal would hurry it."""
        if not self._is_stopping:
            self._is_stopping = True
            os.kill(os.getpid(), signal.SIGTERM)

    def want(self, *engines: str) -> None:
        """Say as the Buffer does that these are recorded."""
        assert self.supervisor is not None
        wanted, buffer = EnginesWanted(engines=engines), self.supervisor.crew[0]
        self.supervisor._engines.hear(wanted, buffer, time.monotonic())  # pyright: ignore[reportPrivateUsage]

    # --- for tests --------------------------------------------------------------------------------------------

    def incarnation(self, name: str) -> Incarnation | None:
        assert self.supervisor is not None
        return next((one for one in self.supervisor.crew if one.name == name), None)

    def process(self, name: str, epoch: int) -> ProcessStarted | None:
        """The process of this very incarnation, once it has announced itself."""
        found = self.incarnation(name)
        return found.process if found is not None and found.epoch == epoch else None

    @property
    def num_steps(self) -> int:
        return len(self.witness.steps)

    def metric(self, actor: str, name: str) -> float:
        """The last figure that this actor reported; 0 before its first report."""
        report = self.witness.reports.get(actor)
        return 0.0 if report is None else {metric.name: metric.value for metric in report.metrics}[name]

    def groups(self) -> Counter[int]:
        """How often each group was reported as a step."""
        return Counter(group_id for step in self.witness.steps for group_id in step.group_ids)


def wait_for_the_end_of(process: ProcessStarted) -> None:
    """A process that was sent SIGKILL is gone a moment later."""
    end_s = time.monotonic() + 60.0
    while is_running(process.pid, process.start_ticks):
        assert time.monotonic() < end_s, f"process {process.pid} is still there"
        time.sleep(0.01)
