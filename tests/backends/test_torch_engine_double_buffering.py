"""A second set of weights: what is prepared beside decoding and swapped in is what a load would have brought, whatever
comes meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import psutil
import pytest
import torch
from engine_cases import Case, make_case, open_engine, random_tokens, request, weights_of
from test_torch_engine_graphs import adapters_of, always, captures_on
from torch_engine_bench import PROMPT, WAIT_S, Bench, BenchFactory, CountingFetcher

from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.engines.torch import engine as engine_module
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.engines.torch.generic import GenericEngine
from penstock.backends.engines.torch.generic_config import GenericConfig
from penstock.backends.engines.torch.second_set import SecondSet, StoppedError, second_set
from penstock.backends.weights.segments import SHARED_FOLDER, segments_of
from penstock.backends.weights.transports import open_exporter, open_fetcher
from penstock.messages.arrays import pack_tokens
from penstock.messages.commands import ApplyWeights, FetchWeights, SleepEngine
from penstock.messages.local import (
    EngineSlept,
    GenerationAdvanced,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import VersionSpan
from penstock.messages.training import UpdateMode
from penstock.messages.weights import Canary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.backends.engines.torch.requests import Ended
    from penstock.backends.weights.protocol import FetchedWeights
    from penstock.messages.weights import WeightManifest

CPU: Final = torch.device("cpu")
TOKENS: Final = random_tokens(20, seed=1)
CANARY: Final = Canary(tokens=pack_tokens(TOKENS), logprobs=b"")
needs_shared_memory = pytest.mark.skipif(not SHARED_FOLDER.is_dir(), reason="needs /dev/shm")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return [make_case("qwen3_tied", tmp_path_factory.mktemp(f"model{seed}"), seed=seed) for seed in range(3)]


@pytest.fixture
def open_bench(cases: list[Case], tmp_path: Path) -> Iterator[BenchFactory]:
    factory = BenchFactory(cases[0], tmp_path / "weights", double_buffering=True)
    yield factory
    factory.close()


def engine_of(case: Case, kind: str) -> TorchEngine | GenericEngine:
    """An engine that serves the weights of the case's folder as version 0."""
    if kind == "generic":
        config = GenericConfig(folder=case.folder, vocab_size=79, max_positions=1536, reason="this is a test")
        generic = GenericEngine(config, EngineSettings(num_slots=4))
        generic.load(weights_of(case.model), 0)
        return generic
    if kind == "bfloat16":
        return open_engine(case, dtype=torch.bfloat16)
    if kind != "learner":
        return open_engine(case)
    settings = replace(EngineSettings(num_slots=4), learner_model=case.folder)
    engine = TorchEngine(read_model_config(case.folder), settings)
    engine.load(weights_of(case.model), 0)
    return engine


def run_with(engine: TorchEngine | GenericEngine, swaps: Mapping[int, Case], second: SecondSet | None) -> list[Ended]:
    """Six requests over four slots; after so many steps the weights of these are put in, as versions 1, 2, …"""
    for tag in range(6):
        assert engine.submit(request(tag, PROMPT, 20 + tag)) is None
    ended: list[Ended] = []
    version = num_steps = 0
    while engine.num_running or engine.num_queued:
        case = swaps.get(num_steps)
        if case is not None:
            version += 1
            if second is None:
                engine.load(weights_of(case.model), version)
            else:
                second.fill(weights_of(case.model), lambda: False)
                second.offer(f"{version}")
                assert second.swap_in(f"{version}", version)
        ended += engine.step().ended
        num_steps += 1
    return sorted(ended, key=lambda each: str(each.tag))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "captured", "learner", "generic"])
@pytest.mark.parametrize("name", ["qwen3_tied", "llama_untied", "qwen3_moe"])
def test_swapped_weights_are_loaded_weights_bit_for_bit(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for requests in flight, with the versions of their tokens, and when the sets change places again."""
    if name == "qwen3_moe" and kind in ("captured", "learner"):
        pytest.skip("experts are neither captured nor computed with the learner's products")
    if kind == "captured":
        monkeypatch.setattr(engine_module, "can_capture", always)
        monkeypatch.setattr(engine_module, "CudaCapture", captures_on)
    first, *others = (make_case(name, tmp_path / f"{seed}", seed=seed) for seed in range(3))
    swaps = {5: others[0], 12: others[1], 13: first, 24: others[0]}
    loaded, swapped = engine_of(first, kind), engine_of(first, kind)
    second = second_set(swapped, CPU, is_wanted=True)
    assert second is not None
    expected = run_with(loaded, swaps, None)
    assert [span.version for span in expected[0].part.spans] == [0, 1, 2, 3]
    assert run_with(swapped, swaps, second) == expected
    fresh = engine_of(others[0], kind)
    for engine in (loaded, swapped):
        assert torch.equal(engine.probe(TOKENS), fresh.probe(TOKENS))
    assert not torch.equal(fresh.probe(TOKENS), engine_of(first, kind).probe(TOKENS))


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_set_without_adapters_follows_one_with_them(
    cases: list[Case], is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_captured:
        monkeypatch.setattr(engine_module, "can_capture", always)
        monkeypatch.setattr(engine_module, "CudaCapture", captures_on)
    engine, plain = open_engine(cases[0]), open_engine(cases[1])
    second = SecondSet(engine, CPU)
    engine.load(weights_of(cases[0].model), 1, adapters_of(cases[0], 1))
    second.fill(weights_of(cases[1].model), lambda: False)
    second.offer("plain")
    assert second.swap_in("plain", 2)
    assert torch.equal(engine.probe(TOKENS), plain.probe(TOKENS))
    engine.load(None, 3, adapters_of(cases[0], 1))
    plain.load(None, 3, adapters_of(cases[0], 1))
    assert torch.equal(engine.probe(TOKENS), plain.probe(TOKENS))


def test_a_set_holds_what_was_offered_last_and_nothing_that_is_half_there(cases: list[Case]) -> None:
    engine = open_engine(cases[0])
    second, tensors = SecondSet(engine, CPU), weights_of(cases[1].model)
    second.fill(tensors, lambda: False)
    assert not second.swap_in("one", 1)
    second.offer("one")
    asked = iter([False] * 40 + [True])
    with pytest.raises(StoppedError):
        second.fill(tensors, lambda: next(asked))
    assert not second.swap_in("one", 1)
    assert engine.version == 0
    assert torch.equal(engine.probe(TOKENS), open_engine(cases[0]).probe(TOKENS))


@pytest.mark.parametrize(
    ("is_wanted", "device", "num_cores", "free", "has_it"),
    [
        (None, "cpu", 2, 10.0, True),
        (None, "cpu", 1, 10.0, False),
        (None, "cpu", 2, 9.9, False),
        (None, "meta", 2, 10.0, False),
        (True, "cpu", 1, 0.0, True),
        (False, "cpu", 8, 99.0, False),
    ],
)
def test_unless_it_is_asked_for_it_takes_two_cores_and_free_memory(
    cases: list[Case], is_wanted: bool | None, device: str, num_cores: int, free: float, has_it: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    engine = open_engine(cases[0])
    memory = psutil.virtual_memory()._replace(available=int(free * engine.weight_bytes))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    def cores(pid: int) -> set[int]:
        return set(range(num_cores))

    monkeypatch.setattr(os, "sched_getaffinity", cores)
    assert (second_set(engine, torch.device(device), is_wanted=is_wanted) is not None) == has_it


# --- behind the queue ----------------------------------------------------------------------------------------------


class HeldTensors(dict[str, torch.Tensor]):
    """Weights of which one is to be had for the check, and the next time only when it is let go."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], fetcher: HoldingFetcher) -> None:
        super().__init__(tensors)
        self._fetcher = fetcher

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "model.layers.1.mlp.up_proj.weight":
            self._fetcher.is_preparing.set()
            assert self._fetcher.may_go_on.wait(WAIT_S)
        return super().__getitem__(name)


class HeldWeights:
    def __init__(self, weights: FetchedWeights, fetcher: HoldingFetcher) -> None:
        self._weights = weights
        self.tensors: Mapping[str, torch.Tensor] = HeldTensors(weights.tensors, fetcher)
        self.digest, self.digest_now = weights.digest, weights.digest_now

    def close(self) -> None:
        self.tensors = {}
        self._weights.close()


class HoldingFetcher(CountingFetcher):
    """Holds whoever prepares what it fetched, in the middle, while ``holds``."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = False
        self.is_preparing, self.may_go_on = threading.Event(), threading.Event()

    def fetch(self, manifest: WeightManifest) -> FetchedWeights:
        weights = open_fetcher().fetch(manifest)
        self.fetched.append(HeldWeights(weights, self) if self.holds else weights)
        return self.fetched[-1]


def held_bench(open_bench: BenchFactory, cases: list[Case], *, run_id: str = "") -> tuple[Bench, HoldingFetcher]:
    """Serves version 1 and is in the midst of preparing what is fetched next."""
    fetcher = HoldingFetcher()
    bench = open_bench(fetcher=fetcher)
    bench.serve(cases[0], 1)
    if run_id:
        bench.exporter = open_exporter("shared_memory", run_id=run_id, learner_epoch=0, folder=Path())
    fetcher.holds = True
    return bench, fetcher


def test_it_decodes_while_it_prepares_and_stamps_both_versions(cases: list[Case], open_bench: BenchFactory) -> None:
    bench, fetcher = held_bench(open_bench, cases)
    manifest = bench.export(weights_of(cases[1].model), 2)
    bench.engine.execute(FetchWeights(manifest))
    assert fetcher.is_preparing.wait(WAIT_S)
    for index in range(3):
        bench.generate(index)
    for end in bench.hear_ends(3).values():  # nothing was staged meanwhile
        assert [span.version for span in end.part.spans] == [1]
    fetcher.may_go_on.set()
    assert bench.hear(WeightsStagedLocally).digest == manifest.digest
    bench.then = {GenerationAdvanced: [ApplyWeights(manifest, UpdateMode.IN_FLIGHT)]}
    bench.generate(1)
    while isinstance(event := bench.said.get(timeout=WAIT_S), GenerationAdvanced):
        pass
    assert isinstance(event, WeightsSwapped)
    [end] = bench.hear_ends(1).values()
    assert end.part.spans == (VersionSpan(1, 8), VersionSpan(2, end.part.num_tokens - 8))


@needs_shared_memory
def test_bytes_that_change_while_they_are_prepared_are_not_staged(cases: list[Case], open_bench: BenchFactory) -> None:
    bench, fetcher = held_bench(open_bench, cases, run_id=f"prepared-{os.getpid()}")
    manifest = bench.export(weights_of(cases[1].model), 2)
    # Opened before the fetch, so that no lease is to be had and nobody waits.
    with Path(manifest.location).open("r+b") as segment:
        bench.engine.execute(FetchWeights(manifest))
        assert fetcher.is_preparing.wait(WAIT_S)
        segment.seek(manifest.size_bytes - 4)
        byte = segment.read(1)[0]
        segment.seek(manifest.size_bytes - 4)
        segment.write(bytes([byte ^ 1]))
    fetcher.may_go_on.set()
    staged = bench.hear(WeightsStagedLocally)
    assert staged.digest == ""
    assert "version 2, publish 2 were changed while they were prepared" in staged.error
    assert fetcher.num_held == 0
    bench.generate(1)
    assert [span.version for span in bench.hear_ends(1)[1].part.spans] == [1]
    again = bench.stage(cases[2], 3, CANARY)
    bench.engine.execute(ApplyWeights(again, UpdateMode.DRAIN))
    assert bench.hear(WeightsSwapped).canary_logprobs == canary_of(cases[2])
    bench.exporter.close()


def canary_of(case: Case) -> bytes:
    """What an engine that was started with these weights says."""
    return open_engine(case).probe(TOKENS).numpy().tobytes()


def schedules(num: int) -> list[tuple[str, ...]]:
    """Every order in which so many versions can be fetched, in turn, and some of them swapped to, none backwards, each
    while it is kept."""

    def grown(done: tuple[str, ...], num_fetched: int, last: int) -> Iterator[tuple[str, ...]]:
        if num_fetched == num:
            yield done
        else:
            yield from grown((*done, f"fetch {num_fetched + 1}"), num_fetched + 1, last)
        for version in range(max(last + 1, num_fetched - 1, 1), num_fetched + 1):
            yield from grown((*done, f"swap {version}"), num_fetched, version)

    return sorted(grown((), 0, 0))


@pytest.mark.parametrize("schedule", schedules(3), ids=lambda schedule: ", ".join(schedule).replace(" ", ""))
def test_what_is_announced_meanwhile_takes_the_set_and_nothing_else(
    cases: list[Case], open_bench: BenchFactory, schedule: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped_in: list[tuple[int, bool]] = []
    swap_in = SecondSet.swap_in

    def watched(self: SecondSet, digest: str, version: int) -> bool:
        swapped_in.append((version, swap_in(self, digest, version)))
        return swapped_in[-1][1]

    monkeypatch.setattr(SecondSet, "swap_in", watched)
    fetcher = CountingFetcher()
    bench = open_bench(fetcher=fetcher)
    bench.serve(cases[0], 0)
    manifests: dict[int, WeightManifest] = {}
    in_the_set: int | None = None
    expected: list[tuple[int, bool]] = [(0, False)]
    for step in schedule:
        what, number = step.split()
        version = int(number)
        if what == "fetch":
            manifests[version] = bench.stage(cases[version % 3], version, CANARY)
            in_the_set = version
            continue
        bench.engine.execute(ApplyWeights(manifests[version], UpdateMode.DRAIN))
        swapped = bench.hear(WeightsSwapped)
        assert (swapped.version, swapped.digest) == (version, manifests[version].digest)
        assert swapped.canary_logprobs == canary_of(cases[version % 3])
        expected.append((version, in_the_set == version))
        in_the_set = None if in_the_set == version else in_the_set
        bench.generate(1)
        assert bench.hear_ends(1)[1].part.spans[0].version == version
    assert swapped_in == expected
    bench.engine.close(timeout_s=WAIT_S)
    assert fetcher.num_held == 0


@needs_shared_memory
def test_an_engine_that_is_closed_in_the_midst_lets_go_of_everything(
    cases: list[Case], open_bench: BenchFactory
) -> None:
    run_id = f"closed-{os.getpid()}"
    bench, fetcher = held_bench(open_bench, cases, run_id=run_id)
    manifest = bench.export(weights_of(cases[1].model), 2)
    bench.engine.execute(FetchWeights(manifest))
    assert fetcher.is_preparing.wait(WAIT_S)
    with pytest.raises(BlockingIOError):  # held while it is read
        os.open(manifest.location, os.O_RDWR | os.O_NONBLOCK)
    closing = threading.Thread(target=bench.engine.close, args=(WAIT_S,))
    closing.start()
    fetcher.may_go_on.set()
    closing.join(WAIT_S)
    assert fetcher.num_held == 0
    os.close(os.open(manifest.location, os.O_RDWR | os.O_NONBLOCK))
    bench.exporter.close()
    assert not segments_of(run_id, SHARED_FOLDER)


KILLED: Final = """
import sys, threading
from pathlib import Path
import msgspec
sys.path.insert(0, sys.argv[1])
import torch
from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.engines.torch.second_set import SecondSet
from penstock.backends.weights.transports import open_fetcher
from penstock.messages.weights import WeightManifest

weights = open_fetcher().fetch(msgspec.json.decode(sys.argv[3], type=WeightManifest))
engine = TorchEngine(read_model_config(Path(sys.argv[2])), EngineSettings(num_slots=4))
num_asked = 0

def is_stopped():
    global num_asked
    num_asked += 1
    if num_asked == 40:
        print("preparing", flush=True)
        threading.Event().wait()
    return False

SecondSet(engine, torch.device("cpu")).fill(weights.tensors, is_stopped)
"""


@needs_shared_memory
def test_an_engine_that_is_killed_in_the_midst_leaves_nothing(cases: list[Case]) -> None:
    run_id = f"killed-{os.getpid()}"
    exporter = open_exporter("shared_memory", run_id=run_id, learner_epoch=0, folder=Path())
    manifest = exporter.export(weights_of(cases[0].model), version=1, publish=1, canary=None)
    arguments = [str(Path(__file__).parent), str(cases[0].folder), msgspec.json.encode(manifest).decode()]
    with subprocess.Popen([sys.executable, "-c", KILLED, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "preparing\n"
        with pytest.raises(BlockingIOError):
            os.open(manifest.location, os.O_RDWR | os.O_NONBLOCK)
        process.send_signal(signal.SIGKILL)
        assert process.wait(WAIT_S) == -signal.SIGKILL
    os.close(os.open(manifest.location, os.O_RDWR | os.O_NONBLOCK))
    exporter.close()
    assert not segments_of(run_id, SHARED_FOLDER)


def test_one_that_has_slept_loads_where_it_decodes(cases: list[Case], open_bench: BenchFactory) -> None:
    bench = open_bench()
    bench.serve(cases[0], 0)
    prepared = bench.stage(cases[1], 1, CANARY)
    bench.engine.execute(SleepEngine())
    bench.hear(EngineSlept)
    bench.engine.execute(ApplyWeights(prepared, UpdateMode.DRAIN))
    assert bench.hear(WeightsSwapped).canary_logprobs == canary_of(cases[1])
