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
| requests that a server was left with to be aborted | the server; ``IDLE_S`` |
| an answer of a server | its deadline in :mod:`~penstock.backends.engines.served.sglang.control` |
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.backends.checkpoint.hf_config import HfConfig, read_config
from penstock.backends.engines.run_endpoints import attached_address, write_endpoint
from penstock.backends.engines.served.base.hand_over import NotHandedOverError
from penstock.backends.engines.served.base.http import CallError, ServerHttp
from penstock.backends.engines.served.base.opened import Opened, free_port, launch, libraries_of, shape_of
from penstock.backends.engines.served.base.taking_over import NOTHING_TAKEN, take_over
from penstock.backends.engines.served.base.updates import checksum_of
from penstock.backends.engines.served.expectation import read_table
from penstock.backends.engines.served.sglang import adapters
from penstock.backends.engines.served.sglang.control import CacheNotFlushed, NoOpenSession, SglangControl
from penstock.backends.engines.served.sglang.endpoint import IDLE_S, SglangEndpoint
from penstock.backends.engines.served.sglang.environment import SGLANG_VERSION, find_environment
from penstock.backends.engines.served.sglang.generate import SglangGenerator
from penstock.backends.engines.served.sglang.media_fetch import MediaFetcher
from penstock.backends.engines.served.sglang.profile import ServerProfile
from penstock.backends.engines.served.sglang.router import await_router
from penstock.backends.engines.served.sglang.server_options import command_line, defaults, merged
from penstock.backends.engines.served.sglang.settings import SglangSettings
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from penstock.backends.engines.options import OptionValue
    from penstock.backends.engines.served.base.launched import LaunchedServer
    from penstock.backends.engines.served.base.taking_over import LeftWeights
    from penstock.backends.engines.served.sglang.server_facts import ServerInfo
    from penstock.backends.engines.spec import EngineSetup

ADMIN_KEY_VARIABLE: Final = "PENSTOCK_SGLANG_ADMIN_KEY"
"""Environment variable with the admin key of servers that run already."""
NUM_SPARE: Final = 2
"""Places that samples do not get: for the canary, and for the request with which a silent server is tried."""
LINGER_S: Final = 60.0
"""For a replaced EngineWorker to come back: a pause, a process, its imports."""
OF_OTHERS: Final = "requests that this engine has not sent run on it"
TRIAL_S: Final = 30.0
"""For one token from a server that was left."""
PASSES_PER_LINE: Final = 10
"""Decode passes from one line about them in a server's log to the next: so few that often enough nobody comes between,
also where the engine is full; so many that what a line costs the server, 0.3 ms of a core, is little beside them."""
ROUTER_S: Final = 60.0
"""For a router to find every server healthy after a swap."""


async def open_engine(setup: EngineSetup, report: Callable[[str], None]) -> Opened[SglangEndpoint]:
    """Start or attach.

    Raises:
        UserFault: the environment is not there, or a running server does not fit; the message says what to do.
        ServerStartError: the server did not start.
        CallError: a running server does not answer.
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
        "decode_log_interval": PASSES_PER_LINE,
    }
    if setup.sleeps and not is_cpu:  # a CPU build has nothing to save, and does not start with it
        own["enable_memory_saver"] = True
    if setup.lora is not None:
        own |= adapters.launch_options(setup.lora, read_table(setup.model_folder), is_cpu=is_cpu)
    if setup.options.record_experts:
        own["enable_return_routed_experts"] = True
    return merged(defaults(is_cpu=is_cpu), own, setup.options.sglang)


async def _launch(setup: EngineSetup, report: Callable[[str], None]) -> Opened[SglangEndpoint]:
    options = setup.options
    environment = find_environment(is_cpu={"cpu": True, "auto": None}.get(options.device, False))
    remote = setup.remote_ranks if setup.remote_ranks is not None and setup.remote_ranks.num_nodes > 1 else None
    num_nodes, host = (1, "127.0.0.1") if remote is None else (remote.num_nodes, remote.host)
    given = launch_options(setup, is_cpu=environment.is_cpu)
    settings = SglangSettings(
        python=environment.python,
        model_folder=setup.model_folder,
        options=tuple(command_line(given)),
        admin_api_key=secrets.token_hex(16),
        log_path=setup.log_path("sglang"),
        start_timeout_s=options.start_timeout_s,
        owner=setup.name,
        on_cpu=environment.is_cpu,
        num_threads=options.num_threads,
        num_nodes=num_nodes,
        dist_init_address=f"{host}:{free_port(host)}" if num_nodes > 1 or meets_itself(options.sglang) else "",
    )
    if _can_be_left(setup, settings):
        settings = replace(settings, linger_s=LINGER_S)
    taken = await take_over(settings, look_at) if setup.takes_over and settings.linger_s else NOTHING_TAKEN
    server = taken.server or await launch(settings, remote, report)
    http = ServerHttp(server.address, admin_api_key=server.settings.admin_api_key)
    try:
        endpoint = replace(await _endpoint(setup, http), libraries=libraries_of(environment.python))
        if taken.server is None:
            await endpoint.control.freeze_gc()
        opened = _opened(setup, (endpoint,), None)
    except CallError:
        await http.close()
        await server.end()
        raise
    write_endpoint(setup.run_folder, setup.name, server.address)
    per_line = passes_per_line(given, endpoint.info)
    return replace(opened, server=server, passes_per_line=per_line, remote_ranks=remote, notices=taken.notices)


def passes_per_line(given: Mapping[str, OptionValue], info: ServerInfo) -> int:
    """As of :class:`.Opened`. Where ranks or stages decode batches of their own, a line tells of one of these."""
    interval = given["decode_log_interval"]
    return interval if isinstance(interval, int) and info.dp_size == info.pp_size == 1 else 0


def _can_be_left(setup: EngineSetup, settings: SglangSettings) -> bool:
    """Whether a successor could go on with the server: all of it is on this node, it holds nothing that only its
    EngineWorker knows of, and its memory is not wanted by the learner meanwhile."""
    return not (setup.sleeps or setup.lora is not None or settings.dist_init_address)


async def look_at(server: LaunchedServer, left: LeftWeights | None) -> None:
    """Make a server clean that was left, and see that it serves what it did, to nobody else. Of one that was left amid
    a load no checksum is asked, which takes a pass over all weights: there is nothing to compare it with.

    Raises:
        NotHandedOverError: it does not.
        CallError: it does not answer.
    """
    http = ServerHttp(server.address, admin_api_key=server.settings.admin_api_key)
    try:
        control = SglangControl(http)
        await _clean(control)
        try:
            await control.flush_cache(IDLE_S)
        except CacheNotFlushed:
            raise NotHandedOverError(f"{OF_OTHERS}, {IDLE_S:g} s after all were aborted") from None
        if left is not None:
            await _compare(control, left)
        await control.try_request(f"taken-over-{secrets.token_hex(4)}", TRIAL_S)
        loads = await control.loads()
        if num_others := loads.num_running + loads.num_queued:
            raise NotHandedOverError(f"{OF_OTHERS}: {num_others}")
    finally:
        await http.close()


async def _compare(control: SglangControl, left: LeftWeights) -> None:
    version = (await control.server_info()).weight_version
    found = checksum_of([(await control.weights_checksum()).overall])
    if (version, found) != (left.label, left.checksum):
        raise NotHandedOverError(
            f"its weights are not those that it was left with: {version}, checksum {found[:12]}, and not "
            f"{left.label}, {left.checksum[:12]}"
        )


def meets_itself(options: Mapping[str, OptionValue]) -> bool:
    """With data-parallel attention also a server on one node needs a place to meet: it derives one from its port, which
    is 0."""
    given = merged(options)
    return given.get("enable_dp_attention") is True or (given.get("attn_dp_size") or 1) != 1


async def _attach(setup: EngineSetup) -> Opened[SglangEndpoint]:
    options = setup.options
    key = os.environ.get(ADMIN_KEY_VARIABLE, "")
    addresses = options.addresses
    if options.router is None:
        addresses = (attached_address(setup.run_folder, setup.name, addresses, setup.place),)
    async with contextlib.AsyncExitStack() as undo:
        endpoints: list[SglangEndpoint] = []
        for address in addresses:
            http = ServerHttp(address, admin_api_key=key)
            undo.push_async_callback(http.close)
            endpoint = await _endpoint(setup, http)
            if problems := await misfits(
                endpoint, setup.model_folder, dtype=setup.dtype, max_context=setup.max_context
            ):
                raise UserFault(f"engines.addresses: the server at {address} does not fit: {'; '.join(problems)}")
            await _clean(endpoint.control)
            endpoints.append(endpoint)
        router = None
        if options.router is not None:
            router = ServerHttp(options.router, admin_api_key=key)
            undo.push_async_callback(router.close)
            await await_router(router, addresses, timeout_s=options.start_timeout_s)
        opened = _opened(setup, tuple(endpoints), router)
        undo.pop_all()
    return opened


def _opened(
    setup: EngineSetup, endpoints: tuple[SglangEndpoint, ...], router: ServerHttp | None
) -> Opened[SglangEndpoint]:
    info, options = endpoints[0].info, setup.options
    vocab_size = shape_of(setup.model_folder).vocab_size
    num_slots = min(options.slots, sum(endpoint.info.max_running_requests - NUM_SPARE for endpoint in endpoints))

    def generator_of(http: ServerHttp) -> SglangGenerator:
        return SglangGenerator(
            http,
            vocab_size=vocab_size,
            incremental=info.incremental_streaming,
            stream_interval=options.progress_tokens,
            seeded=info.deterministic,
            priorities=info.priority_scheduling,
            abort_at=[endpoint.http for endpoint in endpoints],
            fetcher=None if setup.data is None else MediaFetcher(setup.data),
        )

    scorers = tuple(generator_of(endpoint.http) for endpoint in endpoints)
    after_swap = None if router is None else partial(await_router, router, options.addresses, timeout_s=ROUTER_S)
    return Opened(
        endpoints=endpoints,
        generator=scorers[0] if router is None else generator_of(router),
        scorers=scorers,
        num_slots=num_slots,
        is_seeded=info.deterministic,
        has_priorities=info.priority_scheduling,
        after_swap=after_swap,
        on_version=None if options.profile is None else ServerProfile(setup, endpoints).serve,
    )


async def _endpoint(setup: EngineSetup, http: ServerHttp) -> SglangEndpoint:
    control = SglangControl(http)
    return SglangEndpoint(http, control, await control.server_info(), shape_of(setup.model_folder).num_kv_heads)


async def misfits(endpoint: SglangEndpoint, model_folder: Path, *, dtype: str, max_context: int) -> list[str]:
    """Why a server does not run the model of the scenario in a way that its samples can be trained."""
    info = endpoint.info
    model = await endpoint.control.model_info()
    wanted = read_config(model_folder, HfConfig).architectures
    problems: list[str] = []
    if info.version != SGLANG_VERSION:
        problems.append(f"it is SGLang {info.version}, and Penstock speaks to {SGLANG_VERSION}")
    if wanted != model.architectures:
        problems.append(f"it runs {', '.join(model.architectures)}, and the scenario's model is {', '.join(wanted)}")
    if info.dtype != dtype:
        problems.append(f"its --dtype is {info.dtype}, and model.dtype is {dtype}")
    if info.context_length is not None and info.context_length < max_context:
        problems.append(f"its --context-length is {info.context_length}, and model.max_context {max_context}")
    if info.skips_tokenizer:
        problems.append("it was started with --skip-tokenizer-init, so it cannot find stop strings")
    if model.preferred_sampling:
        problems.append("it has --preferred-sampling-params of its own, and the scenario's block sampling: counts")
    return problems


async def _clean(control: SglangControl) -> None:
    await control.abort_all()
    with contextlib.suppress(NoOpenSession):
        await control.end_update()
    await control.continue_()
