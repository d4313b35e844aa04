"""Weights through shared memory hold an engine up for less than one and a half times the copying of their bytes.

A publish of ``--megabytes`` in float32 from a learner's memory into an embedded engine's. Held up is what nothing can
be generated in: loading, or the swap, and whatever is looked at again after it. The publish and the fetch, with their
digests, go on while the engine decodes and are figures beside it. The copy is of the same tensors into memory that has
been written to before, made right before in the same turn, on as many threads. The canary's few tokens are left out.

A publish holds the learner up until its weights are copied: less than five times the copying, in CPU seconds of its
thread. The digest is made by other threads, beside this and the next step; by the clock all share what cores there are.

With ``engines.double_buffering`` the fetching thread prepares them in a second set while the engine decodes, here four
requests. What that makes of its steps is measured as well, against the steps right before.

Without it bytes are hashed again at the swap if somebody has opened the segment for writing since the fetch: the third
arm, in which somebody does, shows what that takes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from penstock.backends.checkpoint.make import ModelShape, write_made_model
from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.engines.torch.fetching import fetch_publish
from penstock.backends.engines.torch.requests import GenerationRequest
from penstock.backends.engines.torch.second_set import SecondSet
from penstock.backends.weights.segments import sweep
from penstock.backends.weights.shared_memory import SharedMemoryExporter
from penstock.backends.weights.transports import open_fetcher
from penstock.benchmarks._harness import Benchmark, Measured, claim, fact, figures, interleaved, pairs, plain_figure
from penstock.messages.arrays import pack_tokens

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.backends.engines.torch.fetching import FetchedPublish
    from penstock.benchmarks._harness import Turn
    from penstock.benchmarks._results import Figure

QUICK: Final = ("--megabytes", "120", "--repetitions", "5")
QUICK_S: Final = 20
MOST: Final = 1.5
MOST_OF_LEARNER: Final = 5.0
LAYER: Final = ModelShape(hidden=768, layers=1, heads=12, kv_heads=12, head_dim=64, intermediate=2240)
LAYER_BYTES: Final = 4 * (4 * 768 * 768 + 3 * 768 * 2240)
"""Of its matrices in float32."""
IN_PLACE: Final = "in place"
DOUBLE: Final = "double buffering"
WRITTEN: Final = "in place, somebody opens it for writing"
NUM_SLOTS: Final = 4
MAX_CONTEXT: Final = 512
NUM_ALONE: Final = 8
"""Decode steps that are measured before preparing begins."""


class Steps(NamedTuple):
    """Decode steps, one after the other."""

    num: int
    mean_s: float
    longest_s: float
    cpu_s: float
    """Of the decoding thread, mean."""

    @classmethod
    def of(cls, seconds: Sequence[tuple[float, float]]) -> Steps:
        """Those that took so long, by the clock and of the processor."""
        wall_s, cpu_s = zip(*seconds, strict=True)
        return cls(len(seconds), fmean(wall_s), max(wall_s), fmean(cpu_s))


class Brought(NamedTuple):
    """One publish, until an engine serves it."""

    load_s: float
    """Or swap."""
    check_s: float = 0.0
    """For the digest after the load."""
    publish_s: float = 0.0
    fetch_s: float = 0.0
    copied_s: float = 0.0
    """Of that until the learner may train on."""
    copied_cpu_s: float = 0.0
    """Its own thread's meanwhile."""
    copy_s: float = 0.0
    copy_cpu_s: float = 0.0
    is_same: bool = False
    """Whether the digest is the manifest's in the end."""
    prepare_s: float = 0.0
    alone: Steps | None = None
    """Before preparing; None: nothing was prepared."""
    beside: Steps | None = None
    """While preparing."""


class Way:
    """A learner's weights, an exporter, an engine, and memory to copy to."""

    def __init__(self, folder: Path, run_id: str) -> None:
        with CheckpointTensors(folder) as tensors:
            self.weights: Mapping[str, torch.Tensor] = {name: tensors[name].float() for name in tensors}
        self.size_bytes = sum(tensor.nbytes for tensor in self.weights.values())
        self.exporter = SharedMemoryExporter(run_id, 1)
        settings = EngineSettings(num_slots=NUM_SLOTS, max_context=MAX_CONTEXT)
        self._engine = TorchEngine(read_model_config(folder), settings)
        self._second = SecondSet(self._engine, settings.device)
        self._preparing = ThreadPoolExecutor(1)
        self._copies = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        self._version = 0

    def bring(self, *, is_written: bool = False, is_double: bool = False) -> Brought:
        """One version.

        Args:
            is_written: somebody opens the segment for writing after the fetch.
            is_double: it is prepared beside decoding.
        """
        self._version += 1
        began_s, began_cpu_s = perf_counter(), thread_time()
        begun = self.exporter.begin(self.weights, version=self._version, publish=self._version, canary=None)
        copied_s, copied_cpu_s = perf_counter() - began_s, thread_time() - began_cpu_s
        manifest = begun.manifest()
        published_s = perf_counter()
        fetched = fetch_publish(open_fetcher(), manifest, "")
        fetched_s = perf_counter()
        if is_written:
            with contextlib.suppress(BlockingIOError):  # the engine is told, and whoever it is has to wait
                os.close(os.open(manifest.location, os.O_RDWR | os.O_NONBLOCK))
        assert fetched.model is not None
        from_s, from_cpu_s = perf_counter(), thread_time()
        for name, tensor in fetched.model.items():
            self._copies[name].copy_(tensor)
        copy_s, copy_cpu_s = perf_counter() - from_s, thread_time() - from_cpu_s
        found = self._swapped(fetched) if is_double else self._loaded(fetched)
        is_same = fetched.digest_now() == manifest.digest
        fetched.close()
        self.exporter.release(self._version)
        return found._replace(
            publish_s=published_s - began_s,
            fetch_s=fetched_s - published_s,
            copied_s=copied_s,
            copied_cpu_s=copied_cpu_s,
            copy_s=copy_s,
            copy_cpu_s=copy_cpu_s,
            is_same=is_same,
        )

    def _loaded(self, fetched: FetchedPublish) -> Brought:
        """Where the engine decodes."""
        began_s = perf_counter()
        self._engine.load(fetched.model, self._version)
        loaded_s = perf_counter()
        fetched.digest_now()
        return Brought(load_s=loaded_s - began_s, check_s=perf_counter() - loaded_s)

    def _swapped(self, fetched: FetchedPublish) -> Brought:
        """Prepared while the engine decodes, then swapped in."""
        model = fetched.model
        assert model is not None
        alone = [self._step() for _ in range(NUM_ALONE)]
        beside: list[tuple[float, float]] = []

        def prepare() -> float:
            from_s = perf_counter()
            self._second.fill(model, lambda: False)
            self._second.offer(fetched.digest_now())
            return perf_counter() - from_s

        preparing = self._preparing.submit(prepare)
        while not beside or not preparing.done():
            beside.append(self._step())
        began_s = perf_counter()
        assert self._second.swap_in(fetched.digest, self._version)
        load_s = perf_counter() - began_s
        return Brought(load_s=load_s, prepare_s=preparing.result(), alone=Steps.of(alone), beside=Steps.of(beside))

    def _step(self) -> tuple[float, float]:
        """One token of each of as many requests as there are slots: seconds, and those of the processor."""
        for number in range(NUM_SLOTS - self._engine.num_running - self._engine.num_queued):
            self._engine.submit(
                GenerationRequest(
                    tag=(self._version, perf_counter(), number),
                    prompt=pack_tokens([number + 1]),
                    seed=number,
                    max_new_tokens=MAX_CONTEXT - 1,
                )
            )
        began_s, began_cpu_s = perf_counter(), thread_time()
        self._engine.step()
        return perf_counter() - began_s, thread_time() - began_cpu_s


def measure(given: argparse.Namespace) -> Measured:
    """Both arms in turn."""
    torch.set_num_threads(1)
    run_id, layers = f"publish{uuid.uuid4().hex[:12]}", max(1, round(given.megabytes * 1e6 / LAYER_BYTES))
    with tempfile.TemporaryDirectory() as name, quiet_transformers():
        write_made_model(LAYER._replace(layers=layers), Path(name) / "model", seed=0)
        way = Way(Path(name) / "model", run_id)
        try:
            arms: dict[str, Callable[[], Brought]] = {
                IN_PLACE: way.bring,
                DOUBLE: partial(way.bring, is_double=True),
                WRITTEN: partial(way.bring, is_written=True),
            }
            turns = interleaved(arms, given.repetitions)
        finally:
            way.exporter.close()
            sweep(run_id)
    copied = figures(turns, "s to copy it", lambda each: each.copy_s)
    held_up = figures(turns, "s held up", lambda each: each.load_s + each.check_s)
    found = [plain_figure("a publish", "MB", [way.size_bytes / 1e6]), *copied, *held_up]
    found += figures(turns, "s of that to look at it again", lambda each: each.check_s)
    published = figures(turns, "s to publish", lambda each: each.publish_s)
    found += published
    found += figures(turns, "s to fetch", lambda each: each.fetch_s)
    ratios = [pairs(held, copy) for held, copy in zip(held_up, copied, strict=True)]
    found += [plain_figure(f"{arm}: held up", "× the copy", each) for arm, each in zip(turns, ratios, strict=True)]
    own = [turn.value for turn in turns[IN_PLACE]]
    learner = "the learner: held up until its weights are copied"
    processor = [each.copied_cpu_s / each.copy_cpu_s for each in own]
    found.append(plain_figure(learner, "× the copy, by the clock", [each.copied_s / each.copy_s for each in own]))
    found.append(plain_figure(learner, "× the copy, of its thread's CPU", processor))
    found.append(plain_figure("a publish, with its digest", "× the copy, by the clock", pairs(published[0], copied[0])))
    found += _beside(turns[DOUBLE])
    are_same = all(turn.value.is_same for arm in turns.values() for turn in arm)
    claims = [
        claim("double buffering: held up ÷ copying it", ratios[list(turns).index(DOUBLE)], at_most=MOST),
        claim("the learner: CPU until it may train on ÷ copying", processor, at_most=MOST_OF_LEARNER),
        fact("the digest after the load is that of the learner", holds=are_same),
    ]
    return Measured(found, claims)


def _beside(turns: Sequence[Turn[Brought]]) -> Iterator[Figure]:
    """What preparing takes, and what it makes of the steps that are decoded meanwhile."""
    values = [turn.value for turn in turns]
    alone = [each.alone for each in values if each.alone is not None]
    beside = [each.beside for each in values if each.beside is not None]
    yield plain_figure("preparing beside decoding", "s", [each.prepare_s for each in values])
    for name, steps in (("alone", alone), ("beside preparing", beside)):
        yield plain_figure(f"decode steps {name}", "s, mean", [each.mean_s for each in steps])
        yield plain_figure(f"decode steps {name}", "s, longest", [each.longest_s for each in steps])
        yield plain_figure(f"decode steps {name}", "CPU s, mean", [each.cpu_s for each in steps])
    lost = [two.num * (two.mean_s - one.mean_s) for one, two in zip(alone, beside, strict=True)]
    yield plain_figure("decoding lost to preparing", "s", lost)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    benchmark = Benchmark(__file__, __doc__, repetitions=7)
    benchmark.option("--megabytes", type=float, default=1000.0, help="of a publish (default: 1000)")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
