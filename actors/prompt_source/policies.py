"""Policies of routing that say by themselves which engine a sample goes to, built in or the user's own.

Invariants:

* A policy knows what it is given and nothing else: no clock, no chance. It may keep what it was asked before, which a
  PromptSource that takes the place of another does not know.
* It chooses among engines that have room and serve what the sample needs, or where none with a free slot does, will in
  time. So whatever it does no engine gets more than its capacity, and where it has no preference the least loaded
  engine is taken: no sample waits for a policy.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from penstock.actors.prompt_source.order import mix
from penstock.messages.base import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_BITS: Final = 53
"""Of a number between 0 and 1."""


class RoutedSample(Value, frozen=True, kw_only=True):
    """A sample that is to be sent to an engine."""

    group_id: int
    index: int
    """Within its group."""
    row: int
    """Of its prompt in the dataset: the same row has the same tokens, whenever it comes."""
    num_prompt_tokens: int
    min_version: int
    """Of the weights that it needs; an engine with older ones keeps it until it has them."""
    deadline_version: int
    """It can be trained at this version at the latest."""
    group_engine: str = ""
    """Where the last sample of its group went; empty for the first one."""


class RoutedEngine(Value, frozen=True, kw_only=True):
    """An engine that has room."""

    name: str
    num_slots: int
    capacity: int
    """Samples that it may have: ``num_slots`` times ``prompt_source.max_load``."""
    load: int
    """Samples that it has."""
    version: int
    """Of its weights."""


class RoutingPolicy(Protocol):
    """What a policy has to offer."""

    def choose(self, sample: RoutedSample, engines: Sequence[RoutedEngine], /) -> str | None:
        """The name of one of these engines, of which there is one at least; None: the least loaded."""
        ...


class RoundRobin:
    """One engine after the other, in the order of their names; of those that serve what the sample needs, if any do."""

    def __init__(self) -> None:
        self._last = (0, "")

    def choose(self, sample: RoutedSample, engines: Sequence[RoutedEngine], /) -> str | None:
        """See :class:`RoutingPolicy`."""
        able = [engine for engine in engines if engine.version >= sample.min_version] or engines
        names = sorted((len(engine.name), engine.name) for engine in able)  # engine/10 comes after engine/9
        self._last = next((name for name in names if name > self._last), names[0])
        return self._last[1]


class ConsistentHash:
    """By the row of the prompt: weighted rendezvous hashing (Thaler and Ravishankar, IEEE/ACM ToN 6(1), 1998).

    Each engine has a number for each row, from both alone, and the highest takes it; its slots weigh. So when an engine
    goes only its own rows move, to all others in proportion, and they come back with it. One that is full passes its
    rows on to the next in their order.
    """

    def choose(self, sample: RoutedSample, engines: Sequence[RoutedEngine], /) -> str | None:
        """See :class:`RoutingPolicy`."""
        return max(engines, key=lambda engine: (_number(sample.row, engine), engine.name)).name


def _number(row: int, engine: RoutedEngine) -> float:
    drawn = (mix(row, *engine.name.encode()) >> (64 - _BITS)) + 1
    return -engine.num_slots / math.log(drawn / (2**_BITS + 1))


POLICIES: Final[Mapping[str, Callable[[], RoutingPolicy]]] = MappingProxyType(
    {"round_robin": RoundRobin, "consistent_hash": ConsistentHash}
)
"""Those of ``prompt_source.routing`` that are policies; the others are the Router's own."""
ROUTINGS: Final = ("prefix_affine", "least_loaded", *POLICIES)
