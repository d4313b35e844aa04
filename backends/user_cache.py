"""Where a user keeps what can be made anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from penstock.messages.errors import UserFault

USERS_CACHE: Final = "XDG_CACHE_HOME"


def user_cache(for_what: str, variable: str = USERS_CACHE) -> Path:
    """``penstock`` in ``XDG_CACHE_HOME``, or else in ``.cache`` of the home folder.

    Raises:
        UserFault: there is neither, as in a container where nobody has this process's number.
    """
    given = os.environ.get(USERS_CACHE)
    try:
        return (Path(given) if given else Path.home() / ".cache") / "penstock"
    except RuntimeError:
        raise UserFault(f"{for_what}: this user has no home folder; set {variable}, or HOME, to a folder") from None
