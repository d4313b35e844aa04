"""Servers whose launcher is gone: who may take them over, and how they end if nobody does. With a quick program in
place of SGLang, and real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest

from penstock.backends.engines.served.base.hand_over import NotHandedOverError
from penstock.backends.engines.served.base.launched import LaunchedServer
from penstock.backends.engines.served.base.left_servers import end_servers, left_servers
from penstock.backends.engines.served.base.settings import OWNER_VARIABLE
from penstock.backends.engines.served.base.taking_over import LeftServer, LeftWeights, take_over
from penstock.backends.engines.served.sglang.settings import SglangSettings
from penstock.backends.processes.process_facts import is_running, marked_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

WAIT_S = 30.0
LONG_S = 600.0
SERVER = """
import signal, subprocess, sys
say = lambda text: print("[2026-01-01 00:00:00] " + text, flush=True)
child = subprocess.Popen(["sglang::scheduler", "-I", "-S", "-c", "import signal; print(flush=True); signal.pause()"],
                         executable=sys.executable, stdout=subprocess.PIPE)
child.stdout.readline()
say("The server is fired up and ready to roll!")
say("INFO:     Uvicorn running on http://127.0.0.1:4711 (Press CTRL+C to quit)")
signal.pause()
"""
LAUNCHER = """
import asyncio, json, os, sys
from pathlib import Path
from penstock.backends.engines.served.base.launched import LaunchedServer
from penstock.backends.engines.served.sglang.settings import SglangSettings

async def main():
    fields = json.loads(sys.argv[1])
    paths = {name: Path(fields.pop(name)) for name in ("python", "model_folder", "log_path")}
    server = await LaunchedServer.launch(SglangSettings(**fields, **paths))
    await server.wait_ready()
    if sys.argv[2]:
        server.keep("something older")
        server.keep(sys.argv[2])
    if sys.argv[3] == "last":
        server.be_last()
    print("ready", flush=True)
    await server.ended

asyncio.run(main())
"""
HOST = "import signal, subprocess, sys; subprocess.call([sys.executable, '-c', *sys.argv[1:]]); signal.pause()"
"""What starts launchers, and is there when they are gone."""
KEPT = LeftServer(port=4711, weights=LeftWeights(label="v3.1.4", checksum="abc")).text()


class Left:
    """A server, and the processes that have started it."""

    def __init__(self, folder: Path, *, linger_s: float, kept: str = KEPT, then: str = "") -> None:
        program = folder / "python"
        program.write_text(f"#!{sys.executable} -IS\n{SERVER}")
        program.chmod(0o755)
        (folder / "model").mkdir()
        self.settings = SglangSettings(
            python=program, model_folder=folder / "model", options=("--tp", "1"), admin_api_key="hush1",
            log_path=folder / "server.log", start_timeout_s=WAIT_S, owner=f"test-{folder}", linger_s=linger_s,
        )  # fmt: skip
        fields = asdict(self.settings) | {
            name: str(getattr(self.settings, name)) for name in ("python", "model_folder", "log_path")
        }
        self.host = subprocess.Popen(
            [sys.executable, "-c", HOST, LAUNCHER, json.dumps(fields), kept, then], stdout=subprocess.PIPE
        )
        assert self.host.stdout is not None
        assert self.host.stdout.readline() == b"ready\n"
        [self.launcher] = [int(pid) for pid in _read(f"/proc/{self.host.pid}/task/{self.host.pid}/children").split()]
        self.processes = marked_processes(self.marks)
        assert len(self.processes) == 3, "guardian, main and scheduler"

    @property
    def marks(self) -> list[bytes]:
        return [f"{OWNER_VARIABLE}={self.settings.owner}".encode()]

    def is_whole(self) -> bool:
        return all(is_running(pid, ticks) for pid, ticks in self.processes.items())

    def await_end(self) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while marked_processes(self.marks):
            assert time.monotonic() < deadline_s, "it is still there"
            time.sleep(0.02)  # between two looks at the kernel's tables

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            kill(self.launcher)
        self.host.kill()
        self.host.wait()
        assert self.host.stdout is not None
        self.host.stdout.close()


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def leave(tmp_path: Path) -> Generator[Callable[..., Left]]:
    made: list[Left] = []

    def make(**options: object) -> Left:
        made.append(Left(tmp_path, **{"linger_s": LONG_S, **options}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for left in made:
        left.close()
        left.await_end()


async def accepts(server: LaunchedServer, weights: LeftWeights | None) -> None:
    assert server.address == "http://127.0.0.1:4711"
    assert weights == LeftWeights(label="v3.1.4", checksum="abc")


def test_a_server_is_taken_over_with_its_key_and_all_its_processes(leave: Callable[..., Left]) -> None:
    left = leave()
    kill(left.launcher)

    async def run() -> None:
        taken = await take_over(replace(left.settings, admin_api_key="other2"), accepts)
        server = taken.server
        assert server is not None, taken.notices
        assert left.is_whole()
        assert server.settings.admin_api_key == "hush1"
        assert {each.name: each.pid in left.processes for each in server.processes} == {
            "main": True, "scheduler": True, "guardian": True,
        }  # fmt: skip
        [scheduler] = [each.pid for each in server.processes if each.name == "scheduler"]
        kill(scheduler)
        async with asyncio.timeout(WAIT_S):
            ended = await server.ended
        assert f"its scheduler process ({scheduler})" in ended.cause
        assert await server.end() == []

    asyncio.run(run())
    left.await_end()


def test_who_has_taken_it_over_is_its_launcher(leave: Callable[..., Left], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backends.engines.served.base.hand_over.HAND_OVER_TIMEOUT_S", 0.5)
    left = leave()
    kill(left.launcher)

    async def run() -> None:
        taken = await take_over(left.settings, accepts)
        assert taken.server is not None
        later = await take_over(left.settings, accepts)
        assert later.server is None
        assert "its launcher is still there" in later.notices[0]
        assert left.is_whole()
        assert await taken.server.end() == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("changes", "kept", "reason"),
    [
        ({"options": ("--tp", "2")}, KEPT, "it was started with other options: --tp 1, --tp 2"),
        ({"environment": {"SOME_NAME": "1"}}, KEPT, "it was started in another environment: SOME_NAME"),
        ({}, "", "it had taken no weights since it was started or taken over"),
    ],
)
def test_what_is_not_as_it_would_be_launched_is_ended_with_the_reason(
    leave: Callable[..., Left], changes: dict[str, object], kept: str, reason: str
) -> None:
    left = leave(kept=kept)
    kill(left.launcher)
    taken = asyncio.run(take_over(replace(left.settings, **changes), accepts))  # type: ignore[arg-type]
    assert taken.server is None
    assert taken.notices == (f"its SGLang server is started anew: {reason}",)
    left.await_end()


def test_a_look_that_refuses_ends_it(leave: Callable[..., Left]) -> None:
    left = leave()
    kill(left.launcher)

    async def refuses(server: LaunchedServer, weights: LeftWeights | None) -> None:
        raise NotHandedOverError("it looks ill")

    taken = asyncio.run(take_over(left.settings, refuses))
    assert taken.notices == ("its SGLang server is started anew: it looks ill",)
    left.await_end()


def test_nothing_that_was_left_is_said_as_such(tmp_path: Path, leave: Callable[..., Left]) -> None:
    left = leave()
    taken = asyncio.run(take_over(replace(left.settings, owner="nobody"), accepts))
    assert taken.notices == ("its SGLang server is started anew: none of its servers are left",)
    assert left.is_whole()


def test_while_its_launcher_lives_nobody_takes_it(leave: Callable[..., Left], monkeypatch: pytest.MonkeyPatch) -> None:
    left = leave()
    monkeypatch.setattr("penstock.backends.engines.served.base.hand_over.HAND_OVER_TIMEOUT_S", 0.5)
    taken = asyncio.run(take_over(left.settings, accepts))
    assert "its launcher is still there after 0.5 s" in taken.notices[0]
    assert left.is_whole()


def test_a_server_that_nobody_takes_ends_after_its_time(leave: Callable[..., Left]) -> None:
    left = leave(linger_s=1.0)
    kill(left.launcher)
    left.await_end()


def test_a_server_that_may_not_linger_ends_with_its_launcher(leave: Callable[..., Left]) -> None:
    left = leave(linger_s=0.0)
    kill(left.launcher)
    left.await_end()


def test_no_server_outlives_the_process_that_starts_launchers(leave: Callable[..., Left]) -> None:
    left = leave()
    left.host.kill()
    left.host.wait()
    assert left.is_whole()
    kill(left.launcher)
    left.await_end()


def test_a_left_server_ends_when_the_process_that_starts_launchers_ends(leave: Callable[..., Left]) -> None:
    left = leave()
    kill(left.launcher)
    assert left.is_whole()
    left.host.kill()
    left.await_end()


def test_a_launch_ends_what_was_left(leave: Callable[..., Left]) -> None:
    left = leave()
    kill(left.launcher)

    async def run() -> None:
        server = await LaunchedServer.launch(left.settings)
        assert not any(is_running(pid, ticks) for pid, ticks in left.processes.items())
        assert await server.end() == []

    asyncio.run(run())


def test_who_knows_that_nobody_comes_ends_what_was_left(leave: Callable[..., Left]) -> None:
    left = leave()
    found = left_servers(left.marks)
    assert len(found) == 1
    kill(left.launcher)
    assert end_servers(found) == []
    assert not any(is_running(pid, ticks) for pid, ticks in left.processes.items())
    assert left_servers(left.marks) == []


def test_a_left_server_whose_guardian_is_stopped_is_ended_as_well(leave: Callable[..., Left]) -> None:
    left = leave()
    kill(left.launcher)
    [guardian] = [
        pid for pid in left.processes if "penstock.backends.processes.guardian" in _read(f"/proc/{pid}/cmdline")
    ]
    os.kill(guardian, signal.SIGSTOP)
    assert end_servers(left_servers(left.marks), timeout_s=2.0) == []
    assert not any(is_running(pid, ticks) for pid, ticks in left.processes.items())


def test_a_server_whose_launcher_was_the_last_ends_with_it(leave: Callable[..., Left]) -> None:
    left = leave(then="last")
    assert left.is_whole()
    kill(left.launcher)
    left.await_end()
