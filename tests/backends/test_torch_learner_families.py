"""Families of models in the torch learner: packed, or padded where they mix tokens outside of attention, they have the
log-probs, loss and gradient of a plain loop over one sequence after the other; and weights are published under the
names of the checkpoint."""

# transformers' factories have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from family_cases import PACKED, PADDED, made
from safetensors.torch import load_file, save_file

from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.learners.batch.packing import pack
from penstock.backends.learners.batch.sequences import demonstration_sequence
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import LearnerOptions, LoraOptions
from penstock.backends.learners.torch import attention
from penstock.backends.learners.torch.attention import TokenInputs
from penstock.backends.learners.torch.critic import Critic
from penstock.backends.learners.torch.model import PackedModel
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.learners.batch.packing import PackedTokens
    from penstock.backends.learners.torch import layout

models: Any = transformers
CPU = torch.device("cpu")


def plain_logprobs(plain: Any, row: list[int], num_context: int) -> torch.Tensor:  # noqa: ANN401 - of transformers
    """Of the tokens after the context, of one sequence alone by transformers' plain attention."""
    logprobs = plain(torch.tensor([row]), use_cache=False).logits[0, :-1].log_softmax(-1)
    found: torch.Tensor = logprobs.gather(1, torch.tensor(row[1:])[:, None])[num_context - 1 :, 0]
    return found


@pytest.mark.parametrize("family", [*PACKED, *PADDED])
def test_loss_and_gradient_are_those_of_a_plain_loop(family: str, tmp_path: Path) -> None:
    folder = made((PACKED | PADDED)[family](), tmp_path)
    model = PackedModel.load(folder, dtype="float32", device=CPU)
    assert model.layout == ("packed" if family in PACKED else "padded")
    assert bool(model.notices) == (family in PADDED)
    drawn = np.random.default_rng(4)
    rows = [drawn.integers(2, 101, length).tolist() for length in (9, 30, 5, 14)]
    rows.append(rows[1][:12] + drawn.integers(2, 101, 6).tolist())
    sequences = [demonstration_sequence(row[:2], row[2:], sample=number) for number, row in enumerate(rows)]
    sequences[4] = sequences[4]._replace(prompt=sequences[1].prompt)  # they share a context, and a little more
    found = model.scores(pack(sequences), temperature=1.0, entropy_gradient=False).logprobs
    torch.autograd.backward(-found.mean())
    with quiet_transformers():
        plain = models.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    wanted = torch.cat([plain_logprobs(plain, row, 2) for row in rows])
    torch.autograd.backward(-wanted.mean())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.model.named_parameters():
        expected = gradients[name]
        assert expected is not None or parameter.grad is None or not parameter.grad.any(), name
        if expected is not None:
            assert parameter.grad is not None, name
            assert float((parameter.grad - expected).abs().max()) <= 1e-5, name


@pytest.mark.parametrize("family", [*PACKED, *PADDED])
def test_weights_are_published_under_the_names_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    folder = made((PACKED | PADDED)[family](), tmp_path)
    tensors = PackedModel.load(folder, dtype="float32", device=CPU).named_tensors()
    stored = load_file(folder / "model.safetensors")
    assert tensors.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensors[name], tensor), name


def test_a_trunk_of_the_critic_is_given_padded_rows_as_well(tmp_path: Path) -> None:
    folder = made(PADDED["lfm2"](), tmp_path)
    model = PackedModel.load(folder, dtype="float32", device=CPU)
    critic = Critic(model, LearnerOptions(objective=objective("ppo", critic="own")), num_steps=1)
    with torch.no_grad():
        critic.roots[0].weight.fill_(0.1)  # type: ignore[operator]
    short, long = ([(7 * place) % 101 for place in range(length)] for length in (9, 30))
    sequences = [demonstration_sequence(row[:2], row[2:], sample=number) for number, row in enumerate((short, long))]
    together = critic.values(pack(sequences), None)
    alone = torch.cat([critic.values(pack([sequence]), None) for sequence in sequences])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_models_that_see_the_future_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(PADDED["lfm2"](), tmp_path)
    attend = attention.token_inputs

    def backwards(packed: PackedTokens, kind: layout.Layout, **where: Any) -> TokenInputs:  # noqa: ANN401
        inputs, places = attend(packed, kind, **where)
        return TokenInputs({**inputs, "input_ids": inputs["input_ids"].flip(1)}, places)  # type: ignore[union-attr]

    monkeypatch.setattr("penstock.backends.learners.torch.model.token_inputs", backwards)
    with pytest.raises(UserFault, match=r"on packed tokens, nor on padded rows: .* nats when another"):
        PackedModel.load(folder, dtype="float32", device=CPU)


def test_bits_of_the_engine_need_packed_tokens(tmp_path: Path) -> None:
    model = PackedModel.load(made(PADDED["lfm2"](), tmp_path), dtype="float32", device=CPU)
    with pytest.raises(UserFault, match=r"learner\.true_on_policy: needs packed tokens"):
        model.compute_as_engine(64)


def test_adapters_of_state_space_layers(tmp_path: Path) -> None:
    """All matrices but the last of each such layer, which peft refuses; and merged, a model has their log-probs."""
    folder = made(PADDED["falcon_h1"](), tmp_path)
    model = PackedModel.load(folder, dtype="float32", device=CPU)
    model.adapt(LoraOptions(rank=4))
    adapters = model.adapters
    assert adapters is not None
    assert "model.layers.0.mamba.in_proj.weight" in (names := [name for name, *_ in adapters.matrices()])
    assert not [name for name in names if "mamba.out_proj" in name]
    with torch.no_grad():
        for tensor in adapters.state().values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    packed = pack([demonstration_sequence([5, 6, 7], [8, 9, 10, 11], sample=0)])
    with torch.no_grad():
        found = model.logprobs(packed, temperature=1.0)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.named_tensors().items()}, folder / "model.safetensors"
    )
    with torch.no_grad():
        merged = PackedModel.load(folder, dtype="float32", device=CPU).logprobs(packed, temperature=1.0)
    torch.testing.assert_close(found, merged, rtol=0, atol=1e-5)
    with pytest.raises(UserFault, match=r"peft does not adapt FalconH1ForCausalLM so: .*out_proj"):
        PackedModel.load(folder, dtype="float32", device=CPU).adapt(LoraOptions(target_modules=("out_proj",)))
