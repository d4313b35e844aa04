"""The embedded engine's forward pass against transformers, and what it refuses to read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from engine_cases import (
    CONTEXT,
    MODELS,
    Case,
    greedy_reference,
    largest_error,
    make_case,
    open_engine,
    part_of,
    random_tokens,
    reference_logprobs,
    request,
    run_all,
    tokens_of,
    weights_of,
)

from penstock.backends.checkpoint.hf_config import INDEX_FILE
from penstock.backends.checkpoint.make import END_ID
from penstock.backends.checkpoint.model_config import read_end_token_ids, read_model_config
from penstock.backends.checkpoint.tensors import SINGLE_FILE, CheckpointTensors
from penstock.backends.engines.torch.attention import FreshAttention, RaggedRows
from penstock.backends.engines.torch.cache import KeyValueCache
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.engines.torch.model import DecoderModel, Rows
from penstock.backends.engines.torch.requests import RequestError
from penstock.backends.engines.torch.sampling import Sampler
from penstock.backends.engines.torch.weights import FusedWeights
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

TOLERANCE = 1e-5
"""Nats, in float32."""


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(str(request.param), tmp_path_factory.mktemp("model"))


@pytest.fixture
def qwen(tmp_path: Path) -> Case:
    return make_case("qwen3_untied", tmp_path / "model")


def test_scores_are_those_of_transformers(case: Case) -> None:
    tokens = random_tokens(700, seed=1)
    scored = open_engine(case, max_context=CONTEXT).score(tokens)
    assert scored.dtype == torch.float32
    assert (scored - reference_logprobs(case.model, tokens)).abs().max() < TOLERANCE


def test_logprobs_of_drawn_tokens_are_those_of_transformers(case: Case) -> None:
    prompts = {tag: random_tokens(1 + 5 * tag, seed=tag) for tag in range(8)}
    ended = run_all(open_engine(case), [request(tag, prompt, 40) for tag, prompt in prompts.items()])
    assert all(largest_error(case, prompt, ended[tag].part) < TOLERANCE for tag, prompt in prompts.items())


def test_logprobs_after_a_long_prefix_are_those_of_transformers(case: Case) -> None:
    prompt, prefix = random_tokens(9, seed=1), part_of(case.model, random_tokens(9, seed=1), random_tokens(600, seed=2))
    wanted = [replace(request(tag, prompt, 620), prefix=prefix) for tag in range(2)]
    ended = run_all(open_engine(case, max_context=CONTEXT), wanted)
    for end in ended.values():
        assert tokens_of(end.part)[:600] == tokens_of(prefix)
        assert end.part.num_tokens == 620
        assert largest_error(case, prompt, end.part) < TOLERANCE


def test_greedy_tokens_are_those_of_generate(case: Case) -> None:
    prompts = {tag: random_tokens(3 + 4 * tag, seed=10 + tag) for tag in range(5)}
    engine = open_engine(case, sampler=Sampler(temperature=0), stop_token_ids=frozenset({END_ID}))
    ended = run_all(engine, [request(tag, prompt, 60) for tag, prompt in prompts.items()])
    for tag, prompt in prompts.items():
        assert tokens_of(ended[tag].part) == greedy_reference(case.model, prompt, 60)


def test_long_prompts_are_prefilled_in_several_passes(qwen: Case) -> None:
    prompts = {tag: random_tokens(300 + tag, seed=tag) for tag in range(16)}
    ended = run_all(open_engine(qwen, num_slots=16), [request(tag, prompt, 3) for tag, prompt in prompts.items()])
    assert all(largest_error(qwen, prompt, ended[tag].part) < TOLERANCE for tag, prompt in prompts.items())


def test_folded_weights_compute_the_same_function(case: Case) -> None:
    config, tokens = read_model_config(case.folder), random_tokens(50, seed=3)
    logits: list[torch.Tensor] = []
    for fold in (True, False):
        weights = FusedWeights(config, torch.float32, torch.device("cpu"), fold=fold)
        weights.load(weights_of(case.model))
        cache = KeyValueCache(config, 1, 64, torch.float32, torch.device("cpu"))
        model = DecoderModel(weights, cache, 64)
        ragged = RaggedRows.pack([tokens], [0], torch.device("cpu"))
        rows = Rows(ragged.tokens, ragged.positions, None, num_kept=50)
        logits.append(model.logits(model.hidden_states(rows, FreshAttention(config, ragged))))
    assert torch.allclose(logits[0], logits[1], atol=TOLERANCE, rtol=0)


def test_bfloat16_weights_stay_near_float32(case: Case) -> None:
    prompts = {tag: random_tokens(4 + 9 * tag, seed=tag) for tag in range(6)}
    engine = open_engine(case, dtype=torch.bfloat16)
    ended = run_all(engine, [request(tag, prompt, 30) for tag, prompt in prompts.items()])
    assert all(largest_error(case, prompt, ended[tag].part) < 0.15 for tag, prompt in prompts.items())
    prompt, tokens = random_tokens(9, seed=1), random_tokens(600, seed=2)
    prefix = part_of(case.model, prompt, tokens)
    engine = open_engine(case, dtype=torch.bfloat16, max_context=CONTEXT)
    ended = run_all(engine, [replace(request(tag, prompt, 620), prefix=prefix) for tag in range(2)])
    assert all(largest_error(case, prompt, end.part) < 0.15 for end in ended.values())


def test_shards_are_read_like_one_file(qwen: Case, tmp_path: Path) -> None:
    sharded = make_case("qwen3_untied", tmp_path / "sharded", max_shard_size="20KB")
    assert (sharded.folder / INDEX_FILE).is_file()
    assert not (sharded.folder / SINGLE_FILE).exists()
    tokens = random_tokens(30, seed=4)
    assert torch.equal(open_engine(sharded).score(tokens), open_engine(qwen).score(tokens))


def test_loading_twice_leaves_nothing_of_the_first(qwen: Case, tmp_path: Path) -> None:
    other = make_case("qwen3_untied", tmp_path / "other", seed=1)
    engine, tokens = open_engine(qwen), random_tokens(30, seed=4)
    engine.load(weights_of(other.model), version=1)
    assert torch.equal(engine.score(tokens), open_engine(other).score(tokens))


def test_opening_reads_no_weights(qwen: Case) -> None:
    (qwen.folder / SINGLE_FILE).unlink()
    engine = TorchEngine(read_model_config(qwen.folder), EngineSettings(num_slots=2))
    assert engine.version is None
    with pytest.raises(RequestError, match="no weights"):
        engine.submit(request(0, [2, 3], 4))


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "serves LlamaForCausalLM.*found MixtralForCausalLM"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, found gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type .* found yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "llama3 needs"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_key_value_heads": 2}, "multiple of num_key_value_heads, got 3 and 2"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"vocab_size": "many"}, r"vocab_size"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(qwen: Case, changes: dict[str, object], message: str) -> None:
    _edit_config(qwen.folder, **changes)
    with pytest.raises(UserFault, match=message):
        read_model_config(qwen.folder)


def test_older_configs_with_rope_at_the_top_are_read(tmp_path: Path) -> None:
    llama = make_case("llama_untied", tmp_path)
    now = read_model_config(llama.folder)
    raw = json.loads((llama.folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (llama.folder / "config.json").write_text(json.dumps(raw))
    assert read_model_config(llama.folder) == now


def test_missing_files_are_named(qwen: Case, tmp_path: Path) -> None:
    with pytest.raises(UserFault, match="does not exist"):
        read_model_config(tmp_path / "nowhere")
    (qwen.folder / SINGLE_FILE).unlink()
    with pytest.raises(UserFault, match=r"has neither model\.safetensors nor"):
        CheckpointTensors(qwen.folder)
    (qwen.folder / "config.json").unlink()
    with pytest.raises(UserFault, match=r"no config\.json"):
        read_model_config(qwen.folder)


def test_broken_shards_are_named(tmp_path: Path) -> None:
    folder = make_case("qwen3_untied", tmp_path, max_shard_size="20KB").folder
    index = json.loads((folder / INDEX_FILE).read_text())
    shard = folder / sorted(set(index["weight_map"].values()))[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserFault, match=f"{shard.name} is no whole safetensors file"):
        CheckpointTensors(folder)
    shard.unlink()
    with pytest.raises(UserFault, match=f"lacks {shard.name}"):
        CheckpointTensors(folder)
    shard.write_bytes(whole)
    index["weight_map"]["model.extra"] = shard.name
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(UserFault, match=r"lacks model\.extra"):
        CheckpointTensors(folder)


def test_weights_of_another_model_change_nothing(qwen: Case) -> None:
    engine, tokens = open_engine(qwen), random_tokens(20, seed=5)
    before = engine.score(tokens)
    weights = weights_of(qwen.model)
    missing = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    misshaped = weights | {"model.norm.weight": torch.zeros(3)}
    for wrong, message in (
        (missing, r"lack lm_head\.weight"),
        (weights | {"model.layers.0.self_attn.sinks": torch.zeros(3)}, "unknown .*sinks"),
        (weights | {"model.layers.9.enorm.weight": torch.zeros(3)}, "unknown .*enorm"),  # and no layer that predicts
        (misshaped, r"model\.norm\.weight: expected shape \[40\] .* found \[3\]"),
    ):
        with pytest.raises(UserFault, match=message):
            engine.load(wrong, version=1)
    assert engine.version == 0
    assert torch.equal(engine.score(tokens), before)
    further = {f"model.layers.9.{name}.weight": torch.zeros(3, 3) for name in ("eh_proj", "enorm", "mlp.up_proj")}
    engine.load(weights | further, version=1)  # of layers that predict further tokens, which it does not draft with
    assert engine.version == 1
    assert torch.equal(engine.score(tokens), before)


def test_end_tokens_come_from_generation_config_and_tokenizer(qwen: Case) -> None:
    (qwen.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert read_end_token_ids(qwen.folder) == {5, 7}
    (qwen.folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    assert read_end_token_ids(qwen.folder) == {5, 7, END_ID}
    (qwen.folder / "generation_config.json").unlink()
    assert read_end_token_ids(qwen.folder) == {END_ID}
    (qwen.folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    with pytest.raises(UserFault, match=r"does not know the eos_token '<\|end\|>'"):
        read_end_token_ids(qwen.folder)


def test_limits_beyond_the_model_are_refused(qwen: Case) -> None:
    config = read_model_config(qwen.folder)
    with pytest.raises(UserFault, match=f"max_context must be at most .* {CONTEXT}, got {CONTEXT + 1}"):
        TorchEngine(config, EngineSettings(max_context=CONTEXT + 1))
    with pytest.raises(UserFault, match=r"stop_token_ids must be below .* got \[79\]"):
        TorchEngine(config, EngineSettings(stop_token_ids=frozenset({79})))
