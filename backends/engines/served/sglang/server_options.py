"""The options of the pinned SGLang server, what of them a scenario may set, and the command line that they make.

``server_options.json`` has the list as the server's own argument parser gives it; a test compares the two.

Invariants:

* A word on the server's command line has been checked here: its name, its type, its choices.
* What Penstock sets itself, and what would break a promise of Penstock's, is refused with the reason.
* Nothing here imports SGLang.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from penstock.backends.engines.served.sglang.environment import SGLANG_VERSION
from penstock.backends.engines.served.sglang.reserved_options import RESERVED
from penstock.backends.engines.served.sglang.settings import LOG_LEVEL_OPTIONS, TELLING_LOG_LEVELS
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.backends.engines.options import OptionValue

KEY: Final = "engines.sglang"
PLACED: Final = ("nnodes",)
"""What a scenario asks of the placement; each server is told by its launch, together with its rank."""
_LIST: Final = Path(__file__).with_name("server_options.json")
_SIZE: Final = re.compile(r"\d+(\.\d+)?[kMGT]|\d+([KMGT]i)?")
_TYPE_NAMES: Final = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text",
    "size": "a whole number, or one with a suffix as in '16k' or '16Ki'", "json": "JSON in a text",
}  # fmt: skip


class ServerOptionError(UserFault):
    """An option that the pinned server would not take, or that is not the user's to set."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(key, text)
        self.key = key
        """As the user wrote it."""
        self.text = text

    def __str__(self) -> str:
        return f"{KEY}.{self.key}: {self.text}"


class ServerOption(msgspec.Struct, frozen=True):
    """One option of ``sglang.launch_server``, as its own parser declares it."""

    name: str
    """Under which the server keeps its value."""
    flags: tuple[str, ...]
    shape: Literal["switch", "toggle", "value"]
    """A switch is on when it is there; a toggle has a ``--no-`` form as well."""
    type: Literal["bool", "int", "size", "float", "str", "json"]
    nargs: Literal["+", "*", "?"] | None = None
    """How many values it takes; None is one."""
    choices: tuple[str | int, ...] | None = None


class _OptionList(msgspec.Struct, frozen=True):
    version: str
    deterministic_attention_backends: tuple[str, ...]
    options: tuple[ServerOption, ...]


class _Given(NamedTuple):
    """One option as a scenario gives it."""

    key: str
    option: ServerOption
    value: bool | int | float | str | list[bool | int | float | str]


def check_server_options(options: Mapping[str, OptionValue]) -> None:
    """Check what a scenario sets under ``engines.sglang``.

    Raises:
        ServerOptionError: the first thing that is wrong.
    """
    for key in options:
        for flag in option_named(key).flags:
            if reason := RESERVED.get(_name_of(flag)):
                raise ServerOptionError(key, f"cannot be set: {reason}")
    command_line(options)


def command_line(options: Mapping[str, OptionValue]) -> list[str]:
    """The words for the server's command line, without those of ``PLACED``. A null leaves the server's default.

    Raises:
        ServerOptionError: the server would not take one of them.
    """
    return [word for given in _resolve(options) if given.option.name not in PLACED for word in _words(given)]


def defaults(*, is_cpu: bool) -> dict[str, OptionValue]:
    """What the options of a scenario are laid over."""
    common: dict[str, OptionValue] = {"sleep_on_idle": True}  # without it an idle server takes a whole core
    return {**common, "device": "cpu", "attention_backend": "torch_native"} if is_cpu else common


def merged(*layers: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Options laid over each other, the last one on top, whichever of an option's names each uses.

    Raises:
        ServerOptionError: there is no such option.
    """
    result: dict[str, OptionValue] = {}
    for layer in layers:
        result |= {_name_of(option_named(key).flags[0]): value for key, value in layer.items()}
    return result


def supports_seeded_sampling(options: Mapping[str, OptionValue], *, is_cpu: bool) -> bool:
    """Whether the server draws by a request's seed; otherwise it ignores the seed and says nothing.

    It does where it infers deterministically, which it cannot on a CPU, nor with most attention backends.
    """
    given = merged(options)
    if is_cpu or not (given.get("enable_deterministic_inference") or given.get("rl_on_policy_target")):
        return False
    able = (None, *deterministic_attention_backends())  # without a choice it takes one that is able
    parts = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return all(given.get(part) in able for part in parts)


def deterministic_attention_backends() -> tuple[str, ...]:
    """With which a server can infer deterministically."""
    return _option_list().deterministic_attention_backends


def option_named(key: str) -> ServerOption:
    """The option that a key of a scenario means: one of its flags, or the name of its value, written with ``_``.

    Raises:
        ServerOptionError: there is none.
    """
    names = _names()
    name = _name_of(key)
    if name not in names:
        begun = [other for other in names if other.startswith(f"{name}_")]
        near = begun if len(begun) == 1 else difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "`python -m sglang.launch_server --help` lists them"
        raise ServerOptionError(key, f"SGLang {SGLANG_VERSION} has no such option; {hint}")
    if name != key:  # one spelling, so that nobody who looks for an option misses it
        raise ServerOptionError(key, f"write it '{name}'")
    return names[name]


@cache
def _option_list() -> _OptionList:
    return msgspec.json.decode(_LIST.read_bytes(), type=_OptionList)


@cache
def _names() -> dict[str, ServerOption]:
    options = _option_list().options
    by_value = {option.name: option for option in options}
    by_flag = {_name_of(flag): option for option in options for flag in option.flags}
    return by_value | by_flag


def _name_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _resolve(options: Mapping[str, OptionValue]) -> Iterator[_Given]:
    keys: dict[ServerOption, str] = {}
    for key, value in options.items():
        option = option_named(key)
        if option in keys:
            raise ServerOptionError(key, f"is another name of '{keys[option]}', which is given as well; remove one")
        keys[option] = key
        if value is None:
            continue
        given = _Given(key, option, value)
        _check_shape(given)
        yield given


def _check_shape(given: _Given) -> None:
    """Whether the value is one, or a list of, what the option takes."""
    key, option, value = given
    if option.nargs in ("+", "*"):
        if not isinstance(value, list):
            raise ServerOptionError(key, f"takes a list; found {_show(value)}")
        if option.nargs == "+" and not value:
            raise ServerOptionError(key, "takes a list of at least one; found an empty one")
        for item in value:
            _check_value(key, option, item)
            if isinstance(item, str) and item.startswith("-"):
                raise ServerOptionError(key, f"no item of the list can begin with '-'; found {_show(item)}")
    elif isinstance(value, list) and option.type == "json":
        pass  # a list of plain values is JSON as it stands
    elif isinstance(value, list):
        raise ServerOptionError(key, f"takes {_TYPE_NAMES[option.type]}, not a list; found {_show(value)}")
    elif not (option.nargs == "?" and value is True):
        _check_value(key, option, value)


def _check_value(key: str, option: ServerOption, value: bool | int | float | str) -> None:
    if not _fits(option, value):
        hint = "; put it in quotes" if option.type == "str" and not isinstance(value, str) else ""
        raise ServerOptionError(key, f"takes {_TYPE_NAMES[option.type]}; found {_show(value)}{hint}")
    if option.choices is not None and value not in option.choices:
        near = difflib.get_close_matches(str(value), map(str, option.choices), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(map(str, option.choices))}"
        raise ServerOptionError(key, f"{_show(value)} is none of its choices; {hint}")
    if option.flags[0] in LOG_LEVEL_OPTIONS and value not in TELLING_LOG_LEVELS:
        levels = ", ".join(TELLING_LOG_LEVELS)
        raise ServerOptionError(
            key, f"must be one of {levels}, since the port is read from the log; found {_show(value)}"
        )
    if option.name == "decode_log_interval" and isinstance(value, int) and value < 1:  # it counts passes modulo this
        raise ServerOptionError(
            key,
            f"must be at least 1; found {value}, which ends the server at its first decode pass. null leaves it to "
            "SGLang; then no passes are timed",
        )


def _fits(option: ServerOption, value: bool | int | float | str) -> bool:
    match option.type:
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "size":
            return type(value) is int or (isinstance(value, str) and _SIZE.fullmatch(value) is not None)
        case "float":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "json":
            return isinstance(value, str) and _is_json(value)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _words(given: _Given) -> list[str]:
    _, option, value = given
    flag = option.flags[0]
    if option.shape == "switch":
        return [flag] if value else []
    if option.shape == "toggle":
        return [flag if value else f"--no-{flag[2:]}"]
    if option.nargs in ("+", "*"):
        assert isinstance(value, list), "as has been checked"
        return [flag, *map(str, value)]
    if value is True:  # of an option whose value may be left out
        return [flag]
    # One word, so that a value which begins with "-" is not taken for an option.
    return [f"{flag}={json.dumps(value) if isinstance(value, list) else value}"]


def _show(value: OptionValue) -> str:
    return f"'{value}'" if isinstance(value, str) else json.dumps(value)
