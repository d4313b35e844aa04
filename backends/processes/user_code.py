"""Loads what a scenario names as ``file.py:Name``: reward functions, filters, staleness policies.

Invariants:

* A file is executed at most once in a process; every name in it comes from that one execution.
* The file's folder is importable while and after it is loaded, so it may import its neighbours as a script may.
* Whatever goes wrong is told with the file and the line of the user's code, not of ours.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Final, cast

from penstock.messages.errors import UserFault
from penstock.messages.texts import unexpanded, valid_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

SUFFIX: Final = ".py"
MAX_FRAMES: Final = 4
_PLACES: Final = ("stdlib", "platstdlib", "purelib", "platlib")
_NOT_USERS: Final = (Path(__file__).parents[1], *(Path(sysconfig.get_path(name)) for name in _PLACES))
"""Where our files are, and those of libraries."""


class UserCodeError(UserFault):
    """A user's file or function: it cannot be loaded, has raised an error, or returned what cannot be used."""


def load_object(spec: str) -> object:
    """The object that ``file.py:Name`` names; ``Name`` may have dots. A relative file is looked for in the current
    folder.

    Raises:
        UserCodeError: no such file, it cannot be imported, or it has no such name.
    """
    path, name = split_spec(spec)
    found: object = _load_module(path)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserCodeError(_no_such_name(path, name, found, part))
        found = getattr(found, part)
    return found


def split_spec(spec: str) -> tuple[Path, str]:
    """The absolute file and the name of ``file.py:Name``.

    Raises:
        UserCodeError: it has another form, or there is no such file.
    """
    file, separator, name = spec.rpartition(":")
    if not separator or not file.endswith(SUFFIX) or not name:
        raise UserCodeError(f"{spec!r}: expected file.py:name, as in rewards/mine.py:score")
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        beside = sorted(other.name for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        hint = f"; Python files there: {', '.join(beside[:8])}" if beside else ""
        raise UserCodeError(f"{spec}: there is no file {path}{hint}{unexpanded(file)}")
    return path, name


def error_place(error: BaseException, path: Path) -> str:
    """``file.py:31`` of the innermost frame in the user's file; empty when there is none (a fault in a library that
    was called from nowhere in it)."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    return f"{path.name}:{lines[-1]}" if lines else ""


def defined_at(function: object) -> str:
    """``file.py:31`` of the first line of a function, or of what calls an object; empty where that is not known."""
    plain = inspect.unwrap(cast("Callable[..., object]", function))
    code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if isinstance(code, CodeType) else ""


def described(error: BaseException, path: Path) -> str:
    """``ValueError: the text (file.py:31)``."""
    place, text = error_place(error, path), named(error)
    return f"{text} ({place})" if place else text


def named(error: BaseException) -> str:
    """``ValueError: the text``, of any exception at all."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_of(error: BaseException) -> str:
    """What it says, also where the class is a user's and cannot say it."""
    try:
        return valid_text(str(error))
    except Exception:
        return "its message cannot be shown"


def told(error: BaseException) -> str:
    """``ValueError: the text (file.py:12, called from file.py:31)``: with the user's frames, none of ours or of a
    library's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-MAX_FRAMES:])]
    return f"{named(error)} ({', called from '.join(places)})" if places else named(error)


def _is_users(filename: str) -> bool:
    path = Path(filename)
    return path.is_absolute() and not any(path.is_relative_to(folder) for folder in _NOT_USERS)


def _load_module(path: Path) -> ModuleType:
    name = f"penstock_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    code = _compiled(path)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # only other suffixes give None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:  # it is foreign code and may raise anything
        del sys.modules[name]
        raise UserCodeError(f"{path} cannot be imported: {described(error, path)}{_hint(error)}") from error
    return module


def _compiled(path: Path) -> CodeType:
    try:
        return compile(path.read_bytes(), str(path), "exec")
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise UserCodeError(f"{path}:{error.lineno}: {error.msg}" + (f": {line}" if line else "")) from error
    except (OSError, ValueError) as error:  # ValueError: null bytes
        raise UserCodeError(f"{path} cannot be read: {error}") from error


def _hint(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f". Install {error.name!r} into {sys.prefix}, or put it beside the file"
    return ""


def _no_such_name(path: Path, name: str, owner: object, part: str) -> str:
    names = [known for known in vars(owner) if not known.startswith("_")] if hasattr(owner, "__dict__") else []
    near = difflib.get_close_matches(part, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{path} has no {name!r}{hint}"
