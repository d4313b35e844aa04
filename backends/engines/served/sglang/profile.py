"""The profile of SGLang servers, by their own profiler.

Every wait is for a server's answer, and ends with the call's own deadline.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.served.base.http import CallError
from penstock.backends.profiling import NO_SNAPSHOT, PROFILE_FOLDER

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from penstock.backends.engines.served.sglang.endpoint import SglangEndpoint
    from penstock.backends.engines.spec import EngineSetup

CPU: Final = "cpu"
_log: Final = logging.getLogger(__name__)


def activities_of(device: str, *, memory: bool) -> tuple[str, ...]:
    """What a server is asked to profile, in its own words; with ``memory`` it writes a snapshot of CUDA's allocator
    beside the trace of each rank."""
    if device == CPU:
        return ("CPU",)
    return ("CPU", "GPU", *(("MEM",) if memory else ()))


class ServerProfile:
    """Of the servers of one engine."""

    def __init__(self, setup: EngineSetup, endpoints: Sequence[SglangEndpoint]) -> None:
        self._setup = setup
        self._endpoints = endpoints
        self._is_running = False
        options = setup.options.profile
        if options is not None and options.memory and any(each.info.device == CPU for each in endpoints):
            _log.info("engines.profile: %s", NO_SNAPSHOT)

    async def serve(self, version: int) -> None:
        """Tokens are of this version from here on. A profile that a server refuses is said, and ends nothing."""
        options = self._setup.options.profile
        if options is None:
            return
        if self._is_running:
            self._is_running = False
            # One that has had all its passes has ended by itself, and there is nothing to be stopped.
            await self._each([endpoint.control.stop_profile() for endpoint in self._endpoints], level=logging.INFO)
        if not options.takes(version):
            return
        name = f"{self._setup.name.replace('/', '-')}-step-{version + 1:07d}"
        folder = (self._setup.run_folder / PROFILE_FOLDER / name).absolute()
        self._is_running = True
        await self._each([
            endpoint.control.start_profile(
                str(folder),
                num_passes=options.max_passes,
                activities=activities_of(endpoint.info.device, memory=options.memory),
                stacks=options.stacks,
            )
            for endpoint in self._endpoints
        ], level=logging.WARNING)  # fmt: skip

    async def _each(self, calls: Sequence[Coroutine[None, None, None]], *, level: int) -> None:
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, CallError):
                _log.log(level, "engines.profile: the server's profiler says: %s", answer)
            elif isinstance(answer, BaseException):
                raise answer
