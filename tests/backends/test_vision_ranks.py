"""A model that sees on two ranks, with whole weights and with shares: what one rank would train, also where a rank sees
no image."""

# safetensors and torch are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from vision_cases import model_folder, picture, prompt_of

from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch.parallel import whole
from penstock.backends.learners.torch.sharded_load import load_divided
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.learners.worker_group.workers import SOLO
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.samples import Completed, Group, Part, Prompt, Reward, Sample, SampleKey, VersionSpan

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from numpy.typing import NDArray
    from rank_cases import Ranks

    from penstock.backends.learners.worker_group.workers import WorkerGroup

pytestmark = pytest.mark.long_run

NUM_RANKS = 2
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


def trained(workers: WorkerGroup, folder: Path, groups: tuple[Group, ...], **division: Any) -> Trained:
    options = LearnerOptions(learning_rate=1e-3, max_tokens_per_micro_batch=40, **division)
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


DIVISIONS = ({"parallel": "ddp"}, {"parallel": "fsdp"}, {"parallel": "fsdp", "shard_size": 1})


@pytest.mark.parametrize("division", DIVISIONS, ids=["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("num_seeing", [1, 2])
def test_two_ranks_train_what_one_trains(
    num_seeing: int, division: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "model")
    texts = [*["user: #\nassistant: ", "user: # and #\nassistant: "][:num_seeing], "user: hm\nassistant: "]
    groups = tuple(
        group_of(folder, number, text, (tmp_path, 10 * number) if "#" in text else None)
        for number, text in enumerate(texts)
    )
    alone = trained(SOLO, folder, groups)
    found = ranks.run(2, trained, folder, groups, **division)
    for each in found:
        assert each.figures[-1]["train/grad_norm"] > 0
        for one, other in zip(each.figures, alone.figures, strict=True):
            assert one == pytest.approx(other, abs=1e-6, rel=1e-4)
        for name, weight in alone.weights.items():
            assert np.allclose(each.weights[name], weight, atol=2e-6), name
    assert alone.num_looks > 0
    assert sum(each.num_looks for each in found) >= alone.num_looks / 2
