"""A learner over nodes, with ranks that have no model: real launchers, lines and signals, and what their ends do."""

from __future__ import annotations

import os
import select
import signal
import socket
import textwrap
from queue import Empty
from typing import TYPE_CHECKING

import pytest
from learner_cases import make_groups, train_command
from test_worker_group import LATE_S, MARK, WAIT_S, WorkerGroup, launched, orders_in
from worker_group_nodes import LocalNodes

from penstock.backends.learners.worker_group import node_line, other_nodes, rank_process
from penstock.backends.learners.worker_group.channel import INLINE_BYTES
from penstock.backends.learners.worker_group.ending import WorkerGroupError
from penstock.backends.learners.worker_group.other_nodes import KEYS_VARIABLE, FurtherNodes
from penstock.backends.processes.curve import bind_at
from penstock.backends.processes.process_facts import environment_of, marked_processes
from penstock.messages.commands import OpenLearner, SaveCheckpoint
from penstock.messages.errors import UserFault
from penstock.messages.local import BatchTrained, CheckpointWritten, LearnerOpened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.backends.processes.curve import AnySocket

pytestmark = pytest.mark.long_run


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WorkerGroup]]:
    """Starts worker groups over nodes and closes them; nothing is left of them."""
    monkeypatch.setattr(rank_process, "RANK_MODULE", "worker_group_stand_in")
    monkeypatch.setattr(other_nodes, "NODE_MODULE", "worker_group_node_stand_in")
    monkeypatch.setenv(MARK, str(tmp_path))
    worker_groups: list[WorkerGroup] = []

    def start(
        fate: str = "none", *, nodes: LocalNodes | None = None, num_ranks: int = 4, rank_timeout_s: float = WAIT_S
    ) -> WorkerGroup:
        folder = tmp_path / str(len(worker_groups))
        folder.mkdir()

        def node_log(node: int) -> Path:
            return folder / "logs" / f"node-{node}.log"

        further = FurtherNodes(nodes or LocalNodes(), node_log)
        worker_groups.append(
            WorkerGroup(folder, fate, num_ranks=num_ranks, rank_timeout_s=rank_timeout_s, further=further)
        )
        return worker_groups[-1]

    yield start
    for workers in worker_groups:
        workers.close()
    assert left(tmp_path) == {}
    assert not list(tmp_path.glob(".worker-group-*"))


def left(folder: Path) -> dict[int, int]:
    """Processes of worker groups below this folder."""
    return marked_processes([f"{MARK}={folder}".encode()])


def test_ranks_of_every_node_get_every_command_as_the_same_bytes_and_the_first_alone_answers(
    launch: Callable[..., WorkerGroup],
) -> None:
    workers = launch(num_ranks=6, nodes=LocalNodes(3))
    many = make_groups(((1.0, 0.0),) * 400)
    for command in (OpenLearner(), train_command(1, groups=many), SaveCheckpoint(1), train_command(2)):
        workers.backend.execute(command)
    assert [workers.next() for _ in range(4)] == [
        LearnerOpened(version=0),
        BatchTrained(version=1, num_trained_tokens=1, num_masked_tokens=0, metrics=()),
        CheckpointWritten(version=1, path="later"),
        BatchTrained(version=2, num_trained_tokens=1, num_masked_tokens=0, metrics=()),
    ]
    workers.close()
    with pytest.raises(Empty):
        workers.events.get_nowait()
    first, *others = [orders_in(workers.log(rank)) for rank in range(6)]
    assert [line.split()[1:3] for line in first] == [
        ["1", "OpenLearner"], ["2", "Train"], ["3", "SaveCheckpoint"], ["4", "Train"]
    ]  # fmt: skip
    assert int(first[1].split()[3]) > INLINE_BYTES, "the batch was to travel by reference"
    assert others == [first] * 5
    assert all(workers.log(rank).splitlines()[-1] == "finished" for rank in range(6))


def test_no_rank_is_told_the_secret_of_the_line(launch: Callable[..., WorkerGroup], tmp_path: Path) -> None:
    nodes = LocalNodes()
    workers = launch(nodes=nodes)
    workers.backend.execute(OpenLearner())
    workers.next()
    told = [
        pid
        for pid in left(tmp_path)
        if any(variable.startswith(KEYS_VARIABLE.encode()) for variable in environment_of(pid))
        and any(variable.startswith(rank_process.RANK_VARIABLE.encode()) for variable in environment_of(pid))
    ]
    assert told == []


@pytest.mark.parametrize(
    ("fate", "kind", "words"),
    [
        ("kill:3", WorkerGroupError, ("rank 3 (process ", " on 127.0.0.1) was killed by SIGKILL", "about to die")),
        ("kill:1", WorkerGroupError, ("rank 1 (process ", ") was killed by SIGKILL", "about to die")),
        ("blame:3", WorkerGroupError, ("rank 3", "SIGKILL")),
        ("user:2", UserFault, ("expected another dtype",)),
        ("disk:2", OSError, ("no space",)),
        ("crash:3", WorkerGroupError, ("rank 3", "failed: KeyError: 'x'. The end of its log")),
    ],
)
def test_the_end_of_a_rank_is_told_wherever_it_was(
    fate: str, kind: type[BaseException], words: tuple[str, ...], launch: Callable[..., WorkerGroup], tmp_path: Path
) -> None:
    error = launch(fate).error_of_a_step()
    assert type(error) is kind
    assert all(word in str(error) for word in words), error
    assert left(tmp_path) == {}


def test_a_rank_of_another_node_that_is_stopped_is_named(launch: Callable[..., WorkerGroup]) -> None:
    story = str(launch("stop:3", rank_timeout_s=LATE_S).error_of_a_step())
    assert "rank 3 (process " in story
    assert "is stopped by a signal" in story


def test_a_node_whose_launcher_is_killed_ends_the_worker_group(
    launch: Callable[..., WorkerGroup], tmp_path: Path
) -> None:
    nodes = LocalNodes()
    workers = launch("hold:0", nodes=nodes)
    workers.backend.execute(OpenLearner())
    workers.next()
    os.kill(nodes.pids[1], signal.SIGKILL)
    error = workers.next()
    assert type(error) is WorkerGroupError
    assert "the learner has lost a node: node 1 (127.0.0.1, ranks 2 to 3) was lost" in str(error)
    assert left(tmp_path) == {}


def test_a_node_that_is_silent_ends_the_worker_group_after_the_limit(
    launch: Callable[..., WorkerGroup], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(other_nodes, "LINK_TIMEOUT_S", LATE_S)
    nodes = LocalNodes()
    workers = launch(nodes=nodes)
    workers.backend.execute(OpenLearner())
    workers.next()
    os.kill(nodes.pids[1], signal.SIGSTOP)
    error = workers.next()
    assert type(error) is WorkerGroupError
    assert "node 1 (127.0.0.1, ranks 2 to 3) was lost: the line has closed, or was silent for 2 s" in str(error)
    assert left(tmp_path) == {}


def test_a_node_whose_launcher_does_not_come_is_named_with_what_it_wrote(
    launch: Callable[..., WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_nodes, "NODE_MODULE", "penstock.no_such_module")
    error = launch().next()
    assert type(error) is WorkerGroupError
    assert "node 1 (ranks 2 to 3) was lost: exit code 1; the others" in str(error)
    assert "No module named penstock.no_such_module" in str(error)


def test_a_run_folder_that_a_node_does_not_share_is_the_users_to_mend(
    launch: Callable[..., WorkerGroup], tmp_path: Path
) -> None:
    def hide() -> None:
        for mark in tmp_path.rglob(".worker-group-*"):
            mark.unlink()

    error = launch(nodes=LocalNodes(before=hide)).next()
    assert type(error) is UserFault
    assert "run.folder: " in str(error)
    assert "put it on a file system that all nodes share" in str(error)


def test_closed_within_a_command_the_first_rank_leaves_it_and_the_others_end(
    launch: Callable[..., WorkerGroup],
) -> None:
    launch("hold:0").close_within_an_order()


def test_who_has_not_the_secret_is_turned_away_and_disturbs_nobody(
    launch: Callable[..., WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers: list[socket.socket] = []

    def listen_and_visit(line: AnySocket, host: str) -> str:
        endpoint = bind_at(line, host)
        address = host, int(endpoint.rpartition(":")[2])
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(200)):
            strangers.append(socket.create_connection(address))
            strangers[-1].sendall(said)
        return endpoint

    monkeypatch.setattr(node_line, "bind_at", listen_and_visit)
    monkeypatch.setattr(node_line, "HANDSHAKE_MS", 1000)
    workers = launch()
    workers.backend.execute(OpenLearner())
    assert isinstance(workers.next(), LearnerOpened)
    for stranger in strangers:
        stranger.settimeout(WAIT_S)
        seen = b"more"
        while seen:
            try:
                seen = stranger.recv(1 << 12)
            except ConnectionResetError:
                break
        stranger.close()


# A line that is silent rather than cut is in test_a_node_that_is_silent_ends_the_worker_group_after_the_limit as well,
# from the launcher's side.
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_no_rank_of_another_node_outlives_the_launcher_or_its_silence(number: signal.Signals, tmp_path: Path) -> None:
    """Nothing but its line tells the node's launcher of the end."""
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from penstock.backends.learners.worker_group import node_line, other_nodes, rank_process
        from penstock.backends.learners.worker_group.other_nodes import FurtherNodes
        from test_worker_group import WorkerGroup
        from worker_group_nodes import LooseNodes
        from penstock.messages.commands import OpenLearner
        rank_process.RANK_MODULE = "worker_group_stand_in"
        other_nodes.NODE_MODULE = "worker_group_node_stand_in"
        other_nodes.LINK_TIMEOUT_S = 5.0
        folder, nodes = Path(sys.argv[1]), LooseNodes()
        further = FurtherNodes(nodes, lambda node: folder / f"node-{node}.log")
        workers = WorkerGroup(folder, "none", num_ranks=4, rank_timeout_s=60.0, further=further)
        workers.backend.execute(OpenLearner())
        workers.next()
        print(*[rank.pid for rank in workers.backend._set.ranks[2:]], nodes.pids[1], flush=True)
        sys.stdin.read()
    """)
    launcher, pids = launched(program, tmp_path)
    assert len(pids) == 3
    handles = [os.pidfd_open(pid) for pid in pids]
    launcher.send_signal(number)
    try:
        for handle in handles:
            assert select.select([handle], [], [], WAIT_S)[0], "something lives on"
            os.close(handle)
    finally:
        launcher.kill()
        launcher.communicate()
