"""What is asked about processes that may end, or never were any, at any moment."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

from penstock.backends.processes.process_facts import descendants_of, facts_of, is_running, kill, pinned, start_ticks_of

DEADLINE_S = 20.0


def test_a_name_that_the_kernel_has_cut_within_a_character_is_no_hindrance(tmp_path: Path) -> None:
    cat = shutil.which("cat")
    assert cat is not None
    name = tmp_path / ("a" * 14 + "ü")  # the kernel keeps 15 bytes
    shutil.copy(cat, name)
    with subprocess.Popen([name], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"there\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"there\n", "so its own name is in force"
        assert b"a\xc3)" in Path(f"/proc/{process.pid}/stat").read_bytes()
        facts = facts_of(process.pid)
        assert facts is not None
        assert facts.parent == os.getpid()
        assert process.pid in descendants_of(os.getpid())
        assert kill(process.pid, facts.start_ticks)
    assert facts_of(process.pid) is None


def test_a_number_that_a_thread_has_got_meanwhile_is_that_of_no_process() -> None:
    number: list[int] = []
    is_there, may_end = threading.Event(), threading.Event()

    def live() -> None:
        number.append(threading.get_native_id())
        is_there.set()
        may_end.wait(DEADLINE_S)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        assert is_there.wait(DEADLINE_S)
        ticks = start_ticks_of(number[0])
        with pinned(number[0], ticks) as handle:
            assert handle is None
        assert not kill(number[0], ticks)
        assert not is_running(number[0], ticks + 1)
    finally:
        may_end.set()
        thread.join(DEADLINE_S)
