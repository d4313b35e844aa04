"""Ends what engines have left to successors, from a process that must not wait: that of the supervisor.

| wait | ends with | at the latest |
|---|---|---|
| a thread of its own for the servers of one engine | their end | ``left_servers.END_TIMEOUT_S``, which is logged |
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.served.base.left_servers import end_servers, left_servers
from penstock.backends.engines.served.base.settings import owner_marks
from penstock.runtime.hosts.processes.job import run_variables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.hosts.processes.boot import Boot

_log: Final = logging.getLogger(__name__)


def marks_of(name: str, boot: Boot) -> list[bytes]:
    """What is in the environment of an engine's servers.

    Args:
        name: of the engine.
        boot: of any actor of its run.
    """
    return owner_marks(name, run_variables(boot.run_id, boot.run_folder))


def end_left_here(name: str, boot: Boot) -> Future[None]:
    """End the servers that incarnations of this engine have left on this machine; returns at once, and says when it is
    done. Those of one that starts after this call are others.

    Args:
        name: of the engine.
        boot: of any actor of its run.
    """
    found, done = left_servers(marks_of(name, boot)), Future[None]()

    def end() -> None:
        tell_left(name, end_servers(found))
        done.set_result(None)

    if found:
        threading.Thread(target=end, name=f"end-left-{name}", daemon=True).start()
    else:
        done.set_result(None)
    return done


def tell_left(name: str, pids: Sequence[int]) -> None:
    """Log which processes would not go, if any."""
    if pids:
        _log.warning("processes %s of a server that %s has left could not be ended", pids, name)
