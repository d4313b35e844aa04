"""Adapters that are published as such: what an engine computes with them, what travels, and what outlives what."""

# torch.manual_seed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import pytest
import torch
from engine_cases import MODELS, make_case, random_tokens, request, run_all, tokens_of
from learner_cases import learner_plan, make_groups, train_command
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.engines.options import EnginesOptions, SamplingOptions
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.engines.torch.factory import open_torch_engine
from penstock.backends.engines.torch.low_rank import Adapters as Beside
from penstock.backends.learners.options import LearnerOptions, LoraOptions
from penstock.backends.learners.torch.adapter_publishing import AdapterTensors
from penstock.backends.learners.torch.backend import open_torch_learner
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.weights.protocol import WeightExportError, WeightFetchError
from penstock.backends.weights.segments import SHARED_FOLDER, segments_of, sweep
from penstock.backends.weights.transports import open_exporter, open_fetcher
from penstock.messages.canary import canary_difference
from penstock.messages.commands import (
    ApplyWeights,
    FetchWeights,
    OpenEngine,
    OpenLearner,
    PublishWeights,
    ReleaseWeights,
    SaveCheckpoint,
    SleepEngine,
)
from penstock.messages.errors import UserFault
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    EngineOpened,
    EngineSlept,
    LearnerOpened,
    LocalEvent,
    WeightsCopied,
    WeightsPublished,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import VersionSpan
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.weights.protocol import FetchedWeights
    from penstock.messages.weights import WeightManifest

WAIT_S = 60.0
FIRST = "model.layers.0.self_attn.q_proj"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(folder: Path, dtype: str = "float32", **lora: Any) -> PackedModel:  # noqa: ANN401 - options of LoRA
    """A learner's model whose adapters are random."""
    model = PackedModel.load(folder, dtype=dtype, device=torch.device("cpu"))
    model.adapt(LoraOptions(publish="adapter", **lora))
    assert model.adapters is not None
    generator = torch.Generator().manual_seed(1)
    for tensor in model.adapters.state().values():
        tensor.data.normal_(std=0.05, generator=generator)
    return model


def beside(model: PackedModel) -> Beside:
    """Its adapters as they are published."""
    assert model.adapters is not None
    tensors = AdapterTensors(model, model.adapters)
    return Beside(dict(tensors.weights()), tensors.low_rank())


def base_of(model: PackedModel) -> dict[str, torch.Tensor]:
    return model.checkpoint_names.rename(dict(model.bare_weights()))


def engine_of(folder: Path, dtype: torch.dtype = torch.float32) -> TorchEngine:
    settings = EngineSettings(num_slots=4, max_context=64, dtype=dtype)
    return TorchEngine(read_model_config(folder), settings)


def learners_logprobs(model: PackedModel, tokens: list[int]) -> torch.Tensor:
    return model.next_token_logits(tokens)[:-1].log_softmax(-1)[:, tokens]


# --- what an engine computes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_those_of_the_learner_and_of_merged_weights(name: str, tmp_path: Path) -> None:
    case, tokens = make_case(name, tmp_path), random_tokens(20, seed=3)
    model = adapted(case.folder, rank=4, alpha=8, target_modules=ATTENTION if "moe" in name else "auto")
    alone, merged = engine_of(case.folder), engine_of(case.folder)
    alone.load(base_of(model), 1)
    before = alone.probe(tokens)
    alone.load(None, 2, beside(model))
    merged.load(model.named_tensors(), 2)
    found = alone.probe(tokens)
    torch.testing.assert_close(found, learners_logprobs(model, tokens), rtol=0, atol=1e-5)
    torch.testing.assert_close(found, merged.probe(tokens), rtol=0, atol=1e-5)
    assert float((found - before).abs().max()) > 1e-2
    # While it decodes as well, where rows of several requests are in one product.
    ends = run_all(alone, [request(index, tokens[: 5 + index], 12) for index in range(6)])
    others = run_all(merged, [request(index, tokens[: 5 + index], 12) for index in range(6)])
    assert {index: tokens_of(end.part) for index, end in ends.items()} == {
        index: tokens_of(end.part) for index, end in others.items()
    }


@pytest.mark.parametrize("targets", [("k_proj",), ("q_proj", "v_proj", "up_proj"), ("down_proj", "o_proj")])
def test_matrices_without_adapter_beside_those_with_one_stay(targets: tuple[str, ...], tmp_path: Path) -> None:
    case, tokens = make_case("qwen3_untied", tmp_path), random_tokens(20, seed=4)
    model = adapted(case.folder, rank=3, target_modules=targets)
    engine = engine_of(case.folder)
    engine.load(base_of(model), 1, beside(model))
    torch.testing.assert_close(engine.probe(tokens), learners_logprobs(model, tokens), rtol=0, atol=1e-5)
    assert beside(model).low_rank.target_modules == tuple(name for name in DENSE if name in targets)


def test_in_bfloat16_it_is_nearer_to_the_learner_than_merged_weights(tmp_path: Path) -> None:
    """Merged, an adapter that is small beside its matrix is rounded away in part."""
    case, tokens = make_case("qwen3_tied", tmp_path), random_tokens(60, seed=5)
    model = adapted(case.folder, "bfloat16", rank=4, alpha=1)
    alone, merged = engine_of(case.folder, torch.bfloat16), engine_of(case.folder, torch.bfloat16)
    alone.load(base_of(model), 1, beside(model))
    merged.load(model.named_tensors(), 1)
    expected = learners_logprobs(model, tokens)
    assert float((alone.probe(tokens) - expected).abs().mean()) < float((merged.probe(tokens) - expected).abs().mean())


def test_the_next_version_is_written_into_the_same_memory_and_the_whole_model_ends_it(tmp_path: Path) -> None:
    case, tokens = make_case("qwen3_tied", tmp_path), random_tokens(20, seed=6)
    model = adapted(case.folder, rank=4)
    first, engine = beside(model), engine_of(case.folder)
    weights = cast("Any", engine)._weights
    engine.load(base_of(model), 1, first)
    said, places = engine.probe(tokens), [tensor.data_ptr() for tensor in weights.tensors()]
    second = first._replace(tensors={name: tensor * 2 for name, tensor in first.tensors.items()})
    engine.load(None, 2, second)
    assert float((engine.probe(tokens) - said).abs().max()) > 1e-2
    engine.load(None, 3, first)
    assert torch.equal(engine.probe(tokens), said)
    assert [tensor.data_ptr() for tensor in weights.tensors()] == places
    engine.load(base_of(model), 4)
    plain = engine_of(case.folder)
    plain.load(base_of(model), 1)
    assert torch.equal(engine.probe(tokens), plain.probe(tokens))


def test_a_running_request_goes_on_under_the_new_adapters(tmp_path: Path) -> None:
    case = make_case("qwen3_tied", tmp_path)
    model, prompt = adapted(case.folder, rank=4), random_tokens(6, seed=7)
    second = beside(model)
    first = second._replace(tensors={name: torch.zeros_like(tensor) for name, tensor in second.tensors.items()})
    engine = engine_of(case.folder)
    engine.load(base_of(model), 1, first)
    engine.submit(request(0, prompt, 20))
    for _ in range(8):
        engine.step()
    engine.load(None, 2, second)
    (end,) = run_all(engine, []).values()
    assert end.part.spans == (VersionSpan(1, 8), VersionSpan(2, 12))
    plain = engine_of(case.folder)
    plain.load(base_of(model), 1)
    (whole,) = run_all(plain, [request(0, prompt, 20)]).values()
    assert tokens_of(end.part)[:8] == tokens_of(whole.part)[:8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.lora_A.weight": torch.zeros(4, 48)}, "computes no adapter beside lm_head; leave it"),
        ({f"{FIRST}.lora_A.weight": torch.zeros(5, 48)}, r"expected shape \[4, 48\] of rank 4, found \[5, 48\]"),
        ({f"{FIRST}.lora_B.weight": None}, r"q_proj\.lora_B\.weight: expected shape \[64, 4\] of rank 4, found none"),
    ],
)
def test_adapters_of_another_model_change_nothing(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    case, tokens = make_case("qwen3_tied", tmp_path), random_tokens(20, seed=8)
    model = adapted(case.folder, rank=4)
    right, engine = beside(model), engine_of(case.folder)
    engine.load(base_of(model), 1, right)
    said = engine.probe(tokens)
    changed = {name: tensor for name, tensor in {**right.tensors, **change}.items() if tensor is not None}
    with pytest.raises(UserFault, match=message):
        engine.load(None, 2, right._replace(tensors=changed))
    assert torch.equal(engine.probe(tokens), said)


# --- a learner and engines ----------------------------------------------------------------------------------------

AnswerT = TypeVar("AnswerT", bound=LocalEvent)


@dataclass
class Part:
    """A backend, and what it says."""

    backend: Any
    said: SimpleQueue[Any] = field(default_factory=SimpleQueue[Any])

    def __post_init__(self) -> None:
        self.backend.start(self.said.put, self.said.put)

    def ask(self, command: object, answer: type[AnswerT]) -> AnswerT:
        self.backend.execute(command)
        said = self.said.get(timeout=WAIT_S)
        if isinstance(said, WeightsCopied):  # and engines are told later
            said = self.said.get(timeout=WAIT_S)
        if isinstance(said, BaseException):
            raise said
        assert isinstance(said, answer), said
        return said


class CountingFetcher:
    """Counts what is fetched, by what it is."""

    def __init__(self) -> None:
        self.fetched: list[str] = []

    def fetch(self, manifest: WeightManifest) -> FetchedWeights:
        weights = open_fetcher().fetch(manifest)
        self.fetched.append("whole" if manifest.low_rank is None else "adapter")
        return weights


class House:
    """Opens learners and engines of one run, and closes them."""

    def __init__(self, folder: Path, model_folder: Path, transport: str, run_id: str) -> None:
        self.folder, self.model_folder, self.transport, self.run_id = folder, model_folder, transport, run_id
        self.parts: list[Part] = []

    def learner(self, epoch: int = 1, publish: Any = "adapter", path: str | None = None, version: int = 0) -> Part:  # noqa: ANN401
        options = LearnerOptions(learning_rate=1e-2, lora=LoraOptions(rank=4, alpha=8, publish=publish))
        exporter = open_exporter(
            self.transport, run_id=self.run_id, learner_epoch=epoch, folder=self.folder / "weights"
        )
        plan = learner_plan(self.model_folder, self.folder / "checkpoints", options, epoch=epoch)
        part = Part(open_torch_learner(plan, exporter))
        self.parts.append(part)
        part.ask(OpenLearner() if path is None else OpenLearner(version=version, path=path), LearnerOpened)
        return part

    def engine(self, fetcher: CountingFetcher | None = None) -> Part:
        backend = open_torch_engine(
            model_folder=self.model_folder,
            options=EnginesOptions(slots=4, device="cpu"),
            sampling=SamplingOptions(max_response_tokens=40),
            max_context=64,
            dtype="float32",
            fetcher=fetcher or open_fetcher(),
        )
        part = Part(backend)
        self.parts.append(part)
        part.ask(OpenEngine(), EngineOpened)
        return part

    def close(self) -> None:
        for part in self.parts:
            part.backend.close(WAIT_S)


@pytest.fixture(params=["disk", "shared_memory"])
def house(request: pytest.FixtureRequest, tmp_path: Path, model_folder: Path) -> Iterator[House]:
    if request.param == "shared_memory" and not SHARED_FOLDER.is_dir():
        pytest.skip("needs /dev/shm")
    run_id = f"adapters-{os.getpid()}"
    opened = House(tmp_path, model_folder, request.param, run_id)
    yield opened
    opened.close()
    left = segments_of(run_id)
    sweep(run_id)
    assert not left
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torch-engine")]


def publish(learner: Part, version: int, number: int) -> WeightManifest:
    return learner.ask(PublishWeights(version=version, publish=number), WeightsPublished).manifest


def train(learner: Part, version: int) -> None:
    learner.ask(train_command(version, groups=make_groups()), BatchTrained)


def serve(engine: Part, manifest: WeightManifest) -> WeightsSwapped:
    """Fetch and swap; what was loaded is what was exported, and computes what the learner does."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=type(manifest))
    staged = engine.ask(FetchWeights(sent), WeightsStagedLocally)
    assert (staged.error, staged.digest) == ("", manifest.digest)
    swapped = engine.ask(ApplyWeights(sent, UpdateMode.IN_FLIGHT), WeightsSwapped)
    assert swapped.digest == manifest.digest
    assert manifest.canary is not None
    assert canary_difference(manifest.canary, swapped.canary_logprobs) < 1e-5
    return swapped


def test_the_base_travels_once_and_each_version_is_the_learners(house: House) -> None:
    learner, fetcher = house.learner(), CountingFetcher()
    engine = house.engine(fetcher)
    manifests = [publish(learner, 0, 0)]
    serve(engine, manifests[0])
    for version in (1, 2):
        train(learner, version)
        manifests.append(publish(learner, version, version))
        serve(engine, manifests[-1])
    assert fetcher.fetched == ["adapter", "whole", "adapter", "adapter"]
    first, *_, last = manifests
    assert first.base == last.base
    assert last.digest != first.digest
    assert last.low_rank is not None
    assert (last.low_rank.rank, last.low_rank.scale, last.low_rank.target_modules) == (4, 2.0, DENSE)
    # One that comes late gets both, after what is older was let go of.
    learner.backend.execute(ReleaseWeights(below_version=2))
    late = CountingFetcher()
    serve(house.engine(late), last)
    assert late.fetched == ["adapter", "whole"]


def test_an_engine_that_slept_gets_the_base_again_though_its_fetch_was_before(house: House) -> None:
    learner, fetcher = house.learner(), CountingFetcher()
    engine = house.engine(fetcher)
    serve(engine, publish(learner, 0, 0))
    train(learner, 1)
    manifest = publish(learner, 1, 1)
    engine.ask(FetchWeights(manifest), WeightsStagedLocally)
    engine.ask(SleepEngine(), EngineSlept)
    swapped = engine.ask(ApplyWeights(manifest, UpdateMode.DRAIN), WeightsSwapped)
    assert manifest.canary is not None
    assert canary_difference(manifest.canary, swapped.canary_logprobs) < 1e-5
    assert fetcher.fetched == ["adapter", "whole", "adapter", "adapter", "whole"]


def test_what_a_dead_learner_published_can_be_served_until_its_successor_has_come_as_far(house: House) -> None:
    first = house.learner()
    publish(first, 0, 0)
    train(first, 1)
    path = first.ask(SaveCheckpoint(version=1), CheckpointWritten).path
    train(first, 2)
    newest = publish(first, 2, 1)
    # It is gone without having closed its exporter.
    second = house.learner(epoch=2, path=path, version=1)
    again = publish(second, 1, 2)
    assert again.base is not None
    assert newest.base is not None
    assert again.base.digest == newest.base.digest
    assert again.base.location != newest.base.location
    second.backend.execute(ReleaseWeights(below_version=1))
    engine = house.engine(fetcher := CountingFetcher())
    serve(engine, newest)
    serve(engine, again)
    assert fetcher.fetched == ["adapter", "whole", "adapter"], "the same model need not be fetched again"
    train(second, 2)
    serve(engine, publish(second, 2, 3))
    with pytest.raises(WeightFetchError, match="is gone"):
        open_fetcher().fetch(newest.base)


@pytest.mark.parametrize("what", ["base", "adapter"])
def test_a_flipped_bit_of_either_is_caught(what: str, house: House) -> None:
    learner, engine = house.learner(), house.engine()
    manifest = publish(learner, 0, 0)
    assert manifest.base is not None
    place = Path((manifest.base if what == "base" else manifest).location)
    file = place / "model.safetensors" if place.is_dir() else place
    data = bytearray(file.read_bytes())
    data[-4] ^= 1
    with file.open("r+b") as opened:
        opened.write(data)
    staged = engine.ask(FetchWeights(manifest), WeightsStagedLocally)
    assert "were changed on the way" in staged.error


@pytest.mark.skipif(not SHARED_FOLDER.is_dir(), reason="needs /dev/shm")
def test_a_bit_of_the_base_that_is_flipped_after_the_fetch_is_told_and_the_base_is_not_used_again(
    tmp_path: Path, model_folder: Path
) -> None:
    house = House(tmp_path, model_folder, "shared_memory", f"adapters-flip-{os.getpid()}")
    learner, engine = house.learner(), house.engine(fetcher := CountingFetcher())
    manifest = publish(learner, 0, 0)
    assert manifest.base is not None
    segment = Path(manifest.base.location)
    with segment.open("r+b") as file:  # before the fetch: afterwards it would wait until the engine has loaded
        engine.ask(FetchWeights(manifest), WeightsStagedLocally)
        file.seek(-4, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-4, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    swapped = engine.ask(ApplyWeights(manifest, UpdateMode.DRAIN), WeightsSwapped)
    assert swapped.digest not in ("", manifest.digest)
    with segment.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(bytes([byte]))
    serve(engine, manifest)
    assert fetcher.fetched == ["adapter", "whole"] * 2
    house.close()


def test_checkpoints_are_the_same_whatever_is_published(house: House, tmp_path: Path, model_folder: Path) -> None:
    other = House(tmp_path / "other", model_folder, house.transport, f"{house.run_id}-other")
    folders: list[Path] = []
    for opened, kind in ((house, "adapter"), (other, "merged")):
        learner = opened.learner(publish=kind)
        publish(learner, 0, 0)
        train(learner, 1)
        folders.append(Path(learner.ask(SaveCheckpoint(version=1), CheckpointWritten).path))
    other.close()
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_a_transport_that_keeps_no_base_is_refused(tmp_path: Path, model_folder: Path) -> None:
    house = House(tmp_path, model_folder, "tensor", "pushed")
    with pytest.raises(WeightExportError, match=r"set weights\.transport: shared_memory or disk"):
        house.learner()


def test_adapters_are_a_small_part_of_the_bytes(tmp_path: Path) -> None:
    """A model of the proportions of real ones: the default rank of 16 beside 1,024 and more columns."""
    folder = tmp_path / "model"
    config = Qwen3Config(
        vocab_size=79, hidden_size=1024, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    with quiet_transformers():
        Qwen3ForCausalLM(config).save_pretrained(folder)
    sizes = {}
    for kind in ("adapter", "merged"):
        house = House(tmp_path / kind, folder, "disk", kind)
        sizes[kind] = publish(house.learner(publish=kind), 0, 0).size_bytes
        house.close()
    assert sizes["adapter"] < 0.05 * sizes["merged"]
