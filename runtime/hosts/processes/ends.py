"""What the end of a process means: whose fault it was, and in which words that is told.

Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.runtime.hosts.processes.boot import EndKind
from penstock.runtime.hosts.processes.ports import OutcomeKind
from penstock.runtime.run.plan import log_name

if TYPE_CHECKING:
    from penstock.runtime.hosts.processes.ports import EndedProcess

_FRAME: Final = re.compile(r'^ *File "([^"\n]+)", line ([0-9]+)', re.MULTILINE)
_FOR_GOOD: Final = {
    EndKind.USER_ERROR: OutcomeKind.USER_ERROR,
    EndKind.DIVERGED: OutcomeKind.DIVERGED,
    EndKind.LEDGER_FAILED: OutcomeKind.FAILED,
    EndKind.DISK_FULL: OutcomeKind.FAILED,
    EndKind.SUPERSEDED: OutcomeKind.FAILED,
}
"""Ends after which starting again would end the same."""


class Verdict(NamedTuple):
    """On one end."""

    cause: str
    ends_as: OutcomeKind | None
    """How the run ends with it; None: somebody may take its place."""


def verdict_on(ended: EndedProcess) -> Verdict:
    """What is told of a process that has ended and was not asked to."""
    end = ended.end
    if end is None:
        return Verdict("its process was killed", None)
    if end.kind in _FOR_GOOD:
        return Verdict(end.error, _FOR_GOOD[end.kind])
    if end.kind is EndKind.CRASHED:
        log, place = log_name(ended.name, ended.epoch), _place_of(end.traceback)
        return Verdict(f"{end.error} ({place}{log} has the traceback)", None)
    return Verdict(f"it ended without being asked to ({end.kind})", None)


def _place_of(traceback: str) -> str:
    """The innermost frame of the last exception."""
    frames = _FRAME.findall(traceback)
    return "{}:{}; ".format(*frames[-1]) if frames else ""
