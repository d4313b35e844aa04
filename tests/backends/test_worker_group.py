"""A learner with ranks that have no model: real processes and signals, and what is told of their ends."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import pytest
from learner_cases import learner_plan, make_groups, train_command

from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.spec import LearnerContext, open_ranks
from penstock.backends.learners.torch.spec import RANK
from penstock.backends.learners.worker_group import backend as worker_group_backend
from penstock.backends.learners.worker_group import rank_process
from penstock.backends.learners.worker_group.channel import INLINE_BYTES
from penstock.backends.learners.worker_group.ending import WorkerGroupError
from penstock.backends.processes.process_facts import marked_processes
from penstock.messages.base import Metric
from penstock.messages.commands import OpenLearner, SaveCheckpoint
from penstock.messages.errors import DivergedError, UserFault
from penstock.messages.local import BatchTrained, CheckpointWritten, LearnerOpened, LocalEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.backends.learners.worker_group.other_nodes import FurtherNodes

WAIT_S: Final = 30.0
MARK: Final = "PENSTOCK_TEST_WORKERS"
LATE_S: Final = 2.0
"""``rank_timeout_s`` of those that are to run into it."""


class WorkerGroup:
    """A started worker group whose answers are read one by one."""

    def __init__(
        self,
        folder: Path,
        fate: str,
        *,
        num_ranks: int,
        rank_timeout_s: float,
        further: FurtherNodes | None = None,
    ) -> None:
        self.folder = folder
        options = LearnerOptions(num_ranks=num_ranks, rank_timeout_s=rank_timeout_s)
        context = LearnerContext(
            plan=learner_plan(folder, folder, options, dtype=fate),
            log_path=lambda who, number: folder / "logs" / f"{who}-{number}.log",
            further=further,
        )
        self.backend = open_ranks(context, RANK)
        self.events: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()
        self.backend.start(self.events.put, self.events.put)
        self._is_closed = False

    def next(self) -> LocalEvent | BaseException:
        return self.events.get(timeout=WAIT_S)

    def error_of_a_step(self) -> BaseException:
        """What it ends with when it is to train."""
        self.backend.execute(OpenLearner())
        assert isinstance(self.next(), LearnerOpened)
        self.backend.execute(train_command())
        while not isinstance(event := self.next(), BaseException):
            pass
        return event

    def close_within_an_order(self) -> None:
        """Rank 0, which holds the order, leaves it, and nothing is said to have failed."""
        for command in (OpenLearner(), train_command()):
            self.backend.execute(command)
        assert isinstance(self.next(), LearnerOpened)
        deadline_s = time.monotonic() + WAIT_S
        while "Train" not in self.log(0):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)  # between two looks at a file; nothing is timed by it
        self.close()
        assert self.log(0).splitlines()[-1] == "left within an order"
        assert self.events.empty()

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank-{rank}.log").read_text()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.backend.close(WAIT_S)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WorkerGroup]]:
    """Starts worker groups and closes them; nothing is left of them."""
    monkeypatch.setattr(rank_process, "RANK_MODULE", "worker_group_stand_in")
    monkeypatch.setenv(MARK, str(tmp_path))
    worker_groups: list[WorkerGroup] = []

    def start(fate: str = "none", *, num_ranks: int = 2, rank_timeout_s: float = WAIT_S) -> WorkerGroup:
        worker_groups.append(
            WorkerGroup(tmp_path / str(len(worker_groups)), fate, num_ranks=num_ranks, rank_timeout_s=rank_timeout_s)
        )
        return worker_groups[-1]

    yield start
    for workers in worker_groups:
        workers.close()
    assert marked_processes([f"{MARK}={tmp_path}".encode()]) == {}


def orders_in(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("order ")]


def test_every_rank_gets_every_command_in_order_as_the_same_bytes_and_the_first_alone_answers(
    launch: Callable[..., WorkerGroup],
) -> None:
    workers = launch(num_ranks=3)
    many = make_groups(((1.0, 0.0),) * 400)
    for command in (OpenLearner(), train_command(1, groups=many), SaveCheckpoint(1), train_command(2)):
        workers.backend.execute(command)
    answers = [workers.next() for _ in range(4)]
    assert answers == [
        LearnerOpened(version=0),
        BatchTrained(version=1, num_trained_tokens=1, num_masked_tokens=0, metrics=()),
        CheckpointWritten(version=1, path="later"),
        BatchTrained(version=2, num_trained_tokens=1, num_masked_tokens=0, metrics=()),
    ]
    workers.close()
    with pytest.raises(Empty):
        workers.events.get_nowait()
    first, *others = [orders_in(workers.log(rank)) for rank in range(3)]
    assert [line.split()[1:3] for line in first] == [
        ["1", "OpenLearner"], ["2", "Train"], ["3", "SaveCheckpoint"], ["4", "Train"]
    ]  # fmt: skip
    assert int(first[1].split()[3]) > INLINE_BYTES, "the batch was to travel by reference"
    assert others == [first, first]


def test_figures_of_the_first_rank_are_the_learners(launch: Callable[..., WorkerGroup]) -> None:
    workers = launch()
    workers.backend.execute(OpenLearner())
    workers.next()
    assert Metric(name="learner/orders", value=1.0) in workers.backend.gauges()
    assert Metric(name="learner/num_ranks", value=2.0) in workers.backend.gauges()


def test_a_rank_that_is_killed_ends_the_worker_group_with_its_last_words(launch: Callable[..., WorkerGroup]) -> None:
    workers = launch("kill:1", num_ranks=3)
    error = workers.error_of_a_step()
    assert isinstance(error, WorkerGroupError)
    story = str(error)
    assert story.startswith("the learner has lost a rank: rank 1 (process ")
    assert "was killed by SIGKILL; the others were ended with it" in story
    assert "about to die" in story
    assert str(workers.folder / "logs" / "rank-1.log") in story
    assert marked_processes([f"{MARK}={workers.folder.parent}".encode()]) == {}


def test_what_others_say_of_a_death_before_it_is_known_is_not_taken_for_the_cause(
    launch: Callable[..., WorkerGroup],
) -> None:
    story = str(launch("blame:1").error_of_a_step())
    assert "rank 1" in story
    assert "SIGKILL" in story


def test_a_rank_that_is_stopped_is_named(launch: Callable[..., WorkerGroup]) -> None:
    story = str(launch("stop:1", rank_timeout_s=LATE_S).error_of_a_step())
    assert "rank 1" in story
    assert "is stopped by a signal" in story


def test_a_rank_that_others_have_overtaken_is_waited_for_no_longer_than_the_limit(
    launch: Callable[..., WorkerGroup],
) -> None:
    story = str(launch("late:1", rank_timeout_s=LATE_S).error_of_a_step())
    assert "rank 1" in story
    assert "had not done what others had done 2 s (learner.rank_timeout_s) before" in story


@pytest.mark.parametrize(
    ("fate", "kind", "words"),
    [
        ("user:1", UserFault, "expected another dtype"),
        ("diverge:0", DivergedError, "the loss is nan"),
        ("disk:0", OSError, "no space"),
        ("crash:1", WorkerGroupError, "failed: KeyError: 'x'. The end of its log"),
    ],
)
def test_an_error_of_a_rank_is_the_learners(
    fate: str, kind: type[BaseException], words: str, launch: Callable[..., WorkerGroup]
) -> None:
    error = launch(fate).error_of_a_step()
    assert type(error) is kind
    assert words in str(error)


def test_a_rank_that_ends_at_once_is_named(launch: Callable[..., WorkerGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "RANK_MODULE", "timeit")  # a module that says nothing, and ends
    error = launch().next()
    assert isinstance(error, WorkerGroupError)
    assert "(process " in str(error)
    assert "ended with exit code" in str(error)


def test_ranks_that_do_not_come_are_named(
    launch: Callable[..., WorkerGroup], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stays_and_says_nothing.py").write_text("import signal\n\nsignal.pause()\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(rank_process, "RANK_MODULE", "stays_and_says_nothing")
    monkeypatch.setattr(worker_group_backend, "START_TIMEOUT_S", LATE_S)
    story = str(launch(rank_timeout_s=LATE_S).next())
    assert re.search(r"rank 0 \(process \d+\), rank 1 \(process \d+\) did not start within 2 s", story)


def test_closed_between_two_commands_every_rank_finishes(launch: Callable[..., WorkerGroup]) -> None:
    workers = launch(num_ranks=3)
    workers.backend.execute(OpenLearner())
    workers.next()
    workers.close()
    assert all(workers.log(rank).splitlines()[-1] == "finished" for rank in range(3))
    assert workers.events.empty()


def test_closed_within_a_command_the_first_rank_leaves_it_and_nothing_is_said_to_have_failed(
    launch: Callable[..., WorkerGroup],
) -> None:
    launch("hold:0").close_within_an_order()


def launched(program: str, folder: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A launcher in a process of its own, and the processes that it has started."""
    found = os.pathsep.join(each for each in sys.path if each)
    launcher = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": found},
    )
    assert launcher.stdout is not None
    return launcher, [int(word) for word in launcher.stdout.readline().split()]


def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from penstock.backends.learners.worker_group import rank_process
        from test_worker_group import WorkerGroup
        from penstock.messages.commands import OpenLearner
        rank_process.RANK_MODULE = "worker_group_stand_in"
        workers = WorkerGroup(Path(sys.argv[1]), "none", num_ranks=2, rank_timeout_s=60.0)
        workers.backend.execute(OpenLearner())
        workers.next()
        pids = [rank.pid for rank in workers.backend._set.ranks]
        print(*pids, flush=True)
        sys.stdin.read()
    """)
    launcher, pids = launched(program, tmp_path)
    assert len(pids) == 2
    handles = [os.pidfd_open(pid) for pid in pids]
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    for handle in handles:
        assert select.select([handle], [], [], WAIT_S)[0], "a rank lives on"
        os.close(handle)
