"""Which processes a scenario makes, before any of them is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.messages.names import BUFFER, FILTER, LEARNER, PROMPT_SOURCE, SCORER, WEIGHT_PUBLISHER, engine_name

if TYPE_CHECKING:
    from penstock.runtime.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Placed:
    """One row of the placement: actors that are alike."""

    name: str
    num_processes: int
    num_threads: int
    device: str
    remark: str = ""


def placement(scenario: Scenario) -> list[Placed]:
    """The rows, in the order in which a sample passes them."""
    engines, learner, rewards = scenario.engines, scenario.learner, scenario.reward.num_workers
    last = engines.count - 1
    return [
        Placed(PROMPT_SOURCE, 1, 1, "cpu"),
        Placed(
            engine_name(0) if last == 0 else f"{engine_name(0)} … {engine_name(last)}",
            engines.count,
            engines.num_threads,
            engines.device,
            f"{engines.backend}, {engines.slots} slots each",
        ),
        Placed(SCORER, 1 + rewards, 1, "cpu", f"with {rewards} for the reward function"),
        Placed(FILTER, 1, 1, "cpu"),
        Placed(BUFFER, 1, 1, "cpu", scenario.staleness.policy),
        Placed(LEARNER, 1, learner.num_threads, learner.device, learner.backend),
        Placed(WEIGHT_PUBLISHER, 1, 1, "cpu", f"transport {scenario.weights.transport}"),
    ]
