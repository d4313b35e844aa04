"""Opens an engine: starts a server for it, or attaches to servers that run already.

Invariants:

* An engine is one endpoint for generation and one or more servers for control: more only behind a router, and then an
  update pauses and loads all of them.
* Servers that are attached to are made clean: what runs is aborted, an update that somebody left open is ended, a pause
  is continued. They are compared with the scenario before.
* What cannot serve is refused here with the reason; a server of ours is ended then.

| waits for | who ends it |
|---|---|
| a server to be ready | the server; ``start_timeout_s`` |
| an answer of a server | its deadline in :mod:`~penstock.backends.engines.served.sglang.control` |
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import secrets
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from penstock.backends.checkpoint.hf_config import HfConfig, read_config
from penstock.backends.engines.run_endpoints import write_endpoint
from penstock.backends.engines.served.sglang.control import NoOpenSession, SglangControl
from penstock.backends.engines.served.sglang.environment import SGLANG_VERSION, find_environment
from penstock.backends.engines.served.sglang.http import SglangError, SglangHttp
from penstock.backends.engines.served.sglang.router import await_router
from penstock.backends.engines.served.sglang.server import SglangServer
from penstock.backends.engines.served.sglang.server_options import command_line, defaults, merged
from penstock.backends.engines.served.sglang.settings import ServerSettings
from penstock.backends.weights.service_messages import Libraries
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from penstock.backends.engines.options import EnginesOptions, OptionValue
    from penstock.backends.engines.served.sglang.control import ServerInfo
    from penstock.backends.processes.remote_ranks import RemoteRanks

ADMIN_KEY_VARIABLE: Final = "PENSTOCK_SGLANG_ADMIN_KEY"
"""Of servers that run already."""
END_TIMEOUT_S: Final = 20.0
NUM_SPARE: Final = 2
"""Places that samples do not get: for the canary, and for the request with which a silent server is tried."""


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What an engine is opened from."""

    name: str
    """Of the actor."""
    place: int
    """Which of its kind it is, counted from 0."""
    model_folder: Path
    run_folder: Path
    options: EnginesOptions
    """As of a run with this kind of engine only."""
    max_context: int
    dtype: str
    sleeps: bool = False
    """It gives its GPU memory up now and then."""
    remote_ranks: RemoteRanks | None = None
    """The other nodes of its placement group, if there are any."""


@dataclass(frozen=True)
class Endpoint:
    """One server."""

    http: SglangHttp
    control: SglangControl
    info: ServerInfo
    libraries: Libraries | None = None
    """Of its environment, when it is ours."""


@dataclass(frozen=True)
class Opened:
    """An engine that is up."""

    generation: SglangHttp
    """To which requests go: the server, or the router."""
    endpoints: tuple[Endpoint, ...]
    server: SglangServer | None
    """When it is ours."""
    remote_ranks: RemoteRanks | None = None
    """The nodes of our server but this one, if it has any."""

    @property
    def num_slots(self) -> int:
        """Requests that run side by side."""
        return sum(endpoint.info.max_running_requests - NUM_SPARE for endpoint in self.endpoints)

    async def close(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Close the connections and end the server, if it is ours."""
        for endpoint in self.endpoints:
            await endpoint.http.close()
        await self.generation.close()
        if self.remote_ranks is not None:
            await self.remote_ranks.stop()
        if self.server is not None:
            await self.server.end(timeout_s)


async def open_engine(setup: EngineSetup, report: Callable[[str], None]) -> Opened:
    """Start or attach.

    Raises:
        UserFault: the environment is not there, or a running server does not fit; the message says what to do.
        ServerStartError: the server did not start.
        SglangError: a running server does not answer.
    """
    if setup.options.addresses:
        return await _attach(setup)
    return await _launch(setup, report)


def launch_options(setup: EngineSetup, *, is_cpu: bool) -> Mapping[str, OptionValue]:
    """Of a server that is started here: what the machine and the scenario's blocks say, and over it its own options."""
    own: dict[str, OptionValue] = {
        "dtype": setup.dtype,
        "context_length": setup.max_context,
        "max_running_requests": setup.options.slots + NUM_SPARE,
        "incremental_streaming_output": True,
    }
    if setup.sleeps and not is_cpu:  # a CPU build has nothing to save, and does not start with it
        own["enable_memory_saver"] = True
    if setup.options.record_experts:
        own["enable_return_routed_experts"] = True
    return merged(defaults(is_cpu=is_cpu), own, setup.options.sglang)


async def _launch(setup: EngineSetup, report: Callable[[str], None]) -> Opened:
    options = setup.options
    environment = find_environment(is_cpu={"cpu": True, "auto": None}.get(options.device, False))
    remote = setup.remote_ranks
    num_nodes, host = (1, "127.0.0.1") if remote is None else (remote.num_nodes, remote.host)
    logs = setup.run_folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    key = secrets.token_hex(16)
    settings = ServerSettings(
        python=environment.python,
        model_folder=setup.model_folder,
        options=tuple(command_line(launch_options(setup, is_cpu=environment.is_cpu))),
        admin_api_key=key,
        log_path=logs / f"{setup.name.replace('/', '-')}-sglang.log",
        start_timeout_s=options.start_timeout_s,
        owner=setup.name,
        on_cpu=environment.is_cpu,
        num_threads=options.num_threads,
        num_nodes=num_nodes,
        dist_init_address=f"{host}:{_free_port(host)}" if num_nodes > 1 or meets_itself(options.sglang) else "",
    )
    server = await SglangServer.launch(settings, report=report)
    if remote is not None and num_nodes > 1:
        await _launch_others(settings, server, remote)
    else:
        remote = None
        await server.wait_ready()
    http = SglangHttp(server.address, admin_api_key=key)
    try:
        endpoint = replace(await _endpoint(http), libraries=libraries_of(environment.python))
        await endpoint.control.freeze_gc()
    except SglangError:
        await http.close()
        await server.end()
        raise
    write_endpoint(setup.run_folder, setup.name, server.address)
    return Opened(http, (endpoint,), server, remote)


async def _launch_others(settings: ServerSettings, server: SglangServer, remote: RemoteRanks) -> None:
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


def meets_itself(options: Mapping[str, OptionValue]) -> bool:
    """With data-parallel attention also a server on one node needs a place to meet: it derives one from its port, which
    is 0."""
    given = merged(options)
    return given.get("enable_dp_attention") is True or (given.get("attn_dp_size") or 1) != 1


def _free_port(host: str) -> int:
    """For the place where a server's nodes meet. Another process may take it first; the start then fails and is tried
    again with another."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


async def _attach(setup: EngineSetup) -> Opened:
    options = setup.options
    key = os.environ.get(ADMIN_KEY_VARIABLE, "")
    addresses = options.addresses if options.router is not None else (options.addresses[setup.place],)
    async with contextlib.AsyncExitStack() as undo:
        endpoints: list[Endpoint] = []
        for address in addresses:
            http = SglangHttp(address, admin_api_key=key)
            undo.push_async_callback(http.close)
            endpoint = await _endpoint(http)
            await _compare(setup, address, endpoint)
            await _clean(endpoint.control)
            endpoints.append(endpoint)
        generation = endpoints[0].http
        if options.router is not None:
            generation = SglangHttp(options.router, admin_api_key=key)
            undo.push_async_callback(generation.close)
            await await_router(generation, addresses, timeout_s=options.start_timeout_s)
        undo.pop_all()
    return Opened(generation, tuple(endpoints), None)


def libraries_of(python: Path) -> Libraries:
    """What is installed beside this interpreter, read off its packages' metadata."""
    folders = [str(folder) for folder in python.parent.parent.glob("lib/python3*/site-packages")]
    versions = {found.name.lower(): found.version for found in importlib.metadata.distributions(path=folders)}
    nccl = next((version for name, version in versions.items() if name.startswith("nvidia-nccl")), "")
    return Libraries(torch=versions.get("torch", ""), nccl=nccl)


async def _endpoint(http: SglangHttp) -> Endpoint:
    control = SglangControl(http)
    return Endpoint(http, control, await control.server_info())


async def _compare(setup: EngineSetup, address: str, endpoint: Endpoint) -> None:
    """The server runs the model of the scenario, in a way that its samples can be trained."""
    info = endpoint.info
    model = await endpoint.control.model_info()
    wanted = read_config(setup.model_folder, HfConfig).architectures
    problems: list[str] = []
    if info.version != SGLANG_VERSION:
        problems.append(f"it is SGLang {info.version}, and Penstock speaks to {SGLANG_VERSION}")
    if wanted != model.architectures:
        problems.append(f"it runs {', '.join(model.architectures)}, and the scenario's model is {', '.join(wanted)}")
    if info.dtype != setup.dtype:
        problems.append(f"its --dtype is {info.dtype}, and model.dtype is {setup.dtype}")
    if info.context_length is not None and info.context_length < setup.max_context:
        problems.append(f"its --context-length is {info.context_length}, and model.max_context {setup.max_context}")
    if info.skips_tokenizer:
        problems.append("it was started with --skip-tokenizer-init, so it cannot find stop strings")
    if model.preferred_sampling:
        problems.append("it has --preferred-sampling-params of its own, and the scenario's block sampling: counts")
    if problems:
        raise UserFault(f"engines.addresses: the server at {address} does not fit: {'; '.join(problems)}")


async def _clean(control: SglangControl) -> None:
    await control.abort_all()
    with contextlib.suppress(NoOpenSession):
        await control.end_update()
    await control.continue_()
