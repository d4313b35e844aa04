"""FP8 checkpoints as DeepSeek-V3 publishes them: read, written, and there and back again to the bit."""

# transformers and safetensors are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import math
import struct
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from penstock.backends.checkpoint.fp8 import BLOCKS, E4M3, SCALE, dequantize, quantize
from penstock.backends.checkpoint.hf_config import INDEX_FILE
from penstock.backends.checkpoint.make import make_model
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.checkpoint.tokenizer_files import copy_tokenizer
from penstock.backends.learners.megatron.bridge.architecture import read_architecture
from penstock.backends.learners.torch.model import CheckpointError, PackedModel
from penstock.messages.errors import UserFault
from penstock.runtime.cli.convert import convert, show_problems

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {
    "vocab_size": 79, "hidden_size": 144, "intermediate_size": 200, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "eos_token_id": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
OF_PREDICTION = "model.layers.2."


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 in bfloat16 with a layer for predicting a second token; none of its sizes divides by 128."""
    folder = tmp_path_factory.mktemp("fp8") / "bf16"
    make_model("xs", folder.with_name("tokenizer"), seed=0)
    torch.manual_seed(5)
    with quiet_transformers():
        DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES)).bfloat16().save_pretrained(folder)
    copy_tokenizer(folder.with_name("tokenizer"), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if name.startswith("model.layers.1."):
            tensors[name.replace("layers.1.", "layers.2.")] = tensors[name] * 1.5
        if name.endswith("correction_bias"):
            tensors[name] = torch.full((4,), 0.1)  # no bfloat16 number
    tensors[f"{OF_PREDICTION}eh_proj.weight"] = torch.randn(144, 288).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def written(source: Path, target: Path, dtype: str, size: str = "5GB") -> dict[str, torch.Tensor]:
    """All tensors of what the command writes."""
    arguments: dict[str, Any] = {"version": None, "max_shard_size": size, "target_format": "huggingface"}
    assert convert(source, target, Console(file=StringIO()), dtype=dtype, **arguments) == 0
    tensors = [load_file(file) for file in sorted(target.glob("*.safetensors"))]
    return {name: tensor for each in tensors for name, tensor in each.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """To the bit."""
    assert one.keys() == other.keys()
    return all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8).reshape(-1), b.view(torch.uint8).reshape(-1))
        for a, b in ((one[name].contiguous(), other[name].contiguous()) for name in one)
    )


E4M3_NUMBERS = sorted(
    {(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)}
    - {480.0}  # that one is NaN
    | {mantissa / 8 * 2.0**-6 for mantissa in range(8)}
)


def float32(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def by_formula(weight: list[list[float]]) -> tuple[list[list[float]], list[list[float]]]:
    """Numbers and scales in plain Python: the nearest e4m3 number by search, of two as near the one with an even
    place in the list."""
    rows, columns = len(weight), len(weight[0])
    scales: list[list[float]] = []
    for top in range(0, rows, 128):
        scales.append([])
        for left in range(0, columns, 128):
            block = [abs(x) for row in weight[top : top + 128] for x in row[left : left + 128]]
            scales[-1].append(float32(max(block) / 448.0) if max(block) else 1.0)
    numbers = [
        [_nearest(float32(x / scales[i // 128][j // 128])) for j, x in enumerate(row)] for i, row in enumerate(weight)
    ]
    return numbers, scales


def _nearest(x: float) -> float:
    place = min(range(len(E4M3_NUMBERS)), key=lambda p: (abs(E4M3_NUMBERS[p] - abs(x)), p % 2))
    return math.copysign(E4M3_NUMBERS[place], x)


@pytest.mark.parametrize("shape", [(128, 128), (3, 5), (130, 129), (1, 300)])
def test_numbers_and_scales_are_those_of_the_formula(shape: tuple[int, int]) -> None:
    torch.manual_seed(shape[1])
    weight = (torch.randn(shape) * torch.logspace(-6, 6, shape[1])).bfloat16()
    weight[:, 128:] *= 1e-20
    quantized, scales = quantize("w", weight)
    numbers, wanted = by_formula(weight.double().tolist())
    assert scales.tolist() == wanted
    assert quantized.double().tolist() == numbers
    back = dequantize("w", quantized, scales, BLOCKS, torch.float32)
    rows = [[float32(q * wanted[i // 128][j // 128]) for j, q in enumerate(row)] for i, row in enumerate(numbers)]
    assert back.double().tolist() == rows


def test_from_fp8_through_bfloat16_to_fp8_nothing_changes() -> None:
    torch.manual_seed(1)
    for magnitude in (-130, -60, 0, 60, 110):
        weight = (torch.randn(200, 300) * 2.0**magnitude).bfloat16()
        first = quantize("w", weight)
        again = quantize("w", dequantize("w", *first, BLOCKS, torch.bfloat16))
        assert same(dict(zip("qs", first, strict=True)), dict(zip("qs", again, strict=True))), magnitude
    # Scales of wider numbers move in their ninth bit at most, and what they scale does not move at all.
    quantized, scales = quantize("w", torch.randn(200, 300))
    once = quantize("w", dequantize("w", quantized, scales, BLOCKS, torch.bfloat16))
    assert torch.equal(once[0].view(torch.uint8), quantized.view(torch.uint8))
    assert not torch.equal(once[1], scales)
    torch.testing.assert_close(once[1], scales, rtol=2**-8, atol=0)


def test_blocks_of_zeros_and_of_the_smallest_numbers_are_numbers() -> None:
    weight = torch.zeros(130, 130, dtype=torch.bfloat16)
    weight[0, 129], weight[129, 0] = 2.0**-133, -(2.0**-126)
    quantized, scales = quantize("w", weight)
    assert scales[0, 0] == scales[1, 1] == 1.0
    assert not quantized[:128, :128].float().any()
    assert dequantize("w", quantized, scales, BLOCKS, torch.float32).isfinite().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_is_refused_by_its_name(bad: float) -> None:
    weight = torch.ones(140, 140)
    weight[139, 139] = bad
    with pytest.raises(UserFault, match=r"down_proj\.weight: has numbers that are infinite or NaN"):
        quantize("down_proj.weight", weight)
    quantized, scales = quantize("w", torch.ones(140, 140))
    scales[1, 1] = bad
    with pytest.raises(UserFault, match="w_scale_inv: has scales that are not positive and finite"):
        dequantize("w", quantized, scales, BLOCKS, torch.bfloat16)
    quantized.view(torch.uint8)[3, 3] = 0x7F
    with pytest.raises(UserFault, match="w: has numbers that are infinite or NaN"):
        dequantize("w", quantized, torch.ones(2, 2), BLOCKS, torch.bfloat16)


def test_a_checkpoint_goes_to_fp8_and_back_and_there_again(bfloat16: Path, tmp_path: Path) -> None:
    original = load_file(bfloat16 / "model.safetensors")
    fp8 = written(bfloat16, tmp_path / "fp8", "fp8", size="100KB")
    matrices = {name for name, tensor in fp8.items() if tensor.dtype == E4M3}
    assert {name for name in fp8 if name.endswith(SCALE)} == {name + SCALE for name in matrices}
    for name, tensor in original.items():
        if name in matrices:
            assert same(dict(zip("qs", quantize(name, tensor), strict=True)), {"q": fp8[name], "s": fp8[name + SCALE]})
        else:
            assert same({"": tensor}, {"": fp8[name]})
    left = {name for name, tensor in original.items() if tensor.ndim == 2} - matrices
    assert left == {
        "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight",
        f"{OF_PREDICTION}eh_proj.weight", f"{OF_PREDICTION}mlp.gate.weight",
    }  # fmt: skip
    config = json.loads((tmp_path / "fp8" / "config.json").read_bytes())
    assert config["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": config["quantization_config"]["modules_to_not_convert"],
    }  # fmt: skip
    assert "lm_head" in config["quantization_config"]["modules_to_not_convert"]
    index = json.loads((tmp_path / "fp8" / INDEX_FILE).read_bytes())["weight_map"]
    assert set(index) == set(fp8)
    back = written(tmp_path / "fp8", tmp_path / "back", "bf16")
    assert back.keys() == original.keys()
    assert {name: tensor.dtype for name, tensor in back.items()} == {n: t.dtype for n, t in original.items()}
    config = json.loads((tmp_path / "back" / "config.json").read_bytes())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert same(written(tmp_path / "back", tmp_path / "again", "fp8"), fp8)
    assert same(written(tmp_path / "fp8", tmp_path / "copy", "fp8"), fp8)


def test_who_would_train_or_serve_it_says_what_to_convert(bfloat16: Path, tmp_path: Path) -> None:
    written(bfloat16, tmp_path / "fp8", "fp8")
    with pytest.raises(CheckpointError, match=r"quantized, .* penstock convert MODEL COPY --dtype bfloat16"):
        PackedModel.load(tmp_path / "fp8", dtype="float32", device=torch.device("cpu"))
    with pytest.raises(UserFault, match=r"quantized \(fp8\), .* penstock convert MODEL COPY --dtype bfloat16"):
        read_architecture(tmp_path / "fp8")


def test_a_checkpoint_without_its_scales_or_of_another_kind_is_refused(bfloat16: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fp8"
    tensors = written(bfloat16, folder, "fp8")
    scale = f"model.layers.0.mlp.up_proj.weight{SCALE}"
    save_file({n: t for n, t in tensors.items() if n != scale}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserFault, match=rf"has no fitting {scale}: there are none"):
        written(folder, tmp_path / "out", "bfloat16")
    said = StringIO()
    assert show_problems(folder, Console(file=said, width=400), version=None) == 1
    assert scale in said.getvalue()
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"] |= {"quant_method": "compressed-tensors"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserFault, match="has quant_method compressed-tensors"):
        written(folder, tmp_path / "out", "bfloat16")
    assert not (tmp_path / "out").exists()
    spoiled = tmp_path / "spoiled"
    spoiled.mkdir()
    for file in bfloat16.iterdir():
        (spoiled / file.name).write_bytes(file.read_bytes())
    broken = load_file(bfloat16 / "model.safetensors")
    broken["model.layers.1.mlp.experts.2.up_proj.weight"][0, 0] = math.inf
    save_file(broken, spoiled / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserFault, match=r"layers\.1\.mlp\.experts\.2\.up_proj\.weight: has numbers that are infinite"):
        written(spoiled, tmp_path / "out", "fp8")
    assert not list(tmp_path.glob(".out*"))
