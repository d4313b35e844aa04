"""Ends the servers that an EngineWorker has left to a successor, where none comes after it.

Whoever knows that nobody comes is not the engine's process, which is gone, but the host of the run's actors, on each
machine where such a server may be.

| wait | ends with | at the latest |
|---|---|---|
| a server that is ended | the end of its guardian, then that of what it may have left | ``END_TIMEOUT_S`` |
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.served.base.guardian_line import FoundGuardian
from penstock.backends.engines.served.base.hand_over import id_of, socket_name_of
from penstock.backends.engines.served.base.processes import end_marked
from penstock.backends.engines.served.base.settings import SERVER_VARIABLE
from penstock.backends.processes.process_facts import marked_processes

if TYPE_CHECKING:
    from collections.abc import Collection

END_TIMEOUT_S: Final = 20.0


def left_servers(marks: Collection[bytes]) -> list[str]:
    """What marks each server of an owner that is on this machine now.

    Args:
        marks: those of the owner, :func:`~penstock.backends.engines.served.base.settings.owner_marks`.
    """
    return sorted({id_of(pid) for pid in marked_processes(marks)} - {""})


def end_servers(server_ids: Collection[str], timeout_s: float = END_TIMEOUT_S) -> list[int]:
    """End these servers, whose launcher is gone or has just been killed; waits for their end.

    Returns:
        Processes that are still there after the time, which should be none.
    """

    async def end_all() -> list[int]:
        ended = await asyncio.gather(*(_end(server_id, timeout_s) for server_id in server_ids))
        return [pid for left in ended for pid in left]

    return asyncio.run(end_all())


async def _end(server_id: str, timeout_s: float) -> list[int]:
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    with suppress(OSError, TimeoutError):  # who has no guardian that listens is ended as below
        async with asyncio.timeout(timeout_s / 2):
            guardian = await FoundGuardian.open(socket_name_of(server_id))
            guardian.end()  # it finds what the server has started, also where that has lost its marks
            await guardian.wait()
    left_s = deadline_s - asyncio.get_running_loop().time()
    return await end_marked([f"{SERVER_VARIABLE}={server_id}".encode()], left_s)
