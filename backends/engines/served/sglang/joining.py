"""A server that runs already, looked at before it joins a run that goes on.

| waits for | who ends it |
|---|---|
| an answer of the server | its deadline in :mod:`~penstock.backends.engines.served.sglang.control` |
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from penstock.backends.checkpoint.hf_config import CONFIG_FILE, DecoderConfig, read_config
from penstock.backends.engines.served.base.http import CallError, ServerHttp
from penstock.backends.engines.served.base.opened import shape_of
from penstock.backends.engines.served.sglang.control import SglangControl
from penstock.backends.engines.served.sglang.endpoint import SglangEndpoint
from penstock.backends.engines.served.sglang.opening import ADMIN_KEY_VARIABLE, misfits
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted


def check_joining(address: str, model_folder: Path, *, dtype: str, max_context: int) -> None:
    """See whether it is a SGLang server that serves this model, and nobody.

    Args:
        address: of the server.
        model_folder: of the run's model.
        dtype: in which the run's engines compute.
        max_context: tokens of the longest sample.

    Raises:
        UserFault: it is not; the message says what does not fit.
    """
    try:
        problems = asyncio.run(_problems(address, model_folder, dtype, max_context))
    except CallError as error:
        raise UserFault(
            f"{address} does not answer as a SGLang server does ({error}); is it the server's address, and is "
            f"{ADMIN_KEY_VARIABLE} set to its admin key, if it has one?"
        ) from None
    if problems:
        raise UserFault(f"the server at {address} cannot join: {'; '.join(problems)}")


async def _problems(address: str, model_folder: Path, dtype: str, max_context: int) -> list[str]:
    http = ServerHttp(address, admin_api_key=os.environ.get(ADMIN_KEY_VARIABLE, ""))
    try:
        control = SglangControl(http)
        endpoint = SglangEndpoint(http, control, await control.server_info(), shape_of(model_folder).num_kv_heads)
        problems = await misfits(endpoint, model_folder, dtype=dtype, max_context=max_context)
        own = Path((await control.model_info()).model_path)
        if not problems and (own / CONFIG_FILE).is_file() and _size_of(own) != _size_of(model_folder):
            problems.append(f"its model, {own}, has other sizes than the run's, {model_folder}")
        loads = await control.loads()
        if num_others := loads.num_running + loads.num_queued:
            what = counted(num_others, "request")
            problems.append(f"it has {what} of others, which would be aborted; end them first")
        return problems
    finally:
        await http.close()


def _size_of(folder: Path) -> tuple[int, ...]:
    """What a server's weights of another model would differ in, at which its loading ends it."""
    config = read_config(folder, DecoderConfig)
    return config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads
