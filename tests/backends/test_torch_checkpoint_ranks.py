"""Checkpoints over ranks: what any number of them wrote, any other reads, bit for bit; what goes wrong on one rank."""

# Transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, cast

import pytest
from checkpoint_cases import (
    DIVISIONS,
    VERSION,
    carry_out,
    die_while_writing,
    digests_of,
    load_and_train,
    open_rank,
    save_where_one_rank_may_not_write,
    train_and_save,
)
from learner_cases import make_groups, train_command
from rank_cases import CPU, Ranks, open_ranks
from transformers import AutoModelForCausalLM

from penstock.backends.learners.checkpoints.folder import CheckpointFolder
from penstock.backends.learners.checkpoints.record import STATE_FOLDER, read_record
from penstock.backends.learners.checkpoints.state import load_state
from penstock.backends.learners.torch.model import CheckpointError
from penstock.backends.learners.worker_group.workers import SOLO, alone_on
from penstock.messages.commands import LearnerCommand, OpenLearner, SaveCheckpoint

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.long_run

TOLERANCE = 1e-6
# What three ranks wrote is read at night, with all other pairs; in CI they read what fewer wrote.
CASES = [
    ("1", "float32", ("2 fsdp", "2 ddp")),
    ("2 fsdp", "float32", ("1", "3 fsdp")),
    ("2 ddp", "float32", ("3 fsdp",)),
    ("2 fsdp", "bfloat16", ("1", "2 copies over 2")),
    ("2 copies over 2", "float32", ("1", "2 copies over 2")),
    *(
        pytest.param(writer, dtype, tuple(DIVISIONS), marks=pytest.mark.slow)
        for writer in DIVISIONS
        for dtype in ("float32", "bfloat16")
    ),
]


@pytest.mark.parametrize(("writer", "dtype", "readers"), CASES)
def test_what_any_number_of_ranks_wrote_any_other_reads_bit_for_bit(
    writer: str, dtype: str, readers: tuple[str, ...], ranks: Ranks, model_folder: Path, tmp_path: Path
) -> None:
    division = DIVISIONS[writer]
    told = ranks.run(division.num_ranks, train_and_save, model_folder, tmp_path, division, dtype)
    written, loss = told[0]
    assert all(other == (written, loss) for other in told)
    path = tmp_path / f"version-000000{VERSION}"
    assert any(name.startswith("critic/exp_avg_sq/trunk") for name in written)
    assert any(name.startswith("master/") for name in written) == (dtype == "bfloat16")
    record = read_record(path, version=VERSION)
    state = load_state(path / STATE_FOLDER, is_wanted=lambda name: not name.startswith("random/"))
    assert digests_of(state) == {name: digest for name, digest in written.items() if not name.startswith("model/")}
    assert {entry.name for entry in tmp_path.iterdir()} == {"reference", path.name}

    model = cast("Any", AutoModelForCausalLM.from_pretrained(path, dtype="auto"))
    loaded = {f"model/{name}": parameter for name, parameter in model.named_parameters()}
    assert digests_of(loaded) == {name: digest for name, digest in written.items() if name.startswith("model/")}
    one = sum(entry.size_bytes for name, entry in record.files.items() if name.startswith(STATE_FOLDER))
    tensor_bytes = sum(tensor.nbytes for tensor in state.values())
    assert tensor_bytes < one < 1.3 * tensor_bytes, "copies on several ranks are written once"

    for reader in (DIVISIONS[name] for name in readers):
        answers = ranks.run(reader.num_ranks, load_and_train, path, reader, dtype)
        for digests, continued, _ in answers:
            assert digests == written, reader
            # Sums over ranks are rounded otherwise, and a model in bfloat16 is rounded after each product.
            assert continued == pytest.approx(loss, abs=TOLERANCE if dtype == "float32" else 2e-3), reader
        if reader.num_ranks > 1 and reader.parallel == "fsdp":
            key = "exp_avg/model.layers.0.mlp.down_proj.weight"
            sizes = [sizes[key] for _, _, sizes in answers]
            copies = reader.num_ranks // (reader.shard_size or reader.num_ranks)
            assert sum(sizes) == copies * state[key].numel(), "each reads its part only"


def test_a_learner_that_was_saved_on_2_ranks_goes_on_alike_on_any_number(
    ranks: Ranks, model_folder: Path, tmp_path: Path
) -> None:
    """With the worker's own commands, and training while the checkpoint is written."""
    batches = [
        train_command(version, groups=make_groups(((0.3 * version, 0.0), (0.5, 0.1)))) for version in (1, 2, 3, 4)
    ]
    begin: list[LearnerCommand] = [OpenLearner(), *batches[:2], SaveCheckpoint(version=2), *batches[2:]]
    (expected, paths), *_ = ranks.run(2, carry_out, model_folder, tmp_path, DIVISIONS["2 fsdp"], 1, begin)
    assert paths == [str(tmp_path / "version-0000002")]
    go_on: list[LearnerCommand] = [
        OpenLearner(version=2, path=paths[0]),
        batches[2],
        SaveCheckpoint(version=3),
        batches[3],
    ]
    for epoch, division in enumerate((DIVISIONS["1"], DIVISIONS["3 fsdp"], DIVISIONS["2 ddp"]), start=2):
        for losses, saved in ranks.run(division.num_ranks, carry_out, model_folder, tmp_path, division, epoch, go_on):
            assert losses[0] == pytest.approx(expected[2], abs=TOLERANCE)
            # A step has been taken since, with gradients that are rounded otherwise.
            assert losses[1] == pytest.approx(expected[3], abs=10 * TOLERANCE)
            assert saved == [str(tmp_path / f"version-0000003-e{epoch}")]


@pytest.mark.parametrize("refusing", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_disk_that_refuses_on_one_rank_ends_the_write_on_all_with_one_story(
    refusing: int, ranks: Ranks, model_folder: Path, tmp_path: Path
) -> None:
    (story, name), *others = ranks.run(2, save_where_one_rank_may_not_write, model_folder, tmp_path, refusing=refusing)
    assert f"cannot be written: rank {refusing}: [Errno 27] File too large" in story
    for other, other_name in others:
        assert f"rank {refusing}: [Errno 27] File too large" in other
        assert other_name == name == "version-0000002"
    assert {entry.name for entry in tmp_path.iterdir()} == {"reference", "version-0000001", name}
    for version in (1, 2):
        read_record(tmp_path / f"version-000000{version}", version=version)


@pytest.mark.slow
def test_a_rank_that_dies_while_it_writes_leaves_the_older_checkpoint_whole(model_folder: Path, tmp_path: Path) -> None:
    with open_ranks(2) as mortal, pytest.raises((AssertionError, EOFError)):
        mortal.run(2, die_while_writing, model_folder, tmp_path)
    assert read_record(tmp_path / "version-0000001", version=1).version == 1
    assert not list(tmp_path.glob("version-0000002*"))
    successor = open_rank(alone_on(CPU), model_folder, DIVISIONS["1"], "float32")
    CheckpointFolder(tmp_path, epoch=2, tokenizer_source=model_folder).write(successor.snapshot(2))
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {"reference", "reference-e2", "version-0000001", "version-0000002-e2"}


@pytest.fixture(scope="module")
def of_two(ranks: Ranks, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks wrote; tests copy it."""
    folder = tmp_path_factory.mktemp("of_two")
    ranks.run(2, train_and_save, model_folder, folder, DIVISIONS["2 fsdp"], "float32")
    return folder / f"version-000000{VERSION}"


def test_what_is_missing_of_a_rank_is_refused_and_not_made_up(of_two: Path, tmp_path: Path) -> None:
    shutil.copytree(of_two.parent, tmp_path, dirs_exist_ok=True)
    path = tmp_path / of_two.name
    for rank in (1, 2):
        (file,) = (path / STATE_FOLDER).glob(f"shard-0000{rank}-*")
        data = file.read_bytes()
        file.unlink()
        with pytest.raises(CheckpointError, match=f"{file.name} is missing"):
            read_record(path, version=VERSION)
        if rank == 1:
            with pytest.raises(CheckpointError, match=r"elements of .*, found [\d,]+: a file of a rank"):
                load_state(path / STATE_FOLDER)
        file.write_bytes(data[:-100])
        with pytest.raises(CheckpointError, match=rf"{file.name} is damaged: expected [\d,]+ bytes"):
            read_record(path, version=VERSION)
        with pytest.raises(CheckpointError, match="the state of the trainer cannot be read"):
            load_state(path / STATE_FOLDER)
        file.write_bytes(data)
    read_record(path, version=VERSION)


def test_ranks_that_read_together_check_every_file_once(of_two: Path, model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(of_two.parent, tmp_path, dirs_exist_ok=True)
    path = tmp_path / of_two.name
    for file in [*read_record(path).files, "../reference/model.safetensors"]:
        data = (path / file).read_bytes()
        (path / file).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        refusals = 0
        for rank in range(3):
            try:
                read_record(path, rank=rank, num_ranks=3)
            except CheckpointError:
                refusals += 1
        assert refusals == 1, file
        (path / file).write_bytes(data)


def test_a_state_larger_than_a_file_is_divided_over_files(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = open_rank(SOLO, model_folder, DIVISIONS["1"], "float32")
    learner.train(1)
    monkeypatch.setattr("penstock.backends.learners.checkpoints.state.MAX_FILE_BYTES", 150_000)
    path = CheckpointFolder(tmp_path, epoch=1, tokenizer_source=model_folder).write(learner.snapshot(1))
    files = list((path / STATE_FOLDER).glob("*.safetensors"))
    assert len(files) > 3
    assert max(file.stat().st_size for file in files) < 200_000
    state = load_state(path / STATE_FOLDER)
    expected = {name: digest for name, digest in learner.digests().items() if not name.startswith("model/")}
    assert digests_of({name: t for name, t in state.items() if not name.startswith("random/")}) == expected
