"""The life of a server of ours, with a quick program in place of SGLang that says what SGLang says."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

import pytest

from penstock.backends.engines.served.base.launched import LaunchedServer, ServerStartError
from penstock.backends.engines.served.base.processes import end_marked, how_it_ended
from penstock.backends.engines.served.base.settings import SERVER_VARIABLE
from penstock.backends.engines.served.sglang.settings import SglangSettings
from penstock.backends.processes.process_facts import environment_of, is_running, marked_processes
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

Parameters = ParamSpec("Parameters")

WAIT_S = 30.0
SERVES = """
import os, signal, sys
words = sys.argv[1:]
with open(words[words.index("--config") + 1]) as file:
    key = file.read().split()[1]
say = lambda text: print("[2026-01-01 00:00:00] " + text, flush=True)
say("options " + " ".join(words))
say("the key is " + key)
say(f"mode {os.stat(words[words.index('--config') + 1]).st_mode & 0o777:o}")
"""
READY = """
say("Load weight begin.")
say("The server is fired up and ready to roll!")
say("INFO:     Uvicorn running on http://127.0.0.1:4711 (Press CTRL+C to quit)")
signal.pause()
"""
TITLED = """
import subprocess
for name in ("sglang::scheduler", "sglang::detokenizer"):
    code = "import signal; print(flush=True); signal.pause()"
    child = subprocess.Popen([name, "-I", "-S", "-c", code], executable=sys.executable, stdout=subprocess.PIPE)
    child.stdout.readline()  # a process has no title for a moment after its exec
"""


def in_loop(test: Callable[Parameters, Coroutine[None, None, None]]) -> Callable[Parameters, None]:
    """A test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@pytest.fixture
def settings(tmp_path: Path) -> Callable[[str], SglangSettings]:
    """``settings(code)``: those of a server that runs this."""

    def make(code: str) -> SglangSettings:
        program = tmp_path / "python"
        program.write_text(f"#!{sys.executable} -IS\n{SERVES}{code}")
        program.chmod(0o755)
        (tmp_path / "model").mkdir()
        return SglangSettings(
            python=program, model_folder=tmp_path / "model", options=("--tp", "1"), admin_api_key="hush1",
            log_path=tmp_path / "server.log", start_timeout_s=WAIT_S, owner=f"test-{tmp_path}",
        )  # fmt: skip

    return make


def left_of(settings: SglangSettings) -> dict[int, int]:
    return marked_processes([f"PENSTOCK_SERVER_OWNER={settings.owner}".encode()])


def text_of(path: Path) -> str:
    return path.read_text()


async def ready_server(settings: SglangSettings) -> LaunchedServer:
    server = await LaunchedServer.launch(settings)
    await server.wait_ready()
    return server


@in_loop
async def test_a_server_is_ready_by_its_own_word_and_gone_after_its_end(
    settings: Callable[[str], SglangSettings],
) -> None:
    given = settings(TITLED + READY)
    news: list[str] = []
    server = await LaunchedServer.launch(given, report=news.append)
    await server.wait_ready()
    assert server.address == "http://127.0.0.1:4711"
    assert "Load weight begin." in news
    assert [process.name for process in server.processes] == ["main", "scheduler", "detokenizer", "guardian"]
    assert len(left_of(given)) == 4
    assert await server.end() == []
    assert not left_of(given)
    ended = await server.ended
    assert ended.was_asked
    assert await server.end() == []


@in_loop
async def test_the_key_reaches_the_server_and_no_log_command_line_or_stranger(
    settings: Callable[[str], SglangSettings],
) -> None:
    given = settings(READY)
    server = await ready_server(given)
    log = text_of(given.log_path)
    key_path = Path(next(word for word in log.split() if word.endswith(".yaml")))
    main = next(process for process in server.processes if process.name == "main")
    assert "the key is (secret)" in log
    assert "mode 600\n" in log
    assert key_path.name not in os.listdir(key_path.parent)
    assert "hush1" not in text_of(Path(f"/proc/{main.pid}/cmdline"))
    await server.end()


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("scheduler", signal.SIGKILL), ("scheduler", signal.SIGTERM), ("detokenizer", signal.SIGKILL),
        ("main", signal.SIGKILL), ("main", signal.SIGTERM), ("guardian", signal.SIGKILL),
    ],
)  # fmt: skip
@in_loop
async def test_the_end_of_any_process_is_the_end_of_the_server(
    settings: Callable[[str], SglangSettings], name: str, number: signal.Signals
) -> None:
    given = settings(TITLED + READY)
    server = await ready_server(given)
    process = next(process for process in server.processes if process.name == name)
    os.kill(process.pid, number)
    async with asyncio.timeout(WAIT_S):
        ended = await server.ended
    assert f"its {name} process ({process.pid})" in ended.cause or f"its {name} ({process.pid})" in ended.cause
    assert number.name in ended.cause
    assert not ended.was_asked
    assert await server.end() == []
    assert not left_of(given)


@in_loop
async def test_stopped_processes_are_named(settings: Callable[[str], SglangSettings]) -> None:
    server = await ready_server(settings(TITLED + READY))
    assert server.stopped() == ()
    [scheduler] = [process for process in server.processes if process.name == "scheduler"]
    os.kill(scheduler.pid, signal.SIGSTOP)
    async with asyncio.timeout(WAIT_S):
        while not server.stopped():  # noqa: ASYNC110 - the kernel tells of a stop to the parent alone
            await asyncio.sleep(0)
    assert server.stopped() == ("scheduler",)
    await server.end()


@in_loop
async def test_a_server_that_fails_to_start_tells_why(settings: Callable[[str], SglangSettings]) -> None:
    given = settings("print('Traceback ...', flush=True); print('ValueError: no such model', flush=True); sys.exit(3)")
    server = await LaunchedServer.launch(given)
    with pytest.raises(ServerStartError, match=r"exit code 3; it said: ValueError: no such model") as raised:
        await server.wait_ready()
    assert str(given.log_path) in str(raised.value)
    assert not left_of(given)


@in_loop
async def test_a_server_that_is_not_ready_in_time_is_ended_with_its_last_word(
    settings: Callable[[str], SglangSettings],
) -> None:
    given = replace(settings("say('Load weight begin.'); signal.pause()"), start_timeout_s=10.0)
    server = await LaunchedServer.launch(given)
    with pytest.raises(ServerStartError, match=r"start_timeout_s = 10; the last that it reported: Load weight begin\."):
        await server.wait_ready()
    assert not left_of(given)


@in_loop
async def test_a_cancelled_wait_leaves_nothing(settings: Callable[[str], SglangSettings]) -> None:
    given = settings("signal.pause()")
    server = await LaunchedServer.launch(given)
    waiting = asyncio.create_task(server.wait_ready())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not left_of(given)


@in_loop
async def test_a_launch_ends_the_earlier_server_of_its_owner_and_no_other(
    settings: Callable[[str], SglangSettings],
) -> None:
    given = settings(TITLED + READY)
    earlier = await ready_server(given)
    other = await ready_server(replace(given, owner="somebody else"))
    later = await ready_server(given)
    async with asyncio.timeout(WAIT_S):
        assert not (await earlier.ended).was_asked
    assert not any(is_running(process.pid, process.start_ticks) for process in earlier.processes)
    assert not other.ended.done()
    assert not later.ended.done()
    for server in (earlier, other, later):
        assert await server.end() == []


@in_loop
async def test_what_is_missing_is_named_before_anything_is_started(settings: Callable[[str], SglangSettings]) -> None:
    given = settings(READY)
    with pytest.raises(UserFault, match="interpreter /no/python is not there"):
        await LaunchedServer.launch(replace(given, python=Path("/no/python")))
    with pytest.raises(UserFault, match="model folder /no/model is not there"):
        await LaunchedServer.launch(replace(given, model_folder=Path("/no/model")))


@in_loop
async def test_a_node_that_does_not_serve_has_no_port(settings: Callable[[str], SglangSettings]) -> None:
    given = settings(
        "say('Dummy health check server started in background thread at 127.0.0.1:0'); signal.pause()",
    )
    server = await ready_server(replace(given, num_nodes=2, node_rank=1, dist_init_address="127.0.0.1:1"))
    assert server.port == 0
    await server.end()


@in_loop
async def test_the_mark_is_in_every_process(settings: Callable[[str], SglangSettings]) -> None:
    server = await ready_server(settings(TITLED + READY))
    prefix = f"{SERVER_VARIABLE}=".encode()
    marks = [
        tuple(variable for variable in environment_of(process.pid) if variable.startswith(prefix))
        for process in server.processes
    ]
    assert [len(found) for found in marks] == [1] * 4
    assert len(set(marks)) == 1
    assert await end_marked(marks[0], WAIT_S) == []
    assert not any(is_running(process.pid, process.start_ticks) for process in server.processes)
    await server.end()


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [(None, "ended"), (3, "ended with exit code 3"), (-9, "was killed by SIGKILL"), (-63, "was killed by signal 63")],
)
def test_an_end_is_put_into_words(exit_code: int | None, words: str) -> None:
    assert how_it_ended(exit_code) == words
