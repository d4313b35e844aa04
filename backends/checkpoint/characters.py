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


IMAGE_SYMBOLS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Of the model that sees; their ids follow those of the others."""
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Likewise."""


def character_tokenizer(*, sees: bool = False) -> Tokenizer:
    """A tokenizer with one token a character, no unknown token, and the two special tokens; ``sees``: and those around
    images."""
    vocabulary = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = (PAD_TOKEN, END_TOKEN, *(IMAGE_SYMBOLS if sees else ()))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer
