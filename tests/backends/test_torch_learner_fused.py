"""Blocks that are compiled: nothing is made anew for batches of other sizes, and what the compiler refuses is said.

Graphs are run as they are traced here, which takes no compiler; that compiled kernels compute the same is looked at by
night, in ``test_torch_learner_ranks.py``.
"""

# torch and transformers are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from penstock.backends.learners.batch.packing import pack
from penstock.backends.learners.batch.sequences import demonstration_sequence
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch import attention
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.sharded_load import load_divided
from penstock.backends.learners.training.canary import choose_canary
from penstock.backends.learners.worker_group.workers import SOLO
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

AutoModel: Any = AutoModelForCausalLM  # transformers' factories have no types
VOCAB = 40


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of nodes of the graphs that were made."""
    graphs: list[int] = []

    def as_it_is(graph: Any, _inputs: Any, **_options: Any) -> Any:  # noqa: ANN401 - of dynamo
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    compiles: Any = torch.compile
    compiles_block: Any = nn.Module.compile

    def compile_function(function: Any, **keys: Any) -> Any:  # noqa: ANN401 - of torch
        return compiles(function, **{**keys, "backend": as_it_is})

    def compile_block(self: nn.Module, **keys: Any) -> None:  # noqa: ANN401 - of torch
        compiles_block(self, **{**keys, "backend": as_it_is})

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", compile_function)
    monkeypatch.setattr(nn.Module, "compile", compile_block)
    yield graphs
    torch.compiler.reset()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def work(model: PackedModel, seed: int) -> None:
    """Forward and backward over sequences of which some share their context, or none."""
    draw = random.Random(seed)
    context = [draw.randrange(2, VOCAB) for _ in range(draw.randint(2, 9))]
    sequences = [
        demonstration_sequence(
            context, [draw.randrange(2, VOCAB) for _ in range(draw.randint(2, 30))], sample=sample
        )._replace(prompt=sample if seed % 2 else sample // 2)
        for sample in range(draw.randint(1, 6))
    ]
    scores = model.scores(pack(sequences), temperature=1.0, entropy_gradient=False)
    torch.autograd.backward(scores.logprobs.sum())


@pytest.mark.parametrize("is_laid_end_to_end", [False, True])
def test_other_sizes_and_the_canary_make_no_graph(
    is_laid_end_to_end: bool, folder: Path, traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_laid_end_to_end:  # as on a GPU, whose kernel is not here: who sees whom does not matter to a graph

        def attend(query: Any, key: Any, value: Any, *_layout: Any) -> Any:  # noqa: ANN401 - tensors
            keys, values = (states.repeat_interleave(2, 1) for states in (key, value))
            return nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True).transpose(1, 2)

        monkeypatch.setattr(attention, "has_uneven_kernel", lambda *_where: True)
        monkeypatch.setattr(attention, "_uneven_attention", attend)
        monkeypatch.setattr(PackedModel, "check_isolation", lambda _model: None)
    model = load_divided(folder, SOLO, LearnerOptions(compile=True), dtype="float32")
    num_graphs = len(traced)
    assert num_graphs >= 4, "before and after attention, log-probs, entropy"
    choose_canary(model)
    for seed in range(12):
        work(model, seed)
    assert len(traced) == num_graphs


def test_what_the_compiler_refuses_is_told_with_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_graph: object, _inputs: object, **_options: object) -> None:
        raise RuntimeError("no C++ compiler")

    compiles_block = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(compiles_block, backend=refuse))
    torch.compiler.reset()
    with pytest.raises(UserFault, match=r"learner\.compile: .*no C\+\+ compiler.*set learner\.compile: false"):
        load_divided(folder, SOLO, LearnerOptions(compile=True), dtype="float32")
    torch.compiler.reset()
