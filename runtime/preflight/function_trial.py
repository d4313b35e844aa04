"""Functions of a user's, loaded once before a run to see whether they can be; the process for it is this module too.

Invariants:

* They are loaded in a process of their own, which is over with the trial; what they print goes nowhere.
* Who is to blame is told by the scenario's key, also of a function that ends the process or never returns.

| wait | who ends it |
|---|---|
| for the process | it; past the deadline it is killed |
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.processes.function_process import FunctionProcess, framed
from penstock.backends.processes.user_code import UserCodeError, load_object, told
from penstock.messages.errors import UserFault
from penstock.messages.option_keys import Names

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMEOUT_S: Final = 120.0
"""As long as a run waits for its functions: imports of a user's may take long."""


class NamedFunction(msgspec.Struct, frozen=True):
    """One of them."""

    key: str
    """Of the scenario."""
    kind: str
    """As what it is loaded: a value of :class:`Names`, or of a reward a kind of
    :func:`penstock.backends.rewards.functions.load_function`."""
    spec: str
    """``file.py:name``"""


class _Said(msgspec.Struct):
    index: int
    """Of the function that is loaded now; one past the last: all are."""
    problem: str = ""


def check_loads(functions: Sequence[NamedFunction], timeout_s: float = TIMEOUT_S) -> None:
    """Load them in a process as a run does.

    Raises:
        UserCodeError: one cannot be loaded; the message begins with its key.
    """
    if not functions:
        return
    given = msgspec.json.encode(functions).decode()
    process = FunctionProcess("penstock.runtime.preflight.function_trial", given, is_silent=True)
    said, deadline_s = _Said(0), time.monotonic() + timeout_s
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.socket, selectors.EVENT_READ)
            while said.index < len(functions):
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise _blamed(functions[said.index], f"did not load within {timeout_s:g} s")
                for body in process.bodies():
                    said = msgspec.json.decode(body, type=_Said)
                    if said.problem:
                        raise UserCodeError(f"{functions[said.index].key}: {said.problem}")
                if process.is_gone and said.index < len(functions):
                    raise _blamed(functions[said.index], f"the process that loads it {process.end()}")
    finally:
        process.end()


def _blamed(function: NamedFunction, text: str) -> UserCodeError:
    return UserCodeError(f"{function.key}: {function.spec}: {text}")


def main() -> None:
    """Arguments: descriptor of the socket, the functions as JSON, process id of the parent."""
    from penstock.backends.rewards.worker import stand_alone  # it imports what a function of a reward is loaded with

    descriptor, given, parent = sys.argv[1:]
    stand_alone(int(parent))
    os.set_inheritable(int(descriptor), False)
    connection = socket.socket(fileno=int(descriptor))
    functions = msgspec.json.decode(given, type=list[NamedFunction])
    for index, function in enumerate(functions):
        _say(connection, _Said(index))
        try:
            _load(function)
        except BaseException as error:  # foreign code may raise anything while it is set up
            message = str(error) if isinstance(error, UserFault) else f"{function.spec}: {told(error)}"
            _say(connection, _Said(index, message.removeprefix(f"{function.key}: ")))
            return
    _say(connection, _Said(len(functions)))


def _say(connection: socket.socket, said: _Said) -> None:
    connection.sendall(framed(msgspec.json.encode(said)))


def _load(function: NamedFunction) -> None:
    if function.kind == Names.POLICY:
        if not callable(load_object(function.spec)):
            raise UserCodeError(f"{function.spec}: expected a class or a function that makes a policy")
    elif function.kind in (Names.OBJECTIVE, Names.TRAINING_HOOK):
        from penstock.backends.processes.hook_calling import Hook

        Hook[object](function.spec, function.key)
    else:
        from penstock.backends.rewards.functions import load_function

        load_function(function.kind, function.spec)


if __name__ == "__main__":
    main()
