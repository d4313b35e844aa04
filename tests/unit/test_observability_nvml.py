"""GPU samples beside the time accounting: real ones where there is a GPU, nothing where there is none."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pynvml
import pytest

from penstock.runtime.observability.nvml import (
    GPU_FILE,
    GpuRow,
    GpuSampler,
    gpu_names,
    read_gpus,
    start_gpu_sampler,
)

if TYPE_CHECKING:
    from pathlib import Path

HAS_GPU = bool(gpu_names())


class Readings:
    """Readings of two GPUs, until the driver goes if it is told to."""

    def __init__(self, num_readings: int | None = None) -> None:
        self.num_readings = num_readings
        self.num_read = 0
        self.has_read = threading.Event()
        self.is_closed = False

    def read(self, at_s: float) -> list[GpuRow]:
        if self.num_readings is not None and self.num_read >= self.num_readings:
            self.has_read.set()
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        self.num_read += 1
        if self.num_read >= 3:
            self.has_read.set()
        return [
            GpuRow(at_s=at_s, gpu=gpu, name="G", utilisation=0.5, memory_used_bytes=1, memory_total_bytes=2)
            for gpu in (0, 1)
        ]

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.skipif(HAS_GPU, reason="this machine has an NVIDIA GPU; the test is about machines without one")
def test_without_a_gpu_there_is_no_sampler_and_no_file(tmp_path: Path) -> None:
    assert start_gpu_sampler(tmp_path, now_s=lambda: 0.0) is None
    assert not (tmp_path / GPU_FILE).exists()
    assert read_gpus(tmp_path) == {}


@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU and its driver, which this machine lacks")
def test_a_real_gpu_is_sampled(tmp_path: Path) -> None:
    sampler = start_gpu_sampler(tmp_path, now_s=lambda: 1.0, interval_s=0.01)
    assert sampler is not None
    sampler.close(10)
    rows = read_gpus(tmp_path)[0]
    assert rows[0].name == gpu_names()[0]
    assert 0 < rows[0].memory_used_bytes <= rows[0].memory_total_bytes


def test_samples_are_written_until_the_end(tmp_path: Path) -> None:
    readings = Readings()
    sampler = GpuSampler(tmp_path, readings, now_s=lambda: 2.5, interval_s=0.001)
    assert readings.has_read.wait(10)
    sampler.close(10)
    gpus = read_gpus(tmp_path)
    assert set(gpus) == {0, 1}
    assert len(gpus[0]) == len(gpus[1]) == readings.num_read
    assert gpus[0][0].at_s == 2.5
    assert readings.is_closed
    assert sampler.error == ""


def test_a_driver_that_goes_ends_the_sampling_only(tmp_path: Path) -> None:
    readings = Readings(num_readings=1)
    sampler = GpuSampler(tmp_path, readings, now_s=lambda: 2.5, interval_s=0.001)
    assert readings.has_read.wait(10)
    sampler.close(10)
    assert "lost" in sampler.error.lower()
    assert len(read_gpus(tmp_path)[0]) == 1
    assert readings.is_closed
