"""Loads and calls a hook; whatever it does wrong is told with its file and line.

Invariants:

* What a hook raises never travels on as it is: it becomes a :class:`UserCodeError`. That holds for ``SystemExit`` and
  ``KeyboardInterrupt`` too, which would end a process without a word why. Only on a main thread a
  ``KeyboardInterrupt`` is taken for Ctrl-C: learners call hooks on others, or hear no Ctrl-C.
* A hook's error names the key of the scenario, the file, the line, and what to do.
"""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from penstock.backends.processes.user_code import UserCodeError, described, error_place, load_object, split_spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

Result = TypeVar("Result")


class Hook(Generic[Result]):
    """A loaded function with where it stands."""

    def __init__(self, spec: str, key: str) -> None:
        """
        Args:
            spec: ``file.py:function``.
            key: of the scenario that names it.

        Raises:
            UserCodeError: it cannot be loaded, or is no function of so many arguments.
        """
        found = load_object(spec)
        self._path, self._name = split_spec(spec)
        self.key = key
        if isinstance(found, type) or not callable(found):
            raise UserCodeError(f"{key}: {spec}: expected a function, found {_kind(found)}")
        if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
            raise UserCodeError(f"{key}: {spec}: expected a plain function, found one with async or yield")
        self._function = cast("Callable[..., Result]", found)

    @classmethod
    def around(cls, function: Callable[..., Result], path: Path, name: str, key: str) -> Hook[Result]:
        """One that is loaded already.

        Args:
            function: of the user's.
            path: the file that it is in.
            name: in messages.
            key: of the scenario that names it.
        """
        hook = cls.__new__(cls)
        hook._function, hook._path, hook._name, hook.key = function, path, name, key
        return hook

    def __call__(self, *given: object) -> Result:
        """Call it.

        Raises:
            UserCodeError: it raised something.
        """
        try:
            return self._function(*given)
        except BaseException as error:  # foreign code may raise anything
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            place = "" if error_place(error, self._path) else f" ({self.place})"
            raise UserCodeError(f"{self.key}: {self._name} raised {described(error, self._path)}{place}") from error

    @property
    def name(self) -> str:
        """Of the function in its file."""
        return self._name

    @property
    def place(self) -> str:
        """``file.py:31`` of its definition."""
        code = getattr(inspect.unwrap(self._function), "__code__", None)
        code = code if code is not None else getattr(type(self._function).__call__, "__code__", None)
        line = getattr(code, "co_firstlineno", None)
        return f"{self._path.name}:{line}" if line is not None else self._path.name

    def fault(self, text: str) -> UserCodeError:
        """That it ``text``: "returned …; expected …"."""
        return UserCodeError(f"{self.key}: {self._name} ({self.place}) {text}")


def checked_tensor(
    hook: Hook[object], returned: object, *, count: int, axis: str, least: float | None = None
) -> Tensor:
    """What a hook returned, as a tensor of so many finite floating-point numbers without gradient.

    Args:
        hook: that returned it.
        returned: by it.
        count: of the numbers.
        axis: what there is one for, in words: "trained tokens".
        least: that a number may be; None: any.

    Raises:
        UserCodeError: it is anything else.
    """
    import torch

    if not isinstance(returned, torch.Tensor):
        raise hook.fault(
            f"returned {_kind(returned)}; expected a tensor of shape [{count}], one number for each of the {axis}"
        )
    if tuple(returned.shape) != (count,):
        raise hook.fault(
            f"returned a tensor of shape {list(returned.shape)}; expected [{count}], one number for each of the {axis}"
        )
    if not returned.is_floating_point():
        raise hook.fault(
            f"returned a tensor of {returned.dtype}; expected floating-point numbers, such as torch.float32"
        )
    values = returned.detach()
    if bool((wrong := ~values.isfinite()).any()):
        index = int(wrong.nonzero()[0, 0])
        raise hook.fault(f"returned {float(values[index])} at place {index} of {count}; expected finite numbers")
    if least is not None and bool((low := values < least).any()):
        index = int(low.nonzero()[0, 0])
        raise hook.fault(f"returned {float(values[index]):g} at place {index} of {count}; expected at least {least:g}")
    return values


def _kind(found: object) -> str:
    if isinstance(found, type):
        return f"the class {found.__name__}"
    return "None" if found is None else type(found).__name__
