"""The recorded runs that models are fitted to: which go together, and what is said of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.engines.options import engine_groups
from penstock.backends.engines.spec import capabilities_of
from penstock.backends.protocol import Capability
from penstock.messages.errors import UserFault
from penstock.runtime.prediction.models import SourceRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.prediction.recorded import Recording


def alike(recordings: Sequence[Recording]) -> None:
    """
    Raises:
        UserFault: they are not of one model, the same backends and one kind of samples, so one fit to all says nothing.
    """
    first = recordings[0]
    for other in recordings[1:]:
        for what, of in (("trains the model", model_of), ("runs on", _backends_of), ("plays", _played)):
            if of(first) != of(other):
                raise UserFault(
                    f"{other.folder}: it {what} {of(other)}, and {first.folder} {of(first)}; calibrate them apart"
                )


def model_of(recording: Recording) -> str:
    """What it trains: how its weights are made, or their folder."""
    model = recording.scenario.model
    return f"make: {model.make}" if model.make is not None else str(model.path)


def _backends_of(recording: Recording) -> str:
    kinds = {(each.backend, each.device) for each in engine_groups(recording.scenario.engines)}
    learner = recording.scenario.learner
    engines = ", ".join(f"{backend} on {device}" for backend, device in sorted(kinds))
    return f"engines {engines}, learner {learner.backend} on {learner.device}"


def _played(recording: Recording) -> str:
    """Lengths are those of turns where there are episodes, and of whole responses where there are none."""
    return "single responses" if recording.scenario.episode.kind == "single" else "episodes of turns"


def source(recording: Recording) -> SourceRun:
    """As ``models.yaml`` names it."""
    machine = recording.start.facts.machine
    return SourceRun(
        folder=str(recording.folder),
        started_at=recording.start.at,
        policy=recording.scenario.staleness.policy,
        num_steps=recording.num_steps,
        num_cpus=machine.num_cpus,
        gpus=machine.gpus,
        learner_ranks=recording.scenario.learner.num_ranks,
        critic_ranks=recording.scenario.learner.critic_ranks,
    )


def timed_on_shared_cores(recording: Recording) -> bool:
    """Its passes were timed by the wall clock, and had their cores not for themselves."""
    engines = recording.scenario.engines
    is_on_cpu = engines.device == "cpu" or not recording.start.facts.machine.gpus
    return is_on_cpu and not capabilities_of(engines) & {Capability.EMBEDDED, Capability.MODELLED}
