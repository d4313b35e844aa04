"""What engines, learner and the other actors want of a machine's cores, and how quick each moment of a run was by that.

The model: whoever works wants so many cores, and where all together want more than there are, each has a core for the
share ``cores ÷ wanted`` of the time that it would. An engine that has its cores for the share f needs ``1 + cold_cost ·
(1 − f)`` times as much CPU time besides, as its caches are cold each time that it gets one back.

By how much engines and learner were slower than alone is measured, where they say so: engines by the time of their
passes by the clock, with a core, and undisturbed (:func:`.slowed`), the learner by both times of its steps. What they
want is then their CPU time over the time in which they worked, times what they waited. Else the kernel tells how long
their threads waited for a core, and the model by how much they were slower; that is more than they want, as threads
that hardly compute wait too. Where it tells nothing (no schedstat) it is their CPU time alone, which is less.

An engine's passes wait for more than a core: the threads of its process take turns at the interpreter. What its others
take, the one that computes waits for however many cores there are, and finds its caches colder. So an engine with one
thread for its passes wants one core, besides what the other actors do for it, and is slower *alone* than its passes
are, by :attr:`CoresFit.alone`, which stays in its times. How much that is, its waits say, less those that the model
explains by who worked beside it: at most as much as its process took beyond that thread.

The other actors take as much CPU time as the responses need, so it is counted with the engines that make them, in the
time that those would have worked with cores enough.

Invariants:

* A moment's speed is in (0, 1], and 1 before anybody works.
* Work that is read off in working time is what it would have been with cores enough, whoever else used the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from penstock.backends.engines.options import engine_groups, num_engines
from penstock.backends.engines.spec import capabilities_of
from penstock.backends.learners.spec import LEARNERS
from penstock.backends.protocol import Capability
from penstock.messages.names import LEARNER, Role, is_engine
from penstock.messages.training import Activity
from penstock.runtime.prediction.passes_fit import slowed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.runtime.prediction.passes_fit import Slowed
    from penstock.runtime.prediction.recorded import Recording

    Floats = NDArray[np.float64]

BUSY: Final = (Activity.WORKING, Activity.APPLYING_WEIGHTS, Activity.PUBLISHING)
"""A learner that waits for the disk wants no core."""
ROUNDS: Final = 20
WAITS: Final = 1.05
"""Times its CPU time, that an engine took by the clock; with less, nothing is told of cold caches."""
MIN_S: Final = 3.0
"""CPU time is reported once a second or so: over less it says little."""


class CoresFit(NamedTuple):
    """What the actors of some runs want."""

    num_cores: int
    engine: float
    """Cores of an engine that works, with what other actors do meanwhile."""
    others: float
    """Of them, those of the other actors."""
    learner: float
    cold_cost: float
    """Of an engine: the share by which its CPU time grows where it hardly has a core."""
    alone: float
    """Time of an engine that has all its cores ÷ CPU time of its undisturbed passes, 1 or more."""
    slowed: float
    """Share of the working time of engines and learner that goes by waiting for a core, by this model."""
    waited: float
    """Likewise, as they have measured it, or of the time in which their threads ran or waited as the kernel has."""
    is_measured: bool
    """Engines have."""

    def share(self, engines: Floats, learner: Floats) -> Floats:
        """Of its cores, that each has while so many engines work, and the learner (0 or 1)."""
        wanted = engines * self.engine + learner * self.learner
        return np.minimum(1.0, self.num_cores / np.maximum(wanted, 1e-9))


class _Lanes(NamedTuple):
    """One run between two reports of CPU time: stretches in which nobody begins or ends."""

    lengths_s: Floats
    engines: Floats
    """Engines that worked."""
    learner: Floats
    """1 where it worked."""
    wanted_s: tuple[float, float]
    """CPU time of engines, and of the learner, and the time that they waited for it."""
    waited_s: float
    """Of it, waiting."""
    others_s: float
    """CPU time of all others."""
    slowed: Slowed | None
    """Engines, as they have measured it."""
    has_one_thread: bool
    """Each engine computes its passes."""

    def busy_s(self, who: Floats) -> float:
        """Time in which they worked: of the engines together, or of the learner."""
        return max(float(self.lengths_s @ who), 1e-9)


def why_no_cores(recordings: Sequence[Recording]) -> str | None:
    """Why nothing can be said of shared cores; None where it can."""
    for recording in recordings:
        learner, engines = recording.scenario.learner, recording.scenario.engines
        if learner.num_ranks > 1:
            return "the learner's ranks are processes whose CPU time is not recorded"
        if recording.start.facts.machine.gpus and {learner.device, engines.device} != {"cpu"}:
            return "engines and learner were on GPUs"
        spec, can = LEARNERS.spec(learner.backend), capabilities_of(engines)
        if not (spec.shares_gpu or spec.is_modelled) or not can & {Capability.EMBEDDED, Capability.MODELLED}:
            return "what computes is in processes whose CPU time is not recorded"
        if len(used := recording.cores_used) < 2 or used[-1].at_s - used[0].at_s < MIN_S:
            return f"the CPU time of actors was recorded over less than {MIN_S:.0f} s"
    cores = {recording.start.facts.machine.num_cpus for recording in recordings}
    return None if len(cores) == 1 else "the runs are of machines with different numbers of cores"


def fit_cores(recordings: Sequence[Recording]) -> CoresFit:
    """What actors want, over all runs, of which :func:`why_no_cores` says nothing."""
    num_cores = recordings[0].start.facts.machine.num_cpus
    lanes = [_lanes(recording) for recording in recordings]
    engines_s = sum(each.busy_s(each.engines) for each in lanes)
    learner_s = sum(each.busy_s(each.learner) for each in lanes)
    own = sum(each.wanted_s[0] for each in lanes) / engines_s
    of_learner = sum(each.wanted_s[1] for each in lanes) / learner_s
    others_s = sum(each.others_s for each in lanes)
    told = [each.slowed for each in lanes if each.slowed is not None]
    is_told = len(told) == len(lanes)
    costs = [(each.cold - 1) / (1 - 1 / each.waits) for each in told if each.waits > WAITS]
    turns, most = 1.0, 1.0
    if is_told and all(each.has_one_thread for each in lanes):
        most, own = max(1.0, own), min(1.0, own)
    fit = CoresFit(num_cores, own, 0.0, of_learner, 0.0, 1.0, 0.0, 0.0, is_told)
    for _ in range(ROUNDS):
        shares = [fit.share(each.engines, each.learner) for each in lanes]
        had_s = alone_s = sum(each.busy_s(each.engines * share) for each, share in zip(lanes, shares, strict=True))
        if is_told:
            had_s = sum(each.busy_s(each.engines) / each.slowed.waits for each in lanes if each.slowed is not None)
            turns = min(max(1.0, alone_s / had_s), most)
        others = others_s / had_s / turns
        fit = fit._replace(engine=own + others, others=others)
    cold_cost = sum(costs) / max(1, len(costs))
    alone = turns + cold_cost * (turns - 1)
    # A core for the share f takes turns / f + cold_cost · (turns / f − 1): so much more than alone.
    fit = fit._replace(cold_cost=cold_cost / alone, alone=alone)
    shares = [fit.share(each.engines, each.learner) for each in lanes]
    both = [(each, each.engines + each.learner, share) for each, share in zip(lanes, shares, strict=True)]
    for_turns_s = (1 - 1 / turns) * sum(each.wanted_s[0] for each in lanes)
    waited_s = sum(each.waited_s for each in lanes) - for_turns_s
    wanted_s = sum(sum(each.wanted_s) for each in lanes) - for_turns_s
    return fit._replace(
        slowed=1 - sum(each.busy_s(who * share) for each, who, share in both) / (engines_s + learner_s),
        waited=waited_s / max(wanted_s, 1e-9),
    )


def at_own_speed(recording: Recording, fit: CoresFit) -> Recording:
    """The same run in working time: everything that engines and learner did took as long as it would alone, but for
    checkpoints, which the disk takes as long for."""
    times_s, engines, learner = _courses(recording)
    lanes, share = _lanes(recording), fit.share(engines, learner)
    of_engines, of_learner = share / (1 + fit.cold_cost * (1 - share)), share
    if lanes.slowed is not None:
        of_engines = _scaled(of_engines, lanes, lanes.engines, fit.alone / (lanes.slowed.waits * lanes.slowed.cold))
    if recording.learner_waits is not None:
        of_learner = _scaled(of_learner, lanes, lanes.learner, 1 / recording.learner_waits)
    engine_s, learner_s = _Worked(times_s, of_engines), _Worked(times_s, of_learner)
    offset_s = recording.offset_s
    return recording._replace(
        generations=[
            each._replace(start_s=engine_s.at(each.start_s), end_s=engine_s.at(each.end_s))
            for each in recording.generations
        ],
        work={
            name: works
            if name == "checkpoint"
            else [
                each._replace(start_s=worked.at(each.start_s), end_s=worked.at(each.end_s))
                for each in works
                for worked in (learner_s if each.who == LEARNER else engine_s,)
            ]
            for name, works in recording.work.items()
        },
        activity={
            name: [
                replace(
                    row,
                    start_s=engine_s.at(row.start_s + offset_s) - offset_s,
                    end_s=engine_s.at(row.end_s + offset_s) - offset_s,
                )
                for row in rows
            ]
            if is_engine(name)
            else rows
            for name, rows in recording.activity.items()
        },
    )


def _scaled(speeds: Floats, lanes: _Lanes, who: Floats, mean: float) -> Floats:
    """The speeds, as much higher or lower all along that those who work have this mean, as far as 1 allows."""
    modelled = lanes.busy_s(who * speeds) / lanes.busy_s(who)
    scaled: Floats = np.minimum(1.0, speeds * mean / modelled)
    return scaled


class _Worked:
    """Working time of a run's time, by the speed from each moment to the next."""

    def __init__(self, times_s: Floats, speeds: Floats) -> None:
        self._times_s = times_s
        self._worked_s = np.concatenate(([times_s[0]], times_s[0] + np.cumsum(np.diff(times_s) * speeds[:-1])))

    def at(self, at_s: float) -> float:
        """Both are Unix times, and the same up to the run's start."""
        if at_s <= self._times_s[0]:
            return at_s
        past_s = max(0.0, at_s - float(self._times_s[-1]))  # after the last change nobody works
        return float(np.interp(at_s, self._times_s, self._worked_s)) + past_s


def _courses(recording: Recording) -> tuple[Floats, Floats, Floats]:
    """Unix times at which somebody begins or ends, and who works from then on: engines, and the learner."""
    changes: list[tuple[float, int, int]] = [(recording.offset_s, 0, 0)]
    for name, rows in recording.activity.items():
        if not is_engine(name) and name != LEARNER:
            continue
        engine, learner = (0, 1) if name == LEARNER else (1, 0)
        for row in rows:
            if row.activity in BUSY and row.end_s > row.start_s:
                start_s, end_s = row.start_s + recording.offset_s, row.end_s + recording.offset_s
                changes += [(start_s, engine, learner), (end_s, -engine, -learner)]
    table = np.array(sorted(changes, key=lambda change: change[0]), dtype=np.float64)
    at_most = float(num_engines(recording.scenario.engines))
    return table[:, 0], np.clip(np.cumsum(table[:, 1]), 0, at_most), np.clip(np.cumsum(table[:, 2]), 0, 1)


def _lanes(recording: Recording) -> _Lanes:
    first, last = recording.cores_used[0], recording.cores_used[-1]
    times_s, engines, learner = _courses(recording)
    edges = np.clip(np.append(times_s, times_s[-1]), first.at_s + recording.offset_s, last.at_s + recording.offset_s)
    roles = Role.ENGINE_WORKER.value, Role.LEARNER.value
    used = {role: max(0.0, cpu_s - first.cpu_s.get(role, 0.0)) for role, cpu_s in last.cpu_s.items()}
    waited = [max(0.0, last.wait_s.get(role, 0.0) - first.wait_s.get(role, 0.0)) for role in roles]
    had = [used.pop(role, 0.0) for role in roles]
    of_engines = slowed(recording.bands, recording.disturbed)
    for place, waits in enumerate((None if of_engines is None else of_engines.waits, recording.learner_waits)):
        if waits is not None:  # told by the threads that compute, so those that hardly do are not counted
            waited[place] = had[place] * (waits - 1)
    wanted = had[0] + waited[0], had[1] + waited[1]
    has_one_thread = all(each.num_threads == 1 for each in engine_groups(recording.scenario.engines))
    return _Lanes(np.diff(edges), engines, learner, wanted, sum(waited), sum(used.values()), of_engines, has_one_thread)
