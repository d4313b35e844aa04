"""Warm starts and made models that are taken from the user's cache are those that would have been computed."""

# Transformers is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest
import torch
from learner_cases import demonstrations, open_learner, train_command

from penstock.backends.checkpoint.kept_model import is_kept, make_model_or_kept
from penstock.backends.checkpoint.make import make_model
from penstock.backends.learners.options import LearnerOptions, WarmStartOptions
from penstock.backends.result_cache import CACHE_VARIABLE
from penstock.messages.commands import OpenLearner, PublishWeights
from penstock.messages.local import BatchTrained, LearnerOpened, WeightsPublished

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = WarmStartOptions(path="x", num_steps=4, batch_size=2, warmup_steps=1)
OPTIONS = LearnerOptions(learning_rate=1e-3, warm_start=BLOCK)


class Came(NamedTuple):
    """What a learner came to."""

    notices: tuple[str, ...]
    loss: float
    figures: dict[str, float]
    """Of a batch after the warm start, without times."""
    weights: dict[str, torch.Tensor]
    """After that batch."""

    def is_as(self, other: Came) -> bool:
        same = all(torch.equal(weight, other.weights[name]) for name, weight in self.weights.items())
        return same and (self.loss, self.figures) == (other.loss, other.figures)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "xs"
    make_model("xs", folder, seed=0)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, empty and switched on."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def learn(
    model: Path, tmp_path: Path, options: LearnerOptions = OPTIONS, *, text: str = "abA=Aab", seed: int = 4
) -> Came:
    learner = open_learner(model, tmp_path / "checkpoints", options, demonstrations=demonstrations(text), seed=seed)
    try:
        notices = learner.ask(OpenLearner(), LearnerOpened).notices
        loss = learner.gauge("learner/warm_start_loss")
        assert learner.gauge("learner/warm_start_fraction") == 1.0
        metrics = learner.ask(train_command(1), BatchTrained).metrics
        learner.ask(PublishWeights(version=1, publish=0), WeightsPublished)
    finally:
        learner.close()
    figures = {metric.name: metric.value for metric in metrics if metric.name.startswith("train/")}
    return Came(notices, loss, figures, learner.weights.published[0])


def test_a_kept_warm_start_is_the_computed_one_bit_for_bit(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, taken = learn(model, tmp_path), learn(model, tmp_path)
    (file,) = (cache / "warm_starts").iterdir()
    assert made.notices == ()
    assert taken.notices == (
        f"the warm start is not computed: its weights are those of an earlier run that began alike ({file})",
    )
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    computed = learn(model, tmp_path)
    assert computed.notices == ()
    assert computed.is_as(made)
    assert computed.is_as(taken)


def test_a_copy_of_the_model_elsewhere_is_the_same_model(model: Path, cache: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert learn(model, tmp_path).is_as(learn(tmp_path / "copy", tmp_path))
    assert len(list((cache / "warm_starts").iterdir())) == 1


def test_a_damaged_warm_start_is_refused_and_computed_again(model: Path, cache: Path, tmp_path: Path) -> None:
    made = learn(model, tmp_path)
    (file,) = (cache / "warm_starts").iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    again = learn(model, tmp_path)
    assert again.notices == (f"{file} is damaged (its digest is another), so what it kept is computed again",)
    assert again.is_as(made)
    assert learn(model, tmp_path).notices[0].startswith("the warm start is not computed")


def test_whatever_it_depends_on_makes_another_entry(model: Path, cache: Path, tmp_path: Path) -> None:
    make_model("xs", tmp_path / "other", seed=1)
    first = learn(model, tmp_path)
    steps = msgspec.structs.replace(OPTIONS, warm_start=msgspec.structs.replace(BLOCK, num_steps=5))
    others = [
        learn(tmp_path / "other", tmp_path),
        learn(model, tmp_path, seed=5),
        learn(model, tmp_path, text="abA=Aaa"),
        learn(model, tmp_path, steps),
        learn(model, tmp_path, msgspec.structs.replace(OPTIONS, betas=(0.8, 0.9))),
        learn(model, tmp_path, msgspec.structs.replace(OPTIONS, num_threads=2)),
    ]
    assert [came.notices for came in (first, *others)] == [()] * 7
    assert len(list((cache / "warm_starts").iterdir())) == 7


def test_a_kept_model_is_the_made_one_byte_for_byte(model: Path, cache: Path, tmp_path: Path) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    assert not is_kept("xs", 0)
    for name in ("made", "taken"):
        assert make_model_or_kept("xs", tmp_path / name, 0) == ""
        assert files(tmp_path / name) == files(model)
    assert is_kept("xs", 0)
    assert not is_kept("xs", 1)
    (file,) = (cache / "made_models").iterdir()
    file.write_bytes(b"")
    assert make_model_or_kept("xs", tmp_path / "again", 0).startswith(f"{file} is damaged")
    assert files(tmp_path / "again") == files(model)
