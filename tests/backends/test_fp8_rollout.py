"""Weights in FP8 from the learner to the engines: the bits of a converted copy, and what they stand for."""

# torch and safetensors are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engine_cases import make_case, open_engine, random_tokens, reference_canary, request, run_all, weights_of
from rich.console import Console
from safetensors.torch import load_file

from penstock.backends.checkpoint.fp8 import E4M3, E4M3_MAX, SCALE
from penstock.backends.checkpoint.fp8_publish import PlainFetcher, QuantizingExporter, plain_tensors
from penstock.backends.checkpoint.make import make_model
from penstock.backends.engines.served.base.staging import stage
from penstock.backends.engines.served.expectation import expect_model
from penstock.backends.weights.disk import DiskExporter, fetch_disk
from penstock.backends.weights.protocol import WeightExportError, WeightFetchError
from penstock.messages.arrays import pack_floats, tokens_view
from penstock.messages.canary import canary_difference
from penstock.messages.engine_counts import EngineCounts
from penstock.messages.errors import UserFault
from penstock.runtime.cli.convert import convert
from penstock.runtime.preflight.fp8_model import check_fp8_model
from penstock.runtime.scenario.resolve import QUANTIZED_CANARY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from penstock.backends.weights.stream import AnyWeights
    from penstock.messages.weights import WeightManifest


class Stream:
    """Weights as a divided learner has them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @property
    def shapes(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor.to("meta") for name, tensor in self._tensors.items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())


class Fetcher:
    def fetch(self, manifest: WeightManifest) -> Any:  # noqa: ANN401 - as the function says
        return fetch_disk(manifest)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "model"
    make_model("xs", folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def copy(model: Path) -> Path:
    """As ``penstock convert --dtype fp8`` writes it."""
    target = model.with_name("copy")
    options: dict[str, Any] = {"version": None, "max_shard_size": "5GB", "target_format": "huggingface"}
    assert convert(model, target, Console(file=StringIO()), dtype="fp8", **options) == 0
    return target


def published(weights: AnyWeights, folder: Path) -> WeightManifest:
    return QuantizingExporter(DiskExporter(folder, 0)).export(weights, version=1, publish=1, canary=None)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_published_has_the_bits_of_a_converted_copy(
    model: Path, copy: Path, tmp_path: Path, is_stream: bool
) -> None:
    weights, expected = load_file(model / "model.safetensors"), load_file(copy / "model.safetensors")
    fetched = fetch_disk(published(Stream(weights) if is_stream else weights, tmp_path))
    found = {name: (tensor.dtype, bits(tensor)) for name, tensor in fetched.tensors.items()}
    assert found == {name: (tensor.dtype, bits(tensor)) for name, tensor in expected.items()}
    assert {tensor.dtype for name, tensor in fetched.tensors.items() if name.endswith("_proj.weight")} == {E4M3}


def test_an_engine_gets_what_the_numbers_stand_for(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    plain = PlainFetcher(Fetcher(), torch.float32).fetch(published(weights, tmp_path))
    assert plain.tensors.keys() == weights.keys()
    for name, tensor in plain.tensors.items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(tensor, weights[name])
            continue
        for rows, there in zip(torch.split(weights[name], 128), torch.split(tensor, 128), strict=True):
            for block, found in zip(torch.split(rows, 128, 1), torch.split(there, 128, 1), strict=True):
                scale = block.abs().max() / E4M3_MAX
                assert torch.equal(found, (block / scale).to(E4M3).float() * scale)
    plain.close()
    assert not plain.tensors


def test_a_tied_head_is_sent_once(tmp_path: Path) -> None:
    case = make_case("qwen3_tied", tmp_path / "model")
    weights = weights_of(case.model)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    fetched = fetch_disk(published(weights, tmp_path))
    assert fetched.tensors["lm_head.weight"].data_ptr() == fetched.tensors["model.embed_tokens.weight"].data_ptr()


def test_right_weights_pass_the_canary_and_wrong_ones_do_not(tmp_path: Path) -> None:
    case = make_case("qwen3_untied", tmp_path / "model")
    weights = weights_of(case.model)
    canary = reference_canary(case.model, random_tokens(12, 7))
    engine = open_engine(case)

    def difference(tensors: dict[str, torch.Tensor]) -> float:
        engine.load(plain_tensors(fetch_disk(published(tensors, tmp_path / str(len(list(tmp_path.iterdir()))))).tensors,
                                  torch.float32), 1)  # fmt: skip
        return canary_difference(canary, pack_floats(engine.probe(tokens_view(canary.tokens)).flatten().tolist()))

    right = difference(weights)
    assert 1e-3 < right < QUANTIZED_CANARY / 3, "rounding of e4m3 numbers shows, and is far from the bound"
    one, other = (f"model.layers.{n}.mlp.down_proj.weight" for n in (0, 1))
    head = {**weights, "lm_head.weight": weights["lm_head.weight"].flip(0)}
    assert difference(head) > QUANTIZED_CANARY
    assert difference({**weights, one: weights[other], other: weights[one]}) > right


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_learner_that_has_diverged_publishes_nothing(model: Path, tmp_path: Path, value: float) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 4] = value
    with pytest.raises(WeightExportError, match=r"up_proj.weight: has .* NaN.*: the learner has diverged"):
        published(weights, tmp_path)
    with pytest.raises(WeightExportError, match=r"no model.layers.* to quantize"):
        published({"other": torch.zeros(4, 4)}, tmp_path)


def test_numbers_without_their_scales_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    manifest = DiskExporter(tmp_path, 0).export({name: torch.ones(4, 4).to(E4M3)}, version=1, publish=1, canary=None)
    with pytest.raises(WeightFetchError, match=f"{name}: is in FP8, and has no scales"):
        PlainFetcher(Fetcher(), torch.float32).fetch(manifest)
    with pytest.raises(UserFault, match="not positive"):
        plain_tensors({name: torch.ones(4, 4).to(E4M3), name + SCALE: torch.zeros(1, 1)}, torch.float32)


def test_a_server_that_was_started_from_the_copy_takes_them_and_no_plain_ones(
    model: Path, copy: Path, tmp_path: Path
) -> None:
    weights, expected = load_file(model / "model.safetensors"), expect_model(copy)
    staged = stage(published(weights, tmp_path), model_folder=copy, folder=tmp_path / "staged", expected=expected)
    quantization = json.loads((staged.folder / "config.json").read_text())["quantization_config"]
    assert (quantization["quant_method"], quantization["weight_block_size"]) == ("fp8", [128, 128])
    staged.close()
    plain = DiskExporter(tmp_path / "plain", 0).export(weights, version=1, publish=1, canary=None)
    with pytest.raises(WeightFetchError, match="weight_scale_inv"):
        stage(plain, model_folder=copy, folder=tmp_path / "staged", expected=expected)


def test_the_copy_is_looked_at_before_the_run(model: Path, copy: Path, tmp_path: Path) -> None:
    check_fp8_model(model, copy)
    with pytest.raises(UserFault, match=r"engines\.fp8_model: .* its weights are not quantized; `penstock convert"):
        check_fp8_model(model, model)
    make_model("s", tmp_path / "other", seed=0)
    with pytest.raises(UserFault, match=r"engines\.fp8_model: .* unknown model\.layers\.2"):
        check_fp8_model(tmp_path / "other", copy)


def test_the_embedded_engine_counts_prompts_that_a_slot_holds(tmp_path: Path) -> None:
    case = make_case("qwen3_tied", tmp_path / "model")
    engine = open_engine(case)
    prompt = random_tokens(9, 1)
    first, second = (run_all(engine, [request(tag, prompt, 3)])[tag].part for tag in (0, 1))
    assert (first.counts, second.counts) == (EngineCounts(9, 0), EngineCounts(9, 8))
    engine.load(weights_of(case.model), 1)
    third = run_all(engine, [request(2, prompt, 3)])[2].part
    assert third.counts == EngineCounts(9, 0), "under new weights the cache is another"
    again = replace(request(3, prompt, 6), prefix=third)
    assert run_all(engine, [again])[3].part.counts == EngineCounts(9 + 9 + third.num_tokens, 8)
