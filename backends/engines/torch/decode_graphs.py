"""CUDA graphs of decode steps: a step of a small model is some hundred short kernels, which Python launches slower than
a GPU computes them; a graph launches all of them at once.

Invariants:

* A graph computes what the step computes without one, on the same memory: weights, cache and the state of the slots are
  allocated once and written in place. After :meth:`.TorchEngine.sleep` they lie elsewhere: ``clear``.
* There are few shapes: how many rows a step has and how far attention reaches are rounded up, to a power of two or to
  one and a half of one. Rows that are added belong to idle slots.
* The first step of a shape runs as it is, which readies the libraries; the second is captured.
* A capture is of the calling thread alone: threads that copy weights meanwhile are not in it, and do not break it.
"""

# torch.cuda is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

from penstock.backends.engines.torch.attention import SlotRange
from penstock.backends.engines.torch.slots import MIN_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.checkpoint.model_config import ModelConfig
    from penstock.backends.engines.torch.engine_settings import EngineSettings

MIN_REACH: Final = 128


class Drawn(NamedTuple):
    """What a decode step has found out, for each row; its tokens and log-probs are in the state of the slots."""

    over: torch.Tensor
    """Bool ``[m]``: whether the response ends."""
    ids: torch.Tensor
    """int64 ``[m]``: the tokens."""


class Capture(Protocol):
    """Makes what can be called in place of a step, again and again."""

    def __call__(self, step: Callable[[], Drawn], /) -> Callable[[], Drawn]: ...


def can_capture(config: ModelConfig, settings: EngineSettings) -> bool:
    """Whether the steps of this engine are made of kernels alone: experts are chosen on the host."""
    return (
        settings.device.type == "cuda"
        and config.experts is None
        and config.vision is None
        and settings.learner_model is None
    )


class DecodeGraphs:
    """Of one engine."""

    def __init__(self, num_slots: int, capacity: int, open_capture: Callable[[], Capture]) -> None:
        """
        Args:
            num_slots: of the engine.
            capacity: of a slot, in positions.
            open_capture: gives what captures, :class:`CudaCapture`; another one after each ``clear``.
        """
        self._rows = _sizes(MIN_ROWS, num_slots)
        self._reaches = _sizes(MIN_REACH, capacity)
        self._open_capture = open_capture
        self._capture = open_capture()
        self._captured: dict[SlotRange, Callable[[], Drawn] | None] = {}
        """None: one step of the shape has run."""

    def shape(self, num_running: int, reach: int) -> SlotRange:
        """Of the step that serves so many slots, whose contexts end before ``reach``."""
        return SlotRange(0, _at_least(num_running, self._rows), _at_least(reach, self._reaches))

    def run(self, shape: SlotRange, step: Callable[[], Drawn]) -> Drawn:
        """Do this step, which is of this shape; what it has drawn is overwritten by the next one."""
        if shape not in self._captured:
            self._captured[shape] = None
            return step()
        replay = self._captured[shape]
        if replay is None:
            replay = self._captured[shape] = self._capture(step)
        return replay()

    def clear(self) -> None:
        """Forget all, and give their memory up."""
        self._captured.clear()
        self._capture = self._open_capture()  # what graphs have shared ends with the last of them


class CudaCapture:
    """Captures on one device; what graphs compute in between lies in memory that all of them share, as none runs beside
    another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], Drawn]) -> Callable[[], Drawn]:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            drawn = step()

        def replay() -> Drawn:
            graph.replay()
            return drawn

        return replay


def _sizes(least: int, most: int) -> list[int]:
    """``least`` doubled again and again, with what lies half-way between, up to ``most``."""
    doubled = [least << power for power in range(most.bit_length())]
    return sorted({size for size in chain(doubled, (size * 3 // 2 for size in doubled)) if size < most} | {most})


def _at_least(wanted: int, sizes: list[int]) -> int:
    return next(size for size in sizes if size >= wanted)
