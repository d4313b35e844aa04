"""A teacher on a stock SGLang server, which is started or runs already.

A server that runs already is asked and otherwise left alone: nobody knows who else uses it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from penstock.backends.checkpoint.hf_config import HfConfig, read_config
from penstock.backends.engines.options import EnginesOptions
from penstock.backends.engines.served.base.http import ServerHttp
from penstock.backends.engines.served.base.opened import Opened, shape_of
from penstock.backends.engines.served.base.teacher import ServedTeacherBackend
from penstock.backends.engines.served.sglang.control import SglangControl
from penstock.backends.engines.served.sglang.endpoint import SglangEndpoint
from penstock.backends.engines.served.sglang.generate import SglangGenerator
from penstock.backends.engines.served.sglang.opening import ADMIN_KEY_VARIABLE, open_engine
from penstock.backends.engines.spec import EngineSetup
from penstock.backends.engines.teacher_options import check_num_top
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.engines.spec import TeacherContext
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import TeacherCommand

NUM_EXTRA_TOKENS: Final = 8
"""Of context beyond the longest sample: a server takes no prompt that fills all of its own, six less at most."""


def open_sglang_teacher(context: TeacherContext) -> Backend[TeacherCommand]:
    """A teacher on a server, which is started or reached by its ``OpenEngine``. The model of one that runs already has
    the same configuration as that in our folder.

    Raises:
        UserFault: the folder does not say how large the vocabulary is, or it is smaller than ``top_logprobs``.
    """
    options = context.options
    check_num_top(options.top_logprobs, shape_of(context.model_folder).vocab_size)
    setup = EngineSetup(
        name=context.name,
        place=context.index,
        model_folder=context.model_folder,
        run_folder=context.run_folder,
        options=EnginesOptions(
            backend="sglang",
            slots=options.slots,
            device=options.device,
            num_threads=options.num_threads,
            sglang=options.sglang,
            start_timeout_s=options.start_timeout_s,
        ),
        max_context=context.max_context + NUM_EXTRA_TOKENS,
        dtype=options.model.dtype,
        data=None,
    )

    async def open_server() -> Opened[SglangEndpoint]:
        if options.addresses:
            return await _attach(setup, options.addresses[context.index])
        return await open_engine(setup, lambda _news: None)

    return ServedTeacherBackend(
        open_server, num_slots=options.slots, timeout_s=options.timeout_s, num_top=options.top_logprobs
    )


async def _attach(setup: EngineSetup, address: str) -> Opened[SglangEndpoint]:
    http = ServerHttp(address, admin_api_key=os.environ.get(ADMIN_KEY_VARIABLE, ""))
    control = SglangControl(http)
    try:
        info = await control.server_info()
        wanted = setup.max_context - NUM_EXTRA_TOKENS
        if info.max_request_tokens < wanted:
            raise UserFault(
                f"teacher.addresses: the server at {address} takes prompts of {info.max_request_tokens} tokens, "
                f"and model.max_context is {wanted}; start it with a larger --context-length"
            )
    except BaseException:
        await http.close()
        raise
    shape = shape_of(setup.model_folder)
    generator = SglangGenerator(http, vocab_size=shape.vocab_size, incremental=info.incremental_streaming)
    return Opened(
        endpoints=(SglangEndpoint(http, control, info, shape.num_kv_heads),),
        generator=generator,
        scorers=(generator,),
        num_slots=setup.options.slots,
    )


def longest_sample(model_folder: Path) -> int | None:
    """Tokens of the longest sample that a server of ours can be asked about; None where the model does not say."""
    limit = read_config(model_folder, HfConfig).max_position_embeddings
    return limit - NUM_EXTRA_TOKENS if limit else None
