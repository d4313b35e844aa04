"""Directed links between processes: delay, order, and the faults that links have.

Invariants:

* Without faults every pack that is sent arrives once, and those of one link in the order in which they were sent.
* Random numbers come from one seeded generator and are drawn in the order of the sends.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

import msgspec

from penstock.messages.wire import encode_pack

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.wire import Envelope
    from penstock.runtime.hosts.virtual.clock import VirtualClock

ProcessT = TypeVar("ProcessT")


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """How packs travel. Shares are probabilities for each pack."""

    min_delay_s: float = 0.0002
    max_delay_s: float = 0.001
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    """Share of packs that others may overtake; they take up to ten times as long."""
    through_codec: bool = False
    """Encode and decode every pack, as on a real wire."""


class LinkFaults(msgspec.Struct, kw_only=True):
    """What is wrong with one directed link at the moment."""

    num_cuts: int = 0
    extra_delay_s: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0


class Links:
    """All links of one host."""

    def __init__(self, model: LinkModel, clock: VirtualClock, *, seed: int) -> None:
        self.num_sent = 0
        self.num_dropped = 0
        self._model = model
        self._clock = clock
        self._random = random.Random(seed)
        self._draw = self._random.random
        self._min_delay_s, self._spread_s = model.min_delay_s, model.max_delay_s - model.min_delay_s
        self._through_codec = model.through_codec
        self._arrivals: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """When what was sent last arrives, by sender and receiver."""
        self._faults: dict[tuple[str, str], LinkFaults] = {}
        self._is_plain = not (model.drop or model.duplicate or model.reorder)

    def faults_of(self, sender: str, receiver: str) -> LinkFaults:
        """What is wrong with a link, to be changed in place."""
        return self._faults.setdefault((sender, receiver), LinkFaults())

    def send(
        self,
        sender: str,
        receiver: str,
        process: ProcessT,
        pack: list[Envelope],
        deliver: Callable[[ProcessT, list[Envelope] | bytes], None],
    ) -> None:
        """One pack to one incarnation of the receiver; ``deliver`` is called when it arrives, if it does."""
        self.num_sent += 1
        what = encode_pack(pack) if self._through_codec else pack
        delay_s = self._min_delay_s + self._spread_s * self._draw()
        if self._faults or not self._is_plain:
            self._send_badly((sender, receiver), process, what, delay_s, deliver)
            return
        at_s, arrivals = self._clock.now_s + delay_s, self._arrivals[sender]
        if at_s < (last_s := arrivals.get(receiver, 0.0)):
            at_s = last_s
        arrivals[receiver] = at_s
        self._clock.at(at_s, deliver, process, what)

    def _send_badly(
        self,
        link: tuple[str, str],
        process: ProcessT,
        what: list[Envelope] | bytes,
        delay_s: float,
        deliver: Callable[[ProcessT, list[Envelope] | bytes], None],
    ) -> None:
        model, chance = self._model, self._random.random
        faults = self._faults.get(link, _NONE)
        if faults.num_cuts or chance() < 1 - (1 - model.drop) * (1 - faults.drop):
            self.num_dropped += 1
            return
        delay_s += faults.extra_delay_s
        copies = 2 if chance() < model.duplicate + faults.duplicate else 1
        for _ in range(copies):
            at_s = self._clock.now_s + delay_s
            if chance() < model.reorder + faults.reorder:
                at_s += 9 * delay_s * chance()
            else:
                sender, receiver = link
                arrivals = self._arrivals[sender]
                at_s = arrivals[receiver] = max(at_s, arrivals.get(receiver, 0.0))
            self._clock.at(at_s, deliver, process, what)


_NONE = LinkFaults()
