"""The bases of everything that is said: values, events, commands, ledger entries, options.

Invariants:

* Every struct is frozen. A message that was sent cannot change under its receiver.
* Events and commands carry their class name as the tag, so an unknown one fails by name when it is decoded.
* ``gc=False`` is safe on all of them because none can contain itself.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Final

import msgspec

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that it cannot read; only the first is its own class. Whoever decodes what others have
written, or what a kill may have torn, expects all of them."""


class Value(msgspec.Struct, frozen=True, gc=False):
    """A part of a message that is never sent alone."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One block of a scenario: strict, so that a misspelt key is an error and not a default."""


OptionValue = bool | int | float | str | list[bool | int | float | str] | None
"""Of an option that is passed through to a part that other packages bring, or to a server."""


class Delivery(StrEnum):
    """What the runtime promises for an event; see ``docs/architecture.md``; :mod:`penstock.runtime.shell.delivery`."""

    DATA = "data"
    """Kept by the sender until it is settled, sent again when overdue, handled once per key."""
    CONTROL = "control"
    """Absolute state with (epoch, sequence): a later one replaces an earlier one, repeating is harmless."""
    LOSSY = "lossy"
    """Progress and reports: worth having, never waited for."""
    LOCAL = "local"
    """Never leaves its process: results of backends, timers, membership as the runtime sees it."""


DATA: Final = Delivery.DATA
CONTROL: Final = Delivery.CONTROL
LOSSY: Final = Delivery.LOSSY
"""What is compared several times for each event has a name of its own, here and beside other enums: to look a member up
in its class goes through a hook, which takes as long as a call (Python 3.11)."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False, omit_defaults=True):
    """A fact, named in the past tense."""

    delivery: ClassVar[Delivery] = Delivery.CONTROL


class Command(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An imperative that an actor returns and that its shell or a backend carries out."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False, omit_defaults=True):
    """One record of the ledger, made durable before what follows it in the same list of commands."""


class Metric(Value, frozen=True, array_like=True):
    """A named figure; the names are those of the field (``train/loss``, ``rollout/response_len/mean``)."""

    name: str
    value: float
