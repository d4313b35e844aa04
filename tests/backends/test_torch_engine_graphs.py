"""Decode steps as graphs: rounded shapes and steps that are done again change nothing; on a GPU, neither do CUDA's."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
import torch
from engine_cases import Case, open_engine, random_tokens, request, run_all, run_steps, tokens_of, weights_of

from penstock.backends.engines.torch import engine as engine_module
from penstock.backends.engines.torch.attention import SlotRange
from penstock.backends.engines.torch.decode_graphs import DecodeGraphs, Drawn, can_capture
from penstock.backends.engines.torch.low_rank import Adapters
from penstock.backends.engines.torch.sampling import Sampler
from penstock.backends.learners.batch.kept_sets import read_kept
from penstock.messages.weights import ADAPTER_DOWN, ADAPTER_UP, LowRank

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.checkpoint.model_config import ModelConfig
    from penstock.backends.engines.torch.engine import TorchEngine
    from penstock.backends.engines.torch.engine_settings import EngineSettings
    from penstock.backends.engines.torch.requests import Ended, GenerationRequest

GREEDY: Final = Sampler(temperature=0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs exist on GPUs only")


def requests() -> list[GenerationRequest]:
    """Groups of three with prompts of 1 to 60 tokens and 1 to 150 new ones."""
    draw = random.Random(0)
    prompts = [random_tokens(draw.randrange(1, 60), seed=group) for group in range(10)]
    return [request(tag, prompts[tag // 3], draw.randrange(1, 150)) for tag in range(30)]


def tokens_by_tag(ended: dict[int, Ended]) -> dict[int, list[int]]:
    return {tag: list(tokens_of(end.part)) for tag, end in ended.items()}


class Captures:
    """In place of CUDA's: what is captured is called again, as it was captured."""

    num_captured = 0
    num_replayed = 0

    def __call__(self, step: Callable[[], Drawn]) -> Callable[[], Drawn]:
        self.num_captured += 1

        def replay() -> Drawn:
            self.num_replayed += 1
            return step()

        return replay


def always(config: ModelConfig, settings: EngineSettings) -> bool:
    return True


def never(config: ModelConfig, settings: EngineSettings) -> bool:
    return False


def captures_on(device: torch.device) -> Captures:
    return Captures()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    """Engines of the CPU decode by graphs."""
    found = Captures()
    monkeypatch.setattr(engine_module, "can_capture", always)

    def capture(device: torch.device) -> Captures:
        return found

    monkeypatch.setattr(engine_module, "CudaCapture", capture)
    return found


@pytest.mark.parametrize("num_slots", [1, 5, 16, 30])
def test_steps_that_are_done_again_draw_the_same(case: Case, captures: Captures, num_slots: int) -> None:
    replayed = run_all(open_engine(case, num_slots=num_slots), requests())
    num_captured, num_replayed = captures.num_captured, captures.num_replayed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "can_capture", never)
        plain = run_all(open_engine(case, num_slots=num_slots), requests())
    assert tokens_by_tag(replayed) == tokens_by_tag(plain)
    assert num_captured < 20 < num_replayed


RECORDING: Final = Sampler(top_p=0.7, num_recorded=32)


def test_steps_that_are_done_again_record_what_they_draw_from(case: Case, captures: Captures) -> None:
    replayed = run_all(open_engine(case, num_slots=5, sampler=RECORDING), requests())
    assert captures.num_replayed > 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "can_capture", never)
        plain = run_all(open_engine(case, num_slots=5, sampler=RECORDING), requests())
    assert {tag: end.part.kept for tag, end in replayed.items()} == {tag: end.part.kept for tag, end in plain.items()}
    assert all(end.part.kept is not None for end in plain.values())


@needs_gpu
def test_graphs_of_cuda_record_what_they_draw_from(case: Case) -> None:
    """A token that its record lacks is refused where a learner reads it."""
    engine = open_engine(case, num_slots=5, sampler=RECORDING, device=torch.device("cuda"))
    for end in run_all(engine, requests()).values():
        record, tokens = end.part.kept, np.asarray(tokens_of(end.part), dtype=np.int32)
        assert record is not None
        assert read_kept(record, np.arange(len(tokens)), tokens) is not None


def test_new_weights_and_sleep_reach_the_next_step(case: Case, other: Case, captures: Captures) -> None:
    engine = open_engine(case, num_slots=4)
    found = _three_lives(engine, case, other)
    assert captures.num_replayed > 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "can_capture", never)
        assert found == _three_lives(open_engine(case, num_slots=4), case, other)


def _three_lives(engine: TorchEngine, case: Case, other: Case) -> list[dict[int, list[int]]]:
    """Under the case's weights, under the other's from amid a response, and under the case's after a sleep."""
    first = run_all(engine, requests()[:8])
    engine.submit(request(99, random_tokens(5, seed=1), 40))
    run_steps(engine, 20)
    engine.load(weights_of(other.model), 1)
    across = run_all(engine, requests()[8:16])
    engine.sleep()
    engine.load(weights_of(case.model), 2)
    return [tokens_by_tag(found) for found in (first, across, run_all(engine, requests()[:8]))]


def adapters_of(case: Case, seed: int) -> Adapters:
    """Random ones beside the query and the down projection of each layer."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: weight for name, weight in weights_of(case.model).items() if "q_proj" in name or "down" in name}
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        path = name.removesuffix(".weight")
        tensors[path + ADAPTER_DOWN] = torch.randn(4, weight.shape[1], generator=generator) * 0.05
        tensors[path + ADAPTER_UP] = torch.randn(weight.shape[0], 4, generator=generator) * 0.05
    return Adapters(tensors, LowRank(rank=4, scale=2.0, target_modules=("q_proj", "down_proj")))


def test_graphs_are_forgotten_with_the_memory_of_adapters_and_not_with_their_values(
    case: Case, captures: Captures
) -> None:
    engine = open_engine(case, num_slots=4)
    counts: list[int] = []
    for adapters in (None, adapters_of(case, 0), adapters_of(case, 1), adapters_of(case, 2), None):
        engine.load(None, 1, adapters)
        before = captures.num_captured
        run_all(engine, requests()[:8])
        counts.append(captures.num_captured - before)
    first, new, same, again, gone = counts
    assert (same, again) == (0, 0)
    assert new == gone == first > 0


def test_shapes_are_few() -> None:
    graphs = DecodeGraphs(256, 4096, Captures)
    shapes = {graphs.shape(n, reach) for n in range(1, 257) for reach in range(32, 4097, 32)}
    assert len(shapes) < 160
    assert graphs.shape(1, 32) == SlotRange(0, 4, 128)
    assert graphs.shape(65, 1056) == SlotRange(0, 96, 1536)
    assert graphs.shape(256, 4096) == SlotRange(0, 256, 4096)
    assert all(
        n <= graphs.shape(n, r).end <= max(4, n * 3 // 2) for n, r in ((7, 32), (33, 64), (129, 160), (200, 4000))
    )


def test_a_cpu_has_none(case: Case) -> None:
    engine = open_engine(case)
    assert not can_capture(engine.config, engine.settings)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_draw_what_single_kernels_draw(
    case: Case, other: Case, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    device = torch.device("cuda:0")
    engine = open_engine(case, num_slots=4, dtype=dtype, device=device, sampler=GREEDY)
    assert can_capture(engine.config, engine.settings)
    found = _three_lives(engine, case, other)
    # The same shapes without a capture: kernels, and so their rounding, are the same.
    monkeypatch.setattr(engine_module, "CudaCapture", captures_on)
    plain = open_engine(case, num_slots=4, dtype=dtype, device=device, sampler=GREEDY)
    assert found == _three_lives(plain, case, other)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_compute_the_newest_adapters(
    case: Case, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def lives(engine: TorchEngine) -> list[dict[int, list[int]]]:
        found: list[dict[int, list[int]]] = []
        for adapters in (None, adapters_of(case, 0), adapters_of(case, 1), None):
            engine.load(None, 1, adapters)
            found.append(tokens_by_tag(run_all(engine, requests()[:8])))
        return found

    device = torch.device("cuda:0")
    captured = lives(open_engine(case, num_slots=4, dtype=dtype, device=device, sampler=GREEDY))
    monkeypatch.setattr(engine_module, "CudaCapture", captures_on)
    assert captured == lives(open_engine(case, num_slots=4, dtype=dtype, device=device, sampler=GREEDY))
    assert captured[0] == captured[3] != captured[1]
