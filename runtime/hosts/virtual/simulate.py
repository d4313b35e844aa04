"""``penstock simulate``: a scenario on the virtual clock, with modelled engines and learner.

The same machines as in a real run, from the same wiring. Nothing is read but the scenario, and nothing is written
unless a folder is named.
"""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
from rich.markup import escape

from penstock.backends.engines.options import engines_kept
from penstock.backends.learners.spec import is_modelled
from penstock.backends.simulated.shared_cores import SharedCores
from penstock.messages.errors import UserFault
from penstock.messages.ledger import EnginesRecorded
from penstock.messages.names import LEARNER, SCORER, is_engine
from penstock.messages.training import RunFinished
from penstock.runtime.hosts.virtual.accounting import RunAccounts
from penstock.runtime.hosts.virtual.event_digest import EventDigest
from penstock.runtime.hosts.virtual.host import HostSettings, VirtualHost
from penstock.runtime.hosts.virtual.links import LinkModel
from penstock.runtime.hosts.virtual.process import Player
from penstock.runtime.hosts.virtual.recording import RunRecording
from penstock.runtime.hosts.virtual.simulate_view import ProgressView, Result, result_table
from penstock.runtime.hosts.virtual.supervisor import SupervisionModel
from penstock.runtime.observability.disk_budget import DiskKeeper
from penstock.runtime.observability.facts import SCENARIO_FILE, command_line, facts_of
from penstock.runtime.observability.figures import RunFigures
from penstock.runtime.observability.recorder import RunRecorder
from penstock.runtime.observability.removed import all_removed
from penstock.runtime.observability.texts import duration_text
from penstock.runtime.observability.trackers import EVENTS_FILE, EventLog
from penstock.runtime.run.modelled_rows import num_evaluation_prompts, num_rows, row_sources
from penstock.runtime.run.plan import RunPlan
from penstock.runtime.run.wiring import actor_names, build_machine, hears, inbox_union, open_backend
from penstock.runtime.scenario import Scenario, dump_scenario
from penstock.runtime.scenario.disk_rules import segment_bytes
from penstock.runtime.shell.engine_scaling import scaling_of
from penstock.runtime.shell.watchdog import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from rich.console import Console

    from penstock.backends.ledger.protocol import LedgerStore
    from penstock.backends.protocol import Timers
    from penstock.messages.training import StepReported
    from penstock.runtime.hosts.virtual.host import Ending
    from penstock.runtime.hosts.virtual.process import Casting

PATIENCE_S: Final = 7 * 24 * 3600.0
"""Virtual seconds without a step after which a run counts as hanging."""
SLICE_S: Final = 600.0


def simulate_scenario(scenario: Scenario, *, seed: int, console: Console, run_folder: Path | None) -> int:
    """Run a resolved scenario to its end on the virtual clock and print what it came to.

    Args:
        scenario: with simulated engines and a simulated learner.
        seed: of lengths, latencies and delays; takes the place of ``run.seed``.
        console: where progress and result go.
        run_folder: where event log, metrics and report go; None writes nothing.

    Returns:
        The exit code: 0 when the run completed.

    Raises:
        UserFault: the number of its rows cannot be told without reading them, or the folder cannot be written.
    """
    result, ending = simulated(scenario, seed=seed, console=console, run_folder=run_folder)
    console.print(result_table(result))
    if run_folder is not None:
        for text in (*all_removed(run_folder), f"report, metrics and event log: {run_folder}"):
            console.print(escape(text), highlight=False, soft_wrap=True)
    if not ending.completed:
        console.print(f"[red]not completed:[/] {escape(ending.story)}", highlight=False, soft_wrap=True)
    return 0 if ending.completed else 1


def simulated(
    scenario: Scenario, *, seed: int, console: Console | None = None, run_folder: Path | None = None
) -> tuple[Result, Ending]:
    """What a run on the virtual clock came to, and how it ended; as :func:`simulate_scenario`, without the table. None
    for ``console`` shows no progress."""
    assert is_modelled(scenario.learner), "load_modelled was not asked"
    scenario = msgspec.structs.replace(scenario, run=msgspec.structs.replace(scenario.run, seed=seed))
    simulation = Simulation(scenario, run_folder, may_lose=False)
    began_s = time.perf_counter()
    try:
        ending = simulation.run(console)
    finally:
        simulation.abandon()
    return simulation.result(ending, time.perf_counter() - began_s), ending


class Simulation:
    """One scenario on one virtual host."""

    def __init__(
        self,
        scenario: Scenario,
        run_folder: Path | None = None,
        *,
        on_step: Callable[[StepReported], None] | None = None,
        link: LinkModel | None = None,
        with_digest: bool = True,
        may_lose: bool = True,
    ) -> None:
        """
        Args:
            scenario: with simulated engines and a simulated learner.
            run_folder: where the run's files go; None writes nothing.
            on_step: hears of every step, when the books are up to it.
            link: how messages travel; None: as on a quick network.
            with_digest: keep the digest of all events; without it :attr:`digest` is that of none.
            may_lose: somebody may kill a process or cut a link. Otherwise nothing is said twice
                (``runtime.resend_after_s``), as all of it arrives: repeats would be a quarter of the work. And nobody
                follows the Buffer, so its entries are not kept: they would be all of the memory of a long run.

        Raises:
            UserFault: the folder cannot be written, or a modelled engine has no memory for one request.
        """
        _check_memory(scenario)
        self.scenario = scenario
        runtime, scaling = scenario.runtime, scaling_of(scenario.engines)
        says_again = may_lose or scaling is not None
        settings = HostSettings(
            seed=scenario.run.seed,
            link=link or _link_of(runtime.simulated_hop_s),
            supervision=SupervisionModel(
                heartbeat_timeout_s=runtime.heartbeat_timeout_s,
                max_restarts=runtime.max_restarts,
                fewest_engines=engines_kept(scenario.engines),
            ),
            heartbeat_s=runtime.heartbeat_s,
            resend_after_s=runtime.resend_after_s if says_again else NEVER,
            scaling=scaling,
            is_brief=not may_lose,
        )
        self.digest = EventDigest()
        digest = self.digest if with_digest else None
        self.host = VirtualHost(actor_names(scenario), casting_of(scenario), settings, digest=digest)
        self._recorder, self._events, self._keeper = _open_folder(scenario, run_folder)
        progress_tokens = scenario.engines.progress_tokens
        self.figures = RunFigures(progress_tokens=progress_tokens) if self._recorder is None else self._recorder.figures
        self._view: ProgressView | None = None
        self._on_step = on_step
        self.accounts = RunAccounts(
            self.host.clock, self.figures, recorder=self._recorder, events=self._events, on_step=self._tell
        )
        self.host.watch(self.accounts, events=self._events is not None)
        self._recording: RunRecording | None = None
        if run_folder is not None and scenario.observability.record:
            plan = plan_of(scenario)
            self._recording = RunRecording(run_folder, lambda _: plan, segment_bytes=segment_bytes(scenario))
            self.host.watch(self._recording)

    def run(self, console: Console | None = None) -> Ending:
        """Go on to the end of the run."""
        with rare_collections():
            if console is None:
                return self._run()
            with ProgressView(console, self.host, self.scenario.run.num_steps) as self._view:
                return self._run()

    def _run(self) -> Ending:
        host, accounts = self.host, self.accounts
        while (ending := host.run(host.clock.now_s + SLICE_S)) is None:
            if host.clock.now_s - accounts.progress_s > PATIENCE_S:
                host.fail(f"no step for {duration_text(PATIENCE_S)} of virtual time\n{host.story()}")
            if self._view is not None:
                self._view.show()
        accounts.close()
        self._finish(ending)
        return ending

    def _tell(self, report: StepReported) -> None:
        if self._keeper is not None:
            self._keeper.look()
        if self._view is not None:
            self._view.step(report.version)
        if self._on_step is not None:
            self._on_step(report)

    def _finish(self, ending: Ending) -> None:
        if self._recorder is not None and self._events is not None:
            self._events.close()
            self._recorder.finish(self.last_word(ending), ending.at_s)

    def abandon(self) -> None:
        """Close the files as they are; after a run that ended it does nothing."""
        if self._recorder is not None and self._events is not None:
            self._recorder.abandon()
        if self._recording is not None:
            self._recording.close()

    def last_word(self, ending: Ending) -> RunFinished:
        """What the Buffer said at the end, or what is known without it."""
        if ending.finished is not None:
            return ending.finished
        figures = self.figures
        return RunFinished(
            completed=False,
            story=ending.story,
            version=figures.version,
            max_staleness=figures.max_staleness,
            balance=figures.balance,
        )

    def result(self, ending: Ending, took_s: float) -> Result:
        """What the run came to."""
        figures, accounts, finished = self.figures, self.accounts, self.last_word(ending)
        times = accounts.step_times
        num_gaps = len(times) - 1
        return Result(
            scenario=self.scenario.run.name,
            completed=ending.completed,
            digest=self.digest.digest,
            num_events=self.host.num_events,
            took_s=took_s,
            virtual_s=ending.at_s,
            num_steps=len(times),
            step_s=(times[-1] - times[0]) / num_gaps if num_gaps > 0 else None,
            engines=accounts.shares_of(is_engine),
            learner=accounts.shares_of(LEARNER.__eq__),
            scorer=accounts.shares_of(SCORER.__eq__),
            mean_staleness=figures.mean_staleness,
            max_staleness=finished.max_staleness,
            bound=self.scenario.staleness.max_staleness or 0,
            balance=finished.balance,
            tokens_lost_estimate=figures.lost_tokens,
            num_restarts=self.host.supervisor.num_restarts,
            scalings=tuple(each for each in self.host.ledger.entries if isinstance(each, EnginesRecorded)),
        )


def _link_of(hop_s: float | None) -> LinkModel:
    return LinkModel() if hop_s is None else LinkModel(min_delay_s=0.75 * hop_s, max_delay_s=1.25 * hop_s)


@contextmanager
def rare_collections() -> Generator[None]:
    """Messages cannot contain themselves, so the collector finds nothing; looking for it costs a third of the time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def plan_of(scenario: Scenario) -> RunPlan:
    """What the actors of a simulated run know about it."""
    return RunPlan(
        scenario=scenario,
        run_id="simulated",
        run_folder="",
        model_folder="",
        num_rows=num_rows(scenario),
        sources=row_sources(scenario),
        num_evaluation_prompts=num_evaluation_prompts(scenario),
    )


def casting_of(scenario: Scenario) -> Casting:
    """Who plays whom: the machines and the simulated backends of the wiring."""
    plan = plan_of(scenario)
    num_cores = scenario.runtime.simulated_cores
    shared = None if num_cores is None else SharedCores(num_cores)

    def cast(name: str, epoch: int, timers: Timers, store: LedgerStore | None) -> Player:
        if shared is not None and (is_engine(name) or name == LEARNER):
            learner, engine = scenario.learner.simulated, scenario.engines.simulated
            cores, cold_cost = (learner.cores, 0.0) if name == LEARNER else (engine.cores, engine.cold_cost)
            timers = shared.timers_of(name, timers, cores, cold_cost)
        return Player(
            machine=build_machine(name, plan, epoch=epoch, records=() if store is None else store.entries()),
            hears=hears(name),
            inbox=inbox_union(name),
            backend=open_backend(name, plan, epoch=epoch, timers=timers, store=store),
        )

    return cast


def _check_memory(scenario: Scenario) -> None:
    limit, prompt = scenario.engines.simulated.kv_tokens, scenario.engines.simulated.prompt_tokens
    if limit is not None and limit <= prompt:
        raise UserFault(
            f"engines.simulated.kv_tokens: {limit:,} tokens do not hold one request, whose prompt has {prompt:,} "
            "(engines.simulated.prompt_tokens); give more, or null for as many as slots allow"
        )


def _open_folder(
    scenario: Scenario, folder: Path | None
) -> tuple[RunRecorder | None, EventLog | None, DiskKeeper | None]:
    if folder is None:
        return None, None, None
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UserFault(f"{folder}: not empty; name a folder that is, or one that is not there yet")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SCENARIO_FILE).write_text(dump_scenario(scenario), encoding="utf-8")
        size = segment_bytes(scenario)
        recorder = RunRecorder(folder, facts_of(scenario, command=command_line()), segment_bytes=size)
        recorder.training.everyone_is_up(0.0)
        keeper = DiskKeeper(folder, scenario.observability.max_disk_gb)
        return recorder, EventLog(folder / EVENTS_FILE, segment_bytes=size), keeper
    except OSError as error:
        raise UserFault(f"{folder}: cannot be written: {(error.strerror or str(error)).lower()}") from error
