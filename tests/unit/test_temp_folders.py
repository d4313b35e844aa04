"""Temporary folders of runs: swept when all who used them are gone, and never before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from data_cases import make_tokenizer

from penstock.backends.processes.temp_folders import (
    OWNER_LOCK,
    TEMP_PREFIX,
    join_folder,
    make_folder,
    remove_folder,
    sweep_folders,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

MAKER = """
import signal, sys
from pathlib import Path
from penstock.backends.processes.temp_folders import join_folder, make_folder
path = Path(sys.argv[2])
if sys.argv[1] == "make":
    path = make_folder(path)
else:
    join_folder(path)
(path / "session").mkdir(exist_ok=True)
(path / "session" / "object").write_text("large")
print(path, flush=True)
signal.pause()
"""

PARTS = {
    "Megatron's ranks": """
from penstock.backends.learners.worker_group.rank_set import RankSet
part = RankSet()
part.launch(range(0), Path)
""",
    "rows that are read from their file": """
from penstock.backends.data.options import DataOptions
from penstock.backends.data.streamed import StreamedRows
part = StreamedRows(DataOptions(path=sys.argv[1], label_key=None), Path(sys.argv[2]), max_context=64)
""",
    "links that chaos disturbs": """
from penstock.runtime.chaos.switchboard import Switchboard
part = Switchboard(seed=0, pid_of=lambda name: None)
""",
    "a tracker of a user's": """
import msgspec
from penstock.backends.processes.function_process import FunctionProcess
part = FunctionProcess("this", said=msgspec.msgpack.Decoder(list), is_silent=True, has_own_tmp=True)
""",
}
"""Whoever has a temporary folder for as long as it is there."""


class User:
    """A process that makes a folder, or joins one."""

    def __init__(self, script: str, *arguments: str, tmp: Path | None = None) -> None:
        environment = os.environ if tmp is None else {**os.environ, "TMPDIR": str(tmp)}
        command = [sys.executable, "-c", script, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdout is not None
        self.folder = Path(self.process.stdout.readline().decode().strip())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def user() -> Generator[Callable[[str, Path], User]]:
    made: list[User] = []

    def begin(how: str, path: Path) -> User:
        made.append(User(MAKER, how, str(path)))
        return made[-1]

    yield begin
    for each in made:
        each.kill()


def test_what_a_killed_run_left_is_removed_and_what_a_living_one_uses_is_not(
    user: Callable[[str, Path], User], tmp_path: Path
) -> None:
    dead, living = user("make", tmp_path), user("make", tmp_path)
    assert sweep_folders(tmp_path) == []
    dead.kill()
    assert sweep_folders(tmp_path) == [dead.folder]
    assert not dead.folder.exists()
    assert (living.folder / "session" / "object").read_text() == "large"


@pytest.mark.parametrize("part", PARTS)
def test_the_folder_of_a_part_whose_process_was_killed_goes_when_the_next_one_is_made(
    part: str, tmp_path: Path
) -> None:
    tmp, tokenizer = tmp_path / "tmp", tmp_path / "tokenizer"
    tmp.mkdir()
    tokenizer.mkdir()
    make_tokenizer(tokenizer)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    script = f"import signal, sys\nfrom pathlib import Path\n{PARTS[part]}\nprint(flush=True)\nsignal.pause()"
    user = User(script, str(tmp_path / "rows.jsonl"), str(tokenizer), tmp=tmp)
    try:
        (folder,) = tmp.glob(f"{TEMP_PREFIX}*")
        assert sweep_folders(tmp) == []
    finally:
        user.kill()
    assert (folder / OWNER_LOCK).exists()
    assert list(tmp.glob("*")) == [folder]
    made = make_folder(tmp)
    assert list(tmp.glob("*")) == [made]
    remove_folder(made)


def test_a_folder_is_used_until_the_last_who_joined_it_is_gone(
    user: Callable[[str, Path], User], tmp_path: Path
) -> None:
    launcher = user("make", tmp_path)
    driver = user("join", launcher.folder)
    launcher.kill()
    assert sweep_folders(tmp_path) == []
    driver.kill()
    assert sweep_folders(tmp_path) == [launcher.folder]


def test_this_process_holds_its_own_until_it_removes_it(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sweep_folders(tmp_path) == []
    num_open = len(os.listdir("/proc/self/fd"))
    remove_folder(folder)
    assert not folder.exists()
    assert len(os.listdir("/proc/self/fd")) == num_open - 1
    join_folder(folder)
    remove_folder(folder)


def test_what_has_no_lock_or_another_name_or_is_a_link_is_left_alone(tmp_path: Path) -> None:
    strange, other, target = tmp_path / f"{TEMP_PREFIX}strange", tmp_path / "other", tmp_path / "target"
    for folder in (strange, other, target):
        folder.mkdir()
    for folder in (other, target):
        (folder / OWNER_LOCK).touch()
    (tmp_path / f"{TEMP_PREFIX}link").symlink_to(target)
    locked_link = tmp_path / f"{TEMP_PREFIX}locked"
    locked_link.mkdir()
    (locked_link / OWNER_LOCK).symlink_to(target / OWNER_LOCK)
    assert sweep_folders(tmp_path) == []
    assert all(folder.exists() for folder in (strange, other, target, locked_link))
    assert sweep_folders(tmp_path / "not there") == []


def test_the_folder_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / f"{TEMP_PREFIX}theirs"
    folder.mkdir()
    (folder / OWNER_LOCK).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
        assert sweep_folders(tmp_path) == []
    assert sweep_folders(tmp_path) == [folder]


def test_what_cannot_be_removed_yet_is_found_by_the_next_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / f"{TEMP_PREFIX}busy"
    (folder / "session").mkdir(parents=True)
    (folder / OWNER_LOCK).touch()

    def fails(path: Path, *, ignore_errors: bool) -> None:
        assert ignore_errors

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", fails)
        sweep_folders(tmp_path)
    assert (folder / OWNER_LOCK).exists()
    assert sweep_folders(tmp_path) == [folder]
    assert not folder.exists()
