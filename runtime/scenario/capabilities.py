"""What each engine backend can do, as far as a scenario can ask for it.

The backends declare it themselves, in modules that import what they run on; this table says the same without that, and
a test compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.protocol import Capability
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

ENGINE_CAPABILITIES: Final[Mapping[str, frozenset[Capability]]] = {
    "torch": frozenset(Capability) - {Capability.RETRACT},
    "sglang": frozenset(Capability) - {Capability.SEEDED_SAMPLING, Capability.STAGED_WEIGHTS},
    "recorded": frozenset(
        {Capability.SEEDED_SAMPLING, Capability.IN_FLIGHT, Capability.INTERRUPT, Capability.STAGED_WEIGHTS}
    ),
    "simulated": frozenset(Capability) - {Capability.RETRACT},
}
_NEEDED_BY: Final = {UpdateMode.IN_FLIGHT: Capability.IN_FLIGHT, UpdateMode.INTERRUPT: Capability.INTERRUPT}


def lacking(
    scenario: Scenario, path: KeyPath, backend: str, can: frozenset[Capability]
) -> Iterator[tuple[KeyPath, str]]:
    """What a resolved scenario demands and the engines of the block at ``path``, which ``can`` do so much, cannot."""
    mode = scenario.staleness.update_mode
    needed = None if mode is None else _NEEDED_BY.get(mode)
    if needed is not None and needed not in can:
        possible = [other.value for other in UpdateMode if other not in _NEEDED_BY or _NEEDED_BY[other] in can]
        yield ("staleness", "update_mode"), f"{backend} engines cannot do {mode}; they can do {', '.join(possible)}"
    if scenario.weights.canary and Capability.CANARY not in can:
        yield ("weights", "canary"), f"{backend} engines cannot return log-probs of a given text; set it to false"
    if scenario.engines.seeded_sampling and Capability.SEEDED_SAMPLING not in can:
        yield (
            (*path, "backend"),
            f"engines.seeded_sampling is true, and {backend} engines ignore the seed of a sample",
        )
