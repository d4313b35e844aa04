"""What engines, learner and the other actors want of a machine's cores, and how quick each moment of a run was by that.

The model: whoever works wants so many cores, and where all together want more than there are, all go on at
``cores ÷ wanted`` of their speed. Engines and learner want the time in which their threads ran or waited for a core,
over the time in which they worked: the kernel tells both, however busy the machine was. Where it does not (no
schedstat) it is the CPU time alone, which is less than they want where cores were short.

The other actors take as much CPU time as the responses need, so it is counted with the engines that make them, in
working time: over ``∫ speed dt``, where the speed follows from what is wanted.

Invariants:

* A moment's speed is in (0, 1], and 1 before anybody works.
* Work that is read off in working time is what it would have been with cores enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from penstock.backends.engines.options import num_engines
from penstock.backends.engines.spec import capabilities_of
from penstock.backends.learners.spec import LEARNERS
from penstock.backends.protocol import Capability
from penstock.messages.names import LEARNER, Role, is_engine
from penstock.messages.training import Activity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.runtime.prediction.recorded import Recording

    Floats = NDArray[np.float64]

BUSY: Final = (Activity.WORKING, Activity.APPLYING_WEIGHTS, Activity.PUBLISHING, Activity.CHECKPOINTING)
ROUNDS: Final = 20
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
    slowed: float
    """Share of the working time of engines and learner that goes by waiting for a core, by this model."""
    waited: float
    """Share of the time in which their threads ran or waited for a core that was waiting, as the kernel told."""


class _Lanes(NamedTuple):
    """One run between two reports of CPU time: stretches in which nobody begins or ends."""

    lengths_s: Floats
    engines: Floats
    """Engines that worked."""
    learner: Floats
    """1 where it worked."""
    wanted_s: tuple[float, float]
    """In which threads of engines, and of the learner, ran or waited for a core."""
    waited_s: float
    """Of it, waiting."""
    others_s: float
    """CPU time of all others."""


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
    lengths, engines, learner = (
        np.concatenate([np.asarray(each[column], dtype=np.float64) for each in lanes]) for column in range(3)
    )
    engines_s, learner_s = max(float(lengths @ engines), 1e-9), max(float(lengths @ learner), 1e-9)
    own = sum(each.wanted_s[0] for each in lanes) / engines_s
    of_learner = sum(each.wanted_s[1] for each in lanes) / learner_s
    others_s = sum(each.others_s for each in lanes)
    others = others_s / engines_s
    speed = np.ones_like(lengths)
    for _ in range(ROUNDS):
        speed = np.minimum(1.0, num_cores / np.maximum(engines * (own + others) + learner * of_learner, 1e-9))
        others = others_s / max(float(lengths * speed @ engines), 1e-9)
    slowed = 1.0 - float(lengths * speed @ (engines + learner)) / (engines_s + learner_s)
    waited = sum(each.waited_s for each in lanes) / max(sum(sum(each.wanted_s) for each in lanes), 1e-9)
    return CoresFit(num_cores, own + others, others, of_learner, slowed, waited)


def at_own_speed(recording: Recording, fit: CoresFit) -> Recording:
    """The same run in working time: everything that engines and learner did took as long as it would alone."""
    times_s, engines, learner = _courses(recording)
    wanted = engines * fit.engine + learner * fit.learner
    speed = np.minimum(1.0, fit.num_cores / np.maximum(wanted, 1e-9))
    worked_s = np.concatenate(([times_s[0]], times_s[0] + np.cumsum(np.diff(times_s) * speed[:-1])))

    def worked(at_s: float) -> float:
        if at_s <= times_s[0]:
            return at_s
        past_s = max(0.0, at_s - float(times_s[-1]))  # after the last change nobody works
        return float(np.interp(at_s, times_s, worked_s)) + past_s

    offset_s = recording.offset_s
    return recording._replace(
        generations=[
            each._replace(start_s=worked(each.start_s), end_s=worked(each.end_s)) for each in recording.generations
        ],
        work={
            name: [each._replace(start_s=worked(each.start_s), end_s=worked(each.end_s)) for each in works]
            for name, works in recording.work.items()
        },
        activity={
            name: [
                replace(
                    row,
                    start_s=worked(row.start_s + offset_s) - offset_s,
                    end_s=worked(row.end_s + offset_s) - offset_s,
                )
                for row in rows
            ]
            if is_engine(name)
            else rows
            for name, rows in recording.activity.items()
        },
    )


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
    engines_used, learner_used = (used.pop(role, 0.0) for role in roles)
    wanted = engines_used + waited[0], learner_used + waited[1]
    return _Lanes(np.diff(edges), engines, learner, wanted, sum(waited), sum(used.values()))
