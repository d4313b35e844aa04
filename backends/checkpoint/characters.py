"""The tokenizer of the models that are made on the spot: one token a character.

Invariants:

* It has exactly :data:`SYMBOLS`, one id a character, and decoding gives back what was encoded. A character that it does
  not know is an error, never dropped and never replaced.
* It needs neither torch nor transformers: rows are looked at before a run without them.
"""

# tokenizers is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import string
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

PAD_TOKEN: Final = "<pad>"
END_TOKEN: Final = "<eos>"
PAD_ID: Final = 0
END_ID: Final = 1
CONTEXT_TOKENS: Final = 512
CHARACTERS: Final = string.digits + string.ascii_lowercase + string.ascii_uppercase + " \n=+-*/(),.:;?!"
SYMBOLS: Final = (PAD_TOKEN, END_TOKEN, *CHARACTERS)
"""Every symbol of the vocabulary; the place in this tuple is the id."""


def character_tokenizer() -> Tokenizer:
    """A tokenizer with one token a character, no unknown token, and the two special tokens."""
    vocabulary = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD_TOKEN, END_TOKEN)])
    return tokenizer
