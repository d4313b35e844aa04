"""How deeply JSON is nested, which whoever takes it from others bounds: what one reader of it can follow is too deep
for the next, whose stack has less room left."""

from __future__ import annotations

import re
from typing import Final

MAX_DEPTH: Final = 64
"""Of lists and objects in one another."""
_FLAT: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[^\[\]{}"]++', re.DOTALL)
_DEEPER: Final = frozenset(b"[{")


def is_too_deep(data: bytes) -> bool:
    """Whether well-formed JSON has more than :data:`MAX_DEPTH` levels."""
    depth = 0
    for bracket in _FLAT.sub(b"", data):
        depth += 1 if bracket in _DEEPER else -1
        if depth > MAX_DEPTH:
            return True
    return False
