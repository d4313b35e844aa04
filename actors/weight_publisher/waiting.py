"""What the WeightPublisher waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.actors.weight_publisher.phases import Phase
from penstock.messages.names import LEARNER, SUPERVISOR
from penstock.messages.waits import Wait

if TYPE_CHECKING:
    from penstock.actors.weight_publisher.canaries import Canaries
    from penstock.actors.weight_publisher.engines import EngineState, EngineTable
    from penstock.actors.weight_publisher.exports import ExportTable
    from penstock.messages.weights import WeightManifest


def publisher_waits(engines: EngineTable, exports: ExportTable, canaries: Canaries) -> list[Wait]:
    """Engines on their way, and a publish for those that have nothing to take."""
    waits: list[Wait] = []
    for engine in engines.by_name.values():
        if engine.phase is Phase.QUARANTINED:
            waits.append(Wait("replacement of", engine.name, SUPERVISOR))
        elif engine.phase is Phase.STARTING:
            waits.append(Wait("start of", engine.name, engine.name))
        elif engine.target is not None:
            waits.append(_wait_for(engine, engine.target.manifest, canaries))
    newest = exports.newest
    if newest is None or exports.has_failed(newest.manifest.publish):
        version = 0 if newest is None else newest.manifest.version
        waits.append(Wait("publish of", f"version {version}", LEARNER))
    return waits


def _wait_for(engine: EngineState, manifest: WeightManifest, canaries: Canaries) -> Wait:
    subject = f"version {manifest.version}"
    if engine.phase is Phase.STAGED:
        return Wait("canary of", subject, canaries.of(manifest.publish) or engine.name)
    return Wait("fetched weights of" if engine.phase is Phase.STAGING else "swapped weights of", subject, engine.name)
