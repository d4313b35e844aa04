"""An EngineWorker on the bench: its engine, the PromptSource and the WeightPublisher are played by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import actor_driver as drive

from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.engine_worker.settings import EngineWorkerSettings
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.commands import ApplyWeights, FetchWeights, Generate
from penstock.messages.flow import SampleIssued
from penstock.messages.local import (
    EngineOpened,
    GenerationAdvanced,
    GenerationEnded,
    Started,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import Cancelled, Completed, InfraError, SampleKey
from penstock.messages.training import UpdateMode
from penstock.messages.weights import Canary, WeightManifest, WeightsCommitted, WeightsStaged

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.samples import Outcome, Part
    from penstock.messages.training import Activity

NAN = float("nan")


def canary_logprobs(*, off: float = 0.0) -> bytes:
    """At two places of three tokens, wrong by this share of their spread."""
    wrong = off * math.sqrt(2)  # which is the spread at both
    return pack_floats([-1.0 + wrong, -2.0, -3.0, -4.0, -2.0, -3.0 + wrong])


CANARY = Canary(tokens=pack_tokens([1, 2, 3]), logprobs=canary_logprobs())


def manifest(publish: int, version: int | None = None, *, canary: Canary | None = CANARY) -> WeightManifest:
    """Of this publish; versions are publish numbers unless told."""
    return WeightManifest(
        version=publish if version is None else version,
        publish=publish,
        learner_epoch=0,
        transport="disk",
        location=f"weights-{publish}",
        size_bytes=1,
        digest=f"digest-{publish}",
        canary=canary,
    )


class EngineBench:
    """An EngineWorker named engine/0, and those around it played by hand."""

    def __init__(self, *, check_canary: bool = True, retracts: bool = False, epoch: int = 0) -> None:
        settings = EngineWorkerSettings(
            name="engine/0", epoch=epoch, retracts=retracts, check_canary=check_canary, canary_tolerance=0.05
        )
        self.driver = drive.Driver(EngineWorker(settings))

    @property
    def worker(self) -> EngineWorker:
        return self.driver.machine

    def activity(self) -> Activity:
        """What the engine's time is spent on now."""
        return self.worker.activity

    def hear(self, *events: Event) -> list[AnyCommand]:
        return self.driver.hear(*events)

    def opened(self, num_slots: int = 2) -> EngineBench:
        """The engine is up, without weights."""
        self.hear(Started(epoch=0), EngineOpened(num_slots=num_slots))
        return self

    def serving(self, publish: int = 0, num_slots: int = 2) -> EngineBench:
        """The engine serves these weights."""
        self.opened(num_slots)
        self.stage(publish)
        self.commit(publish)
        self.swap()
        return self

    # --- requests ---------------------------------------------------------------------------------------------

    def issue(
        self, group_id: int, index: int = 0, *, attempt: int = 0, min_version: int = 0, prefix: Part | None = None
    ) -> list[AnyCommand]:
        return self.hear(issued(group_id, index, attempt=attempt, min_version=min_version, prefix=prefix))

    def advance(self, group_id: int, from_token: int, chunk: Part, *, attempt: int = 0) -> list[AnyCommand]:
        key = SampleKey(group_id, 0)
        return self.hear(GenerationAdvanced(key=key, attempt=attempt, from_token=from_token, chunk=chunk))

    def end(
        self, group_id: int, made: Part | None = None, outcome: Outcome | None = None, *, attempt: int = 0
    ) -> list[AnyCommand]:
        """The engine ends a request; it completed unless told."""
        return self.hear(
            GenerationEnded(
                key=SampleKey(group_id, 0),
                attempt=attempt,
                outcome=outcome or Completed(),
                part=made or drive.part((0, 4)),
            )
        )

    def interrupted(self, group_id: int, made: Part) -> list[AnyCommand]:
        return self.end(group_id, made, Cancelled(cause="interrupted"))

    def fail(self, group_id: int, *, attempt: int = 0) -> list[AnyCommand]:
        return self.end(group_id, drive.part((0, 2)), InfraError(detail="out of memory"), attempt=attempt)

    # --- weights ----------------------------------------------------------------------------------------------

    def stage(self, publish: int, *, digest: str | None = None, error: str = "") -> list[AnyCommand]:
        """The publisher stages, and the backend has fetched what it was asked for."""
        commands = self.hear(WeightsStaged(manifest=manifest(publish)))
        for fetch in drive.every(commands, FetchWeights):
            commands = [*commands, *self.fetched(fetch.manifest.publish, digest=digest, error=error)]
        return commands

    def fetched(self, publish: int, *, digest: str | None = None, error: str = "") -> list[AnyCommand]:
        found = f"digest-{publish}" if digest is None else digest
        return self.hear(WeightsStagedLocally(version=publish, publish=publish, digest=found, error=error))

    def commit(self, publish: int, mode: UpdateMode = UpdateMode.IN_FLIGHT) -> list[AnyCommand]:
        return self.hear(WeightsCommitted(version=publish, publish=publish, update_mode=mode))

    def swap(self, *, digest: str | None = None, canary_logprobs: bytes = CANARY.logprobs) -> list[AnyCommand]:
        """The backend has done the swap that it was asked for."""
        applying = self.worker.weights.applying
        assert applying is not None
        return self.hear(
            WeightsSwapped(
                version=applying.version,
                publish=applying.publish,
                digest=applying.digest if digest is None else digest,
                canary_logprobs=canary_logprobs,
            )
        )


def issued(
    group_id: int, index: int = 0, *, attempt: int = 0, min_version: int = 0, prefix: Part | None = None
) -> SampleIssued:
    return SampleIssued(
        key=SampleKey(group_id, index),
        attempt=attempt,
        group_size=2,
        prompt=drive.prompt(group_id),
        seed=99,
        min_version=min_version,
        deadline_version=min_version + 2,
        prefix=prefix,
    )


def submitted(commands: list[AnyCommand]) -> list[int]:
    """Groups of the requests that the engine is given."""
    return [generate.key.group_id for generate in drive.every(commands, Generate)]


def applied(commands: list[AnyCommand]) -> list[int]:
    """Publishes that the engine is told to swap to."""
    return [apply.manifest.publish for apply in drive.every(commands, ApplyWeights)]
