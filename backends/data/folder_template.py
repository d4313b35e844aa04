"""The chat template of a checkpoint folder, rendered by transformers' own function without loading the tokenizer, which
takes seconds and brings torch. A run loads it; to look at rows before a run this is enough.
"""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
from tokenizers import Tokenizer

from penstock.backends.checkpoint.hf_config import TOKENIZER_CONFIG_FILE
from penstock.backends.data.problems import DataError
from penstock.backends.data.tokenizer import FILE_NAME
from penstock.messages.base import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.backends.data.row import Message

TEMPLATE_FILE = "chat_template.jinja"


class _Named(msgspec.Struct):
    name: str
    template: str


class FolderTemplate:
    """What a transformers tokenizer of the folder would render."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            DataError: a file of the folder cannot be read.
        """
        config, path = folder / TOKENIZER_CONFIG_FILE, folder / TEMPLATE_FILE
        try:
            said = msgspec.json.decode(config.read_bytes(), type=dict[str, object]) if config.is_file() else {}
            self.chat_template: object = path.read_text(encoding="utf-8") if path.is_file() else _template_in(said)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        except UNREADABLE as error:
            raise DataError(f"{config}: {error}") from error
        self.added_tokens_decoder: Mapping[int, Any] = Tokenizer.from_file(
            str(folder / FILE_NAME)
        ).get_added_tokens_decoder()
        self._special = {name: text for name, value in said.items() if (text := _token_text(name, value)) is not None}

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        tokenize: bool,
        add_generation_prompt: bool,
        **arguments: object,
    ) -> object:
        """As transformers' method, for ``tokenize=False``."""
        from transformers.utils.chat_template_utils import render_jinja_template

        from penstock.backends.data.template_bounds import bound_rendering  # here, as it brings Jinja

        assert not tokenize
        bound_rendering()
        given: dict[str, Any] = {**self._special, **arguments}
        texts, _ = cast(
            "tuple[list[str], object]",
            render_jinja_template(
                conversations=[list(conversation)],
                tools=None if tools is None else list(tools),
                chat_template=str(self.chat_template),
                add_generation_prompt=add_generation_prompt,
                **given,
            ),
        )
        return texts[0]


def _template_in(config: Mapping[str, object]) -> str | None:
    """The template that is taken where none is named."""
    template = config.get("chat_template")
    if not isinstance(template, list):
        return template if isinstance(template, str) else None
    named = msgspec.convert(cast("list[object]", template), list[_Named])
    return next((each.template for each in named if each.name == "default"), None)


def _token_text(name: str, value: object) -> str | None:
    if not name.endswith("_token"):
        return None
    content = cast("dict[str, object]", value).get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
