"""The embedded engine with a mixture of experts: what it reads, what it refuses, and that company changes nothing."""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that every reader of torch code knows
from engine_cases import (
    Case,
    drawn,
    largest_error,
    logprobs_of,
    make_case,
    open_engine,
    random_tokens,
    reference_logprobs,
    request,
    run_all,
    run_steps,
    tokens_of,
    weights_of,
)
from transformers import AutoModelForCausalLM

from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.engines.torch.slots import MIN_ROWS
from penstock.messages.arrays import tokens_view
from penstock.messages.errors import UserFault
from penstock.messages.samples import Part, VersionSpan

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.engines.torch.requests import Ended, GenerationRequest

TOLERANCE = 1e-5
"""Nats, in float32."""


@pytest.fixture
def moe(tmp_path: Path) -> Case:
    return make_case("qwen3_moe", tmp_path / "model")


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_moe_shares"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(str(request.param), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def mixed() -> list[GenerationRequest]:
    draw = random.Random(0)
    prompts = [random_tokens(draw.randrange(1, 50), seed=group) for group in range(8)]
    return [request(tag, prompts[tag // 3], draw.randrange(1, 60)) for tag in range(24)]


@pytest.fixture(scope="module")
def alone(case: Case, mixed: list[GenerationRequest]) -> dict[int, Ended]:
    engine = open_engine(case, num_slots=1)
    return {cast("int", wanted.tag): run_all(engine, [wanted])[cast("int", wanted.tag)] for wanted in mixed}


def _rows_are_independent() -> bool:
    """Whether a row of a grouped product has the same bits however many rows its group has, on this machine."""
    generator = torch.Generator().manual_seed(0)
    rows, matrices = torch.randn(64, 48, generator=generator), torch.randn(2, 48, 80, generator=generator)
    whole = rows @ matrices[1]
    return all(
        torch.equal(
            F.grouped_mm(rows[:count], matrices, offs=torch.tensor([0, count], dtype=torch.int32)), whole[:count]
        )
        for count in range(MIN_ROWS, 64)
    )


def _assert_same(left: Ended, right: Ended) -> None:
    assert left.reason == right.reason
    assert tokens_of(left.part) == tokens_of(right.part)
    assert torch.allclose(logprobs_of(left.part), logprobs_of(right.part), atol=TOLERANCE, rtol=0)
    if _rows_are_independent():
        assert drawn(left) == drawn(right)


@pytest.mark.parametrize("num_slots", [3, 24])
def test_company_does_not_change_a_response(
    case: Case, mixed: list[GenerationRequest], alone: dict[int, Ended], num_slots: int
) -> None:
    together = run_all(open_engine(case, num_slots=num_slots), random.Random(1).sample(mixed, len(mixed)))
    assert together.keys() == alone.keys()
    for tag, end in together.items():
        _assert_same(end, alone[tag])


def test_a_continued_response_is_the_uninterrupted_one(
    case: Case, mixed: list[GenerationRequest], alone: dict[int, Ended]
) -> None:
    draw = random.Random(1)
    continued = [
        replace(wanted, prefix=_cut(alone[cast("int", wanted.tag)].part, draw.randrange(wanted.max_new_tokens)))
        for wanted in mixed
    ]
    for tag, end in run_all(open_engine(case, num_slots=16), continued).items():
        _assert_same(end, alone[tag])


def _cut(part: Part, length: int) -> Part:
    spans = (VersionSpan(0, length),) if length else ()
    return Part(tokens=part.tokens[: 4 * length], logprobs=part.logprobs[: 4 * length], spans=spans)


@pytest.mark.parametrize("num_slots", [3, 24])
def test_ended_responses_say_which_experts_their_tokens_went_to(
    case: Case, mixed: list[GenerationRequest], num_slots: int
) -> None:
    """Also those whose prompt was copied from another slot, who moved, or who went on from a prefix."""
    engine = open_engine(case, num_slots=num_slots, records_experts=True)
    ended = run_all(engine, mixed)
    half = {tag: tokens_of(end.part)[: max(1, end.part.num_tokens // 2)] for tag, end in ended.items()}
    continued = [
        replace(wanted, tag=tag + 100, prefix=_cut(ended[tag].part, len(half[tag])))
        for wanted in mixed
        if wanted.max_new_tokens > len(half[tag := cast("int", wanted.tag)])
    ]
    ended |= run_all(engine, continued)
    prompts = {cast("int", wanted.tag): list(tokens_view(wanted.prompt)) for wanted in mixed}
    for tag, end in ended.items():
        _check_experts(case, prompts[tag % 100], end.part)


def _check_experts(case: Case, prompt: list[int], part: Part) -> None:
    record, config = part.experts, cast("Any", case.model.config)
    assert record is not None
    tokens = prompt + tokens_of(part)
    shape = (len(tokens) - 1, config.num_hidden_layers, config.num_experts_per_tok)
    layers = cast("Any", case.model).model.layers
    sparse = [index for index, layer in enumerate(layers) if hasattr(layer.mlp, "gate")]
    whole = np.frombuffer(record.ids, np.uint8).reshape(shape)
    assert (np.delete(whole, sparse, axis=1) == 255).all(), "layers without experts have none"
    found = whole[:, sparse]
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_pre_hook(
            lambda gate, inputs: chosen.append(
                F.linear(inputs[0].flatten(0, -2), gate.weight).topk(config.num_experts_per_tok).indices
            )
        )
        for layer in (layers[index] for index in sparse)
    ]
    with torch.no_grad():
        case.model(torch.tensor([tokens[:-1]]))
    for hook in hooks:
        hook.remove()
    wanted = torch.stack(chosen, dim=1).numpy()
    assert (np.sort(found, -1) == np.sort(wanted, -1)).all()


def test_a_model_without_experts_has_none_to_record(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match="record_experts is true, and the model has no experts"):
        open_engine(make_case("qwen3_tied", tmp_path / "model"), records_experts=True)


def test_a_prompt_is_computed_anew_under_the_experts_of_other_weights(moe: Case, tmp_path: Path) -> None:
    other = make_case("qwen3_moe", tmp_path / "other", seed=1)
    engine, prompt = open_engine(moe), random_tokens(30, seed=2)
    running = request(0, prompt, 20)
    engine.submit(running)
    run_steps(engine, 8)
    engine.load(weights_of(other.model), version=1)
    ended = run_all(engine, [request(1, prompt, 20)])
    assert ended[0].part.spans == (VersionSpan(0, 8), VersionSpan(1, 12))
    first = Part(tokens=ended[0].part.tokens[:32], logprobs=ended[0].part.logprobs[:32], spans=(VersionSpan(0, 8),))
    assert largest_error(moe, prompt, first) < TOLERANCE
    assert largest_error(other, prompt, ended[1].part) < TOLERANCE
    tokens = random_tokens(30, seed=4)
    assert torch.equal(engine.score(tokens), open_engine(other).score(tokens))


@pytest.mark.parametrize("changes", [{"num_experts_per_tok": 1}, {"num_experts_per_tok": 8}, {"norm_topk_prob": False}])
def test_any_number_of_experts_per_token_is_that_of_transformers(moe: Case, changes: dict[str, object]) -> None:
    _edit_config(moe.folder, **changes)
    model = cast("Any", AutoModelForCausalLM).from_pretrained(moe.folder, dtype=torch.float32)
    edited, prompt = Case(moe.folder, model), random_tokens(9, seed=1)
    tokens = random_tokens(200, seed=6)
    assert (open_engine(edited).score(tokens) - reference_logprobs(model, tokens)).abs().max() < TOLERANCE
    assert largest_error(edited, prompt, run_all(open_engine(edited), [request(0, prompt, 30)])[0].part) < TOLERANCE


def test_experts_in_shards_are_read_like_one_file(moe: Case, tmp_path: Path) -> None:
    sharded = make_case("qwen3_moe", tmp_path / "sharded", max_shard_size="20KB")
    assert len(list(sharded.folder.glob("*.safetensors"))) > 1
    tokens = random_tokens(30, seed=4)
    assert torch.equal(open_engine(sharded).score(tokens), open_engine(moe).score(tokens))


def test_weights_of_other_experts_change_nothing(moe: Case) -> None:
    engine, tokens = open_engine(moe), random_tokens(20, seed=5)
    before = engine.score(tokens)
    weights = weights_of(moe.model)
    expert, router = "model.layers.2.mlp.experts.7.up_proj.weight", "model.layers.0.mlp.gate.weight"
    fused = {name: tensor.detach() for name, tensor in moe.model.state_dict().items()}
    for wrong, message in (
        ({name: tensor for name, tensor in weights.items() if name != expert}, rf"lack {expert}"),
        (weights | {"model.layers.0.mlp.experts.8.up_proj.weight": weights[expert]}, r"unknown .*experts\.8\.up_proj"),
        (weights | {"model.layers.1.mlp.gate.weight": weights[router]}, r"unknown model\.layers\.1\.mlp\.gate"),
        (weights | {router: torch.zeros(7, 48)}, rf"{router}: expected shape \[8, 48\] .* found \[7, 48\]"),
        (weights | {expert: torch.zeros(25, 48)}, rf"{expert}: expected shape \[24, 48\] .* found \[25, 48\]"),
        (fused, r"lack .*experts\.0\.down_proj.* and have unknown model\.layers\.0\.mlp\.experts\.down_proj"),
    ):
        with pytest.raises(UserFault, match=message):
            engine.load(wrong, version=1)
    assert engine.version == 0
    assert torch.equal(engine.score(tokens), before)


def _edit_config(folder: Path, **changes: object) -> None:
    """None removes a field."""
    path = folder / "config.json"
    edited = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in edited.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be 1 to num_experts, 8, found 9"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be 1 to num_experts, 8, found 0"),
        ({"num_experts_per_tok": None}, "needs num_experts, num_experts_per_tok, .* found 8, None, 24 and True"),
        ({"norm_topk_prob": None}, "norm_topk_prob, found 8, 2, 24 and None"),
        ({"num_local_experts": None}, "needs num_experts"),
        ({"num_experts": 4}, "num_experts is 4 and num_local_experts 8"),
        ({"moe_intermediate_size": 20}, "multiples of 8, found 48 and 20"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1, found 0"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers"),
        ({"use_sliding_window": True}, "sliding-window"),
    ],
)
def test_a_mixture_that_is_not_understood_is_refused(moe: Case, changes: dict[str, object], message: str) -> None:
    _edit_config(moe.folder, **changes)
    with pytest.raises(UserFault, match=message):
        read_model_config(moe.folder)


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, {0, 2}),
        ({"mlp_only_layers": None}, {0, 1, 2}),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, {1}),
        ({"num_local_experts": None, "num_experts": 8}, {0, 2}),
        ({"mlp_only_layers": [0, 1, 2]}, set[int]()),
    ],
)
def test_layers_with_experts_are_those_of_transformers(moe: Case, changes: dict[str, object], sparse: set[int]) -> None:
    _edit_config(moe.folder, **changes)
    config = read_model_config(moe.folder)
    assert {layer for layer in range(config.num_layers) if config.experts_of(layer) is not None} == sparse
    built = cast("Any", AutoModelForCausalLM).from_config(
        cast("Any", moe.model).config_class.from_pretrained(moe.folder)
    )
    found = {index for index, layer in enumerate(built.model.layers) if hasattr(layer.mlp, "experts")}
    assert found == sparse
