"""Which server that an EngineWorker has left is taken over by the next one, and which is started anew."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest
from running_server import settings_for

from penstock.backends.engines.served.base.http import ServerHttp
from penstock.backends.engines.served.base.settings import OWNER_VARIABLE
from penstock.backends.engines.served.base.taking_over import TakenOver, take_over
from penstock.backends.engines.served.sglang import opening
from penstock.backends.engines.served.sglang.control import PauseMode, SglangControl
from penstock.backends.processes.process_facts import marked_processes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(580)]

LINGER_S = 120.0
WAIT_S = 60.0
OWNER = "engine/7"
REQUEST = json.dumps({"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}).encode()
"""An engine's process in little: it launches, has its server load weights, keeps what they are or that others come, and
waits to be killed."""
ENGINE = """
import asyncio, json, sys
from pathlib import Path
from penstock.backends.engines.served.base.http import ServerHttp
from penstock.backends.engines.served.base.launched import LaunchedServer
from penstock.backends.engines.served.base.taking_over import LeftServer, LeftWeights
from penstock.backends.engines.served.base.updates import checksum_of
from penstock.backends.engines.served.sglang.control import SglangControl
from penstock.backends.engines.served.sglang.settings import SglangSettings

async def main():
    fields = json.loads(sys.argv[1])
    paths = {name: Path(fields.pop(name)) for name in ("python", "model_folder", "log_path")}
    settings = SglangSettings(**fields, **paths)
    server = await LaunchedServer.launch(settings)
    await server.wait_ready()
    http = ServerHttp(server.address, admin_api_key=settings.admin_api_key)
    control = SglangControl(http)
    await control.update_from_disk(str(settings.model_folder), version="v3.1.4", flush=True)
    checksum = checksum_of([(await control.weights_checksum()).overall])
    weights = None if sys.argv[2] else LeftWeights(label="v3.1.4", checksum=checksum)
    server.keep(LeftServer(port=server.port, weights=weights).text())
    print("ready", server.address, settings.admin_api_key, flush=True)
    await server.ended

asyncio.run(main())
"""


class LeftServerBench:
    """A server whose launcher was killed."""

    def __init__(self, environment: SglangEnvironment, model: Path, folder: Path, *, amid_load: bool) -> None:
        self.settings = replace(settings_for(environment, model, folder), owner=OWNER, linger_s=LINGER_S)
        fields = asdict(self.settings) | {
            name: str(getattr(self.settings, name)) for name in ("python", "model_folder", "log_path")
        }
        arguments = [json.dumps(fields), "loads" if amid_load else ""]
        launcher = subprocess.Popen([sys.executable, "-c", ENGINE, *arguments], stdout=subprocess.PIPE, text=True)
        assert launcher.stdout is not None
        words = launcher.stdout.readline().split()
        assert words[:1] == ["ready"], "the server did not start"
        self.address, self.key = words[1], words[2]
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        launcher.stdout.close()

    def processes(self) -> dict[int, int]:
        return marked_processes([f"{OWNER_VARIABLE}={OWNER}".encode()])

    async def taken(self) -> TakenOver:
        """What a successor gets; the server is ended again."""
        taken = await take_over(replace(self.settings, admin_api_key="another0key"), opening.look_at)
        if taken.server is not None:
            assert taken.server.address == self.address
            assert taken.server.settings.admin_api_key == self.key
            assert await taken.server.end() == []
        return taken


@pytest.fixture
def leave(
    environment: SglangEnvironment, tiny_model: Callable[..., Path], tmp_path: Path
) -> Callable[..., LeftServerBench]:
    """``leave()``: starts a server and kills its launcher, amid a load or not."""
    return lambda *, amid_load=False: LeftServerBench(environment, tiny_model(), tmp_path, amid_load=amid_load)


async def load_others(left: LeftServerBench, model: Path) -> None:
    http = ServerHttp(left.address, admin_api_key=left.key)
    await SglangControl(http).update_from_disk(str(model), version="v3.1.4", flush=True)
    await http.close()


def test_a_server_that_was_left_in_the_midst_of_work_is_taken_over_clean(
    leave: Callable[..., LeftServerBench], tiny_model: Callable[..., Path]
) -> None:
    """Paused, with a request in it, and with weights of a load that nobody saw end."""
    left = leave(amid_load=True)

    async def run() -> TakenOver:
        await load_others(left, tiny_model(seed=1))
        http = ServerHttp(left.address, admin_api_key=left.key)
        request = asyncio.create_task(http.call("POST", "/generate", REQUEST, timeout_s=WAIT_S))
        await SglangControl(http).pause(PauseMode.RETRACT, WAIT_S)
        taken = await left.taken()
        await asyncio.gather(request, return_exceptions=True)
        await http.close()
        return taken

    taken = asyncio.run(run())
    assert taken.server is not None, taken.notices
    assert "has taken over its running SGLang server" in taken.notices[0]
    assert not left.processes(), "its new owner has ended it"


def test_a_server_with_other_weights_is_started_anew(
    leave: Callable[..., LeftServerBench], tiny_model: Callable[..., Path]
) -> None:
    """As if somebody else had had it load them."""
    left = leave()
    asyncio.run(load_others(left, tiny_model(seed=1)))
    taken = asyncio.run(left.taken())
    assert taken.server is None
    assert "anew: its weights are not those that it was left with: v3.1.4, checksum" in taken.notices[0]
    assert not left.processes()


@pytest.mark.slow  # another reason of the same look, with a server of its own
def test_requests_of_others_are_a_reason_to_start_anew(
    leave: Callable[..., LeftServerBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = leave()
    monkeypatch.setattr(opening, "IDLE_S", 2.0)

    async def run() -> TakenOver:
        http = ServerHttp(left.address, admin_api_key="")

        async def ask_for_ever() -> None:
            while True:
                await http.call("POST", "/generate", REQUEST, timeout_s=WAIT_S)

        strangers = [asyncio.create_task(ask_for_ever()) for _ in range(4)]
        taken = await left.taken()
        for stranger in strangers:
            stranger.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
        await http.close()
        return taken

    taken = asyncio.run(run())
    assert taken.server is None
    assert "requests that this engine has not sent run on it" in taken.notices[0]
    assert not left.processes()
