r"""What a response has put into ``\boxed{…}``."""

from __future__ import annotations

from typing import Final

BOXED: Final = "\\boxed"


def boxed_answers(text: str) -> list[str]:
    """What stands in each whole ``\\boxed{…}``, braces inside counted."""
    found: list[str] = []
    end = 0
    while (start := text.find(f"{BOXED}{{", end)) >= 0:
        start = end = start + len(BOXED) + 1
        depth = 1
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if not depth:
            found.append(text[start : end - 1])
    return found
