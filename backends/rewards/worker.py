"""A process that calls one reward function or filter: ``python -m penstock.backends.rewards.worker``.

Invariants:

* It dies with the thread that started it, whatever it is doing: the kernel sends SIGKILL.
* Each call is answered once, in the order of arrival for a plain function, whatever the function raises
  (``SystemExit`` and ``KeyboardInterrupt`` too). A call that never returns is the parent's to end, by killing this
  process.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec

from penstock.backends.processes.frames import Ready, frame
from penstock.backends.processes.function_child import line_to_parent, load_failure, orders_beside, orders_of
from penstock.backends.processes.user_code import defined_at, described, named
from penstock.backends.processes.user_loop import run_beside_functions
from penstock.backends.rewards.extracted import bounded_answer
from penstock.backends.rewards.functions import (
    FILTER,
    NoRewardError,
    arguments,
    group_judged,
    judged,
    kept,
    load_function,
    weighed,
)
from penstock.backends.rewards.sampling_calls import HOOK, PRIORITY, SAMPLE_FILTER
from penstock.backends.rewards.wire import CALLS, CallFailed, GroupCall, Kept, Launched, RewardCall

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable

    from penstock.backends.rewards.functions import Loaded
    from penstock.backends.rewards.wire import Answer, Call

MAX_REASON_CHARACTERS: Final = 500


class Served(NamedTuple):
    """The function, as what it is called, and which entry of a dictionary it returns is the reward."""

    kind: str
    loaded: Loaded
    key: str | None


def main() -> None:
    """Arguments: kind of function, what to load, as JSON the options of a reward function (nothing: none)."""
    line, (kind, spec, options_json) = line_to_parent()
    try:
        launched = msgspec.json.decode(options_json, type=Launched) if options_json else None
        loaded = load_function(kind, spec, launched)
    except BaseException as error:  # foreign code may raise anything while it is set up
        line.sendall(frame([load_failure(error, spec)]))
        return
    line.sendall(frame([Ready(loaded.names, loaded.concurrency, is_async=loaded.is_async)]))
    served = Served(kind, loaded, None if launched is None else launched.function.key)
    if loaded.is_async:
        run_beside_functions(_serve_side_by_side(line, served), spec)
    else:
        _serve_in_turn(line, served)


def _serve_in_turn(line: socket.socket, served: Served) -> None:
    for call in orders_of(line, CALLS):
        line.sendall(frame([_answer(call, served)]))


async def _serve_side_by_side(line: socket.socket, served: Served) -> None:
    stream, writer = await asyncio.open_connection(sock=line)
    running: set[asyncio.Task[None]] = set()

    async def run(call: Call) -> None:
        writer.write(frame([await _answer_async(call, served)]))

    async for call in orders_beside(stream, CALLS):
        task = asyncio.create_task(run(call))
        running.add(task)
        task.add_done_callback(running.discard)
    writer.close()


def _answer(call: Call, served: Served) -> Answer:
    loaded = served.loaded
    start = time.perf_counter()
    try:
        returned = loaded.function(**arguments(call, loaded.names))
        return _converted(call, served, returned, time.perf_counter() - start)
    except BaseException as error:  # foreign code may raise anything, and that is its answer
        return _failure(call, error, loaded, time.perf_counter() - start)


async def _answer_async(call: Call, served: Served) -> Answer:
    kind, loaded = served.kind, served.loaded
    start = time.perf_counter()
    deadline = asyncio.timeout(call.timeout_s)
    try:
        async with deadline:
            returned = await cast("Awaitable[object]", loaded.function(**arguments(call, loaded.names)))
        return _converted(call, served, returned, time.perf_counter() - start)
    except TimeoutError as error:
        elapsed_s = time.perf_counter() - start
        if deadline.expired():
            return CallFailed(call.id, elapsed_s, f"the {kind} function took longer than {call.timeout_s:g} s")
        return _failure(call, error, loaded, elapsed_s)
    except BaseException as error:  # as above; nobody else cancels these tasks
        return _failure(call, error, loaded, time.perf_counter() - start)


def _converted(call: Call, served: Served, returned: object, elapsed_s: float) -> Answer:
    if served.kind in (FILTER, SAMPLE_FILTER):
        return kept(call.id, elapsed_s, returned)
    if served.kind == HOOK:
        return Kept(call.id, elapsed_s, True, "")  # nothing hangs on it
    if served.kind == PRIORITY:
        return weighed(call.id, elapsed_s, returned)
    if isinstance(call, GroupCall):
        return group_judged(call, elapsed_s, returned, served.key)
    found = judged(call.id, elapsed_s, returned, served.key)
    extract = served.loaded.extract
    if extract is None or not isinstance(call, RewardCall):
        return found
    return msgspec.structs.replace(found, answer=bounded_answer(extract(call.response, call.truncated) or ""))


def _failure(call: Call, error: BaseException, loaded: Loaded, elapsed_s: float) -> CallFailed:
    if isinstance(error, NoRewardError):
        place = defined_at(loaded.function)
        reason = f"{error} ({place})" if loaded.path is not None and place else str(error)
    elif loaded.path is not None:
        reason = described(error, loaded.path)
    else:
        reason = named(error)
    return CallFailed(call.id, elapsed_s, reason[:MAX_REASON_CHARACTERS])


if __name__ == "__main__":
    main()
