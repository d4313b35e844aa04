"""Weights under other names than the learner's, for engines whose model calls them otherwise.

Invariants:

* No two weights come under one name; what is renamed keeps its values and its shape.
* Weights that share their memory keep doing so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from penstock.backends.processes.hook_calling import Hook

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from penstock.backends.weights.protocol import WeightExporter
    from penstock.backends.weights.stream import AnyWeights, WeightStream
    from penstock.messages.weights import Canary, WeightManifest

NAMES: Final = "weights.names_function"


class RenamingExporter:
    """Exports through another one, under the names that the user's function gives."""

    def __init__(self, inner: WeightExporter, spec: str) -> None:
        """
        Args:
            inner: carries the weights.
            spec: ``file.py:function``.

        Raises:
            UserCodeError: it cannot be loaded.
        """
        self._inner = inner
        self._hook: Hook[object] = Hook(spec, NAMES)

    def export(self, tensors: AnyWeights, *, version: int, publish: int, canary: Canary | None) -> WeightManifest:
        """See :class:`.WeightExporter`.

        Raises:
            UserCodeError: the function failed, or gave no name, or one twice.
        """
        if isinstance(tensors, Mapping):
            names = new_names(self._hook, tensors)
            renamed: AnyWeights = {names[name]: tensor for name, tensor in tensors.items()}
        else:
            renamed = _RenamedStream(tensors, new_names(self._hook, tensors.shapes))
        return self._inner.export(renamed, version=version, publish=publish, canary=canary)

    def release(self, below_version: int) -> None:
        """See :class:`.WeightExporter`."""
        self._inner.release(below_version)

    def close(self) -> None:
        """See :class:`.WeightExporter`."""
        self._inner.close()


class _RenamedStream:
    """See :class:`.WeightStream`."""

    def __init__(self, inner: WeightStream, names: Mapping[str, str]) -> None:
        self._inner = inner
        self._names = names

    @property
    def shapes(self) -> Mapping[str, torch.Tensor]:
        return {self._names[name]: tensor for name, tensor in self._inner.shapes.items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((self._names[name], tensor) for name, tensor in self._inner.tensors())


def new_names(hook: Hook[object], names: Iterable[str]) -> dict[str, str]:
    """By the name that the learner has.

    Raises:
        UserCodeError: the function failed, or gave no name, or one twice.
    """
    found: dict[str, str] = {}
    owners: dict[str, str] = {}
    for name in names:
        new = hook(name)
        if not isinstance(new, str) or not new:
            raise hook.fault(f"returned {new!r} for '{name}'; expected the name that the engine has for it")
        if new in owners:
            raise hook.fault(f"returned '{new}' for '{name}' and for '{owners[new]}'; every weight needs its own name")
        owners[new] = name
        found[name] = new
    return found


def renamed_exporter(exporter: WeightExporter, spec: str | None) -> WeightExporter:
    """The same one where no function is named."""
    return exporter if spec is None else RenamingExporter(exporter, spec)
