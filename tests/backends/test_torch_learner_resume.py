"""Checkpoints of the torch learner: what goes on from one, what a damaged one says, what is written meanwhile."""

# Transformers and safetensors are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
import pytest
import torch
from learner_cases import RunningLearner, demonstrations, learner_plan, make_groups, open_learner, train_command
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.backends.learners.checkpoints.folder import CheckpointFolder
from penstock.backends.learners.checkpoints.record import RECORD_FILE, STATE_FOLDER, read_record, write_record
from penstock.backends.learners.checkpoints.state import load_state
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import LearnerOptions, ObjectiveOptions, WarmStartOptions
from penstock.backends.learners.torch.backend import open_torch_learner
from penstock.backends.learners.torch.model import CheckpointError
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.transports import open_exporter, open_fetcher
from penstock.messages.commands import (
    DeleteCheckpoints,
    OpenLearner,
    PublishWeights,
    ReleaseWeights,
    SaveCheckpoint,
    Train,
)
from penstock.messages.errors import UserFault
from penstock.messages.local import BatchTrained, CheckpointWritten, LearnerOpened, WeightsPublished

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.messages.local import LocalEvent

pytestmark = pytest.mark.long_run

TIMEOUT_S: Final = 120
MODEL_FILE: Final = "model.safetensors"
TENSORS_FILE: Final = f"{STATE_FOLDER}/shard-00001-model-00001-of-00001.safetensors"


class Case(NamedTuple):
    """How a learner is set up."""

    options: LearnerOptions
    dtype: str = "float32"

    def open(self, model_folder: Path, checkpoints: Path, *, epoch: int = 1) -> RunningLearner:
        given = demonstrations() if self.options.warm_start is not None else None
        return open_learner(
            model_folder, checkpoints, self.options, dtype=self.dtype, epoch=epoch, seed=3, demonstrations=given
        )


WARM_START = WarmStartOptions(path="x", num_steps=4, batch_size=2)
KL = ObjectiveOptions(kl_coef=0.1)
SHARED = objective("ppo", critic="shared", gae_lambda=0.9, kl_coef=0.1)
CASES: Final = {
    "plain": Case(LearnerOptions(learning_rate=1e-2)),
    "kl": Case(LearnerOptions(learning_rate=1e-2, objective=KL)),
    "bfloat16": Case(LearnerOptions(learning_rate=1e-2, weight_decay=0.1), "bfloat16"),
    "warm_start": Case(LearnerOptions(learning_rate=1e-2, warm_start=WARM_START)),
    "schedule": Case(LearnerOptions(learning_rate=1e-2, lr_schedule="cosine", warmup_steps=2)),
    "updates": Case(
        LearnerOptions(
            learning_rate=1e-2, num_updates=2, num_passes=2, objective=objective("grpo", old_logprobs="recompute")
        )
    ),
    "critic": Case(
        LearnerOptions(learning_rate=1e-2, num_updates=3, num_passes=2, objective=objective("ppo", critic_only_steps=2))
    ),
    "shared_critic": Case(LearnerOptions(learning_rate=1e-2, num_updates=2, objective=SHARED), "bfloat16"),
    "shared_critic_in_float16": Case(LearnerOptions(learning_rate=1e-2, num_updates=2, objective=SHARED), "float16"),
    "own_critic_in_bfloat16": Case(LearnerOptions(learning_rate=1e-2, objective=objective("ppo")), "bfloat16"),
    "everything": Case(
        LearnerOptions(learning_rate=1e-2, lr_schedule="linear", warmup_steps=4, warm_start=WARM_START, objective=KL),
        "bfloat16",
    ),
}


@pytest.fixture(scope="module")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of version 1 and a reference; tests copy it."""
    folder = tmp_path_factory.mktemp("whole") / "checkpoints"
    learner = CASES["everything"].open(model_folder, folder)
    learner.ask(OpenLearner(), LearnerOpened)
    train(learner, 1, 1)
    save(learner, 1)
    learner.close()
    return folder


def batch(version: int) -> Train:
    """Batches that differ from version to version."""
    step = (version * 0.37) % 1.0
    return train_command(version, groups=make_groups(((step, 0.0, 1.0), (0.5, step / 2, 0.0))))


def train(learner: RunningLearner, first: int, last: int) -> list[dict[str, float]]:
    """Figures of each step, without those of the clock."""
    figures: list[dict[str, float]] = []
    for version in range(first, last + 1):
        trained = learner.ask(batch(version), BatchTrained)
        figures.append({m.name: m.value for m in trained.metrics if not m.name.startswith("perf/")})
        torch.rand(3)  # somebody draws, so the random state is one that only a checkpoint can bring back
    return figures


def save(learner: RunningLearner, version: int) -> Path:
    return Path(learner.ask(SaveCheckpoint(version=version), CheckpointWritten).path)


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Model, optimizer and random state."""
    return {**load_file(checkpoint / MODEL_FILE), **load_state(checkpoint / STATE_FOLDER)}


def assert_same_bits(one: Path, other: Path) -> None:
    expected, got = tensors_of(one), tensors_of(other)
    assert got.keys() == expected.keys()
    assert any(key.startswith("exp_avg_sq/") for key in got)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("name", CASES)
def test_a_learner_that_goes_on_from_a_checkpoint_is_the_uninterrupted_one_bit_for_bit(
    name: str, model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    case = CASES[name]
    straight = case.open(model_folder, tmp_path / "straight")
    straight.ask(OpenLearner(), LearnerOpened)
    expected = train(straight, 1, 6)
    expected_path = save(straight, 6)

    first = case.open(model_folder, tmp_path / "checkpoints")
    first.ask(OpenLearner(), LearnerOpened)
    train(first, 1, 3)
    path = save(first, 3)
    torch.manual_seed(99)
    second = case.open(model_folder, tmp_path / "checkpoints", epoch=2)
    opened += (straight, first, second)
    assert second.ask(OpenLearner(version=3, path=str(path)), LearnerOpened).version == 3
    assert train(second, 4, 6) == expected[3:]
    got = save(second, 6)
    assert got.name == "version-0000006-e2"
    assert_same_bits(expected_path, got)
    records = [read_record(folder, version=6) for folder in (expected_path, got)]
    assert records[0].trained_tokens == records[1].trained_tokens == second.gauge("learner/trained_tokens")
    assert records[0].canary == records[1].canary
    folders = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    reference = ["reference"] if case.options.objective.kl_coef else []
    assert folders == [*reference, "version-0000003", "version-0000006-e2"]


GO_ON = """
    import sys
    from pathlib import Path
    from penstock.messages.commands import OpenLearner
    from penstock.messages.local import LearnerOpened
    from test_torch_learner_resume import CASES, save, train
    name, model_folder, checkpoints, path = sys.argv[1:]
    learner = CASES[name].open(Path(model_folder), Path(checkpoints), epoch=1002)
    learner.ask(OpenLearner(version=3, path=path), LearnerOpened)
    train(learner, 4, 6)
    print(save(learner, 6))
    learner.close()
"""


def run_python(program: str, *arguments: str | Path) -> str:
    """What it prints."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# Every case goes on in one process, in CI too. That another process differs in nothing is asked there of the one with
# the most state, and of a critic's at night.
@pytest.mark.parametrize("name", ["everything", pytest.param("critic", marks=pytest.mark.slow)])
def test_another_process_goes_on_bit_for_bit(
    name: str, model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    learner = CASES[name].open(model_folder, tmp_path / "checkpoints")
    opened.append(learner)
    learner.ask(OpenLearner(), LearnerOpened)
    train(learner, 1, 3)
    path = save(learner, 3)
    train(learner, 4, 6)
    expected = save(learner, 6)
    got = run_python(GO_ON, name, model_folder, tmp_path / "checkpoints", path).strip()
    assert got.endswith("version-0000006-e1002")
    assert_same_bits(expected, Path(got))


def test_a_checkpoint_at_version_zero_spares_the_warm_start(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    first = CASES["everything"].open(model_folder, tmp_path)
    first.ask(OpenLearner(), LearnerOpened)
    path = save(first, 0)
    expected = train(first, 1, 2)
    second = CASES["everything"].open(model_folder, tmp_path, epoch=2)
    opened += (first, second)
    second.ask(OpenLearner(version=0, path=str(path)), LearnerOpened)
    assert "learner/warm_start_fraction" not in {metric.name for metric in second.backend.gauges()}
    assert train(second, 1, 2) == expected


def test_the_weights_lie_in_memory_of_their_own_and_not_in_the_file(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    """A file that is removed or cut short under a mapping would end the process with SIGBUS."""
    copy = tmp_path / "model"
    shutil.copytree(model_folder, copy)
    learner = CASES["plain"].open(copy, tmp_path / "checkpoints")
    opened.append(learner)
    learner.ask(OpenLearner(), LearnerOpened)
    path = save(learner, 0)
    second = CASES["plain"].open(model_folder, tmp_path / "checkpoints", epoch=2)
    opened.append(second)
    second.ask(OpenLearner(version=0, path=str(path)), LearnerOpened)
    for file in (copy / MODEL_FILE, path / MODEL_FILE, path / TENSORS_FILE):
        os.truncate(file, 0)
    assert train(learner, 1, 2) == train(second, 1, 2)


@pytest.mark.parametrize("name", ["kl", "bfloat16"])
def test_what_was_saved_loads_in_transformers(
    name: str, model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    learner = CASES[name].open(model_folder, tmp_path, epoch=7)
    opened.append(learner)
    learner.ask(OpenLearner(), LearnerOpened)
    train(learner, 1, 1)
    path = save(learner, 1)
    learner.ask(PublishWeights(version=1, publish=0), WeightsPublished)
    assert path.name == "version-0000001-e7"
    model = cast("Any", AutoModelForCausalLM.from_pretrained(path, dtype="auto"))
    loaded = dict(model.named_parameters())
    assert all(torch.equal(tensor, loaded[key]) for key, tensor in learner.weights.published[0].items())
    assert (tmp_path / "reference-e7").is_dir() == (name == "kl")


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_not_there_is_named(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    learner = CASES["plain"].open(model_folder, tmp_path)
    opened.append(learner)
    error = learner.error(OpenLearner(version=4, path=str(tmp_path / "version-0000004")))
    assert isinstance(error, CheckpointError)
    assert "version-0000004: the checkpoint of version 4 is not there" in str(error)


def test_a_copied_run_goes_on_from_its_own_checkpoint(
    whole: Path, model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    learner = CASES["everything"].open(model_folder, copy, epoch=2)
    opened.append(learner)
    learner.ask(OpenLearner(version=1, path=str(tmp_path / "original" / "version-0000001")), LearnerOpened)
    saved = learner.ask(SaveCheckpoint(version=1), CheckpointWritten)
    assert Path(saved.path).parent == copy


def test_a_model_without_trainer_state_is_no_checkpoint(model_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"trainer_state/state\.json is missing: expected a checkpoint"):
        read_record(model_folder, version=0)


def test_a_checkpoint_of_another_version_is_refused(whole: Path) -> None:
    with pytest.raises(CheckpointError, match="expected version 7, found 1"):
        read_record(whole / "version-0000001", version=7)


def test_a_checkpoint_of_a_newer_format_is_refused_before_it_is_read(whole: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(whole / "version-0000001", tmp_path / "version-0000001"))
    (path / RECORD_FILE).write_text(json.dumps({"format_version": 2, "shards": "something new"}))
    with pytest.raises(CheckpointError, match="written in format 2, and this penstock reads format 1"):
        read_record(path, version=1)


FILES = ("model.safetensors", TENSORS_FILE, RECORD_FILE, "config.json", "../reference/model.safetensors")


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_missing_cut_short_or_changed_is_named(file: str, whole: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(whole, tmp_path / "checkpoints")) / "version-0000001"
    data = (path / file).read_bytes()
    name = Path(file).name.replace(".", r"\.")
    draw = random.Random(file)
    for _ in range(20):
        place = draw.randrange(len(data))
        (path / file).write_bytes(data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match=rf"{name}.*(damaged|written in format)"):
            read_record(path, version=1)
    os.truncate(path / file, len(data) // 2)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        read_record(path, version=1)
    (path / file).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        read_record(path, version=1)
    (path / file).write_bytes(data)
    assert read_record(path, version=1).version == 1


def test_options_that_the_checkpoint_does_not_fit_are_named(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    learner = CASES["plain"].open(model_folder, tmp_path)
    learner.ask(OpenLearner(), LearnerOpened)
    path = save(learner, 0)
    other_dtype = CASES["bfloat16"].open(model_folder, tmp_path, epoch=2)
    with_kl = CASES["kl"].open(model_folder, tmp_path, epoch=2)
    opened += (learner, other_dtype, with_kl)
    assert "expected a model of bfloat16" in str(other_dtype.error(OpenLearner(version=0, path=str(path))))
    error = with_kl.error(OpenLearner(version=0, path=str(path)))
    assert isinstance(error, CheckpointError)
    assert "kl_coef is 0.1, and the checkpoint was written without a reference" in str(error)


def test_a_checkpoint_of_another_learner_is_named_as_such(
    whole: Path, model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    path = Path(shutil.copytree(whole, tmp_path / "checkpoints")) / "version-0000001"
    record = read_record(path, version=1)
    write_record(path, msgspec.structs.replace(record, backend="megatron"))
    opened.append(CASES["everything"].open(model_folder, tmp_path / "checkpoints", epoch=2))
    refused = str(opened[0].error(OpenLearner(version=1, path=str(path))))
    assert "learner.backend is torch, and the megatron learner wrote it" in refused


def test_a_critic_goes_on_from_a_checkpoint_that_has_such_a_critic(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    plain, own = (CASES[name].open(model_folder, tmp_path / name) for name in ("plain", "critic"))
    paths = [save(learner, 0) for learner in (plain, own) if learner.ask(OpenLearner(), LearnerOpened)]
    without = CASES["critic"].open(model_folder, tmp_path / "plain", epoch=2)
    shared = Case(LearnerOptions(objective=objective("ppo", critic="shared")))
    other = shared.open(model_folder, tmp_path / "critic", epoch=2)
    ignoring = CASES["plain"].open(model_folder, tmp_path / "critic", epoch=3)
    opened += (plain, own, without, other, ignoring)
    for learner, path, story in ((without, paths[0], "has none"), (other, paths[1], "has one of")):
        error = learner.error(OpenLearner(version=0, path=str(path)))
        assert isinstance(error, CheckpointError)
        assert story in str(error)
    # An objective without a critic has no use for one.
    assert ignoring.ask(OpenLearner(version=0, path=str(paths[1])), LearnerOpened).version == 0


def test_optimizer_state_of_another_model_is_refused(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    learner = CASES["bfloat16"].open(model_folder, tmp_path)
    opened.append(learner)
    learner.ask(OpenLearner(), LearnerOpened)
    train(learner, 1, 1)
    state = load_state(save(learner, 1) / STATE_FOLDER)
    optimizer = cast("Any", learner.backend)._worker._opened.trainer
    no_step = {key: tensor for key, tensor in state.items() if key != "step/model.norm.weight"}
    no_master = {key: tensor for key, tensor in state.items() if key != "master/model.norm.weight"}
    for wrong, story in (
        (state | {"exp_avg/lm.head": torch.zeros(2)}, "exp_avg/lm.head with shape [2], and the model has no"),
        (state | {"exp_avg/model.norm.weight": torch.zeros(2)}, "shape [2], and the model has [64]"),
        (no_step, "model.norm.weight is not whole"),
        (no_master, "model.norm.weight is not whole"),
    ):
        with pytest.raises(CheckpointError) as raised:
            optimizer.restore(wrong)
        assert story in str(raised.value)


def test_a_version_without_a_path_cannot_be_opened(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    learner = CASES["plain"].open(model_folder, tmp_path)
    opened.append(learner)
    assert "names version 3 and no checkpoint" in str(learner.error(OpenLearner(version=3)))


# --- writing ------------------------------------------------------------------------------------------------------


class Gate:
    """Holds every write of a checkpoint back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        write = CheckpointFolder.write

        def held(folder: CheckpointFolder, snapshot: Any) -> Path:  # noqa: ANN401 - handed on
            self.reached.set()
            assert self.opened.wait(TIMEOUT_S)
            return write(folder, snapshot)

        monkeypatch.setattr(CheckpointFolder, "write", held)


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner], monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, learner = (CASES["bfloat16"].open(model_folder, tmp_path / name) for name in ("straight", "held"))
    opened += (straight, learner)
    straight.ask(OpenLearner(), LearnerOpened)
    train(straight, 1, 1)
    expected = save(straight, 1)
    gate = Gate(monkeypatch)
    learner.ask(OpenLearner(), LearnerOpened)
    train(learner, 1, 1)
    learner.backend.execute(SaveCheckpoint(version=1))
    train(learner, 2, 3)
    assert not list(tmp_path.glob("held/version*"))
    gate.opened.set()
    written = learner.next(CheckpointWritten)
    assert written.version == 1
    assert_same_bits(expected, Path(written.path))


def test_one_checkpoint_is_written_at_a_time(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = CASES["plain"].open(model_folder, tmp_path)
    opened.append(learner)
    gate = Gate(monkeypatch)
    learner.ask(OpenLearner(), LearnerOpened)
    learner.backend.execute(SaveCheckpoint(version=0))
    train(learner, 1, 1)
    learner.backend.execute(SaveCheckpoint(version=1))
    learner.backend.execute(batch(2))
    gate.opened.set()
    answers: list[LocalEvent] = [learner.next(CheckpointWritten)]
    answers += (learner.next((CheckpointWritten, BatchTrained)) for _ in range(2))  # type: ignore[arg-type]
    assert sorted((type(answer).__name__, answer.version) for answer in answers) == [  # type: ignore[attr-defined]
        ("BatchTrained", 2),
        ("CheckpointWritten", 0),
        ("CheckpointWritten", 1),
    ]
    for version in (0, 1):
        read_record(tmp_path / f"version-000000{version}", version=version)


def test_what_was_opened_is_not_written_again(model_folder: Path, tmp_path: Path, opened: list[RunningLearner]) -> None:
    first, second = (CASES["plain"].open(model_folder, tmp_path, epoch=epoch) for epoch in (1, 2))
    opened += (first, second)
    first.ask(OpenLearner(), LearnerOpened)
    path = save(first, 0)
    second.ask(OpenLearner(version=0, path=str(path)), LearnerOpened)
    assert save(second, 0) == path
    assert [entry.name for entry in tmp_path.iterdir()] == ["version-0000000"]


@contextmanager
def largest_file(size_bytes: int) -> Generator[None]:
    """The kernel refuses every write beyond, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size_bytes", [1_000, 40_000, 400_000])
def test_a_disk_that_refuses_is_named_with_the_bytes_and_the_older_checkpoint_stays(
    size_bytes: int, model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    learner = CASES["plain"].open(model_folder, tmp_path)
    opened.append(learner)
    learner.ask(OpenLearner(), LearnerOpened)
    train(learner, 1, 1)
    older = save(learner, 1)
    train(learner, 2, 2)
    with largest_file(size_bytes):
        error = learner.error(SaveCheckpoint(version=2))
    assert isinstance(error, UserFault)
    assert f"{tmp_path / 'version-0000002'}: the checkpoint (" in str(error)
    assert "bytes) cannot be written: " in str(error)
    assert "File too large" in str(error)
    assert [entry.name for entry in tmp_path.iterdir()] == [older.name]
    again = CASES["plain"].open(model_folder, tmp_path, epoch=2)
    opened.append(again)
    again.ask(OpenLearner(version=1, path=str(older)), LearnerOpened)
    train(again, 2, 2)
    assert save(again, 2).name == "version-0000002-e2"


KILL_AT = """
    import os, resource, signal, sys
    from pathlib import Path
    import torch
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.worker_group.workers import SOLO
    from penstock.backends.learners.checkpoints.folder import CheckpointFolder
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.torch.snapshot import take_snapshot
    from penstock.backends.learners.torch.trainer import PolicyTrainer
    from learner_cases import make_groups
    source, folder = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    model = PackedModel.load(source, dtype="float32", device=torch.device("cpu"))
    trainer = PolicyTrainer(
        model, LearnerOptions(), temperature=1.0, num_steps=9, reference=model, check_stop=lambda: None
    )

    def shot(version):
        return take_snapshot(
            model, trainer, model, version=version, dtype="float32", trained_tokens=0, canary=(1,)
        )

    trainer.train(make_groups(), version=1, min_token_version=0)
    whole = CheckpointFolder(folder, epoch=1, tokenizer_source=source)
    whole.write(shot(1))
    snapshot = shot(2)
    largest = max(path.stat().st_size for path in (folder / "version-0000001").rglob("*"))
    for place in range(12):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            limit = (1, 700, 1_500, 4_000, 9_000, 30_000, 100_000, largest // 3, largest // 2, largest - 1)
            hard = (*limit, largest, largest + 1)[place]
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            epoch = place + 2
            CheckpointFolder(folder, epoch=epoch, tokenizer_source=source).write(snapshot)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        print(place + 2, os.WTERMSIG(status) == signal.SIGXFSZ if os.WIFSIGNALED(status) else "wrote", flush=True)
"""


def test_a_learner_that_dies_at_any_byte_leaves_the_older_checkpoint_and_no_half_one(
    model_folder: Path, tmp_path: Path
) -> None:
    ends = dict(line.split() for line in run_python(KILL_AT, model_folder, tmp_path).splitlines())
    assert list(ends.values()) == ["True"] * 10 + ["wrote"] * 2
    assert read_record(tmp_path / "version-0000001", version=1).version == 1
    found = {entry.name for entry in tmp_path.iterdir() if entry.name.startswith("version")}
    assert found == {"version-0000001", "version-0000002-e12", "version-0000002-e13"}
    for epoch in (12, 13):
        assert read_record(tmp_path / f"version-0000002-e{epoch}", version=2).epoch == epoch
    assert not list(tmp_path.glob(".*"))


def test_an_incarnation_that_wakes_up_late_touches_nothing_of_its_successor(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    late, successor = (CASES["kl"].open(model_folder, tmp_path, epoch=epoch) for epoch in (1, 3))
    opened += (late, successor)
    late.ask(OpenLearner(), LearnerOpened)
    successor.ask(OpenLearner(), LearnerOpened)
    path = save(successor, 0)
    being_written = tmp_path / ".version-0000001-e3.partial"
    being_written.mkdir()
    left_over = tmp_path / ".version-0000001.partial"
    left_over.mkdir()
    assert save(late, 0).name == "version-0000000"
    assert path.name == "version-0000000-e3"
    assert read_record(path, version=0).epoch == 3
    assert being_written.is_dir()
    assert not left_over.exists()


def test_a_checkpoint_that_somebody_else_wrote_is_not_overwritten(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    (tmp_path / "version-0000000").mkdir()
    (tmp_path / "version-0000000" / "mine").write_text("mine")
    learner = CASES["plain"].open(model_folder, tmp_path)
    opened.append(learner)
    learner.ask(OpenLearner(), LearnerOpened)
    assert "no checkpoint is written twice" in str(learner.error(SaveCheckpoint(version=0)))
    assert (tmp_path / "version-0000000" / "mine").read_text() == "mine"


# --- removing -----------------------------------------------------------------------------------------------------


def test_older_checkpoints_go_and_nothing_else_does(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    folder, outside = tmp_path / "checkpoints", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    for name in ("version-0000001", "version-0000002-e3", "version-0000003", "version-0000012", "reference", "notes"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(name)
    (folder / "version-0000001" / "link").symlink_to(outside)
    (folder / "version-0000000").symlink_to(outside)
    (folder / ".version-0000001-e9.deleted").symlink_to(outside)
    learner = CASES["plain"].open(model_folder, folder)
    opened.append(learner)
    learner.backend.execute(DeleteCheckpoints(below_version=3))
    learner.ask(OpenLearner(), LearnerOpened)
    left = {entry.name for entry in folder.iterdir()}
    kept = {"version-0000003", "version-0000012", "reference", "notes"}
    assert left == kept | {"version-0000000", ".version-0000001-e9.deleted"}
    train(learner, 1, 1)
    save(learner, 1)
    assert (outside / "precious").read_text() == "precious"


def test_removing_where_nothing_was_written_is_no_error(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    learner = CASES["plain"].open(model_folder, tmp_path / "none")
    opened.append(learner)
    learner.backend.execute(DeleteCheckpoints(below_version=3))
    learner.ask(OpenLearner(), LearnerOpened)


# --- what engines need meanwhile ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["disk", "shared_memory"])
def test_a_learner_that_fails_leaves_its_newest_export_and_one_that_ends_does_not(
    transport: Any,  # noqa: ANN401 - one of two literals
    model_folder: Path,
    tmp_path: Path,
) -> None:
    def learner(epoch: int) -> RunningLearner:
        exporter = open_exporter(
            transport, run_id=f"resume-{os.getpid()}", learner_epoch=epoch, folder=tmp_path / "weights"
        )
        plan = learner_plan(model_folder, tmp_path / "checkpoints", LearnerOptions(), num_steps=5, epoch=epoch)
        backend = open_torch_learner(plan, exporter)
        return RunningLearner(backend, cast("Any", None))

    first = learner(1)
    first.ask(OpenLearner(), LearnerOpened)
    manifest = first.ask(PublishWeights(version=0, publish=0), WeightsPublished).manifest
    first.error(batch(5))
    first.backend.close(TIMEOUT_S)
    assert open_fetcher().fetch(manifest).digest == manifest.digest
    second = learner(2)
    second.backend.execute(ReleaseWeights(below_version=9))
    second.ask(OpenLearner(), LearnerOpened)
    assert open_fetcher().fetch(manifest).digest == manifest.digest
    newer = second.ask(PublishWeights(version=0, publish=1_000_000), WeightsPublished).manifest
    assert newer.digest == manifest.digest
    with pytest.raises(WeightFetchError, match="gone"):
        open_fetcher().fetch(manifest)
    second.backend.close(TIMEOUT_S)
    with pytest.raises(WeightFetchError, match="gone"):
        open_fetcher().fetch(newer)


def test_a_record_holds_no_machine_or_user_names(whole: Path) -> None:
    text = (whole / "version-0000001" / RECORD_FILE).read_text()
    assert str(whole) not in text
    assert msgspec.json.decode(text)["format_version"] == 1
