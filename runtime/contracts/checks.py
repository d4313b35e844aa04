"""Checks of one function, each with a name and, where it failed, with what happened and where.

Invariants:

* What a function raises is a finding with file and line, and never ends the others.
* Every call has a deadline: a function that hangs is a finding too.

| wait | who ends it |
|---|---|
| for the function | it; at the latest the deadline of the call, by a signal to this process |
"""

# What is compared is of any type:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import math
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from penstock.backends.processes.user_code import described, split_spec
from penstock.backends.rewards.functions import NoRewardError
from penstock.messages.errors import UserFault
from penstock.runtime.contracts.findings import Begun, Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType

ResultT = TypeVar("ResultT")


class Checks:
    """Collects the findings about one function."""

    def __init__(
        self,
        spec: str,
        *,
        timeout_s: float,
        reward_key: str | None = None,
        tell: Callable[[Begun | Finding], None] | None = None,
    ) -> None:
        """
        Args:
            spec: ``file.py:function``, or the name of something built in.
            timeout_s: of each call.
            reward_key: ``reward.key`` of the scenario.
            tell: is told what begins and what came of it.
        """
        self.spec = spec
        self.timeout_s = timeout_s
        self.reward_key = reward_key
        self.findings: list[Finding] = []
        self._tell = tell or _tell_nobody
        self.path = split_spec(spec)[0] if ":" in spec else Path(spec)

    @property
    def has_failed(self) -> bool:
        """Whether anything is wrong."""
        return any(finding.state == "failed" for finding in self.findings)

    def run(self, name: str, check: Callable[[], str | None]) -> bool:
        """Do one check, which raises where something is wrong, and may return a note; whether it passed."""
        self._tell(Begun(name))
        try:
            with deadline(self.timeout_s):
                note = check()
            found = Finding(name, "note" if note else "passed", note or "")
        except BaseException as error:  # foreign code may raise anything, and Ctrl-C does not reach its process
            found = Finding(name, "failed", self._story(error))
        self.findings.append(found)
        self._tell(found)
        return found.state != "failed"

    def _story(self, error: BaseException) -> str:
        if isinstance(error, (UserFault, NoRewardError)):
            place = (
                described(error, self.path).rpartition(" (")[2] if self.path.name in described(error, self.path) else ""
            )
            text = str(error)
            return text if not place or self.path.name in text else f"{text} ({place}"
        return described(error, self.path)


@contextmanager
def deadline(timeout_s: float) -> Generator[None]:
    """Ends what runs in it, on the main thread."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise UserFault(f"took longer than {timeout_s:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def unchanged(given: ResultT, call: Callable[[ResultT], object]) -> object:
    """What a call returned that may not change what it is given.

    Raises:
        UserFault: it did.
    """
    before = copy.deepcopy(given)
    returned = call(given)
    if not same(before, given):
        raise UserFault("changed what it was given; work on a copy")
    return returned


def check_same(one: object, other: object) -> None:
    """
    Raises:
        UserFault: two calls with the same arguments returned different things.
    """
    if not same(one, other):
        raise UserFault(
            "returned different things when it was called twice with the same arguments; ranks and resumed runs need "
            "the same, so make it a function of what it is given"
        )


def same(one: object, other: object) -> bool:
    """Whether two things of any kind have the same content; not-a-number is itself."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and bool(torch.equal(torch.nan_to_num(one.detach()), torch.nan_to_num(other.detach())))
        )
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    fields = getattr(one, "__dataclass_fields__", None)
    if fields is not None and type(one) is type(other):
        return all(same(getattr(one, name), getattr(other, name)) for name in fields)
    return bool(one == other)


def _tell_nobody(_: Begun | Finding) -> None:
    pass
