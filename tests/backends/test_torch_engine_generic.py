"""The embedded engine by transformers' own layers and cache: greedy tokens and log-probs are those of transformers, and
whatever is drawn is what the engine's own forward pass would have drawn."""

# transformers' factories have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Unpack, cast

import msgspec
import pytest
import torch
import transformers
from engine_cases import (
    VOCAB_SIZE,
    Case,
    Settings,
    logprobs_of,
    open_engine,
    random_tokens,
    request,
    run_all,
    run_steps,
    tokens_of,
    weights_of,
)
from family_cases import PACKED, PADDED, made
from safetensors.torch import load_file

from penstock.backends.checkpoint.model_config import read_tokenizer
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.engines.torch.fetching import FetchedPublish
from penstock.backends.engines.torch.generic import GenericEngine
from penstock.backends.engines.torch.generic_config import GenericConfig, read_engine_config
from penstock.backends.engines.torch.generic_weights import check_generic
from penstock.backends.engines.torch.requests import Ended, RequestError
from penstock.backends.engines.torch.sampling import Sampler
from penstock.backends.engines.torch.spec import TORCH
from penstock.backends.engines.torch.stopping import EndReason, StopStrings
from penstock.messages.errors import UserFault
from penstock.messages.samples import VersionSpan
from penstock.messages.turn_sampling import TurnSampling
from penstock.messages.weights import LowRank

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from penstock.backends.engines.torch.engine import TorchEngine
    from penstock.backends.weights.protocol import FetchedWeights
    from penstock.messages.weights import WeightManifest

models: Any = transformers
NUM_NEW = 14
SERVED = {name: config for name, config in (PACKED | PADDED).items() if name != "bamba"}
"""That of Bamba says something else with its cache than without."""


def generic_of(folder: Path) -> GenericConfig:
    """The config as it would be for a model that the engine's own forward pass does not compute."""
    read = read_engine_config(folder)
    return GenericConfig(
        folder=folder, vocab_size=read.vocab_size, max_positions=read.max_positions, reason="this is a test"
    )


def open_generic(folder: Path, **settings: Unpack[Settings]) -> GenericEngine:
    engine = GenericEngine(generic_of(folder), replace(EngineSettings(num_slots=8), **settings))
    engine.load(load_file(folder / "model.safetensors"), 0)
    return engine


def as_torch(engine: GenericEngine) -> TorchEngine:
    """For helpers that call what both have."""
    return cast("TorchEngine", engine)


@pytest.mark.parametrize("family", SERVED)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = made(SERVED[family](), tmp_path)
    engine = open_generic(folder, sampler=Sampler(temperature=0), max_context=64)
    # Of one length and of several, alone and twice, one that windows of 8 do not reach over, and one of a single token.
    prompts = [[5, 6, 7, 8, 9], [50, 6, 3, 8, 9], list(range(4, 23)), [3], [5, 6, 7, 8, 9]]
    found = run_all(as_torch(engine), [request(tag, prompt, NUM_NEW) for tag, prompt in enumerate(prompts)])
    with quiet_transformers():
        plain = models.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for tag, prompt in enumerate(prompts):
        tokens = tokens_of(found[tag].part)
        with torch.no_grad():
            logprobs = plain(torch.tensor([prompt + tokens]), use_cache=False).logits[0].log_softmax(-1)
        expected = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(logprobs_of(found[tag].part), expected, rtol=0, atol=2e-5)
        if tag < 3:
            ids = torch.tensor([prompt])
            greedy = plain.generate(ids, do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None, pad_token_id=0)
            assert tokens == greedy[0, len(prompt) :].tolist()


def test_a_publish_is_loaded_by_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    """Mixtral's experts are one tensor in memory, and have other names in a checkpoint."""
    for family in ("mixtral", "olmoe", "gpt_oss", "falcon_h1"):
        folder = made(SERVED[family](), tmp_path / family)
        stored = load_file(folder / "model.safetensors")
        engine = open_generic(folder)
        before = engine.score(list(range(2, 20)))
        engine.load({name: tensor * 1.5 for name, tensor in stored.items()}, 1)
        assert not torch.allclose(engine.score(list(range(2, 20))), before, atol=1e-2)
        engine.load(stored, 2)
        assert torch.equal(engine.score(list(range(2, 20))), before)
        name = next(name for name in stored if "experts" in name or "mamba" in name)
        check_generic(generic_of(folder), {key: tuple(tensor.shape) for key, tensor in stored.items()})
        with pytest.raises(UserFault, match=r"of another model than config\.json describes: they lack"):
            engine.load({key: tensor for key, tensor in stored.items() if key != name}, 3)
        with pytest.raises(UserFault, match="have unknown more"):
            engine.load({**stored, "more": torch.zeros(1)}, 3)
        with pytest.raises(UserFault, match=r"expected shape \[.*\] from config.json, found \[1\]"):
            engine.load({**stored, name: torch.zeros(1)}, 3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sampler": Sampler(temperature=0.7, top_k=9, top_p=0.9, min_p=0.02)},
        {"stop_token_ids": frozenset(range(10, 20))},
        {"num_slots": 2},
    ],
    ids=["plain", "cut off", "stops", "few slots"],
)
def test_it_draws_what_the_other_forward_pass_draws(case: Case, settings: Settings) -> None:
    requests = [request(tag, random_tokens(4 + tag % 3, tag // 2), 3 + 4 * (tag % 4)) for tag in range(10)]
    requests.append(replace(request(10, random_tokens(4, 99), 12), sampler=Sampler(temperature=0)))
    found = run_all(as_torch(open_generic(case.folder, **settings)), requests)
    expected = run_all(open_engine(case, **settings), requests)
    assert found.keys() == expected.keys()
    for tag, end in expected.items():
        torch.testing.assert_close(logprobs_of(found[tag].part), logprobs_of(end.part), rtol=0, atol=1e-5)
        assert bare(found[tag]) == bare(end)


def bare(end: Ended) -> Ended:
    """Without what is rounded, and what depends on who else was there."""
    part = msgspec.structs.replace(end.part, logprobs=bytes(len(end.part.logprobs)), counts=None)
    return replace(end, part=part)


def test_stop_strings_end_a_response(case: Case) -> None:
    strings = StopStrings(("a", "Z9"), read_tokenizer(case.folder))
    requests = [request(tag, random_tokens(5, tag), 200) for tag in range(6)]
    found = run_all(as_torch(open_generic(case.folder, stop_strings=strings)), requests)
    expected = run_all(open_engine(case, stop_strings=strings), requests)
    assert EndReason.STOP_STRING in {end.reason for end in found.values()}
    assert {tag: (end.reason, end.part.tokens) for tag, end in found.items()} == {
        tag: (end.reason, end.part.tokens) for tag, end in expected.items()
    }


def test_samples_of_a_group_share_their_context_and_run_together(case: Case) -> None:
    engine = open_generic(case.folder, num_slots=6)
    prompt = random_tokens(9, 1)
    found = run_all(as_torch(engine), [request(tag, prompt, 4) for tag in range(4)])
    assert engine.num_prefilled == 8
    counts = [end.part.counts for _, end in sorted(found.items())]
    assert [each.num_cached_tokens for each in counts if each is not None] == [0, 8, 8, 8]
    # Two groups of four are too many for six slots: the second waits, whole, for the first.
    for tag in range(8):
        engine.submit(request(tag, random_tokens(9, tag // 4), 4))
    assert engine.step().num_read_tokens == 9 + 3 * 1
    assert engine.step().num_read_tokens == 0
    assert (engine.num_running, engine.num_queued) == (4, 4)
    run_steps(as_torch(engine), 2)
    assert (engine.num_running, engine.num_queued) == (0, 4)


def test_new_weights_go_on_with_the_cache_and_are_stamped(case: Case) -> None:
    engine, prompt = open_generic(case.folder), random_tokens(6, 3)
    engine.submit(request(0, prompt, 10))
    engine.submit(request(1, prompt, 3))
    run_steps(as_torch(engine), 3)
    engine.load(weights_of(case.model), 7)
    ended, _ = run_steps(as_torch(engine), 7)
    assert [end.part.spans for end in ended] == [(VersionSpan(0, 3), VersionSpan(7, 7))]
    assert engine.num_generated == 13


def test_what_was_interrupted_goes_on_as_if_nothing_had_happened(case: Case) -> None:
    engine, requests = open_generic(case.folder), [request(tag, random_tokens(5, 8), 12) for tag in range(3)]
    whole = run_all(as_torch(engine), requests)
    for each in requests:
        engine.submit(each)
    run_steps(as_torch(engine), 5)
    aborted = engine.abort(1)
    assert aborted is not None
    assert (aborted.reason, aborted.part.num_tokens) == (EndReason.ABORTED, 5)
    assert engine.abort(1) is None
    run_steps(as_torch(engine), 2)
    interrupted = {end.tag: end.part for end in engine.interrupt()}
    assert (engine.num_running, sorted(cast("dict[int, Any]", interrupted))) == (0, [0, 2])
    again = run_all(as_torch(engine), [replace(requests[tag], prefix=interrupted[tag]) for tag in (0, 2)])
    for tag in (0, 2):
        assert again[tag].part.tokens == whole[tag].part.tokens
        torch.testing.assert_close(logprobs_of(again[tag].part), logprobs_of(whole[tag].part), rtol=0, atol=1e-5)


def test_progress_is_reported_from_where_it_was(case: Case) -> None:
    engine = open_generic(case.folder, progress_tokens=4)
    engine.submit(request(0, random_tokens(5, 8), 11))
    ended, advanced = run_steps(as_torch(engine), 11)
    assert [(each.from_token, each.chunk.num_tokens) for each in advanced] == [(0, 4), (4, 4)]
    assert b"".join(each.chunk.tokens for each in advanced) == ended[0].part.tokens[: 4 * 8]


def test_logits_that_are_no_numbers_fail_that_request_alone(case: Case) -> None:
    engine = open_generic(case.folder)
    weights = weights_of(case.model)
    bad = random_tokens(3, 5)[0]
    engine.load({**weights, "model.embed_tokens.weight": without_row(weights["model.embed_tokens.weight"], bad)}, 1)
    good = [token for token in random_tokens(20, 6) if token != bad][:5]
    found = run_all(as_torch(engine), [request(0, [*good[:4], bad], 1), request(1, good, 1)])
    assert found[0].reason is EndReason.FAILED
    assert not found[0].part.num_tokens


def without_row(matrix: torch.Tensor, row: int) -> torch.Tensor:
    matrix = matrix.clone()
    matrix[row] = float("nan")
    return matrix


def test_asleep_it_has_no_weights_and_awake_those_that_it_is_given(case: Case) -> None:
    engine = open_generic(case.folder)
    before = engine.score(random_tokens(20, 1))
    assert engine.sleep() >= 4 * sum(parameter.numel() for parameter in case.model.parameters())
    with pytest.raises(RequestError, match="no weights"):
        engine.submit(request(0, [3], 1))
    engine.load(weights_of(case.model), 3)
    assert torch.equal(engine.score(random_tokens(20, 1)), before)
    engine.submit(request(0, [3], 2))
    with pytest.raises(RuntimeError, match="1 request is open"):
        engine.sleep()


def test_requests_that_do_not_fit_are_refused(case: Case) -> None:
    engine = open_generic(case.folder, max_context=16)
    for wrong, story in (
        (request(0, [], 1), "a prompt and 1 new tokens must fit"),
        (request(0, [3] * 10, 7), "must fit into 16"),
        (request(0, [VOCAB_SIZE], 1), "outside the model's vocabulary"),
    ):
        with pytest.raises(RequestError, match=story):
            engine.submit(wrong)
    early = engine.submit(replace(request(0, [3], 2), prefix=finished(case)))
    assert early is not None
    assert early.reason is EndReason.LENGTH


def finished(case: Case) -> Any:  # noqa: ANN401 - a part
    return run_all(open_engine(case), [request(0, [3], 2)])[0].part


def test_a_model_whose_cache_says_otherwise_is_refused(tmp_path: Path) -> None:
    """Bamba's, of this transformers; and RecurrentGemma's, which keeps its state in its layers."""
    folder = made(PADDED["bamba"](), tmp_path)
    with pytest.raises(UserFault, match=r"BambaForCausalLM says other log-probs with transformers' cache than without"):
        open_generic(folder)


def test_which_models_it_is_for_and_what_is_said_of_it(tmp_path: Path, case: Case) -> None:
    folder = made(PACKED["gemma2"](), tmp_path)
    config = read_engine_config(folder)
    assert isinstance(config, GenericConfig)
    assert config.max_positions == TORCH.longest_context(folder) == 512
    assert "several times slower" in config.notice
    assert "found Gemma2ForCausalLM" in config.notice
    assert TORCH.notice(folder) == config.notice
    assert TORCH.notice(case.folder) == ""
    for settings, key in (({"records_experts": True}, "record_experts"), ({"learner_model": folder}, "true_on_policy")):
        with pytest.raises(UserFault, match=f"{key}: true, and the embedded engine computes this model by"):
            GenericEngine(config, replace(EngineSettings(), **cast("Mapping[str, Any]", settings)))
    with pytest.raises(UserFault, match="max_context must be at most"):
        GenericEngine(config, EngineSettings(max_context=513))


@pytest.mark.parametrize("wrong", [{"architectures": ["MambaForCausalLM"]}, {"model_type": "t5"}])
def test_what_transformers_does_not_build_as_a_causal_model_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    file = made(PACKED["gemma2"](), tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    with pytest.raises(UserFault, match=r"the torch engine serves LlamaForCausalLM, .*, found "):
        read_engine_config(tmp_path)


def test_turns_and_the_canary(case: Case) -> None:
    engine = open_generic(case.folder)
    tokens = random_tokens(12, 2)
    torch.testing.assert_close(engine.probe(tokens), open_engine(case).probe(tokens), rtol=0, atol=1e-5)
    turned = replace(request(0, tokens, 5), sampler=Sampler().turned(TurnSampling(temperature=0.0)))
    assert run_all(as_torch(engine), [turned])[0].part.tokens == run_all(open_engine(case), [turned])[0].part.tokens


def test_adapters_alone_are_refused_where_they_are_fetched(case: Case) -> None:
    manifest = cast("WeightManifest", SimpleNamespace(low_rank=LowRank(rank=2, scale=1.0, target_modules=("q_proj",))))
    weights = cast("FetchedWeights", SimpleNamespace(tensors={}))
    story = FetchedPublish(manifest, weights, None).what_is_wrong(generic_of(case.folder))
    assert story.startswith(
        "learner.lora.publish: adapter, and the embedded engine computes this model by transformers'"
    )
    assert story.endswith("set it to merged")
