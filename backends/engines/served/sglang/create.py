"""From a scenario's options to an engine of SGLang servers; what cannot be served is refused before any is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.engines.served.base.create import served_engine, served_folder
from penstock.backends.engines.served.expectation import expect_model
from penstock.backends.engines.served.sglang.loading import ServerStaging
from penstock.backends.engines.served.sglang.opening import open_engine
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.engines.served.base.opened import Opened
    from penstock.backends.engines.served.sglang.endpoint import SglangEndpoint
    from penstock.backends.engines.spec import EngineContext, EngineSetup
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import EngineCommand


def open_sglang_engine(context: EngineContext) -> Backend[EngineCommand]:
    """An engine of SGLang servers, not started yet.

    Raises:
        UserFault: the model folder lacks what is needed; the message says which.
    """
    folder = served_folder(context)
    staging = ServerStaging(
        engine=context.name,
        model_folder=folder,
        folder=context.run_folder / "weights" / f"staged-{context.name.replace('/', '-')}",
        expected=expect_model(folder),
        bucket_size_bytes=context.bucket_size_bytes,
    )
    return served_engine(context, _open, staging)


async def _open(setup: EngineSetup, report: Callable[[str], None]) -> Opened[SglangEndpoint]:
    opened = await open_engine(setup, report)
    if opened.num_slots < 1:
        await opened.close()
        raise UserFault("the server's --max-running-requests is too small; it must be at least 3")
    return opened
