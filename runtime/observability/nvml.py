"""What NVML says about the GPUs of this machine, beside the time accounting.

Invariants:

* Without an NVIDIA driver nothing is started and no file is written.
* NVML's utilisation says only that some kernel ran; ``ActivitySpan.occupancy`` says how full the engine was.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import pynvml

from penstock.runtime.observability.jsonl import JsonLinesWriter, read_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GPU_FILE: Final = "gpu.jsonl"
SAMPLE_INTERVAL_S: Final = 1.0


class GpuRow(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one moment, as it stands in ``gpu.jsonl``."""

    at_s: float
    """Seconds since the start of the run."""
    gpu: int
    name: str
    utilisation: float | None
    """Share of NVML's last sampling period in which some kernel ran, in [0, 1]; null where NVML has none (MIG)."""
    memory_used_bytes: int
    memory_total_bytes: int


class GpuReader(Protocol):
    """Where the figures come from."""

    def read(self, at_s: float) -> list[GpuRow]:
        """Every GPU, now."""
        ...

    def close(self) -> None:
        """Let the driver go."""
        ...


class NvmlReader:
    """The GPUs of this machine through NVML."""

    def __init__(self) -> None:
        """
        Raises:
            pynvml.NVMLError: there is no NVIDIA driver, or it does not answer.
        """
        _nvml.nvmlInit()
        handles = [_nvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in range(_nvml.nvmlDeviceGetCount())]
        self._gpus = [(gpu, handle, _text(_nvml.nvmlDeviceGetName(handle))) for gpu, handle in enumerate(handles)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for _, _, name in self._gpus)

    def read(self, at_s: float) -> list[GpuRow]:
        """Every GPU, now.

        Raises:
            pynvml.NVMLError: the driver has gone.
        """
        rows: list[GpuRow] = []
        for gpu, handle, name in self._gpus:
            memory = _nvml.nvmlDeviceGetMemoryInfo(handle)
            row = GpuRow(
                at_s=at_s,
                gpu=gpu,
                name=name,
                utilisation=_utilisation(handle),
                memory_used_bytes=int(memory.used),
                memory_total_bytes=int(memory.total),
            )
            rows.append(row)
        return rows

    def close(self) -> None:
        """Let the driver go."""
        _nvml.nvmlShutdown()


class GpuSampler:
    """A thread that writes ``gpu.jsonl`` until it is closed."""

    def __init__(
        self,
        run_folder: Path,
        reader: GpuReader,
        *,
        now_s: Callable[[], float],
        interval_s: float = SAMPLE_INTERVAL_S,
    ) -> None:
        self.error = ""
        """Why sampling ended early; empty while all is well."""
        self._reader = reader
        self._now_s = now_s
        self._interval_s = interval_s
        self._lines = JsonLinesWriter(run_folder / GPU_FILE, lines_per_write=1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Take a last sample and end; a driver that does not answer in time is left behind."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._sample()
            while not self._stop.wait(self._interval_s):
                self._sample()
            self._sample()
        except (pynvml.NVMLError, OSError) as error:
            # A GPU that fell off the bus or a full disk ends the sampling, not the run, which will notice itself.
            self.error = str(error)
        finally:
            self._lines.close()
            self._reader.close()

    def _sample(self) -> None:
        for row in self._reader.read(self._now_s()):
            self._lines.append(row)


def start_gpu_sampler(
    run_folder: Path, *, now_s: Callable[[], float], interval_s: float = SAMPLE_INTERVAL_S
) -> GpuSampler | None:
    """Start sampling where there is a GPU; None, and no file, where there is none."""
    reader = _open_reader()
    return None if reader is None else GpuSampler(run_folder, reader, now_s=now_s, interval_s=interval_s)


def gpu_names() -> tuple[str, ...]:
    """The GPUs of this machine; none without an NVIDIA driver."""
    reader = _open_reader()
    if reader is None:
        return ()
    try:
        return reader.names
    finally:
        reader.close()


def read_gpus(run_folder: Path) -> dict[int, list[GpuRow]]:
    """The samples of a run by GPU, in order of time; none if there was no GPU.

    Raises:
        UserFault: the file is damaged.
    """
    path = run_folder / GPU_FILE
    gpus: dict[int, list[GpuRow]] = {}
    for row in read_rows(path, GpuRow) if path.exists() else ():
        gpus.setdefault(row.gpu, []).append(row)
    return gpus


_nvml: Final[Any] = pynvml  # it has no annotations


def _open_reader() -> NvmlReader | None:
    try:
        reader = NvmlReader()
    except pynvml.NVMLError:
        return None
    if not reader.names:
        reader.close()
        return None
    return reader


def _utilisation(handle: Any) -> float | None:  # noqa: ANN401 - an opaque pointer
    try:
        return float(_nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except _nvml.NVMLError_NotSupported:
        return None  # a MIG slice has no figure of its own


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
