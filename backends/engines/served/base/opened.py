"""The start of an engine's server where that is ours, and what an engine is once it is up.

| waits for | who ends it |
|---|---|
| a server to be ready | the server; ``start_timeout_s`` |
"""

from __future__ import annotations

import importlib.metadata
import socket
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final, Generic, NamedTuple

from penstock.backends.checkpoint.hf_config import CONFIG_FILE, HfConfig, need, read_config
from penstock.backends.engines.served.base.dialect import EndpointT
from penstock.backends.engines.served.base.launched import LaunchedServer
from penstock.backends.engines.served.base.taking_over import LeftServer
from penstock.backends.weights.service_messages import Libraries

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from penstock.backends.engines.served.base.generator import Generator
    from penstock.backends.engines.served.base.settings import ServerSettings
    from penstock.backends.engines.served.base.taking_over import LeftWeights
    from penstock.backends.processes.remote_ranks import RemoteRanks

END_TIMEOUT_S: Final = 20.0


class ModelShape(NamedTuple):
    """What of the model is needed here."""

    vocab_size: int
    """Rows of the embedding."""
    num_kv_heads: int


@dataclass(frozen=True, kw_only=True)
class Opened(Generic[EndpointT]):
    """An engine that is up: one endpoint for generation and one or more servers for control."""

    endpoints: tuple[EndpointT, ...]
    generator: Generator
    """Of the server, or of the router before several."""
    scorers: tuple[Generator, ...]
    """Of each server."""
    num_slots: int
    """Requests of samples that run side by side."""
    is_seeded: bool = False
    """A request's seed is heeded."""
    has_priorities: bool = False
    server: LaunchedServer | None = None
    """The server process, when it is ours."""
    passes_per_line: int = 0
    """Of our server: decode passes from one line about them in its log to the next; 0: it tells nothing of use."""
    remote_ranks: RemoteRanks | None = None
    """The nodes of our server but this one, if it has any."""
    after_swap: Callable[[], Awaitable[None]] | None = None
    """What is waited for before requests are let in again under new weights."""
    on_version: Callable[[int], Awaitable[None]] | None = None
    """Told of the version that is served from then on, likewise."""
    notices: tuple[str, ...] = ()
    """What people should know of how it came up."""

    def keep(self, weights: LeftWeights | None) -> None:
        """Of a server of ours: the weights that a successor of this process finds in it; None while it loads others."""
        if self.server is not None:
            self.server.keep(LeftServer(port=self.server.port, weights=weights).text())

    def be_last(self) -> None:
        """Of a server of ours: it ends with this process, and waits for no successor."""
        if self.server is not None:
            self.server.be_last()

    async def close(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Close the connections and end the server, if it is ours."""
        for endpoint in self.endpoints:
            await endpoint.close()
        await self.generator.http.close()
        if self.remote_ranks is not None:
            await self.remote_ranks.stop()
        if self.server is not None:
            await self.server.end(timeout_s)


async def launch(settings: ServerSettings, remote: RemoteRanks | None, report: Callable[[str], None]) -> LaunchedServer:
    """Start a server, on other nodes as well where it has any, and wait until it is ready.

    Raises:
        UserFault: the interpreter or the model is not there.
        ServerStartError: it did not start.
    """
    server = await LaunchedServer.launch(settings, report=report)
    if remote is not None:
        await _launch_others(settings, server, remote)
    else:
        await server.wait_ready()
    return server


async def _launch_others(settings: ServerSettings, server: LaunchedServer, remote: RemoteRanks) -> None:
    """Start the server's processes on the other nodes and wait until all of it is ready."""
    key_path = settings.log_path.with_suffix(".key.yaml")  # in the run's folder, which every node sees
    key_path.unlink(missing_ok=True)
    key_path.touch(mode=0o600, exist_ok=False)
    key_path.write_text(settings.key_file_text(), encoding="utf-8")
    try:
        for rank in range(1, settings.num_nodes):
            other = replace(settings, node_rank=rank)
            log_path = settings.log_path.with_suffix(f".node-{rank}.log")
            await remote.start(
                rank, other.command(key_path), other.environment_of({}, f"{settings.owner}-{rank}"), str(log_path)
            )
        await server.wait_ready()
    except BaseException:
        await remote.stop()
        await server.end()
        raise
    finally:
        key_path.unlink(missing_ok=True)


def free_port(host: str) -> int:
    """For the place where a server's nodes meet. Another process may take it first; the start then fails and is tried
    again with another."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def libraries_of(python: Path) -> Libraries:
    """What is installed beside this interpreter, read off its packages' metadata."""
    folders = [str(folder) for folder in python.parent.parent.glob("lib/python3*/site-packages")]
    versions = {found.name.lower(): found.version for found in importlib.metadata.distributions(path=folders)}
    nccl = next((version for name, version in versions.items() if name.startswith("nvidia-nccl")), "")
    return Libraries(torch=versions.get("torch", ""), nccl=nccl)


@cache
def shape_of(model_folder: Path) -> ModelShape:
    """What the checkpoint's configuration says, read once: while a process serves a model its folder does not change.

    Raises:
        UserFault: it does not say it.
    """
    config = read_config(model_folder, HfConfig)
    need(config, str(model_folder / CONFIG_FILE), "vocab_size", "num_attention_heads")
    return ModelShape(config.vocab_size, config.num_kv_heads)
