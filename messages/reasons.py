"""Why samples fail: the text of a reason as it travels, and the kind that such texts are counted by.

Invariants:

* A reason is text that users' code, models and peers have a part in. Nothing is decided by it but what people are told
  and when a run in which every sample fails for one reason ends.
* The kind of a reason does not depend on the values in it, so that a run has few kinds and many texts.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.messages.base import Value

MAX_REASON_CHARACTERS: Final = 500
MAX_KIND_CHARACTERS: Final = 120
_PLACE: Final = re.compile(r"\(([^()\s]{1,80}\.py:\d+)")
_NAME: Final = re.compile(r"[A-Za-z_][\w.-]{0,63}")
_ERROR: Final = re.compile(r"[A-Z]\w{0,63}")
_QUOTED: Final = re.compile(r"'[^']*'|\"[^\"]*\"")
_NUMBER: Final = re.compile(r"\d[\d.,]*")


class ReasonCount(Value, frozen=True, kw_only=True):
    """How many samples ended, or are about to end, for one kind of reason."""

    cause: str
    """Of the samples' end, as in the balance: ``scoring_failed``, ``generation_failed``, ``filter_error``."""
    kind: str
    """See :func:`reason_kind`."""
    example: str
    """The first reason of this kind, in full."""
    num_samples: int


def reason_kind(reason: str) -> str:
    """What a reason has in common with others of its kind: the class of the exception and the line that raised it,
    ``ValueError (reward.py:7)``; where no line is known, the text without the values in it."""
    head, place = _head(reason), _PLACE.findall(reason)
    if head and place:
        return f"{head} ({place[-1]})"[:MAX_KIND_CHARACTERS]
    first_line = reason.partition("\n")[0][:MAX_REASON_CHARACTERS]
    return _NUMBER.sub("#", _QUOTED.sub("'…'", first_line))[:MAX_KIND_CHARACTERS]


def _head(reason: str) -> str:
    """The class of the exception, behind the name of the component that it came from, if there is one; empty: none."""
    first, colon, rest = reason.partition(": ")
    if not colon:
        first = reason.partition(" (")[0]
    if not _NAME.fullmatch(first):
        return ""
    second = rest.partition(": ")[0]
    if ": " in rest and _ERROR.fullmatch(second):
        return f"{first}: {second}"
    return first
