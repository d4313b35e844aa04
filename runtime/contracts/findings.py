"""What checks of a function say, also from one process to another."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["passed", "failed", "note"]


class Begun(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A check has begun."""

    check: str


class Finding(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What came of one check."""

    check: str
    state: State
    story: str = ""
    """What was found and what is expected, with file and line where there is one."""
