"""Calibration closes the loop: what is played with known models is fitted, and gives these models back."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import yaml
from msgspec.structs import replace
from typer.testing import CliRunner

from penstock import api
from penstock.backends.engines.decode_passes import (
    DISTURBED,
    READING,
    READING_DISTURBED,
    DecodePasses,
    added_up,
    bands_in,
)
from penstock.backends.engines.options import EpisodeModelOptions
from penstock.backends.simulated.decode_clock import DecodeClock
from penstock.backends.simulated.lengths import planned
from penstock.messages.commands import ApplyWeights, FetchWeights, Generate, PublishWeights, SaveCheckpoint, Train
from penstock.messages.errors import UserFault
from penstock.messages.flow import SampleGenerated, SampleScored
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    EpisodeMoved,
    GenerationEnded,
    WeightsPublished,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.names import LEARNER, SCORER, Role, is_engine
from penstock.messages.samples import SampleKey
from penstock.messages.training import Activity
from penstock.runtime.cli.app import app
from penstock.runtime.hosts.virtual.host import IdleWatcher
from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.launch.runs import close_record, open_record
from penstock.runtime.observability.facts import Start, facts_of
from penstock.runtime.observability.trackers import ActivityRow, read_activity
from penstock.runtime.prediction import checking
from penstock.runtime.prediction.calibrate import calibrate
from penstock.runtime.prediction.cores_fit import BUSY
from penstock.runtime.prediction.fitting import Course, fit_line
from penstock.runtime.prediction.forecast import Forecast, forecast, play
from penstock.runtime.prediction.learner_fit import fit_steps, loads_of
from penstock.runtime.prediction.lengths_fit import correlation_of
from penstock.runtime.prediction.models import Models, read_models, write_models
from penstock.runtime.prediction.passes_fit import slowed
from penstock.runtime.prediction.prompts_fit import RereadFit, fit_reread
from penstock.runtime.prediction.recorded import (
    CoresUsed,
    Episode,
    Generation,
    Hop,
    Recording,
    SampleSeen,
    Turn,
    Work,
    generations_of,
    read_recording,
)
from penstock.runtime.scenario.load import dump_scenario
from penstock.runtime.scenario.modelled import load_modelled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.clock import VirtualClock
    from penstock.runtime.hosts.virtual.process import Process
    from penstock.runtime.scenario import Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"
PROMPT_TOKENS = 40
TRUTH = (
    "engines.count=2",
    "engines.slots=12",
    "engines.simulated.response_tokens_median=60",
    "engines.simulated.response_tokens_sigma=0.7",
    "engines.simulated.response_tokens_correlation=0.5",
    f"engines.simulated.prompt_tokens={PROMPT_TOKENS}",
    "engines.simulated.prefill_s=0.08",
    "engines.simulated.prefill_token_s=0.0005",
    "engines.simulated.token_s=0.01",
    "engines.simulated.token_load_s=0.0008",
    "engines.simulated.context_token_s=0.00001",
    "engines.simulated.apply_weights_s=0.3",
    "engines.simulated.fetch_weights_s=0.2",
    "learner.simulated.step_s=1.0",
    "learner.simulated.token_s=0.0004",
    "learner.simulated.publish_s=0.25",
    "learner.simulated.size_bytes=1000",
    "learner.simulated.checkpoint_s=0.9",
    "reward.num_workers=64",
    "reward.simulated.num_workers=64",
    "reward.simulated.latency_s=0.05",
    "reward.simulated.latency_sigma=0.4",
    "reward.simulated.constant_rate=0.2",
    "reward.simulated.success_rate=0.4",
    "filter.drop_zero_spread=false",
    "sampling.max_response_tokens=400",
    "sampling.samples_per_group=6",
    "learner.groups_per_batch=6",
    "run.num_steps=24",
)
SHAPE = tuple(key for key in TRUTH if ".simulated." not in key)


AGES = {"sync": 0, "one_step_off": 1, "fully_async": 2}


def truth(policy: str = "sync", *overrides: str, known: tuple[str, ...] = TRUTH) -> Scenario:
    rules = (f"staleness.policy={policy}", f"staleness.max_staleness={AGES[policy]}")
    return load_modelled(SCENARIOS / "fully_async.yaml", [*known, *rules, *overrides])[0]


@cache
def forecast_of_truth(policy: str, known: tuple[str, ...] = TRUTH, num_seeds: int = 2) -> Forecast:
    """As ``forecast``, once for all tests."""
    return forecast(truth(policy, known=known), range(num_seeds))


class Played(IdleWatcher):
    """Watches a simulation as traces do; implements :class:`penstock.runtime.hosts.virtual.host.Watcher`."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.generations: list[tuple[str, float, float, SampleKey, GenerationEnded]] = []
        self.work: dict[str, list[Work]] = {}
        self.scores: dict[SampleKey, float] = {}
        self.rewards: dict[SampleKey, float] = {}
        self.ends_s: dict[SampleKey, float] = {}
        self.hops_s: dict[SampleKey, float] = {}
        self.moves: dict[SampleKey, list[float]] = {}
        """When its episode went to its tools and came back, in turns."""
        self.plans: dict[SampleKey, tuple[int, ...]] = {}
        """Tokens at the end of each turn."""
        self.versions: dict[int, int] = {}
        """Of groups: whose training they were in."""
        self._running: dict[SampleKey, float] = {}
        self._open: dict[tuple[str, str, int], tuple[float, float]] = {}
        self._scenario = scenario
        simulation = Simulation(scenario, folder / "run")
        self._clock = TimedClock.timed = simulation.host.clock
        simulation.host.watch(self)
        assert simulation.run().completed
        simulation.abandon()
        worked_s = simulation.accounts.shares_of(SCORER.__eq__).occupied_s
        self._scorer = ActivityRow(actor=SCORER, epoch=0, activity=Activity.WORKING, start_s=0.0, end_s=worked_s)
        self.recording = self._recorded(folder)

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        now_s, name = self._clock.now_s, process.name
        if isinstance(event, GenerationEnded) and is_engine(name):
            self.ends_s[event.key] = now_s
            self.generations.append((name, self._running.pop(event.key), now_s, event.key, event))
        elif isinstance(event, EpisodeMoved):
            self.moves.setdefault(event.key, []).append(now_s)
        elif isinstance(event, SampleGenerated) and name == SCORER:
            self.scores[event.sample.key] = -now_s
            self.hops_s[event.sample.key] = now_s - self.ends_s[event.sample.key]
        for done, span in (
            (BatchTrained, "step"),
            (WeightsPublished, "publish"),
            (WeightsStagedLocally, "fetch_weights"),
            (WeightsSwapped, "apply_weights"),
            (CheckpointWritten, "checkpoint"),
        ):
            if isinstance(event, done):
                version = event.manifest.version if isinstance(event, WeightsPublished) else event.version
                began_s, size = self._open.pop((name, span, version))
                self.work.setdefault(span, []).append(Work(name, version, began_s, now_s, size))
        for command in commands:
            self._begun(name, command, now_s)

    def _begun(self, name: str, command: AnyCommand, now_s: float) -> None:
        match command:
            case Generate():
                self._running[command.key] = now_s
                engines, most_tokens = self._scenario.engines, self._scenario.sampling.max_response_tokens
                plan = planned(engines.simulated, most_tokens, command, run_seed=self._scenario.run.seed)
                self.plans[command.key] = plan.ends
            case Train():
                size = sum(group.num_tokens for group in command.groups)
                self._open[name, "step", command.version] = now_s, size
                for group in command.groups:
                    self.versions[group.group_id] = command.version
                    self.rewards.update({sample.key: sample.reward or 0.0 for sample in group.samples})
            case PublishWeights():
                self._open[name, "publish", command.version] = now_s, 1000
            case SaveCheckpoint():
                self._open[name, "checkpoint", command.version] = now_s, 0
            case FetchWeights():
                self._open[name, "fetch_weights", command.manifest.version] = now_s, 0
            case ApplyWeights():
                self._open[name, "apply_weights", command.manifest.version] = now_s, 0
            case _:
                event = getattr(command, "event", None)
                if isinstance(event, SampleScored) and self.scores[event.sample.key] < 0:
                    self.scores[event.sample.key] += now_s

    def _recorded(self, folder: Path) -> Recording:
        seen: dict[SampleKey, SampleSeen] = {}
        read: set[tuple[str, int]] = set()
        rows: list[Generation] = []
        episodes: list[Episode] = []
        for engine, start_s, end_s, key, ended in sorted(self.generations, key=lambda each: each[1]):
            is_read = (engine, key.group_id) in read
            read.add((engine, key.group_id))
            again = round(self._scenario.engines.simulated.prompt_reread_tokens)
            cached = PROMPT_TOKENS - again if is_read else 0
            made, outcome = ended.part.num_tokens, str(ended.outcome.__struct_config__.tag)
            version = self.versions.get(key.group_id)
            seen[key] = sample = SampleSeen(
                key.group_id, key.index, made, self.rewards.get(key), "trained", version, PROMPT_TOKENS, cached, outcome
            )
            if self._scenario.engines.simulated.episode is None:
                rows.append(Generation(engine, start_s, end_s, made, True, outcome, sample))
                continue
            episodes.append(self._episode(engine, start_s, end_s, sample))
            seen[key] = episodes[-1].sample or sample
            rows += generations_of(episodes[-1], 0.0)
        return Recording(
            folder=folder,
            start=Start(at="2026-01-01T00:00:00+00:00", facts=facts_of(self._scenario, command="penstock run")),
            scenario=self._scenario,
            num_steps=self._scenario.run.num_steps,
            steady=None,
            offset_s=0.0,
            trace_fraction=1.0,
            samples=list(seen.values()),
            generations=rows,
            scores_s=[took_s for took_s in self.scores.values() if took_s > 0],
            num_scored=len(self.scores),
            work=self.work,
            activity={SCORER: [self._scorer], **self._lanes(folder)},
            hops=[Hop(hop_s, key.group_id % 2 == 0) for key, hop_s in self.hops_s.items()],
            episodes=episodes,
            cores_used=self._cores_used(folder),
        )

    def _episode(self, engine: str, start_s: float, end_s: float, sample: SampleSeen) -> Episode:
        """What the traces tell of it, and the ledger of what was read."""
        model = self._scenario.engines.simulated.episode
        assert model is not None
        key = SampleKey(sample.group_id, sample.number)
        *moves, last_s = self.moves[key]  # it comes back to end
        edges = [start_s, *moves]
        turns: list[Turn] = []
        read, again, made = 0, 0, 0
        for place, end in enumerate(self.plans[key]):
            begin = made + (model.reply_tokens if turns else 0)
            context = PROMPT_TOKENS + begin
            turns.append(Turn(edges[2 * place], edges[2 * place + 1], 0, context, end - begin, True))
            again += round(model.reread_share * (PROMPT_TOKENS + made)) + model.reply_tokens if place else 0
            read, made = read + context, end
        assert last_s == end_s
        unread = again + PROMPT_TOKENS - (sample.num_cached or 0)
        return Episode(engine, turns, end_s, True, sample._replace(num_read=read, num_cached=read - unread))

    def _lanes(self, folder: Path) -> dict[str, list[ActivityRow]]:
        """Of engines and learner, where they share cores; nothing else is read from them."""
        shares = self._scenario.runtime.simulated_cores is not None
        lanes = read_activity(folder / "run") if shares else {}
        return {name: list(rows) for name, rows in lanes.items() if is_engine(name) or name == LEARNER}

    def _cores_used(self, folder: Path) -> list[CoresUsed]:
        """What the kernel would say at the two ends: who works has a thread for each core that it wants."""
        engines, learner, end_s = 0.0, 0.0, 0.0
        for name, rows in self._lanes(folder).items():
            busy_s = sum(row.end_s - row.start_s for row in rows if row.activity in BUSY)
            engines += 0.0 if name == LEARNER else busy_s * self._scenario.engines.simulated.cores
            learner += busy_s * self._scenario.learner.simulated.cores if name == LEARNER else 0.0
            end_s = max(end_s, rows[-1].end_s)
        roles: tuple[str, str] = Role.ENGINE_WORKER.value, Role.LEARNER.value
        half: dict[str, float] = dict(zip(roles, (engines / 2, learner / 2), strict=True))
        return [CoresUsed(0.0, dict.fromkeys(roles, 0.0), {}), CoresUsed(end_s, half, half)] if end_s else []


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return Played(truth(), tmp_path_factory.mktemp("recorded")).recording


@pytest.fixture(scope="module")
def models(recording: Recording) -> Models:
    return calibrate([recording])


def full_pass_s(models: Models) -> float:
    """At full slots: coefficients of what went together are not told apart well, and their sum is."""
    engines = models.engines
    return engines.token_s + 11 * engines.token_load_s + 1000 * engines.context_token_s


def test_what_was_played_is_fitted_and_gives_its_models_back(models: Models) -> None:
    engines, learner, reward = models.engines, models.learner, models.reward
    assert full_pass_s(models) == pytest.approx(0.01 + 11 * 0.0008 + 1000 * 0.00001, rel=0.08)
    assert (engines.apply_weights_s, engines.fetch_weights_s) == pytest.approx((0.3, 0.2), rel=0.01)
    assert engines.prompt_tokens == PROMPT_TOKENS
    assert engines.response_tokens_correlation == pytest.approx(0.5, abs=0.12)
    assert learner.step_s == pytest.approx(1.0, rel=0.02)
    assert learner.token_s == pytest.approx(0.0004, rel=0.02)
    assert (learner.publish_s, learner.checkpoint_s) == pytest.approx((0.25, 0.9), rel=0.01)
    assert reward.latency_s == pytest.approx(0.05, rel=0.1)
    assert reward.latency_sigma == pytest.approx(0.4, rel=0.15)
    assert reward.success_rate == pytest.approx(0.4, abs=0.08)
    assert reward.constant_rate == pytest.approx(0.2, abs=0.1)
    decode = next(fit for fit in models.fits if fit.what.startswith("decode"))
    assert decode.error is not None
    assert decode.error < 0.05


@pytest.mark.parametrize(("told_s", "fitted"), [(None, (0.0, 0.9)), (0.3, (0.3, 0.6)), (5.0, (0.9, 0.0))])
def test_of_a_checkpoint_steps_wait_for_the_copy_alone(
    recording: Recording, told_s: float | None, fitted: tuple[float, float]
) -> None:
    learner = calibrate([recording._replace(snapshot_s=told_s)]).learner
    assert (learner.snapshot_s, learner.checkpoint_s) == pytest.approx(fitted, rel=0.01)


@pytest.mark.parametrize("policy", list(AGES))
def test_fitted_models_predict_policies_that_they_have_not_seen(models: Models, policy: str) -> None:
    real = forecast_of_truth(policy)
    predicted = forecast(models.applied(truth(policy, known=SHAPE)), range(2))  # nothing of the truth is in it
    assert predicted.step_s.mean == pytest.approx(real.step_s.mean, rel=0.1)
    for measured, told in ((real.engines, predicted.engines), (real.learner, predicted.learner)):
        assert told["working"].mean == pytest.approx(measured["working"].mean, abs=0.06)
    assert sum(share.mean for share in predicted.engines.values()) == pytest.approx(1.0)
    assert sum(predicted.ages) == pytest.approx(1.0)


SHARED = (
    *TRUTH,
    "engines.simulated.cores=1.0",
    "learner.simulated.cores=1.5",
    "learner.simulated.step_s=3.0",
    "runtime.simulated_cores=2",
)
"""Two engines and a learner on two cores."""


def error_elsewhere(models: Models, policy: str, known: tuple[str, ...] = SHARED) -> tuple[float, float]:
    """(Predicted − real) ÷ real of the time of a step under another policy; and the busy shares' larger difference."""
    real = forecast_of_truth(policy, known)
    predicted = forecast(models.applied(truth(policy, known=SHAPE)), range(2))
    pairs = ((real.engines, predicted.engines), (real.learner, predicted.learner))
    busy = max(abs(told["working"].mean - was["working"].mean) for was, told in pairs)
    return predicted.step_s.mean / real.step_s.mean - 1, busy


def on_two_cores(recording: Recording) -> Recording:
    machine = replace(recording.start.facts.machine, num_cpus=2)
    return recording._replace(start=replace(recording.start, facts=replace(recording.start.facts, machine=machine)))


@pytest.mark.parametrize("fitted_on", ["sync", "fully_async"])
def test_engines_and_learner_on_the_same_cores_are_predicted_under_another_overlap(
    fitted_on: str, tmp_path: Path
) -> None:
    elsewhere = "fully_async" if fitted_on == "sync" else "sync"
    recording = on_two_cores(Played(truth(fitted_on, known=SHARED), tmp_path).recording)
    found = calibrate([recording])
    assert (found.engines.cores, found.learner.cores) == pytest.approx((1.0, 1.5), rel=0.02)
    assert found.cores == 2
    assert found.learner.step_s == pytest.approx(3.0, rel=0.03), "as it would take alone"
    assert found.learner.checkpoint_s == pytest.approx(0.9, rel=0.01), "whoever else wants the cores"
    error, busy = error_elsewhere(found, elsewhere)
    assert abs(error) < 0.05
    assert busy < 0.05
    assert any(text.startswith("cores: threads of engines and learner waited") for text in found.unknown), "half of it"
    first, last = recording.cores_used
    quiet = last._replace(cpu_s={role: 2 * cpu_s for role, cpu_s in last.cpu_s.items()}, wait_s={})
    alone = calibrate([recording._replace(cores_used=[first, quiet])])
    assert (alone.engines.cores, alone.learner.cores) == (found.engines.cores, found.learner.cores)
    assert not any(text.startswith("cores: ") for text in alone.unknown)
    light = quiet._replace(cpu_s={**quiet.cpu_s, "filter": 0.2 * quiet.cpu_s[Role.ENGINE_WORKER.value]})
    others = calibrate([recording._replace(cores_used=[first, light])]).engines.cores - found.engines.cores
    assert 0.2 <= others < 0.45, "as much as it took, over time that went the slower the more overlapped"
    untold = calibrate([recording._replace(cores_used=[])])
    assert any(text.startswith("engines.cores, learner.cores: the CPU time") for text in untold.unknown)
    assert untold.cores is None
    assert abs(error_elsewhere(untold, elsewhere)[0]) > 0.1, "sharing decides here"


TAILS = (
    *TRUTH,
    "engines.count=1",
    "engines.slots=32",
    "engines.simulated.response_tokens_median=12",
    "engines.simulated.response_tokens_sigma=1.2",
    "engines.simulated.response_tokens_correlation=0.0",
    "engines.simulated.prefill_s=0.02",
    "engines.simulated.token_load_s=0.0004",
    "engines.simulated.context_token_s=0",
    "learner.simulated.token_s=0.0001",
    "sampling.samples_per_group=8",
    "learner.groups_per_batch=8",
)
"""Short responses with a long one now and then, on an engine that is full until a batch ends: a token beside 31 others
takes more than twice as long as alone."""


class TimedClock(DecodeClock):
    """Times its passes as an engine does: where cores are short, of each four two wait for one and find cold caches."""

    passes: ClassVar[DecodePasses]
    timed: ClassVar[VirtualClock | None]
    """That of the host, which says how much slower it went."""
    cold_cost: ClassVar[float]
    last_s = unread_tokens = unread_s = 0.0

    def admit(self, context_tokens: int, prefill_tokens: float) -> None:
        held_s = self._held_s
        super().admit(context_tokens, prefill_tokens)
        self.unread_tokens += prefill_tokens
        self.unread_s += self._held_s - held_s

    def advance(self, now_s: float, *, is_paused: bool) -> None:
        before, held, num_running, counted_s = self.count, self.context_tokens, self.num_running, self._counted_s
        step_s, since_s = self.step_s, self.last_s
        self.last_s = now_s if self.timed is None else self.timed.now_s
        super().advance(now_s, is_paused=is_paused)
        if not (num_passes := round(self.count - before)):
            return
        speed = min(1.0, (now_s - counted_s) / (self.last_s - since_s))
        share = speed * (1 + self.cold_cost) / (1 + speed * self.cold_cost)
        cold = 1.0 if share > 0.99 else share / speed
        for place in range(num_passes):
            plain = 1.0, 1.0 if cold > 1 else 1 / share
            cpu, wall = (2 * cold - 1, 2 * cold / share - 1) if place % 4 < 2 and cold > 1 else plain
            pass_s, context, read = step_s + self.unread_s, round(held) + place * num_running, round(self.unread_tokens)
            self.passes.add(num_running, context, cpu * pass_s, wall * pass_s, read_tokens=read)
            self.unread_tokens = self.unread_s = 0.0


def timed(policy: str, known: tuple[str, ...], folder: Path, *, cold_cost: float = 0.0) -> Recording:
    """Played with engines that time their passes."""
    TimedClock.passes, TimedClock.timed, TimedClock.cold_cost = DecodePasses(), None, cold_cost
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.backends.simulated.engine.DecodeClock", TimedClock)
        recording = Played(truth(policy, known=known), folder).recording
    said: dict[str, float | None] = {metric.name: metric.value for metric in TimedClock.passes.metrics()}
    return recording._replace(
        bands=bands_in(said),
        disturbed=bands_in(said, DISTURBED),
        reading=bands_in(said, READING),
        reading_disturbed=bands_in(said, READING_DISTURBED),
    )


CROWDED = (
    *SHARED,
    "engines.num_threads=2",
    "engines.simulated.cores=1.8",
    "engines.simulated.cold_cost=1.5",
    "learner.simulated.cores=2.0",
    "learner.simulated.step_s=0.5",
)
"""Likewise, and who gets a core back finds its caches cold; an engine alone has cores enough."""


def test_what_cold_caches_and_waits_made_dearer_is_taken_out_where_cores_are_not_short(tmp_path: Path) -> None:
    recording = on_two_cores(timed("fully_async", CROWDED, tmp_path, cold_cost=1.5))
    slow = slowed(recording.bands, recording.disturbed)
    assert slow is not None
    steps = recording.work["step"]
    waits = sum(work.duration_s for work in steps) / sum(0.5 + 0.0004 * work.size for work in steps)
    first, last = recording.cores_used
    engines, learner = Role.ENGINE_WORKER.value, Role.LEARNER.value
    wanted = {role: last.cpu_s[role] + last.wait_s[role] for role in (engines, learner)}
    cpu_s = {engines: wanted[engines] / slow.waits, learner: wanted[learner] / waits}
    wait_s = {role: wanted[role] - cpu_s[role] for role in wanted}
    recording = recording._replace(cores_used=[first, last._replace(cpu_s=cpu_s, wait_s=wait_s)], learner_waits=waits)
    found = calibrate([recording])
    assert found.engines.cores == pytest.approx(1.8, rel=0.03)
    assert found.engines.cold_cost == pytest.approx(1.5, rel=0.15)
    assert full_pass_s(found) == pytest.approx(0.01 + 11 * 0.0008 + 1000 * 0.00001, rel=0.08)
    error, busy = error_elsewhere(found, "sync", CROWDED)
    assert abs(error) < 0.05
    assert busy < 0.05
    by_cpu_time = [band._replace(wall_s=0.0) for band in added_up([*recording.bands, *recording.disturbed])]
    before = calibrate([recording._replace(bands=by_cpu_time, disturbed=(), learner_waits=None)])
    assert error_elsewhere(before, "sync", CROWDED)[0] > 2 * max(0.04, abs(error)), "cold caches decide here"


TURNS = 1.25
TAKING_TURNS = (
    *SHARED,
    "engines.simulated.cores=1.25",
    "engines.simulated.token_s=0.03",
    "learner.simulated.step_s=1.5",
)
"""The threads of an engine have one core in turns, and take so much CPU time a second of that which decodes. Other
actors have a quarter of a core besides."""


def test_what_threads_of_an_engine_wait_for_each_other_stays_in_its_times(tmp_path: Path) -> None:
    recording = on_two_cores(timed("fully_async", TAKING_TURNS, tmp_path))
    passes = added_up([*recording.bands, *recording.disturbed])
    waits = sum(band.wall_s for band in passes) / sum(band.seconds for band in passes)
    first, last = recording.cores_used
    engines = Role.ENGINE_WORKER.value
    wanted_s = last.cpu_s[engines] + last.wait_s[engines]
    had_s = wanted_s / waits
    two = replace(recording.scenario, engines=replace(recording.scenario.engines, num_threads=2))
    side_by_side = last._replace(cpu_s={**last.cpu_s, engines: had_s})
    recording = recording._replace(bands=passes, disturbed=())
    before = calibrate([recording._replace(scenario=two, cores_used=[first, side_by_side])])
    alone_s = had_s / 1.25
    last = last._replace(cpu_s={**last.cpu_s, engines: alone_s, Role.FILTER.value: 0.25 * alone_s})
    bands = [band._replace(seconds=band.seconds / TURNS) for band in passes]
    recording = recording._replace(cores_used=[first, last], bands=bands)
    found = calibrate([recording])
    told = {key: value for fit in found.fits for key, value in fit.values.items()}
    assert told["cores.alone"] == pytest.approx(TURNS, rel=0.02)
    assert (found.engines.cores, before.engines.cores) == pytest.approx((1.25, 1.25), rel=0.02)
    assert full_pass_s(found) == pytest.approx(0.03 + 11 * 0.0008 + 1000 * 0.00001, rel=0.08)
    assert full_pass_s(found) == pytest.approx(full_pass_s(before), rel=0.02), "as if no thread had to wait for another"
    error, busy = error_elsewhere(found, "sync", TAKING_TURNS)
    assert error == pytest.approx(error_elsewhere(before, "sync", TAKING_TURNS)[0], abs=0.02)
    assert busy < 0.05
    parallel = calibrate([recording._replace(scenario=two)])
    assert full_pass_s(parallel) < 0.9 * full_pass_s(found), "what both waited is taken to be for cores"


def on_a_busy_machine(recording: Recording, seed: int) -> Recording:
    """The same where others take cores now and then: work goes on at a speed of its own every half second."""
    draw = np.random.default_rng(seed)
    end_s = max(each.end_s for each in recording.generations)
    edges = 0.5 * np.arange(math.ceil(2 * end_s) + 1)
    took: NDArray[np.float64] = np.append(0.0, np.cumsum(draw.lognormal(0.0, 0.6, len(edges) - 1)))
    took *= edges[-1] / took[-1]

    def at(at_s: float) -> float:
        return float(np.interp(at_s, edges, took))

    work = {
        name: [each._replace(start_s=at(each.start_s), end_s=at(each.end_s)) for each in works]
        if name == "apply_weights"
        else works
        for name, works in recording.work.items()
    }
    rows = [each._replace(start_s=at(each.start_s), end_s=at(each.end_s)) for each in recording.generations]
    return recording._replace(generations=rows, work=work)


@pytest.fixture(scope="module")
def tails(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return timed("fully_async", TAILS, tmp_path_factory.mktemp("tails"))


def errors_of_tails(models: Models) -> list[float]:
    """(Predicted − real) ÷ real of the time of a step, under the policies that leave engines with few requests."""
    shape = tuple(key for key in TAILS if ".simulated." not in key)
    told = {each: forecast(models.applied(truth(each, known=shape)), [0]) for each in AGES if AGES[each] < 2}
    return [told[each].step_s.mean / forecast_of_truth(each, TAILS, 1).step_s.mean - 1 for each in told]


def test_long_tails_are_predicted_from_a_run_whose_engine_was_always_full(tails: Recording) -> None:
    """Requests that ran beside each other count by passes: by time, full stretches would seem more than they were."""
    found = calibrate([tails._replace(bands=())])
    assert max(map(abs, errors_of_tails(found))) < 0.06
    assert found.fewest_running > 2
    assert any(text.startswith("engines.token_s: ") and "extrapolated" in text for text in found.unknown)


def test_what_engines_say_of_their_passes_counts_more_than_what_a_busy_machine_did_to_responses(
    tails: Recording,
) -> None:
    busy = on_a_busy_machine(tails, 1)
    found, silent = calibrate([busy]), calibrate([busy._replace(bands=())])
    alone, beside_31 = 0.01, 0.01 + 31 * 0.0004
    told, guessed = (
        each.token_s / (each.token_s + 31 * each.token_load_s + 31 * 30 * each.context_token_s)
        for each in (found.engines, silent.engines)
    )
    assert told == pytest.approx(alone / beside_31, rel=0.02)
    assert guessed != pytest.approx(alone / beside_31, rel=0.2), "it is hard enough"
    assert (found.fewest_running, found.is_load_known) == (1, True)
    passes = next(fit for fit in found.fits if fit.what == "decode passes by their requests")
    assert passes.values["decode.passes.most_running"] == pytest.approx(32, abs=1)
    assert passes.values["decode.responses_to_passes"] == pytest.approx(1.0, abs=0.1)
    errors, others = errors_of_tails(found), errors_of_tails(silent)
    assert max(map(abs, errors)) < 0.06
    assert all(abs(error) < abs(other) for error, other in zip(errors, others, strict=True))


def test_what_one_load_cannot_tell_is_named_with_what_it_means_elsewhere(recording: Recording, tmp_path: Path) -> None:
    """Requests that never have others beside them, or always as many."""
    apart = [
        each._replace(start_s=100.0 * place, end_s=100.0 * place + 0.01 * each.num_tokens)
        for place, each in enumerate(recording.generations)
    ]
    together = [each._replace(engine=f"engine/{number}", sample=None) for each in apart for number in (0, 0)]
    found = calibrate([recording._replace(generations=together, work={**recording.work, "apply_weights": []})])
    assert not found.is_load_known
    assert any(text.startswith("engines.token_load_s: what a request costs is not told") for text in found.unknown)
    assert any("others, as the runs did not tell" in text for text in found.doubts(recording.scenario))
    extreme = found.if_requests_cost_all
    assert extreme is not None
    assert extreme.engines.token_s + extreme.engines.token_load_s == pytest.approx(found.engines.token_s), "beside one"
    write_models(found, tmp_path / "models.yaml")
    arguments = ["simulate", str(SCENARIOS / "fully_async.yaml"), *SHAPE, "--models", str(tmp_path / "models.yaml")]
    shown = CliRunner().invoke(app, [*arguments, "--seeds", "1"], terminal_width=140)
    assert shown.exit_code == 0, shown.output
    assert "the runs did not tell what a request costs" in shown.output
    alone = calibrate([recording._replace(generations=apart, work={**recording.work, "apply_weights": []})])
    assert alone.is_load_known, "there was no other load to tell"
    assert alone.if_requests_cost_all is None


TOOLS = (
    *TRUTH,
    "engines.simulated.episode.turns=[1, 1, 2]",
    "engines.simulated.episode.tool_s=0.8",
    "engines.simulated.episode.tool_sigma=0.5",
    "engines.simulated.episode.end_s=0.1",
    "engines.simulated.episode.reply_tokens=12",
    "engines.simulated.episode.reread_share=0.5",
)
"""Up to three turns, which wait for tools for as long as they take."""


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return calibrate([Played(truth("fully_async", known=TOOLS), tmp_path_factory.mktemp("tools")).recording])


def test_turns_and_tools_are_fitted(with_tools: Models) -> None:
    found, episode = with_tools, with_tools.engines.episode
    assert episode is not None
    assert episode.turns == pytest.approx((0.25, 0.25, 0.5), abs=0.05)
    assert (episode.tool_s, episode.tool_sigma, episode.end_s) == pytest.approx((0.8, 0.5, 0.1), rel=0.06)
    assert episode.reply_tokens == 12
    assert episode.reread_share == pytest.approx(0.5, abs=0.03)
    assert found.engines.response_tokens_median == pytest.approx(60, rel=0.1), "of a turn"
    assert found.engines.prompt_tokens == PROMPT_TOKENS
    waits = next(fit for fit in found.fits if fit.what.startswith("turns and tools"))
    assert waits.bias == pytest.approx(0.0, abs=0.1)


# One seed with the same models a hair apart differs by a tenth.
@pytest.mark.parametrize("policy", ["sync", pytest.param("one_step_off", marks=pytest.mark.slow)])
def test_turns_and_tools_predict_another_policy(with_tools: Models, policy: str) -> None:
    real = forecast_of_truth(policy, TOOLS, 6)
    predicted = forecast(with_tools.applied(truth(policy, known=SHAPE)), range(6))
    assert predicted.step_s.mean == pytest.approx(real.step_s.mean, rel=0.06)
    assert predicted.engines["working"].mean == pytest.approx(real.engines["working"].mean, abs=0.05)
    assert predicted.learner["working"].mean == pytest.approx(real.learner["working"].mean, abs=0.05)
    single = forecast_of_truth(policy)
    assert single.step_s.mean < 0.8 * real.step_s.mean, "turns and tools decide here"


REREAD = (*TRUTH, "engines.simulated.prompt_reread_tokens=30", "engines.simulated.prefill_token_s=0.004")
"""Servers read most of a prompt again for each sample of its group."""


def test_prompts_that_are_read_again_hold_up_what_runs(tmp_path: Path) -> None:
    models = calibrate([Played(truth(known=REREAD), tmp_path).recording])
    assert models.engines.prompt_reread_tokens == 30
    real = forecast(truth("fully_async", known=REREAD), range(1)).step_s.mean
    once = replace(models, engines=replace(models.engines, prompt_reread_tokens=0.0))
    found, read_once = (
        forecast(each.applied(truth("fully_async", known=SHAPE)), range(1)).step_s.mean for each in (models, once)
    )
    assert found == pytest.approx(real, rel=0.1)
    assert read_once < 0.85 * real


def test_what_reading_costs_is_told_by_the_passes_that_read_and_not_by_what_goes_once_with_a_response(
    tmp_path: Path,
) -> None:
    recording = timed("fully_async", REREAD, tmp_path)
    assert calibrate([recording]).engines.prefill_token_s == pytest.approx(0.004, rel=0.03)
    # Engines that read at no cost, and hold everybody up as long for something else.
    free = [band._replace(seconds=band.seconds - 0.004 * band.read_tokens) for band in recording.reading]
    found = calibrate([recording._replace(reading=free)])
    assert found.engines.prefill_token_s < 0.0004
    real = forecast(truth("fully_async", known=REREAD), range(1)).step_s.mean
    again = forecast(found.applied(truth("fully_async", known=SHAPE)), range(1)).step_s.mean
    assert again == pytest.approx(real, rel=0.1), "it lies in what all passes take"


def test_what_new_weights_made_an_engine_forget_is_not_read_again(recording: Recording) -> None:
    def generation(start_s: float, cached: int, *, engine: str = "engine/0", is_whole: bool = True) -> Generation:
        sample = SampleSeen(1, 0, 5, 1.0, "trained", 1, 40, cached, "completed")
        return Generation(engine, start_s, start_s + 1, 5, is_whole, "completed", sample)

    seen = [
        generation(1.0, 0),
        generation(1.5, 39),
        generation(2.0, 30),
        generation(2.5, 0, is_whole=False),  # of two stretches: nobody knows what was read in which
        generation(3.0, 0, engine="engine/1"),  # has a cache of its own
        generation(5.0, 0),  # new weights came
        generation(5.5, 35),
    ]
    swap = Work("engine/0", 2, 4.0, 4.5, 0)
    found = fit_reread([recording._replace(generations=seen, work={"apply_weights": [swap]})])
    assert found == RereadFit(tokens=(1 + 10 + 5) / 3, num_requests=3)
    assert fit_reread([recording._replace(generations=seen[:1])]) is None


def test_the_way_of_messages_is_fitted_and_counts(models: Models, tmp_path: Path) -> None:
    slow = (*TRUTH, "runtime.simulated_hop_s=0.4")
    found = calibrate([Played(truth("sync", known=slow), tmp_path).recording])
    assert found.hop_s == pytest.approx(0.4, rel=0.1)
    assert models.hop_s == pytest.approx(0.0006, rel=0.1), "of a quick network"
    real = forecast_of_truth("fully_async", slow).step_s.mean
    assert forecast_of_truth("fully_async").step_s.mean < 0.9 * real, "it decides here"
    predicted = forecast(
        found.applied(truth("fully_async", known=SHAPE)), range(6)
    ).step_s.mean  # seeds differ by a tenth
    assert predicted == pytest.approx(real, rel=0.05)


def test_too_few_messages_tell_nothing(recording: Recording) -> None:
    found = calibrate([recording._replace(hops=recording.hops[:3])])
    assert found.hop_s is None
    assert any(text.startswith("hop_s: ") for text in found.unknown)


def test_what_the_runs_could_not_say_is_said(models: Models) -> None:
    unknown = "\n".join(models.unknown)
    assert "learner.publish_byte_s: it did not vary by itself" in unknown  # one size alone
    assert "engines.kv_tokens" in unknown
    assert "engines.start_s: no start was recorded" in unknown  # there are no lanes
    assert models.engines.kv_tokens is None


def test_slots_that_never_filled_are_told(recording: Recording) -> None:
    engines = replace(recording.scenario.engines, slots=500)
    found = calibrate([recording._replace(scenario=replace(recording.scenario, engines=engines))])
    assert any(text.startswith("engines.slots: at most 12 of 500") for text in found.unknown)
    assert any("engines.slots is 500" in text for text in found.doubts(replace(recording.scenario, engines=engines)))


def test_what_a_micro_batch_costs_is_fitted_where_rounds_vary_and_told_where_runs_differ(recording: Recording) -> None:
    learner = replace(recording.scenario.learner, max_tokens_per_micro_batch=256)
    shaped = recording._replace(scenario=replace(recording.scenario, learner=learner))
    rounds = {version: load.num_rounds for version, load in loads_of(shaped).items()}
    steps = [
        work._replace(end_s=work.start_s + 0.5 + 0.001 * work.size + 2.0 * rounds[work.version])
        for work in recording.work["step"]
    ]
    assert len({rounds[work.version] for work in steps}) > 1
    timed = shaped._replace(work=recording.work | {"step": steps})
    found = fit_steps([timed]).line
    assert found.fitted == pytest.approx([work.duration_s for work in steps], rel=0.02)
    assert found.values["micro_batch_s"] == pytest.approx(2.0, rel=0.1)
    other = timed.scenario.learner
    on_two = replace(timed.scenario, learner=replace(other, simulated=replace(other.simulated, num_ranks=2)))
    told = fit_steps([timed, timed._replace(scenario=on_two)])
    assert "micro_batch_s" not in told.line.values
    assert (told.num_ranks, told.why_no_packing) == (1, "learners divided their batches over 1, 2 ranks")


def test_rewards_that_wait_for_a_worker_tell_its_work_and_no_spread(recording: Recording) -> None:
    found = calibrate([recording._replace(scores_s=[10 * each for each in recording.scores_s])])
    assert any(text.startswith("reward.latency_sigma: a worker took 0.05") for text in found.unknown)
    assert (found.reward.latency_s, found.reward.latency_sigma) == pytest.approx((0.054, 0.0), rel=0.05)


def test_longer_responses_than_were_recorded_are_doubted(models: Models, recording: Recording) -> None:
    sampling = replace(recording.scenario.sampling, max_response_tokens=4096)
    assert models.truncated_share > 0
    assert any("4,096" in text for text in models.doubts(replace(recording.scenario, sampling=sampling)))
    assert not any("sampling" in text for text in models.doubts(recording.scenario))


def test_runs_of_different_models_are_not_fitted_together(recording: Recording) -> None:
    other = replace(recording.scenario, model=replace(recording.scenario.model, make="s"))
    with pytest.raises(UserFault, match="calibrate them apart"):
        calibrate([recording, recording._replace(scenario=other)])
    episodes = replace(recording.scenario, episode=replace(recording.scenario.episode, kind="tools"))
    with pytest.raises(UserFault, match=r"plays episodes of turns, and .* single responses; calibrate them apart"):
        calibrate([recording, recording._replace(scenario=episodes)])


def test_a_run_of_which_nothing_was_traced_is_refused(recording: Recording) -> None:
    with pytest.raises(UserFault, match="trace_fraction"):
        calibrate([recording._replace(generations=[])])
    with pytest.raises(UserFault, match="no step was traced"):
        calibrate([recording._replace(work={})])


def test_a_folder_without_traces_or_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text(dump_scenario(truth()))
    with pytest.raises(UserFault, match="no traces"):
        read_recording(tmp_path)
    (tmp_path / "traces").mkdir()
    with pytest.raises(UserFault, match=r"ledger\.sqlite"):
        read_recording(tmp_path)


def test_a_scenario_of_episodes_is_played_with_the_turns_of_the_models(models: Models) -> None:
    played = ["episode.kind=function", "episode.generate=multi_turn", "episode.tools=[calculator]"]
    scenario, changed = load_modelled(SCENARIOS / "fully_async.yaml", [*SHAPE, *played])
    assert "episode" in changed
    assert "episode" not in load_modelled(SCENARIOS / "fully_async.yaml", [*SHAPE, "episode.kind=single"])[1]
    assert any(text.startswith("episode: the runs had none") for text in models.doubts(scenario, has_episodes=True))
    with_turns = replace(models, engines=replace(models.engines, episode=EpisodeModelOptions()))
    assert any(text.startswith("episode: the runs had episodes") for text in with_turns.doubts(scenario))
    assert not any(text.startswith("episode") for text in with_turns.doubts(scenario, has_episodes=True))


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_of_models_comes_back_as_it_was(models: Models, tmp_path: Path) -> None:
    write_models(models, tmp_path / "models.yaml")
    assert read_models(tmp_path / "models.yaml") == models


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"form": 2}, "form"),
        ({"engines": {"tokens_s": 1}}, "tokens_s"),
        ({"truncated_share": "many"}, "truncated_share"),
        ({"more": 1}, "more"),
        ({"most_running": 0}, "most_running"),
        ({"cores": -1.0}, "cores"),
        ({"hop_s": -1.0}, "hop_s"),
        ({"hop_s": float("nan")}, "hop_s"),
    ],
)
def test_a_file_of_models_that_is_wrong_names_file_and_key(
    models: Models, tmp_path: Path, change: dict[str, Any], what: str
) -> None:
    path = tmp_path / "models.yaml"
    write_models(models, path)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(UserFault, match=what) as fault:
        read_models(path)
    assert str(path) in str(fault.value)


def test_what_was_changed_by_hand_in_a_file_of_models_is_told_with_its_line(models: Models, tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    write_models(models, path)
    whole = path.read_text()
    line = next(number for number, text in enumerate(whole.splitlines(), 1) if text.startswith("  token_s: "))
    for word, says in (("token_s: quick", "must be a number, above 0; found 'quick'"), ("token_z: 1", "did you mean")):
        path.write_text(whole.replace(f"token_s: {models.engines.token_s!r}", word, 1))
        with pytest.raises(UserFault, match=rf"models\.yaml:{line}: engines\.token_.: .*{says}"):
            read_models(path)
    path.write_text(whole.replace("form: 1", "form: 2", 1))
    with pytest.raises(UserFault, match="has form 2, and this version reads form 1"):
        read_models(path)
    path.write_text("run: {name: x}")
    with pytest.raises(UserFault, match="no file of models"):
        read_models(path)


def test_simulate_takes_the_models_and_says_how_far_they_may_be_off(models: Models, tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    write_models(models, path)
    arguments = ["simulate", str(SCENARIOS / "fully_async.yaml"), *SHAPE, "--models", str(path), "--seeds", "1"]
    shown = CliRunner().invoke(app, arguments, terminal_width=140)
    assert shown.exit_code == 0, shown.output
    for words in (
        "step time",
        "tokens/s",
        "working",
        "wait for a slot",
        "goodput",
        "staleness",
        "active:",
        "was not checked",
    ):
        assert words in shown.output, words
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert told["seeds"] == [0]
    assert told["step_s"]["low"] == told["step_s"]["mean"] > 0
    refused = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert isinstance(refused.exception, UserFault)


def test_queues_are_as_deep_as_what_goes_through_them_waits() -> None:
    """By Little's law, where it is known how long something waits."""
    late = forecast(
        truth("fully_async", "reward.simulated.latency_s=0.5", "reward.simulated.latency_sigma=0"), range(2)
    )
    assert late.depths["for_rewards"].mean == pytest.approx(36 * 0.5 / late.step_s.mean, rel=0.15)
    few, heavy = (
        forecast(truth("fully_async", key), range(1)).depths
        for key in ("engines.slots=2", "learner.simulated.step_s=30")
    )
    assert few["for_slots"].mean > 36 > heavy["for_slots"].mean
    assert few["ready"].mean < 6 < heavy["ready"].mean
    assert heavy["incomplete"].mean < few["incomplete"].mean


def test_a_run_with_too_few_steps_has_no_steady_part() -> None:
    with pytest.raises(UserFault, match="too few for a steady part"):
        play(truth("sync", "run.num_steps=4"), 0)


# --- fits -------------------------------------------------------------------------------------------------------------


def test_a_coefficient_that_cannot_be_told_is_dropped_with_the_reason() -> None:
    draw = np.random.default_rng(5)
    size = draw.uniform(1, 10, 400)
    columns = {
        "fixed": np.ones(400),
        "size": size,
        "twin": 3 * size,
        "chance": draw.uniform(0, 1, 400),
        "nothing": np.zeros(400),
    }
    y = 2.0 + 0.5 * size + draw.normal(0, 0.1, 400)
    line = fit_line(y, columns, np.arange(400) % 2 == 0)
    assert line.values == {"fixed": pytest.approx(2.0, rel=0.03), "size": pytest.approx(0.5, rel=0.03)}
    assert line.dropped["twin"] == "it did not vary by itself"
    assert line.dropped["nothing"] == "nothing of it was recorded"
    assert "chance" in line.dropped["chance"]
    assert line.error.typical == pytest.approx(0.08 / 4.75, rel=0.3)  # mean |noise| over mean y
    assert line.error.count == 200


def test_the_error_is_that_on_what_the_fit_has_not_seen() -> None:
    """Steps with an even number take twice as long: the fit on the odd ones is off by half of what it sees."""
    unseen = np.arange(40) % 2 == 0
    line = fit_line(np.where(unseen, 2.0, 1.0), {"fixed": np.ones(40)}, unseen)
    assert line.error.typical == pytest.approx(0.5)
    assert line.error.bias == pytest.approx(-0.5)
    assert line.values["fixed"] == pytest.approx(1.5)


def test_a_negative_effect_is_no_effect() -> None:
    size = np.linspace(1, 10, 100)
    line = fit_line(20 - size, {"fixed": np.ones(100), "size": size}, np.arange(100) % 2 == 0)
    assert list(line.values) == ["fixed"]


def test_the_first_coefficient_is_above_0_whatever_else_it_costs() -> None:
    size = np.linspace(5, 10, 100)
    line = fit_line(size - 4, {"fixed": np.ones(100), "size": size}, np.arange(100) % 2 == 0)
    assert line.values == {"fixed": pytest.approx(3.5, rel=0.01)}
    assert line.dropped == {"size": "with it fixed would not be above 0"}


def test_means_of_a_course_are_those_of_its_pieces() -> None:
    # 0 up to 1; then 2, growing by 1 a second up to 3; then 0.
    course = Course(np.array([1.0, 3.0]), np.array([2.0, -4.0]), np.array([1.0, -1.0]))
    starts, ends = np.array([1.0, 0.0, 2.0, 5.0]), np.array([3.0, 4.0, 3.0, 6.0])
    assert course.means(starts, ends) == pytest.approx([3.0, 6.0 / 4, 3.5, 0.0])


def test_correlation_of_lengths_within_groups() -> None:
    def samples(lengths: list[list[int]]) -> list[SampleSeen]:
        return [
            SampleSeen(group, index, length, None, None, None, None, None, None)
            for group, each in enumerate(lengths)
            for index, length in enumerate(each)
        ]

    draw = np.random.default_rng(1)
    alone = [[int(x) for x in draw.integers(1, 1000, 4)] for _ in range(300)]
    assert correlation_of(samples([[group + 1] * 4 for group in range(50)])) == 1.0
    assert correlation_of(samples(alone)) == pytest.approx(0.0, abs=0.05)
    assert correlation_of(samples([[7, 7], [7, 7]])) is None
    assert correlation_of(samples([[1], [2]])) is None


GROWING = (
    *TRUTH,
    "engines.simulated.response_tokens_sigma=0.3",
    "engines.simulated.response_tokens_course=[0.5, 1.5]",
    "engines.simulated.response_tokens_course_groups=144",
)
"""Lengths that triple over the 24 batches of 6 groups."""


def test_lengths_that_grow_over_training_are_fitted_and_predicted(tmp_path: Path) -> None:
    models = calibrate([Played(truth(known=GROWING), tmp_path).recording])
    first, last = models.engines.response_tokens_course
    assert last / first == pytest.approx(3.0, rel=0.3)
    assert models.engines.response_tokens_course_groups == pytest.approx(144, abs=2)
    assert models.engines.response_tokens_correlation == pytest.approx(0.5, abs=0.15)
    half = "run.num_steps=12"
    real = forecast(truth("fully_async", half, known=GROWING), range(2)).step_s.mean
    predicted = forecast(models.applied(truth("fully_async", half, known=SHAPE)), range(2)).step_s.mean
    assert predicted == pytest.approx(real, rel=0.15), "six steps are counted"
    steady = replace(models, engines=replace(models.engines, response_tokens_course=()))
    wrong = forecast(steady.applied(truth("fully_async", half, known=SHAPE)), range(2)).step_s.mean
    assert wrong - real > 2 * abs(predicted - real), "without the course the first half is predicted too slow"
    longer = truth("fully_async", "run.num_steps=48", known=SHAPE)
    assert any("later groups are modelled as the last" in text for text in models.doubts(longer))


def test_what_engines_share_of_a_link_is_told_by_runs_with_several_numbers_of_them(tmp_path: Path) -> None:
    link = (*TRUTH, "engines.simulated.fetch_shared_byte_s=0.00005")  # 0.05 s for each copy of 1,000 bytes
    runs = [
        Played(truth("sync", f"engines.count={count}", known=link), tmp_path / f"{count}").recording for count in (2, 5)
    ]
    models = calibrate(runs)
    assert models.engines.fetch_weights_s == pytest.approx(0.2, rel=0.02)
    assert models.engines.fetch_shared_byte_s == pytest.approx(0.00005, rel=0.02)
    assert calibrate(runs[:1]).engines.fetch_weights_s == pytest.approx(0.3, rel=0.02), "all of it, where none varied"


def test_lengths_that_do_not_change_have_no_course(models: Models) -> None:
    assert models.engines.response_tokens_course == ()


def test_models_of_runs_without_any_reward_say_why_nothing_is_trained() -> None:
    alike = ("reward.simulated.success_rate=0", "filter.drop_zero_spread=")
    with pytest.raises(UserFault, match=r"no group can pass: 0 of the modelled answers .*drop_zero_spread=false"):
        forecast(truth("sync", alike[0], f"{alike[1]}true"), [0])
    assert forecast(truth("sync", alike[0], f"{alike[1]}false"), [0]).goodput.mean > 0


def test_a_program_calibrates_as_the_command_does(
    recording: Recording, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close_record(tmp_path, open_record(tmp_path, "small"), 0)

    def read(folder: Path) -> Recording:
        assert folder == tmp_path
        return recording

    monkeypatch.setattr(checking, "read_recording", read)
    out = tmp_path / "models.yaml"
    found = api.calibrate(tmp_path, check=False, output=out)
    assert replace(found, made_at=models.made_at) == models
    assert read_models(out) == found
    with pytest.raises(UserFault, match="is there already"):
        api.calibrate([tmp_path], check=False, output=out)
    one = {"engines.count": 2, "run.num_steps": 2, "learner.groups_per_batch": 2}
    scenario = Path(__file__).parents[2] / "scenarios" / "simulated_1024_engines.yaml"
    by_file, by_value = (api.simulate(scenario, one, models=each, seed=3).digest for each in (out, found))
    assert by_file == by_value != api.simulate(scenario, one, seed=3).digest


def test_an_engine_whose_memory_holds_no_prompt_is_refused() -> None:
    scenario = truth()
    model = replace(scenario.engines.simulated, kv_tokens=10)
    with pytest.raises(UserFault, match=r"kv_tokens: 10 tokens do not hold one request, whose prompt has"):
        play(replace(scenario, engines=replace(scenario.engines, simulated=model)), 0)
