"""A reward model on a stock SGLang server, which is started with ``--is-embedding`` and asked at ``/classify``.

SGLang's classes for Qwen2 and Qwen3 give the head a bias that stock checkpoints do not have, and leave it as it was
drawn at the start of the process (seen on SGLang 0.5.23): every server would add a number of its own to all scores.
Such a server gets a folder of links to the checkpoint's files, with a bias of 0 beside them.
"""

# safetensors is typed in part only:
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import json
import secrets
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from penstock.backends.checkpoint.hf_config import HfConfig, read_config
from penstock.backends.engines.served.base.http import BadReply, Refused, ServerHttp
from penstock.backends.engines.served.base.opened import launch
from penstock.backends.engines.served.base.reward_model import RewardModelBackend, UnscorableTextError
from penstock.backends.engines.served.sglang.environment import find_environment
from penstock.backends.engines.served.sglang.server_options import command_line, defaults, merged
from penstock.backends.engines.served.sglang.settings import SglangSettings
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.engines.served.base.launched import LaunchedServer
    from penstock.backends.engines.spec import RewardModelContext

BIASED: Final = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
SERVED: Final = (*BIASED, "LlamaForSequenceClassification", "Gemma2ForSequenceClassification")
"""Architectures with one score that the pinned server knows."""
BIAS: Final = "score.bias"
BIAS_FILE: Final = "zero-bias.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
NUM_EXTRA_TOKENS: Final = 8
"""As of a teacher's server: none takes a prompt that fills all of its context."""


class ServerLostError(RuntimeError):
    """The server of a reward model has ended; the message is its story."""


class _Scored(msgspec.Struct):
    embedding: list[float]


def open_sglang_reward_model(context: RewardModelContext) -> RewardModelBackend:
    """
    Raises:
        UserFault: the pinned server does not know the model.
    """
    config = read_config(context.model_folder, HfConfig)
    if not set(config.architectures) & set(SERVED):
        raise UserFault(
            f"reward_model.backend: SGLang scores with {', '.join(SERVED)}, and {context.model_folder} is "
            f"{', '.join(config.architectures)}; set it to torch"
        )
    known = config.max_position_embeddings
    limit = context.options.max_context or (known - NUM_EXTRA_TOKENS if known else None)
    return RewardModelBackend(context, SglangScorer(context, limit), limit)


class SglangScorer:
    """A :class:`~penstock.backends.engines.served.base.reward_model.TokenScorer`; the server batches by itself."""

    def __init__(self, context: RewardModelContext, limit: int | None) -> None:
        self._context, self._limit = context, limit
        self._server: LaunchedServer | None = None
        self._places = asyncio.Semaphore(context.options.slots)

    async def open(self) -> None:
        """See the protocol."""
        context, options = self._context, self._context.options
        environment = find_environment(is_cpu={"cpu": True, "auto": None}.get(options.device, False))
        own = {"dtype": options.dtype, "max_running_requests": options.slots, "is_embedding": True}
        if self._limit is not None:
            own["context_length"] = self._limit + NUM_EXTRA_TOKENS
        key, name = secrets.token_hex(16), context.name.replace("/", "-")
        logs = context.run_folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        settings = SglangSettings(
            python=environment.python,
            model_folder=without_bias(context.model_folder, context.run_folder / "reward_model" / name),
            options=tuple(command_line(merged(defaults(is_cpu=environment.is_cpu), own, options.sglang))),
            admin_api_key=key,
            log_path=logs / f"{name}-sglang.log",
            start_timeout_s=options.start_timeout_s,
            owner=context.name,
            on_cpu=environment.is_cpu,
            num_threads=options.num_threads,
        )
        self._server = await launch(settings, None, lambda _news: None)
        self._http = ServerHttp(self._server.address, admin_api_key=key)

    async def watch(self) -> None:
        """See the protocol."""
        assert self._server is not None, "it has opened"
        end = await asyncio.shield(self._server.ended)
        if not end.was_asked:
            raise ServerLostError(end.story)

    async def score(self, ids: list[int]) -> float:
        """See the protocol."""
        body = msgspec.json.encode({"input_ids": ids})
        try:
            async with self._places:
                reply = await self._http.call("POST", "/classify", body, timeout_s=self._context.options.timeout_s)
        except Refused as error:
            raise UnscorableTextError(str(error)) from None
        try:
            found = msgspec.json.decode(reply, type=_Scored).embedding
        except UNREADABLE as error:
            raise BadReply(f"/classify: {error}") from None
        if len(found) != 1:
            raise BadReply(f"/classify gives {len(found)} numbers; a reward model has one")
        return found[0]

    async def close(self, timeout_s: float) -> None:
        """See the protocol."""
        if self._server is not None:
            await self._http.close()
            await self._server.end(timeout_s)


def without_bias(folder: Path, own: Path) -> Path:
    """The folder to serve: this one, or one of links to its files with a head that adds nothing."""
    files = sorted(folder.glob("*.safetensors"))
    if not set(read_config(folder, HfConfig).architectures) & set(BIASED) or any(
        BIAS in _names(file) for file in files
    ):
        return folder
    own.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        (own / file.name).unlink(missing_ok=True)
        (own / file.name).symlink_to(file.resolve())
    save_file({BIAS: np.zeros(1, np.float32)}, own / BIAS_FILE)
    if (index := own / INDEX_FILE).exists():  # the server passes over files that it does not name
        content = json.loads(index.read_text())
        content["weight_map"][BIAS] = BIAS_FILE
        index.unlink()
        index.write_text(json.dumps(content))
    return own


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="numpy") as opened:
        return list(opened.keys())
