"""What is wrong, in the words of a program: the arguments that it gave in place of options of the command line.

The same code refuses both, and names what has to be changed as the command line does.
"""

from __future__ import annotations

import re
from functools import wraps
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable

_ARGUMENTS: Final = {
    **{name: name for name in ("about", "budget", "faults", "models", "objective", "output", "price", "rollouts")},
    **{name: name for name in ("scenario", "slots", "vary")},
    "devices": "num_devices",
    "engine-speed": "engine_speeds",
    "from-format": "log_format",
    "processes": "num_processes",
    "seeds": "num_seeds",
}
_OPTION: Final = re.compile(rf"(?<![\w-])--({'|'.join(_ARGUMENTS)})(?![\w-])(?: (\w+)=([\w.]+)| (\d+)(?!\S))?")

P = ParamSpec("P")
T = TypeVar("T")


def in_arguments(call: Callable[P, T]) -> Callable[P, T]:
    """The function, whose :class:`UserFault` names its arguments."""

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except UserFault as error:
            raise UserFault(_OPTION.sub(_argument, str(error))) from None

    return called


def _argument(found: re.Match[str]) -> str:
    """``--seeds`` → ``num_seeds``, ``--processes 1`` → ``num_processes=1``, ``--about engines=8`` →
    ``about={"engines": 8}``."""
    option, key, value, number = found.groups()
    name = _ARGUMENTS[option]
    if key is not None:
        return f'{name}={{"{key}": {value}}}'
    return name if number is None else f"{name}={number}"
