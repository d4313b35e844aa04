"""The embedded reward model: transformers' class for sequence classification, several texts in one pass.

Invariants:

* One pass at a time, on a thread of its own; what has come meanwhile goes into the next ones, in order.
* A score does not depend on what else is in the pass: padding is on the right and behind a mask, and the token that
  pads is never the last one of a text, which is where transformers looks for the end.
"""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.backends.checkpoint.hf_config import HfConfig, read_config
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.devices import choose_device
from penstock.backends.engines.served.base.reward_model import RewardModelBackend
from penstock.backends.engines.torch.factory import DTYPES
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.backends.engines.reward_model_options import RewardModelOptions
    from penstock.backends.engines.spec import RewardModelContext


def open_torch_reward_model(context: RewardModelContext) -> RewardModelBackend:
    """
    Raises:
        UserFault: the device does not exist, or the configuration cannot be read.
    """
    options = context.options
    device = choose_device(options.device, "reward_model.device")
    limit = options.max_context or read_config(context.model_folder, HfConfig).max_position_embeddings or None
    return RewardModelBackend(context, TorchScorer(context.model_folder, options, device), limit)


class _Waiting(NamedTuple):
    ids: list[int]
    score: asyncio.Future[float]


class TorchScorer:
    """A :class:`~penstock.backends.engines.served.base.reward_model.TokenScorer`."""

    def __init__(self, folder: Path, options: RewardModelOptions, device: torch.device) -> None:
        self._folder, self._options, self._device = folder, options, device
        self._thread = ThreadPoolExecutor(1, "reward-model-pass")
        self._waiting: deque[_Waiting] = deque()
        self._passes: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """See the protocol."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def watch(self) -> None:
        """See the protocol."""

    async def score(self, ids: list[int]) -> float:
        """See the protocol."""
        waiting = _Waiting(ids, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._passes is None:
            self._passes = asyncio.create_task(self._work())
        return await waiting.score

    async def close(self, timeout_s: float) -> None:
        """See the protocol."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        try:
            while batch := self._next():
                try:
                    texts = [each.ids for each in batch]
                    scores = await asyncio.get_running_loop().run_in_executor(self._thread, self.scores, texts)
                except BaseException as error:  # whoever waits ends the process with it
                    for each in batch:
                        if not each.score.cancelled():
                            each.score.set_exception(error)
                    raise
                for each, score in zip(batch, scores, strict=True):
                    if not each.score.cancelled():
                        each.score.set_result(score)
        finally:
            self._passes = None

    def _next(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        longest = 0
        while self._waiting and len(batch) < self._options.slots:
            longest = max(longest, len(self._waiting[0].ids))
            if batch and longest * (len(batch) + 1) > self._options.max_tokens:
                break
            batch.append(self._waiting.popleft())
        return batch

    # --- on the thread ----------------------------------------------------------------------------------------

    def _load(self) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        torch.set_num_threads(self._options.num_threads)
        with quiet_transformers():
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                self._folder, dtype=DTYPES[self._options.dtype], output_loading_info=True
            )
            model, info = loaded
            missing: list[str] = sorted(info["missing_keys"])
            tokenizer: Any = AutoTokenizer.from_pretrained(self._folder)
        if missing:
            raise UserFault(
                f"reward_model.path: {self._folder} has no weights for {', '.join(missing[:3])}, so its scores would "
                "be random numbers; take a checkpoint of a reward model, not of the language model that it grew from"
            )
        if model.config.num_labels != 1:
            raise UserFault(
                f"reward_model.path: {self._folder} has {model.config.num_labels} outputs; one is the score"
            )
        self._model: Any = model.to(self._device).eval()
        self._pad: int = tokenizer.pad_token_id or 0

    def scores(self, texts: Sequence[list[int]]) -> list[float]:
        """Of each text, in one pass."""
        ends = {ids[-1] for ids in texts}
        pad = next(token for token in (self._pad, *range(len(ends) + 1)) if token not in ends)
        width = max(map(len, texts))
        ids = torch.tensor([[*text, *[pad] * (width - len(text))] for text in texts], device=self._device)
        mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts], device=self._device)
        self._model.config.pad_token_id = pad
        with torch.inference_mode():
            logits: torch.Tensor = self._model(input_ids=ids, attention_mask=mask).logits
        found: list[float] = logits[:, 0].float().tolist()
        return found
