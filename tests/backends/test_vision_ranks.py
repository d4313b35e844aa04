"""A model that sees on several ranks, with whole weights and with shares: what one rank would train, also where a rank
sees no image."""

# safetensors and torch are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from vision_cases import model_folder, picture, prompt_of

from penstock.backends.learners.batch.sequences import read_groups
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch.parallel import replica, whole
from penstock.backends.learners.torch.reference import frozen
from penstock.backends.learners.torch.sharded_load import load_divided
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.learners.worker_group.workers import SOLO
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.samples import Completed, Group, Part, Prompt, Reward, Sample, SampleKey, VersionSpan

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from rank_cases import Ranks

    from penstock.backends.learners.worker_group.workers import WorkerGroup

pytestmark = pytest.mark.long_run

NUM_RANKS = 4
AGE = 3
"""Of the tokens, so that nobody asks whether the engine has seen the images: it was another model."""


class Trained(NamedTuple):
    figures: list[dict[str, float]]
    weights: dict[str, NDArray[np.float32]]
    num_looks: int
    """Micro-batches with images that this rank has run."""


def group_of(folder: Path, number: int, text: str, images: tuple[Path, int] | None) -> Group:
    media = () if images is None else tuple(picture(images[0], images[1] + n) for n in range(text.count("#")))
    ids, at = prompt_of(folder, text, media)
    samples = tuple(
        Sample(
            key=SampleKey(number, index),
            parts=(
                Part(
                    tokens=pack_tokens(tokens), logprobs=pack_floats([-2.0] * len(tokens)),
                    spans=(VersionSpan(0, len(tokens)),),
                ),
            ),
            outcome=Completed(reward=Reward(value=float(index))),
        )
        for index, tokens in enumerate(([12, 13, 14, 1], [20, 21, 1], [30, 1]))
    )  # fmt: skip
    return Group(
        group_id=number, prompt=Prompt(row=number, epoch=0, tokens=pack_tokens(ids), media=at), samples=samples
    )


def groups_of(folder: Path, num_seeing: int, pictures: Path) -> tuple[Group, ...]:
    texts = [*["user: #\nassistant: ", "user: # and #\nassistant: "][:num_seeing], "user: hm\nassistant: "]
    return tuple(
        group_of(folder, number, text, (pictures, 10 * number) if "#" in text else None)
        for number, text in enumerate(texts)
    )


def trained(workers: WorkerGroup, folder: Path, groups: tuple[Group, ...], options: LearnerOptions) -> Trained:
    model = load_divided(folder, workers, options, dtype="float32")
    assert model.eyes is not None
    look, num_looks = model.eyes._features, 0  # pyright: ignore[reportPrivateUsage]

    def features(values: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        nonlocal num_looks
        num_looks += 1
        return look(values, grids)

    model.eyes._features = features  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
    trainer = PolicyTrainer(
        model, options, temperature=1.0, num_steps=2, reference=None, check_stop=lambda: None, workers=workers
    )
    figures: list[dict[str, float]] = []
    for step in (1, 2):
        result = trainer.train(groups, version=AGE + step, min_token_version=0)
        figures.append({m.name: m.value for m in result.metrics if not m.name.startswith("perf/")})
    shares = dict(model.weights(whole))
    weights = {name: tensor.numpy().copy() for name, tensor in model.checkpoint_names.rename(shares).items()}
    return Trained(figures, weights, num_looks)


OPTIONS = LearnerOptions(learning_rate=1e-3, max_tokens_per_micro_batch=40)
DIVISIONS = {
    "ddp": (2, replace(OPTIONS, parallel="ddp")),
    "fsdp": (2, OPTIONS),
    "hsdp": (4, replace(OPTIONS, shard_size=2)),
}


def first_gradients(
    workers: WorkerGroup, folder: Path, groups: tuple[Group, ...], options: LearnerOptions
) -> dict[str, NDArray[np.float32]]:
    """By the names in memory, of a policy that has moved on from its reference."""
    model = load_divided(folder, workers, options, dtype="float32")
    reference = frozen(replica(model, workers, options))
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.mul_(1.05)
    trainer = PolicyTrainer(
        model, options, temperature=1.0, num_steps=2, reference=reference, check_stop=lambda: None, workers=workers
    )
    trainer.accumulate(read_groups(groups, min_token_version=0), version=AGE)
    found = {name: weight.grad for name, weight in model.model.named_parameters()}
    return {name: whole(gradient).numpy().copy() for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize(("division", "num_seeing"), [("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2), ("hsdp", 1)])
def test_ranks_train_what_one_trains(division: str, num_seeing: int, ranks: Ranks, tmp_path: Path) -> None:
    num_ranks, options = DIVISIONS[division]
    folder = model_folder(tmp_path / "model")
    groups = groups_of(folder, num_seeing, tmp_path)
    alone = trained(SOLO, folder, groups, OPTIONS)
    found = ranks.run(num_ranks, trained, folder, groups, options)
    for each in found:
        assert each.figures[-1]["train/grad_norm"] > 0
        for one, other in zip(each.figures, alone.figures, strict=True):
            assert one == pytest.approx(other, abs=1e-6, rel=1e-4)
        for name, weight in alone.weights.items():
            assert np.allclose(each.weights[name], weight, atol=2e-6), name
    assert alone.num_looks > 0
    assert sum(each.num_looks for each in found) >= alone.num_looks / 2
    if options.parallel == "fsdp":
        assert len({each.num_looks for each in found}) == 1, "a rank without images looks at a blank square"


def test_gradients_behind_a_frozen_tower_and_beside_a_reference_are_those_of_one_rank(
    ranks: Ranks, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "model")
    options = replace(OPTIONS, objective=objective(name="grpo", kl_coef=0.1), freeze=(r"visual\.",))
    groups = groups_of(folder, 1, tmp_path)
    alone = first_gradients(SOLO, folder, groups, options)
    assert alone
    assert not any("visual" in name for name in alone)
    for each in ranks.run(2, first_gradients, folder, groups, options):
        assert each.keys() == alone.keys()
        for name, gradient in alone.items():
            assert np.allclose(each[name], gradient, rtol=0.0, atol=1e-5 * np.abs(gradient).max()), name
