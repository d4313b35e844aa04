"""A stock server for the length of a test, with an event loop of its own so that plain tests can use it."""

from __future__ import annotations

import asyncio
import secrets
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from penstock.backends.engines.served.base.launched import LaunchedServer
from penstock.backends.engines.served.sglang.server_options import command_line, defaults, merged
from penstock.backends.engines.served.sglang.settings import SglangSettings

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Mapping
    from pathlib import Path

    from penstock.backends.engines.options import OptionValue
    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

Result = TypeVar("Result")

START_TIMEOUT_S: Final = 300.0
"""Some 30 seconds of one core, on a machine that may have other work."""
SMALL: Final[dict[str, OptionValue]] = {
    "dtype": "float32", "mem_fraction_static": 0.2, "max_total_tokens": 16384, "max_running_requests": 16,
}  # fmt: skip


class RunningServer(NamedTuple):
    """A server that is ready."""

    address: str
    """``http://127.0.0.1:PORT``."""
    admin_api_key: str
    model_folder: Path
    handle: LaunchedServer


def settings_for(
    environment: SglangEnvironment, model_folder: Path, log_folder: Path, options: dict[str, OptionValue] | None = None
) -> SglangSettings:
    """How the tests launch a server: small, in float32, with ``options`` over that."""
    return SglangSettings(
        python=environment.python,
        model_folder=model_folder,
        options=tuple(command_line(merged(defaults(is_cpu=True), SMALL, options or {}))),
        admin_api_key=secrets.token_hex(16),
        log_path=log_folder / "server.log",
        start_timeout_s=START_TIMEOUT_S,
        on_cpu=True,
    )


@contextmanager
def run_server(
    environment: SglangEnvironment,
    model_folder: Path,
    log_folder: Path,
    *,
    owner: str = "",
    admin_api_key: str = "",
    variables: Mapping[str, str] | None = None,
) -> Generator[RunningServer]:
    """Start a server, of an actor of this name, and end it with all its processes."""
    settings = replace(settings_for(environment, model_folder, log_folder), owner=owner)
    if variables:
        settings = replace(settings, environment=variables)
    if admin_api_key:
        settings = replace(settings, admin_api_key=admin_api_key)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server-loop", daemon=True)
    thread.start()

    def wait_for(work: Coroutine[None, None, Result], timeout_s: float) -> Result:
        return asyncio.run_coroutine_threadsafe(work, loop).result(timeout_s)

    try:
        handle = wait_for(LaunchedServer.launch(settings), START_TIMEOUT_S)
        try:
            wait_for(handle.wait_ready(), START_TIMEOUT_S + 60)
            yield RunningServer(handle.address, settings.admin_api_key, model_folder, handle)
        finally:
            assert wait_for(handle.end(), 60) == []
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=60)
        loop.close()
