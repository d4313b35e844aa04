"""Stands in for triton where there is no GPU: kernels can be defined with it and never launched.

SGLang's modules define Triton kernels when they are loaded. The real package imports without a GPU too, at the price
of a gigabyte of disk.
"""

from __future__ import annotations

import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Anything(ModuleType):
    """A module that has every attribute; called as a decorator, it gives back the function."""

    __version__ = "3.9.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value: object
        if name[:1].isupper():  # stands as a base class or in annotations
            value = type(name, (), {"__init__": _ignore})
        else:
            full_name = f"{self.__name__}.{name}"
            value = sys.modules.get(full_name) or _Anything(full_name)
        setattr(self, name, value)
        return value

    def __call__(self, *arguments: object, **options: object) -> object:
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return _same

    def __bool__(self) -> bool:
        return False


class _Triton(_Anything):
    """The package itself, with the two functions that plain Python code calls."""

    @staticmethod
    def cdiv(dividend: int, divisor: int) -> int:
        return -(dividend // -divisor)

    @staticmethod
    def next_power_of_2(number: int) -> int:
        return 1 << (number - 1).bit_length() if number > 0 else 1


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "triton" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Triton(spec.name) if spec.name == "triton" else _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _ignore(self: object, *arguments: object, **options: object) -> None:
    pass


def _same(function: Callable[..., object]) -> Callable[..., object]:
    return function


sys.meta_path.insert(0, _Finder())
