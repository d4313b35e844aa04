"""One run from the driver's side: prepare, start the host, supervise, end, sum up.

Invariants:

* Whatever goes wrong, the host and every process of the run are ended before this returns or raises.
* Every report is written to the run's folder before it is shown.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.engines.options import engines_kept
from penstock.backends.processes.curve import make_keys
from penstock.backends.processes.temp_folders import remove_folder
from penstock.messages.names import SUPERVISOR, is_engine
from penstock.messages.training import RunFinished
from penstock.runtime.hosts.driver.open_host import open_host
from penstock.runtime.hosts.processes.announcer import SUPERVISOR_EPOCH
from penstock.runtime.hosts.processes.boot import Boot
from penstock.runtime.hosts.processes.control import Address
from penstock.runtime.hosts.processes.descendants import kill_descendants
from penstock.runtime.hosts.processes.links import Links
from penstock.runtime.hosts.processes.loop import RunClock
from penstock.runtime.hosts.processes.operator_door import OperatorDoor
from penstock.runtime.hosts.processes.ports import FIRST_EPOCH, Outcome, OutcomeKind, SupervisorSettings
from penstock.runtime.hosts.processes.signals import Signals
from penstock.runtime.hosts.processes.supervisor import Supervisor
from penstock.runtime.observability.disk_budget import DiskKeeper
from penstock.runtime.observability.facts import facts_of, steps_to_train
from penstock.runtime.observability.nvml import start_gpu_sampler
from penstock.runtime.observability.traces import open_traces
from penstock.runtime.observability.tracking import Trackers
from penstock.runtime.observability.wait_graph import WaitBoard
from penstock.runtime.run.placement import place, sharing_devices
from penstock.runtime.safe_text import terminal_lines
from penstock.runtime.scenario.disk_rules import segment_bytes
from penstock.runtime.scenario.evaluation_rules import sets_of
from penstock.runtime.shell.engine_scaling import scaling_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.evaluation import EvaluationFinished
    from penstock.messages.training import ActorReported, FailuresCounted, StepReported
    from penstock.messages.waits import WaitsReported
    from penstock.runtime.hosts.processes.job import DriverJob
    from penstock.runtime.hosts.processes.ports import ProcessHost
    from penstock.runtime.observability.live import LiveView
    from penstock.runtime.observability.metrics import RunMetrics
    from penstock.runtime.observability.recorder import RunRecorder
    from penstock.runtime.run.placement import Placement

STDIN: Final = 0
GPU_CLOSE_S: Final = 0.5
LEFTOVERS_S: Final = 2.0
SAMPLE_EVERY_S: Final = 60.0

_log: Final = logging.getLogger(__name__)


class Session:
    """One run. Implements ``penstock.runtime.hosts.processes.ports.RunSink``."""

    def __init__(self, job: DriverJob, view: LiveView, *, on_ready: Callable[[], None]) -> None:
        self._job = job
        self._view = view
        self._on_ready = on_ready
        self._started_unix_s = time.time() if job.started_unix_s is None else job.started_unix_s
        self._clock = RunClock(self._started_unix_s)
        self._folder = Path(job.run_folder)
        self._up: set[str] = set()
        self._waits = WaitBoard()
        self._names = job.names or _names_of(job)
        self._present = set(self._names)
        """Actors of the run, which engines may join and leave."""
        self._keeper = DiskKeeper(self._folder, job.scenario.observability.max_disk_gb)
        shows = job.scenario.observability.show_samples
        self._next_sample_s = SAMPLE_EVERY_S if shows else math.inf

    def run(self) -> Outcome:
        """From the start to the end.

        Raises:
            UserFault: something that the user gave cannot be used.
        """
        with self._open_trackers() as trackers:
            outcome = self._run(trackers)
            if outcome.kind is not OutcomeKind.ABANDONED:
                self._finish(outcome)
        return outcome

    def _open_trackers(self) -> Trackers:
        scenario = self._job.scenario
        return Trackers(
            self._folder,
            scenario.observability.trackers,
            pass_env=scenario.runtime.pass_env,
            evaluation_log=scenario.evaluation.log_function,
            resumes=self._job.first_epoch > FIRST_EPOCH,
        )

    def _run(self, trackers: Trackers) -> Outcome:
        job, scenario = self._job, self._job.scenario
        with ExitStack() as stack:
            stack.callback(remove_folder, Path(job.temp_folder))
            stack.callback(kill_descendants, timeout_s=LEFTOVERS_S, spare=trackers.pids)
            self._keeper.start()
            stack.callback(self._keeper.close)
            host = open_host(scenario, Path(job.temp_folder), job.wiring, spare=trackers.pids)
            stack.callback(host.stop)
            preparation = host.prepare(job) if job.plan is None else None
            self._recorder = self._open_recorder(stack, trackers)
            self._view.phase(host.phase)
            host.start()
            placement = place(scenario, host.nodes(), at_start=True)
            plan = job.plan
            if preparation is not None:
                prepared = preparation.finish(self._view.phase)
                for text in prepared.notices:
                    self.on_notice("data", text)
                for text in prepared.engine_notices:
                    self.on_notice("engines", text, is_warning=True)
                if scenario.run.only == "evaluate":
                    counts = zip(prepared.num_evaluation_prompts, sets_of(scenario), strict=True)
                    self._view.expect_answers(sum(count * each.samples_per_prompt for count, each in counts))
                plan = msgspec.msgpack.encode(prepared)
            assert plan is not None
            # Until here SIGTERM raises SystemExit, as Ray has it; from here to the end of the process a signal is
            # something that the supervisor reads.
            signals = Signals()
            signals.install()
            return self._supervise(host, placement, signals, plan)

    def _open_recorder(self, stack: ExitStack, trackers: Trackers) -> RunRecorder:
        from penstock.runtime.observability.recorder import RunRecorder  # brings the report, while the host starts

        scenario = self._job.scenario
        metrics = None if scenario.observability.metrics_port is None else self._serve_metrics(stack)
        sampler = start_gpu_sampler(self._folder, now_s=self._clock.now_s)
        if sampler is not None:
            stack.callback(sampler.close, GPU_CLOSE_S)
        started_at = datetime.fromtimestamp(self._started_unix_s, UTC).astimezone()
        return RunRecorder(
            self._folder,
            facts_of(scenario, command=self._job.command),
            view=self._view,
            metrics=metrics,
            trackers=trackers,
            started_at=started_at,
            resumes=self._job.first_epoch > FIRST_EPOCH,
            segment_bytes=segment_bytes(scenario),
            own_cpu_s=time.process_time,
        )

    def _serve_metrics(self, stack: ExitStack) -> RunMetrics:
        from penstock.backends.processes.http_server import is_loopback  # brings aiohttp
        from penstock.runtime.observability.metrics import RunMetrics
        from penstock.runtime.observability.metrics_server import TOKEN_FILE, serve_metrics, write_token

        scenario = self._job.scenario
        host, port = scenario.observability.metrics_host, scenario.observability.metrics_port
        assert port is not None, "asked for with a port only"
        metrics = RunMetrics(
            scenario=scenario.run.name, policy=scenario.staleness.policy, num_steps=steps_to_train(scenario)
        )
        token = None if is_loopback(host) else write_token(self._folder)
        server = serve_metrics(port, metrics.registry, host=host, token=token)
        stack.callback(server.close)
        with_token = "" if token is None else f", with the token in {self._folder / TOKEN_FILE}"
        self._view.note(f"metrics: http://{host}:{server.port}/metrics{with_token}")
        return metrics

    # --- the run ----------------------------------------------------------------------------------------------

    def _supervise(self, host: ProcessHost, placement: Placement, signals: Signals, plan: bytes) -> Outcome:
        job, runtime = self._job, self._job.scenario.runtime
        links = Links(client_keys=make_keys() if runtime.encrypt else None, host=host.node_host, wakes_on_changes=True)
        door = self._open_door(links)
        launcher = host.launcher(placement)
        settings = SupervisorSettings(
            names=self._names,
            heartbeat_timeout_s=runtime.heartbeat_timeout_s,
            max_restarts=runtime.max_restarts,
            first_epoch=job.first_epoch,
            shares_devices=sharing_devices(job.scenario),
            leave_timeout_s=job.scenario.engines.leave_timeout_s,
            gpu_timeout_s=job.scenario.engines.gpu_timeout_s or 0.0,  # null: all is reserved, nobody waits
            fewest_engines=engines_kept(job.scenario.engines),
            scaling=scaling_of(job.scenario.engines),
            stop_timeout_s=runtime.stop_timeout_s,
        )
        supervisor = Supervisor(
            settings,
            boot_of=self._boots(links, host, plan),
            links=links,
            launcher=launcher,
            sink=self,
            signals=signals,
            lifeline=STDIN,
            door=door,
        )
        self._on_ready()
        self._tell_start()
        try:
            return supervisor.run()
        finally:
            if door is not None:
                door.close()
            links.close(linger_ms=0)

    def _open_door(self, links: Links) -> OperatorDoor | None:
        try:
            return OperatorDoor(self._folder, links.poller)
        except OSError as error:
            self.on_notice(SUPERVISOR, f"it can be told nothing while it goes on, as it cannot listen: {error}")
            return None

    def _boots(self, links: Links, host: ProcessHost, plan: bytes) -> Callable[[str, int], Boot]:
        job, runtime, observability = self._job, self._job.scenario.runtime, self._job.scenario.observability
        common = Boot(
            run_id=job.run_id,
            run_folder=job.run_folder,
            started_unix_s=self._started_unix_s,
            name="",
            epoch=0,
            names=job.names or _possible_names_of(job),
            supervisor=Address(SUPERVISOR, SUPERVISOR_EPOCH, links.endpoint, links.server_key),
            client_keys=links.client_keys,
            host="127.0.0.1" if host.is_embedded else None,
            heartbeat_s=runtime.heartbeat_s,
            resend_after_s=runtime.resend_after_s,
            overdue_after_s=runtime.overdue_after_s,
            validate=False,
            trace_salt=open_traces(self._folder) if observability.tracing else b"",
            trace_fraction=observability.trace_fraction,
            otlp_endpoint=observability.otlp_endpoint,
            segment_bytes=segment_bytes(job.scenario),
            records=observability.record,
            wiring=job.wiring,
            plan=plan,
        )
        engines = job.scenario.engines

        def boot_of(name: str, epoch: int) -> Boot:
            boot = msgspec.structs.replace(common, name=name, epoch=epoch)
            if not is_engine(name):
                return boot
            file, url = engines.notice_file, engines.notice_url
            return msgspec.structs.replace(boot, notice_s=engines.notice_s, notice_file=file, notice_url=url)

        return boot_of

    def _tell_disk(self) -> None:
        for text in self._keeper.take_news():
            self.on_notice("run folder", text)

    def _finish(self, outcome: Outcome) -> None:
        self._tell_disk()
        finished = outcome.finished or self._last_word()
        self._recorder.finish(
            msgspec.structs.replace(finished, completed=outcome.kind is OutcomeKind.COMPLETED, story=outcome.story),
            self._clock.now_s(),
        )

    def _last_word(self) -> RunFinished:
        """What the last step said, for a Buffer that can say nothing any more."""
        figures = self._recorder.figures
        return RunFinished(
            completed=False,
            story="",
            version=figures.version,
            max_staleness=figures.max_staleness,
            balance=figures.balance,
        )

    # --- what the supervisor tells ----------------------------------------------------------------------------

    def on_step(self, report: StepReported) -> None:
        """See :class:`~penstock.runtime.hosts.processes.ports.RunSink`, as for the other methods."""
        self._recorder.step(report, self._clock.now_s())

    def on_evaluation(self, finished: EvaluationFinished) -> None:
        self._recorder.evaluated(finished, self._clock.now_s())

    def on_report(self, report: ActorReported) -> None:
        self._recorder.actor(report, self._clock.now_s())

    def on_actor(self, name: str, epoch: int, state: str) -> None:
        _log.info("%s %d: %s", name, epoch, state)
        if state in ("lost", "ended", "left"):
            self._waits.forget(name)
        if state in ("starting", "left") and name not in self._present:  # one may leave that never got its GPUs
            self._present.add(name)
            self._recorder.joins(name, self._clock.now_s())
        if state == "left":
            self._names = tuple(each for each in self._names if each != name)
            self._present.discard(name)
            self._recorder.leaves(name, self._clock.now_s())
        elif state == "up" and len(self._up) < len(self._names) and name in self._names:
            self._up.add(name)
            self._tell_start()

    def _tell_start(self) -> None:
        if len(self._up) < len(self._names):
            self._view.phase(f"starting the actors: {len(self._up)} of {len(self._names)}")
        else:
            self._recorder.training.everyone_is_up(self._clock.now_s())
            self._view.follow()

    def on_notice(self, name: str, text: str, *, is_warning: bool = False) -> None:
        _log.log(logging.WARNING if is_warning else logging.INFO, "%s: %s", name, terminal_lines(text))
        if is_warning:
            self._recorder.warn(f"{name}: {text}")
        self._view.note(f"{name}: {text}")

    def on_failures(self, counted: FailuresCounted) -> None:
        self._recorder.failures(counted)

    def on_lost(self, name: str, cause: str) -> None:
        self._recorder.lost(name, f"{name} was lost: {cause}")

    def on_waits(self, report: WaitsReported) -> None:
        self._waits.hear(report, self._clock.now_s())
        self._recorder.waits(report)

    def on_slow(self, name: str, turn_s: float) -> None:
        self._view.note(f"{name} has been busy with one thing for {turn_s:.0f} s; its log shows with what")

    def on_stopping(self, limit_s: float) -> None:
        self._view.note(f"a checkpoint is written first, which may take {limit_s:g} s; a second signal ends at once")

    def on_turn(self) -> None:
        """On a terminal the view draws by itself; who waits for whom is told here, when there is news of it."""
        self._view.tick()
        self._tell_disk()
        if self._clock.now_s() >= self._next_sample_s:
            self._next_sample_s = self._clock.now_s() + SAMPLE_EVERY_S
            self._recorder.show_sample()
        graph = self._waits.take(self._clock.now_s())
        if graph:
            _log.warning("waits that last too long:\n%s", graph)
            self._view.note(f"waits that last too long:\n{graph}")


def _possible_names_of(job: DriverJob) -> tuple[str, ...]:
    from penstock.runtime.run.wiring import possible_actors

    return possible_actors(job.scenario)


def _names_of(job: DriverJob) -> tuple[str, ...]:
    from penstock.runtime.run.wiring import actor_names

    return actor_names(job.scenario)
