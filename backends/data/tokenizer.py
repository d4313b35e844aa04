"""Text to token ids and back, with the ``tokenizers`` library alone: no torch, no transformers, quick to start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tokenizers import Tokenizer

from penstock.backends.checkpoint.tokenizer_files import CONVERT, has_tiktoken_only
from penstock.backends.data.control_tokens import ControlTokens, JsonT
from penstock.backends.data.length_bound import LengthBound
from penstock.backends.data.problems import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FILE_NAME: Final = "tokenizer.json"


class TextTokenizer:
    """The tokenizer of a checkpoint folder.

    Limits and padding that the file may carry are switched off: a prompt that is silently cut is not the row's prompt.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ``DataError`` when the folder has no tokenizer that can be read."""
        path = folder / FILE_NAME
        if has_tiktoken_only(folder):
            raise DataError(f"{folder}: {CONVERT}")
        if not path.is_file():
            reason = "it has no tokenizer.json" if folder.is_dir() else "there is no such folder"
            raise DataError(
                f"no tokenizer in {folder}: {reason}. `AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)` "
                "of transformers writes one"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise DataError(f"{path} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._control = ControlTokens((token.content, token.special) for token in added)
        self._bound = LengthBound(self._tokenizer)

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int] | str]:
        """Token ids of each text, or, as a text, why the tokenizer refuses it.

        ``special``: add what the tokenizer puts around a text of its own (a begin-of-sequence token, say).
        """
        try:
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=special)
        except Exception:  # one text spoils the batch, and the library raises Exception itself
            return [self._encode_one(text, special=special) for text in texts]
        return [encoding.ids for encoding in encodings]

    def min_tokens(self, text: str) -> int:
        """See :meth:`~penstock.backends.data.length_bound.LengthBound.min_tokens`."""
        return self._bound.min_tokens(text)

    def inert(self, text: str, *, keeps_marks: bool = False) -> str:
        """See :meth:`~penstock.backends.data.control_tokens.ControlTokens.inert`."""
        return self._control.inert(text, keeps_marks=keeps_marks)

    def inert_json(self, value: JsonT, *, keeps_marks: bool = False) -> JsonT:
        """See :meth:`~penstock.backends.data.control_tokens.ControlTokens.inert_json`."""
        return self._control.inert_json(value, keeps_marks=keeps_marks)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    @property
    def num_tokens(self) -> int:
        """Token ids are below."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def num_own_tokens(self) -> int:
        """Those of its vocabulary, without what was added to it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=False)

    def token_text(self, token: int) -> str:
        """The name of a token; for a special token the text that stands for it."""
        return self._tokenizer.id_to_token(token) or ""

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name; None when there is none."""
        return self._tokenizer.token_to_id(token)

    def ids(self) -> dict[str, int]:
        """Every token by its name, those that were added to the vocabulary too."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def _encode_one(self, text: str, *, special: bool) -> list[int] | str:
        try:
            return self._tokenizer.encode(text, add_special_tokens=special).ids
        except Exception as error:
            return str(error)
