"""A plan of a scenario from its source: for the command line, and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.runtime.prediction.planning.search import Plan, search
from penstock.runtime.prediction.planning.varied import VariedSpace
from penstock.runtime.prediction.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.runtime.prediction.models import Models
    from penstock.runtime.prediction.planning.candidate import Asked
    from penstock.runtime.scenario import Scenario
    from penstock.runtime.scenario.source import Source


class Planned(NamedTuple):
    """A plan, and the space that it was searched in."""

    plan: Plan
    space: VariedSpace

    @property
    def scenario(self) -> Scenario:
        """The one to run."""
        return self.space.real_of(self.plan.chosen.candidate)

    @property
    def assumed(self) -> list[str]:
        """What nothing has measured."""
        return self.space.assumed(self.plan.chosen.candidate)


def planned(
    source: Source,
    asked: Asked,
    *,
    models: Models | None = None,
    varied: Mapping[str, tuple[str, ...]] | None = None,
    num_processes: int = 1,
    on_round: Callable[[int], Callable[[], None]] = lambda _: lambda: None,
) -> Planned:
    """Plan a scenario, as it was read.

    Args:
        source: of the scenario.
        asked: what is to be best, and with how many simulations.
        models: how long things take; None: as the scenario's own models have it.
        varied: further keys that may be chosen, each with its values.
        num_processes: that simulate side by side.
        on_round: see :func:`.search`.

    Raises:
        UserFault: the scenario cannot be planned.
    """
    space = VariedSpace(source, models, asked, dict(varied or {}))
    with Workers(num_processes) as workers:
        return Planned(search(space, asked, workers, on_round=on_round), space)
