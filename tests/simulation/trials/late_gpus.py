# pyright: reportPrivateUsage=false
"""Engines whose GPUs are still to come each time that they are started, as on a cluster that brings nodes.

What ``runtime/hosts/processes/gpu_waits.py`` does with real launchers: an engine that waits has no process, and no peer
knows it. Who is not wanted any more is not waited for; whose GPUs take too long is given up, as one that is lost too
often is. Either way its incarnation is fenced before everyone, though nobody has ever heard of it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from penstock.runtime.hosts.virtual.host import VirtualHost


class GpuTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Who waits, and for how long."""

    names: tuple[str, ...]
    wait_s: float
    """Longest time; each draws its own."""
    timeout_s: float


class LateGpus:
    """Holds the engines of a virtual host back."""

    def __init__(self, trial: GpuTrial, host: VirtualHost) -> None:
        self.num_waits = self.num_dropped = self.num_in_vain = 0
        self._trial, self._host, self._supervisor = trial, host, host.supervisor
        self._random = random.Random(f"gpus {host.settings.seed}")
        self._waits: dict[str, tuple[int, int]] = {}
        """Epoch and number of the wait, by name."""
        self._start, self._match = self._supervisor.start, self._supervisor._match_engines
        self._supervisor.start = self._begin  # type: ignore[method-assign]
        self._supervisor._match_engines = self._drop_unwanted  # type: ignore[method-assign]

    def _begin(self, name: str, epoch: int = 0) -> None:
        if name not in self._trial.names:
            self._start(name, epoch)
            return
        self.num_waits += 1
        self._supervisor._coming[name] = epoch
        self._waits[name] = epoch, self.num_waits
        wait_s = self._random.random() * self._trial.wait_s
        comes = wait_s < self._trial.timeout_s
        at_s = self._host.clock.now_s + min(wait_s, self._trial.timeout_s)
        self._host.clock.at(at_s, LateGpus._come if comes else LateGpus._in_vain, self, (name, epoch, self.num_waits))

    def _is_over(self, what: tuple[str, int, int]) -> bool:
        """Whether this very wait has ended otherwise: with the machine, or as nobody wants the engine any more."""
        name, *wait = what
        if self._waits.get(name) != tuple(wait):
            return True
        del self._waits[name]
        return not self._supervisor.is_coming(name, wait[0])

    def _come(self, what: tuple[str, int, int]) -> None:
        if not self._is_over(what):
            self._start(what[0], what[1])

    def _in_vain(self, what: tuple[str, int, int]) -> None:
        if self._is_over(what):
            return
        name, epoch, _ = what
        self.num_in_vain += 1
        self._fence(name, epoch)
        story = f"its GPUs have not come within {self._trial.timeout_s:g} s"
        if not self._supervisor._engines.give_up(name, epoch, story):
            self._supervisor._fail_run(story)
        elif len(self._supervisor._engines.unrecorded()) == 1:
            self._supervisor.tell_given_up(self._supervisor._drive)

    def _drop_unwanted(self) -> None:
        for name, (epoch, _) in list(self._waits.items()):
            if self._supervisor.is_coming(name, epoch) and not self._supervisor._engines.is_wanted(name):
                del self._waits[name]
                self.num_dropped += 1
                self._fence(name, epoch)
        self._match()

    def _fence(self, name: str, epoch: int) -> None:
        del self._supervisor._coming[name]
        self._supervisor._fences[name] = epoch
        self._supervisor._announce(name, epoch, None)
