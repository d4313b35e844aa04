"""Word that an engine's machine will be taken: by a signal, or by a file."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from penstock import load_scenario
from penstock.messages.errors import UserFault
from penstock.runtime.hosts.processes.machine_notice import MachineNotice

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _handler() -> Generator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_signal_is_word_that_wakes_the_loop_and_counts_from_then() -> None:
    notice = MachineNotice(30.0, None)
    notice.listen()
    assert notice.word() is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert select.select([notice.fileno()], [], [], 10.0)[0]
    assert notice.take()
    assert not notice.take()
    word = notice.word()
    assert word is not None
    assert word.how == "SIGTERM"
    assert 20.0 < word.left_s <= 30.0
    with pytest.raises(SystemExit) as raised:
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.code == 128 + signal.SIGTERM
    notice.close()


def test_without_notice_a_signal_ends_the_process_as_ever() -> None:
    code = (
        "import os, signal, time\n"
        "from penstock.runtime.hosts.processes.machine_notice import MachineNotice\n"
        "MachineNotice(None, None).listen(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(10)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGTERM


def test_a_file_is_word_when_it_is_newer_than_the_process(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    file.touch()
    os.utime(file, (1.0, 1.0))
    notice = MachineNotice(0.001, str(file))
    assert notice.word() is None, "it was word to a predecessor"
    os.utime(file, (time.time() + 1, time.time() + 1))
    word = notice.word()
    assert word is not None
    assert word.how == f"the file {file}"
    file.unlink()
    later = notice.word()
    assert later is not None, "word is not taken back"
    assert later.left_s <= word.left_s
    notice.close()


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"engines.notice_file": "/run/notice"}, r"how long before says engines\.notice_s; set it as well"),
        ({"engines.notice_url": "aws"}, r"how long before says engines\.notice_s; set it as well"),
        (
            {"engines.notice_s": 5, "engines.notice_url": "file:///etc/hostname"},
            "'file:///etc/hostname' cannot be asked; give one of aws, azure, gcp, or an address that begins with http://",
        ),
        (
            {
                "engines.notice_s": 5,
                "engines.placement": "colocate",
                "staleness.policy": "sync",
                "staleness.max_staleness": 0,
            },
            "the machine of a colocated engine is the learner's",
        ),
        ({"engines.notice_s": 0}, "notice_s"),
    ],
)
def test_what_a_notice_cannot_be_given_with_is_refused(overrides: dict[str, object], reason: str) -> None:
    with pytest.raises(UserFault, match=reason):
        load_scenario("quickstart", overrides)
