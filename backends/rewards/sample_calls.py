"""What of a sample becomes part of a function's call: its text and its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.rewards.wire import FilterCall, RewardCall
from penstock.messages.arrays import tokens_view
from penstock.messages.samples import Truncated

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.data.tokenizer import TextTokenizer
    from penstock.messages.samples import Group, Prompt, Sample

_ENCODER: Final = msgspec.msgpack.Encoder()


class ResponseText:
    """Token ids of samples to text; the tokenizer is read at the first use, on the thread that uses it."""

    def __init__(self, tokenizer_folder: Path) -> None:
        self._folder = tokenizer_folder
        self._tokenizer: TextTokenizer | None = None

    def of(self, sample: Sample) -> str:
        """What the model wrote, without special tokens and without what others wrote in between."""
        return self._decode(written_tokens(sample))

    def of_all(self, sample: Sample) -> str:
        """What the model wrote and what others wrote in between, without special tokens."""
        return self._decode([token for part in sample.parts for token in tokens_view(part.tokens)])

    def _decode(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            from penstock.backends.data.tokenizer import TextTokenizer

            self._tokenizer = TextTokenizer(self._folder)
        return self._tokenizer.decode(ids)


def written_tokens(sample: Sample) -> list[int]:
    """The token ids that the model produced, of all parts."""
    ids: list[int] = []
    for part in sample.parts:
        tokens = tokens_view(part.tokens)
        ids += tokens.tolist() if not part.loss_mask else [i for i, m in zip(tokens, part.loss_mask, strict=True) if m]
    return ids


def reward_call(
    sample: Sample, prompt: Prompt, timeout_s: float, call_id: int, text: ResponseText, names: frozenset[str]
) -> RewardCall:
    """The call that scores a sample, without the costly parts that are not among ``names``."""
    return RewardCall(
        id=call_id,
        timeout_s=timeout_s,
        prompt=prompt.text,
        response=text.of(sample) if "response" in names else "",
        label=prompt.label,
        metadata=prompt.metadata if "metadata" in names else b"",
        truncated=isinstance(sample.outcome, Truncated),
        tokens=b"".join(part.tokens for part in sample.parts) if "tokens" in names else b"",
        prompt_tokens=prompt.tokens if "prompt_tokens" in names else b"",
        row=prompt.row,
        group_id=sample.key.group_id,
        index=sample.key.index,
        conversation=text.of_all(sample) if "conversation" in names else "",
        messages=prompt.messages if "messages" in names else b"",
        images=tuple(each.reference for each in sample.images(prompt)) if "images" in names else (),
    )


def filter_call(group: Group, timeout_s: float, call_id: int, text: ResponseText, names: tuple[str, ...]) -> FilterCall:
    """The call that judges a group, or shows it, without the responses when ``names`` does not have them."""
    responses = tuple(text.of(sample) for sample in group.samples) if "responses" in names else ()
    return FilterCall(call_id, timeout_s, _ENCODER.encode(group), responses)
