"""What a plan chooses between, and what was asked of it."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.actors.buffer.policies import BUILTIN
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence

SECONDS_OF_HOUR: Final = 3600.0
ENGINE, LEARNER = "engine", "learner"


class Objective(StrEnum):
    """What is to be best."""

    THROUGHPUT = "throughput"
    """Trained tokens a second."""
    GOODPUT = "goodput"
    """Share of the tokens made that were trained; of equal ones (1 %), trained tokens a second."""
    COST = "cost"
    """Price of a trained token."""


class Prices(msgspec.Struct, frozen=True):
    """Of a device for an hour, in whatever currency."""

    engine: float
    learner: float


def read_prices(text: str) -> Prices:
    """Read ``2.5``, or ``engine=1.2,learner=2.5``.

    Raises:
        UserFault: it is neither.
    """
    parts = [part.strip() for part in text.split(",")]
    found: dict[str, float] = {}
    for part in parts:
        name, mark, digits = part.rpartition("=")
        try:
            price = float(digits)
        except ValueError:
            price = -1.0
        known = (ENGINE, LEARNER) if mark else ("",)
        if not 0 <= price < float("inf") or name.strip() not in known or name.strip() in found:
            raise UserFault(
                f"--price: cannot read '{text}'; write the price of a device for an hour, 2.5, or one for each: "
                "engine=1.2,learner=2.5"
            )
        found[name.strip()] = price
    if "" in found and len(found) == 1:
        return Prices(found[""], found[""])
    if found.keys() != {ENGINE, LEARNER}:
        raise UserFault(f"--price: '{text}' has to name both, engine=1.2,learner=2.5, or be one number for all")
    return Prices(found[ENGINE], found[LEARNER])


def read_objective(text: str) -> Objective:
    """Its name.

    Raises:
        UserFault: there is no such.
    """
    if text not in set(Objective):
        raise UserFault(f"--objective: there is no '{text}'; there are {', '.join(Objective)}")
    return Objective(text)


def read_speeds(texts: Sequence[str]) -> dict[int, float]:
    """Read ``2=1.7``: an engine of two devices is 1.7 times as quick as the scenario's.

    Raises:
        UserFault: one cannot be read.
    """
    found: dict[int, float] = {}
    for text in texts:
        read = re.fullmatch(r"(\d{1,5})=(\d{1,6}(?:\.\d{1,9})?)", text.strip())
        if read is None or not int(read[1]) or not float(read[2]):
            raise UserFault(f"--engine-speed: cannot read '{text}'; write DEVICES=SPEED, such as 2=1.7")
        found[int(read[1])] = float(read[2])
    return found


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One way to use the devices."""

    policy: str
    max_staleness: int
    num_engines: int
    engine_devices: int
    """Of each engine."""
    slots: int
    """Of each engine."""
    learner_ranks: int
    """One device each."""
    critic_ranks: int = 0
    """Of these, those that hold the critic alone; 0: each holds whatever there is."""
    is_colocated: bool
    varied: tuple[str, ...] = ()
    """Overrides of the scenario besides, of keys that the plan was told to vary."""

    @property
    def num_devices(self) -> int:
        """In use; those that engines and learner take in turns count once."""
        engines = self.num_engines * self.engine_devices
        return max(engines, self.learner_ranks) if self.is_colocated else engines + self.learner_ranks

    @property
    def schedule(self) -> str:
        """Policy, bound and place, for people."""
        built_in = BUILTIN.get(self.policy)
        eta = "" if built_in is not None and built_in.fixed_staleness else f" η {self.max_staleness}"
        return ", ".join((f"{self.policy}{eta}", *(["colocated"] * self.is_colocated), *self.varied))

    @property
    def split(self) -> str:
        """Devices of engines + devices of the learner, and how many of those are the critic's."""
        size = f" × {self.engine_devices}" if self.engine_devices > 1 else ""
        critic = f" ({self.critic_ranks:,} critic)" if self.critic_ranks else ""
        return f"{self.num_engines:,}{size} + {self.learner_ranks:,}{critic}"

    @property
    def short(self) -> str:
        """All of it on one line."""
        return f"{self.split}, {self.slots:,} slots, {self.schedule}"

    def hourly(self, prices: Prices) -> float:
        """Price of an hour. A device that both use has the higher price of the two."""
        if self.is_colocated:
            return self.num_devices * max(prices.engine, prices.learner)
        return self.num_engines * self.engine_devices * prices.engine + self.learner_ranks * prices.learner


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is to be of."""

    num_devices: int
    """At most."""
    objective: Objective = Objective.THROUGHPUT
    prices: Prices | None = None
    max_staleness: int = 4
    """At most."""
    slots: tuple[int, ...] = ()
    """Of an engine; empty: halves and multiples of the scenario's, as far as the models reach."""
    engine_speeds: dict[int, float] = {}
    """Devices of an engine → its speed, that of the scenario's engine being 1; the scenario's need not be in it."""
    rank_efficiency: float = 1.0
    """Of twice as many ranks: 0.9 makes the divided part of a step 1.8 times as quick."""
    num_seeds: int = 5
    """Of what is compared in the end."""
    budget: int = 48
    """Simulations, at most."""
