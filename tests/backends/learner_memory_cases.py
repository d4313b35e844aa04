"""Host memory that each rank of a sharded torch learner takes to load a model, and to publish it: jobs and figures.

* Counted is anonymous memory (``RssAnon`` in ``/proc/self/status``), a thousand times a second, above what the rank had
  before. Pages of the model's files that are mapped while it loads are the system's, which takes them back.
* Loading includes the check that packed sequences do not see each other, which runs the model.
"""

# Transformers is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Final, NamedTuple

TIMEOUT_S: Final = 600.0
INTERVAL_S: Final = 0.001
MIB: Final = 2**20
LAYER_BYTES: Final = 44 * MIB
"""Of one layer of the model, in float32."""
ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB)}
"""Of the ranks: what they let go of goes back to the system, and is seen when it is taken again."""


class Work(NamedTuple):
    """What one rank is to do."""

    rank: int
    num_ranks: int
    folder: str
    max_bucket_bytes: int


class Used(NamedTuple):
    """The most that one rank had above what it had before, in bytes."""

    load_bytes: int
    publish_bytes: int


class PeakMemory:
    """The highest anonymous memory of this process while the block runs.

    | wait | who ends it |
    |---|---|
    | of the thread, between two looks | the end of the block; at the latest the interval |
    """

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._before_bytes = self._peak_bytes = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def added_bytes(self) -> int:
        return self._peak_bytes - self._before_bytes

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._peak_bytes = max(self._peak_bytes, anonymous_bytes())


def anonymous_bytes() -> int:
    """Of this process, in memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def make_large_model(folder: Path, size_bytes: int) -> int:
    """A Qwen3 of about that size in float32, all of it 0, which takes no room on disk; its exact size."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from penstock.backends.weights.tensor_file import lay_out

    config = Qwen3Config(
        vocab_size=2048, hidden_size=1024, intermediate_size=2816, num_hidden_layers=round(size_bytes / LAYER_BYTES),
        num_attention_heads=16, num_key_value_heads=8, head_dim=64, max_position_embeddings=256,
        tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        layout = lay_out(dict(Qwen3ForCausalLM(config).named_parameters()))
    path = folder / "model.safetensors"
    path.write_bytes(layout.header)
    os.truncate(path, layout.size_bytes)
    return layout.size_bytes


def load_and_publish(work: Work) -> Used:
    """As one rank, in a process of its own."""
    import torch
    import torch.distributed as dist

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.torch.publishing import GatheredWeights
    from penstock.backends.learners.torch.sharded_load import load_divided
    from penstock.backends.learners.worker_group.workers import join_workers
    from penstock.backends.weights.disk import DiskExporter

    torch.set_num_threads(1)
    folder = Path(work.folder)
    workers = join_workers(
        store=dist.FileStore(str(folder / "store"), work.num_ranks),  # type: ignore[attr-defined]  # it is
        rank=work.rank,
        num_ranks=work.num_ranks,
        device=torch.device("cpu"),
        timeout_s=TIMEOUT_S,
    )
    with PeakMemory() as loading:
        model = load_divided(folder / "model", workers, LearnerOptions(parallel="fsdp"), dtype="float32")
    workers.barrier()
    with PeakMemory() as publishing:
        weights = GatheredWeights(model, workers, max_bucket_bytes=work.max_bucket_bytes)
        if workers.is_first:
            exporter = DiskExporter(folder / "published", 0)
            exporter.export(weights, version=0, publish=0, canary=None)
        weights.finish()
    workers.barrier()
    dist.destroy_process_group()
    return Used(loading.added_bytes, publishing.added_bytes)


def measure(folder: Path, num_ranks: int, max_bucket_bytes: int) -> list[Used]:
    """What each rank takes for the model in ``folder/model``."""
    work = [Work(rank, num_ranks, str(folder), max_bucket_bytes) for rank in range(num_ranks)]
    with multiprocessing.get_context("spawn").Pool(num_ranks) as pool:
        return pool.map_async(load_and_publish, work, chunksize=1).get(TIMEOUT_S)
