"""A scenario on its way: what is set, what was left and why, and which of slime's defaults were written down."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec

from penstock.backends.checkpoint.options import ModelOptions
from penstock.backends.data.options import DataOptions
from penstock.backends.engines.options import EnginesOptions, SamplingOptions
from penstock.backends.learners.objectives.spec import keys_of
from penstock.backends.learners.options import LearnerOptions

if TYPE_CHECKING:
    from penstock.runtime.slime.mapping import Plain
    from penstock.runtime.slime.reasons import Effect
    from penstock.runtime.slime.script import Flag, LaunchScript

_BLOCKS: Final = {
    "data": DataOptions(),
    "model": ModelOptions(),
    "sampling": SamplingOptions(),
    "engines": EnginesOptions(),
    "learner": LearnerOptions(),
}
_OBJECTIVE: Final = "learner.objective."


class Left(NamedTuple):
    """A flag that has no place in the scenario, or not quite the same one."""

    line: int
    """0: the script does not have the flag."""
    flag: str
    """Empty: the place is no flag."""
    reason: str
    effect: Effect = "but_for"
    file: str = ""
    """Where it stands, if it is not the script itself."""

    @property
    def place(self) -> str:
        """``--lr (line 3)``."""
        place = f"{self.file}:{self.line}" if self.file else f"line {self.line}" if self.line else "not given"
        return f"--{self.flag} ({place})" if self.flag else place

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class Taken(NamedTuple):
    """A default that was written down because ours differs."""

    key: str
    value: Plain
    ours: Plain
    whose: str

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.value)} is {self.whose}; Penstock's default is {_shown(self.ours)}"


class Writer:
    """Keys by their dotted names; :attr:`flags` by theirs."""

    def __init__(self, script: LaunchScript) -> None:
        self.script = script
        self.flags = {flag.name: flag for flag in script.flags if flag.name}  # the last one counts, as for argparse
        self.document: dict[str, Plain] = {}
        self.left: list[Left] = []
        self.taken: list[Taken] = []

    def set(self, key: str, value: Plain) -> None:
        """Set a key; blocks around it are made."""
        *blocks, last = key.split(".")
        place = self.document
        for block in blocks:
            inner = place.setdefault(block, {})
            assert isinstance(inner, dict), key
            place = inner
        place[last] = value

    def get(self, key: str) -> Plain:
        """None where it is not set, or null."""
        place: Plain = self.document
        for part in key.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return place

    def whole(self, key: str, default: int) -> int:
        """A key that holds a whole number."""
        value = self.get(key)
        return value if isinstance(value, int) else default

    def take(self, key: str, value: Plain, whose: str = "slime's default", *, unless: tuple[str, ...] = ()) -> None:
        """Set a key that no flag has set, and say so if ours would be another value.

        Args:
            key: with its dots.
            value: of slime.
            whose: where it comes from.
            unless: flags that give the value, so that it is no default.
        """
        if self.get(key) is not None:
            return
        self.set(key, value)
        ours = self._ours(key)
        if ours != value and not any(flag in self.flags for flag in unless):
            self.taken.append(Taken(key, value, ours, whose))

    def _ours(self, key: str) -> Plain:
        if key.startswith(_OBJECTIVE):
            preset, name = keys_of(str(self.get(_OBJECTIVE + "name"))), key.removeprefix(_OBJECTIVE)
            return _as_plain(preset.get(name, getattr(LearnerOptions().objective, name)))
        block, _, name = key.partition(".")
        return _as_plain(getattr(_BLOCKS[block], name))

    def leave(self, flag: Flag, reason: str, effect: Effect = "but_for") -> None:
        """Take note of a flag."""
        self.left.append(Left(flag.line, flag.name, reason, effect, flag.file))

    def leave_named(self, name: str, reason: str, effect: Effect = "but_for") -> None:
        """Likewise, where the script has it."""
        if flag := self.flags.get(name):
            self.leave(flag, reason, effect)

    def value(self, name: str) -> str | None:
        """The first value of a flag."""
        flag = self.flags.get(name)
        return flag.values[0] if flag is not None and flag.values else None

    def number(self, name: str, default: float) -> float:
        """The value of a flag as a number."""
        text = self.value(name)
        if text is None:
            return default
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if math.isfinite(found):
            return found
        if not any(left.flag == name and left.effect == "other" for left in self.left):
            self.leave(self.flags[name], f"its value, {text}, is no number; {default:g} was taken", "other")
        return default

    def count(self, name: str, default: int) -> int:
        """Likewise, as a whole number."""
        return int(self.number(name, default))


def _as_plain(value: object) -> Plain:
    return cast("Plain", msgspec.json.decode(msgspec.json.encode(value)))


def _shown(value: Plain) -> str:
    return msgspec.json.encode(value).decode()
