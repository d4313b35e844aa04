"""A tokenizer of one token a character, with a chat template that knows tools, arguments and images."""

# tokenizers has types in part only:
# pyright: reportUnknownMemberType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ("<pad>", "<eos>", "<bos>", "<image_pad>", "<|assistant|>")
TEMPLATE = (
    "{% if tools %}<{% for tool in tools %}{{ tool.function.name }};{% endfor %}>{% endif %}"
    "{% for message in messages %}{{ message.role[0] }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<image_pad>{% endif %}{% endfor %}{% endif %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}-"
    "{% endif %}{% endif %}"
)


def make_tokenizer(folder: Path, *, template: bool = False) -> Path:
    """Write it; characters outside ASCII are unknown to it."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocab = {symbol: index for index, symbol in enumerate((*SPECIAL, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_lines(path: Path, *rows: object) -> str:
    """One row a line; a text is written as it is."""
    lines = (row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    path.write_text("".join(lines))
    return str(path)
