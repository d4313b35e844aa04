"""Functions of a user's, loaded once before a run to see whether they can be; the process for it is this module too.

Invariants:

* They are loaded in a process of their own, which is over with the trial; what they print goes nowhere.
* Who is to blame is told by the scenario's key, also of a function that ends the process or never returns.

| wait | who ends it |
|---|---|
| for the process | it; past the deadline it is killed |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.episodes.functions.wire import FunctionSpecs
from penstock.backends.processes.frames import LoadFailed, Ready, frame
from penstock.backends.processes.function_child import line_to_parent, load_failure
from penstock.backends.processes.function_pool import START_TIMEOUT_S
from penstock.backends.processes.function_process import FunctionProcess
from penstock.backends.processes.user_code import UserCodeError, load_object
from penstock.messages.option_keys import Names

if TYPE_CHECKING:
    from collections.abc import Sequence

MODULE: Final = "penstock.runtime.preflight.function_trial"


class NamedFunction(msgspec.Struct, frozen=True):
    """One of them."""

    key: str
    """Key of the scenario that names the function."""
    kind: str
    """As what it is loaded: a value of :class:`Names`, or of a reward a kind of
    :func:`penstock.backends.rewards.functions.load_function`."""
    spec: str
    """``file.py:name``; for episodes, all of them in words."""
    episode: FunctionSpecs | None = None
    """What plays them, with tools and environment."""


class _Loading(msgspec.Struct, frozen=True, array_like=True, tag=True):
    index: int
    """Of the function that is loaded now."""


_SAID: Final[msgspec.msgpack.Decoder[list[Ready | LoadFailed | _Loading]]] = msgspec.msgpack.Decoder(
    list[Ready | LoadFailed | _Loading]
)


def check_loads(functions: Sequence[NamedFunction], timeout_s: float = START_TIMEOUT_S) -> None:
    """Load them in a process as a run does.

    Raises:
        UserCodeError: one cannot be loaded; the message begins with its key.
    """
    if not functions:
        return
    given = msgspec.json.encode(functions).decode()
    process = FunctionProcess[_Loading](MODULE, given, said=_SAID, is_silent=True)
    tried, deadline_s = functions[0], process.started_at_s + timeout_s
    try:
        while process.ready is None:
            if not process.waits(deadline_s):
                raise UserCodeError(f"{tried.spec}: did not load within {timeout_s:g} s")
            for loading in process.heard():
                tried = functions[loading.index]
            if process.is_gone and process.ready is None:
                raise UserCodeError(f"{tried.spec}: the process that loads it {process.end()}")
    except UserCodeError as error:
        raise UserCodeError(f"{tried.key}: {str(error).removeprefix(f'{tried.key}: ')}") from None
    finally:
        process.end()


def main() -> None:
    """Arguments: the functions as JSON."""
    line, (given,) = line_to_parent()
    for index, function in enumerate(msgspec.json.decode(given, type=list[NamedFunction])):
        line.sendall(frame([_Loading(index)]))
        try:
            _load(function)
        except BaseException as error:  # foreign code may raise anything while it is set up
            line.sendall(frame([load_failure(error, function.spec)]))
            return
    line.sendall(frame([Ready()]))


def _load(function: NamedFunction) -> None:
    if function.kind == Names.POLICY:
        if not callable(load_object(function.spec)):
            raise UserCodeError(f"{function.spec}: expected a class or a function that makes a policy")
    elif function.kind == Names.ROUTING:
        from penstock.runtime.run.own_routing import OwnRouting

        OwnRouting(function.spec)
    elif function.kind == Names.TRACKER:
        if not callable(load_object(function.spec)):
            raise UserCodeError(f"{function.spec}: expected a class of a tracker, which is called with the run")
    elif function.kind == Names.DATA_SOURCE:
        from penstock.backends.data.own_source.child import check_source

        check_source(load_object(function.spec), function.spec)
    elif function.kind in (Names.OBJECTIVE, Names.TRAINING_HOOK, Names.EVALUATION_HOOK):
        from penstock.backends.processes.hook_calling import Hook

        Hook[object](function.spec, function.key)
    elif function.episode is not None:
        from penstock.backends.episodes.functions.loading import load_functions

        load_functions(function.episode)
    else:
        from penstock.backends.rewards.functions import load_function

        load_function(function.kind, function.spec)


if __name__ == "__main__":
    main()
