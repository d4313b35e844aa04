"""What a view of the dashboard consists of on the server's side, and how it asks.

Invariants:

* An answer is made of a run's folder and a checked query alone, in a thread, and has a deadline. It changes nothing.
* A query is a struct: what it does not name is refused, and so is what does not fit its types.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

LIMIT_S: Final = 10.0


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a page may ask with an address; without fields of its own: nothing."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One address that is answered with JSON."""

    path: str
    """Below ``/api/``, such as ``samples/table``."""
    query: type[Query]
    """Of what is asked. ``run``, which run is meant, is taken off before."""
    answer: Callable[[Path, Any], msgspec.Struct]
    """Run folder and query → what is sent. A ``UserFault`` is shown to the person, as it is."""
    limit_s: float = LIMIT_S
    is_shared: bool = False
    """It is made of the files of its view alone: one answer does for every page that asks until one of them changes."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One tab of the page; ``assets/views/<name>.js`` draws it."""

    name: str
    title: str
    files: tuple[str, ...]
    """Of a run's folder: the view is told when one of them has changed."""
    routes: tuple[Route, ...]
