"""Lets megatron-core find no CUDA: its tensors stay on the CPU, its groups talk over gloo.

megatron-core asks for CUDA by name in some forty places, most of which need none. Where CUDA is there nothing of this
happens, so the same learner runs on GPUs. :func:`install` comes before the first import of megatron-core;
:mod:`.gaps` has what is mended inside of it afterwards.

Only the processes of a learner's ranks may call it: torch behaves otherwise in the whole process from then on.

| what megatron-core asks | what it gets |
|---|---|
| ``torch.cuda.current_device()`` for ``device=`` | the CPU |
| ``device="cuda"`` of a factory, ``.to("cuda")``, ``.cuda()`` | the CPU; the tensor itself |
| ``pin_memory=True`` | nothing is pinned |
| ``tensor.type() == "torch.cuda.FloatTensor"`` (its optimizers sort by it) | true of a float tensor on the CPU |
| streams, events, ``synchronize()``, memory figures | objects that do nothing; zeros |
| the random state of the GPU | that of the CPU |

``torch.cuda.is_available()`` stays false.
"""

# torch's own functions are wrapped here, whatever they take:
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CPU: Final = torch.device("cpu")
_FACTORIES: Final = (
    "tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "randperm", "eye",
    "linspace", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_strided",
)  # fmt: skip
_state: Final = {"installed": False}


def install() -> bool:
    """Change torch, once in a process.

    Returns:
        Whether this process goes without CUDA.

    Raises:
        RuntimeError: megatron-core was imported before.
    """
    if _state["installed"] or torch.cuda.is_available():
        return _state["installed"]
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before no_cuda.install(); it has looked for CUDA already")
    _redirect_devices()
    _rename_types()
    _still_streams()
    _share_random_state()
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, _WithoutTriton())
    _state["installed"] = True
    return True


def is_installed() -> bool:
    """Whether this process goes without CUDA."""
    return _state["installed"]


def replace(owner: Any, **values: Any) -> None:  # noqa: ANN401  # modules and classes of torch
    """Put other functions in the place of those that a module or class has."""
    for name, value in values.items():
        setattr(owner, name, value)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _redirect_devices() -> None:
    replace(torch.cuda, current_device=lambda: CPU, set_device=lambda device: None)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    replace(torch.Tensor, cuda=lambda self, *args, **kwargs: self, to=_to_cpu(torch.Tensor.to))
    replace(torch.nn.Module, cuda=lambda self, device=None: self, to=_to_cpu(torch.nn.Module.to))


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


def _to_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return move(self, *args, **kwargs)

    return to


class _TypeName(str):
    """``torch.FloatTensor``, which is equal to ``torch.cuda.FloatTensor`` as well."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "torch.cuda." + str.__str__(self).split(".")[-1]

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _rename_types() -> None:
    original: Callable[..., Any] = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        found = original(self, *args, **kwargs)
        return _TypeName(found) if not args and not kwargs else found

    replace(torch.Tensor, type=type_, record_stream=lambda self, stream: None)


class _Event:
    """Everything is in order on a CPU already."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return 0.0


class _Stream(_Event):
    cuda_stream = 0
    device = CPU

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: object = None) -> object:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _still_streams() -> None:
    only = _Stream()

    def nothing(*args: object, **kwargs: object) -> None:
        pass

    def zero(*args: object, **kwargs: object) -> int:
        return 0

    def empty(*args: object, **kwargs: object) -> defaultdict[str, int]:
        return defaultdict(int)

    def current(*args: object, **kwargs: object) -> _Stream:
        return only

    replace(
        torch.cuda,
        Stream=_Stream, Event=_Event, current_stream=current, default_stream=current,
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=nothing, empty_cache=nothing, reset_peak_memory_stats=nothing,
        memory_allocated=zero, max_memory_allocated=zero, memory_reserved=zero, max_memory_reserved=zero,
        memory_stats=empty,
    )  # fmt: skip
    replace(torch.cuda.nvtx, range_push=zero, range_pop=zero)


def _share_random_state() -> None:
    """What megatron-core draws inside a fork of the GPU's generator is drawn from the forked state of the CPU's."""

    def get_rng_state(device: object = "cuda") -> torch.Tensor:
        return torch.random.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: object = "cuda") -> None:
        torch.random.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    for module in (torch.cuda, torch.cuda.random):
        replace(
            module, get_rng_state=get_rng_state, set_rng_state=set_rng_state, manual_seed=manual_seed,
            manual_seed_all=manual_seed,
        )  # fmt: skip


class _WithoutTriton(importlib.abc.MetaPathFinder):
    """From 0.18 on megatron-core imports one module, an optional saver of memory, that wants triton and does not ask
    whether it is there. There are stand-ins while that module is imported, and no longer."""

    NAMES: Final = (
        "megatron.core.transformer.moe.paged_stash",
        "megatron.core.transformer.moe.ops.paged_stash",
    )

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.NAMES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            replace(spec.loader, exec_module=_with_stand_ins(spec.loader.exec_module))
        return spec


def _with_stand_ins(run: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
    def exec_module(module: types.ModuleType) -> None:
        triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")

        def jit(function: Any = None, **options: object) -> Any:  # noqa: ANN401
            return function or (lambda other: other)

        replace(triton, __version__="0", language=language, jit=jit)
        replace(language, __getattr__=lambda name: object())
        own = {"triton": triton, "triton.language": language}
        before = {name: sys.modules[name] for name in own if name in sys.modules}  # of a module that imports this one
        sys.modules.update(own)
        try:
            run(module)
        finally:
            for name in own:
                del sys.modules[name]
            sys.modules.update(before)

    return exec_module
