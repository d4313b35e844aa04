"""How few tokens a long text can have, said without tokenising it: a tokenizer takes more than a second for a megabyte.

Invariants:

* The number is never above the number of tokens that the tokenizer gives. Of a tokenizer that may drop more than
  whitespace, or make one token of any number of characters, it is 0.
* Texts of an ordinary length cost one comparison.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from tokenizers import models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

LONG_CHARACTERS: Final = 1 << 16
"""Shorter texts are tokenised."""
COMPOSED: Final = 4
"""Characters that NFC makes one of, at most: no character is decomposed into more."""
KEEP_ALL: Final = frozenset(
    {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "Whitespace", "WhitespaceSplit"}
)
"""Pre-tokenizers that drop nothing but whitespace, if their behaviour is not ``Removed``."""


class LengthBound:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._normalizers = list(_parts(tokenizer.normalizer, "normalizers"))
        self._pre_tokenizers = list(_parts(tokenizer.pre_tokenizer, "pretokenizers"))

    def min_tokens(self, text: str) -> int:
        """The text becomes so many tokens, or more."""
        if len(text) < LONG_CHARACTERS or not self._longest:
            return 0
        return _num_kept(text) // (self._longest if text.isascii() else self._longest * self._composed)

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token; 0: a token may stand for any number."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        is_bounded = self._composed and self._keeps_all() and self._knows_all(vocabulary)
        return max(map(len, vocabulary)) if is_bounded else 0

    @cached_property
    def _composed(self) -> int:
        """Characters that the normaliser makes one of; 0: any number."""
        composed = 1
        for part in self._normalizers:
            match part:
                case {"type": "NFC"}:
                    composed *= COMPOSED
                case {"type": "Prepend" | "ByteLevel"}:
                    pass
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    if _num_kept(new) < len(old):
                        return 0
                case _:
                    return 0
        return composed

    def _keeps_all(self) -> bool:
        return all(part["type"] in KEEP_ALL and part.get("behavior") != "Removed" for part in self._pre_tokenizers)

    def _knows_all(self, vocabulary: dict[str, int]) -> bool:
        """Each character becomes a token or a part of one, and no unknown token stands for several."""
        model: object = self._tokenizer.model
        if isinstance(model, models.WordLevel):
            return model.unk_token not in vocabulary  # what it does not know is an error
        if not isinstance(model, models.BPE):
            return False
        if model.byte_fallback:
            return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        is_of_bytes = any(part["type"] == "ByteLevel" for part in (*self._normalizers, *self._pre_tokenizers))
        return is_of_bytes and all(letter in vocabulary for letter in pre_tokenizers.ByteLevel.alphabet())


def _num_kept(text: str) -> int:
    """Characters that are tokenised in any case: whitespace may be dropped beside a token."""
    return sum(map(len, text.split()))


def _parts(component: object, key: str) -> Iterator[dict[str, Any]]:
    """Of a component of a tokenizer, as its file describes them."""
    if component is None:
        return
    described: dict[str, Any] = msgspec.json.decode(cast("Any", component).__getstate__())
    waiting = [described]
    while waiting:
        part = waiting.pop()
        if part["type"] == "Sequence":
            waiting.extend(part[key])
        else:
            yield part
