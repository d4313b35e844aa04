"""Numbers in sentences, variables in paths, addresses without what is secret in them, and texts that messages hold."""

from __future__ import annotations

import re
from typing import Final

_SINGULAR: Final = {"are": "is", "were": "was", "have": "has", "go": "goes"}

_VARIABLE: Final = re.compile(r"\$(?:\{[^{}/]+\}|[A-Za-z_]\w*)")
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


def unexpanded(path: str) -> str:
    """What to say, behind what was found, of a path that is not there and has a variable in it: of the shell, or of
    Hydra (``${oc.env:DATA}``). Empty for one without."""
    found = _VARIABLE.search(path)
    if found is None:
        return ""
    return (
        f"; {found[0]} is taken as it stands, since no variable is expanded in a scenario: write the path itself, "
        "or give it on the command line as KEY=PATH, where your shell expands it"
    )


def valid_text(text: str) -> str:
    """Without halves of surrogates, which an escape of JSON may spell for Python and no message can hold."""
    return text.encode("utf-8", "replace").decode()
