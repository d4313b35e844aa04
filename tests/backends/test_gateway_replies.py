"""The answers of a gateway's turn: what they cost the loop that all of its agents wait for."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from penstock.backends.episodes.api import CompletionRequest, Response
from penstock.backends.episodes.replies import Replies
from penstock.backends.episodes.turns import TurnRun, Wording
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.samples import Completed, Part, VersionSpan

if TYPE_CHECKING:
    from penstock.backends.data.tokenizer import TextTokenizer

NUM_TOKENS = 30_000


def _letters(ids: list[int]) -> str:
    return "a" * len(ids)


def test_log_probs_of_a_long_answer_take_no_longer_than_their_number_does() -> None:
    tokenizer = cast("TextTokenizer", SimpleNamespace(decode=_letters))
    part = Part(
        tokens=pack_tokens([1] * NUM_TOKENS),
        logprobs=pack_floats([-1.0] * NUM_TOKENS),
        spans=(VersionSpan(0, NUM_TOKENS),),
    )

    async def answer() -> Response:
        run = TurnRun(b"", 1, Wording(tokenizer, (), "none", ""), 3, lambda _: None)
        run.ended(part, Completed())
        replies = Replies(CompletionRequest(prompt="a", logprobs=0), [run], session="s", model="m", ignored=[])
        return await replies.whole()

    began_s = time.process_time()
    (choice,) = asyncio.run(answer()).choices
    assert time.process_time() - began_s < 1.0
    assert getattr(choice, "logprobs").text_offset == list(range(NUM_TOKENS))  # noqa: B009 - of one kind of choice
