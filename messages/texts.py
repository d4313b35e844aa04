"""Numbers in sentences, and addresses without what is secret in them."""

from __future__ import annotations

import re
from typing import Final

_SINGULAR: Final = {"are": "is", "were": "was", "have": "has", "go": "goes"}

_USER_INFO: Final = re.compile(r"(?<=://)[^\s/?#@\"'\\]{1,1024}@(?=[^\s/?#@])")


def counted(number: int, one: str) -> str:
    """``1 step``, ``1,234 steps``, ``2 batches``, ``2 entries``: a number and what it counts, given in the singular."""
    if number == 1:
        return f"1 {one}"
    if one.endswith("y") and one[-2] not in "aeiou":
        return f"{number:,} {one[:-1]}ies"
    return f"{number:,} {one}{'es' if one.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def does(number: int, many: str) -> str:
    """``runs`` of one, ``run`` of any other number: what so many do, given in the plural."""
    return many if number != 1 else _SINGULAR.get(many, f"{many}s")


def without_credentials(text: str) -> str:
    """The text with ``***`` for what stands before the host of an address: ``https://***@example.org``."""
    return _USER_INFO.sub("***@", text)
