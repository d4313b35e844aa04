"""Chat messages to text, with the checkpoint's own template."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn, Protocol, cast

import jinja2

from penstock.backends.data.control_tokens import ControlTokens
from penstock.backends.data.problems import DataError
from penstock.backends.data.row import BadColumnError
from penstock.backends.data.template_bounds import TemplateWorkError, bound_rendering

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.backends.data.row import Message


_REFUSALS: Final = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""What templates raise for messages that they are not made for; ``range`` in the sandbox an OverflowError."""
_MEND: Final = (
    "mend it (chat_template.jinja, or chat_template in tokenizer_config.json), or copy that of the model's authors"
)


class _AddedToken(Protocol):
    """Of a transformers tokenizer."""

    content: str
    special: bool


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    chat_template: object
    added_tokens_decoder: Mapping[int, _AddedToken]

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        tokenize: bool,
        add_generation_prompt: bool,
        **arguments: object,
    ) -> object: ...


class EndlessTemplateError(BadColumnError):
    """The template does more for some messages than it may. For rows that is the end, and no row is to blame: the
    others would take as long, one after the other."""

    def at(self, place: str) -> NoReturn:
        """
        Raises:
            DataError: in any case.
        """
        raise DataError(f"{place}: {self.message}") from self


class ChatTemplate:
    """The chat template of a checkpoint folder, rendered by transformers, whose semantics templates are written for.

    transformers is imported here only: it takes seconds, and a scenario without a template does not need it.
    """

    def __init__(
        self, folder: Path, arguments: Mapping[str, object] | None = None, tokenizer: ChatTokenizer | None = None
    ) -> None:
        """
        Args:
            folder: of the checkpoint.
            arguments: variables that the template gets where nothing else is said.
            tokenizer: of the folder; None: transformers' is loaded.

        Raises:
            DataError: the folder has no template.
        """
        self._folder = folder
        self._tokenizer = _loaded(folder) if tokenizer is None else tokenizer
        self._arguments = arguments or {}
        added = self._tokenizer.added_tokens_decoder.values()
        self._control = ControlTokens((token.content, token.special) for token in added)
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{folder} has no chat template (neither chat_template.jinja nor chat_template in "
                "tokenizer_config.json); set data.chat_template: false, or add the template of the model's authors"
            )

    def render(self, prompt: str | Sequence[Message]) -> str:
        """The text up to where the assistant begins to answer. A text counts as one user message.

        Raises:
            BadColumnError: the template refuses the messages.
        """
        return self.render_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)

    def render_messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        *,
        begins_answer: bool = True,
        arguments: Mapping[str, object] | None = None,
    ) -> str:
        """The text of a conversation with the tools that the model may call; ``begins_answer``: up to where the
        assistant begins to answer; ``arguments``: in place of those that hold elsewhere. Control tokens within
        messages of others than the assistant, and within tools, are text.

        Raises:
            BadColumnError: the template refuses the messages; an :class:`EndlessTemplateError`: it does not end.
        """
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    self._control.inert_messages(messages),
                    tools=self._control.inert_json(list(tools), keeps_marks=True) if tools else None,
                    tokenize=False,
                    add_generation_prompt=begins_answer,
                    **(self._arguments if arguments is None else arguments),
                )
            )
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"{self._folder}: the chat template is broken at its line {error.lineno}: {error.message}; {_MEND}"
            ) from error
        except TemplateWorkError as error:
            raise EndlessTemplateError(
                "the chat template does not end",
                f"{self._folder}: the chat template {error} for one conversation; {_MEND}",
            ) from error
        except _REFUSALS as error:
            raise BadColumnError(
                "the chat template refuses the messages", f"the chat template refuses the messages: {error}"
            ) from error


def _loaded(folder: Path) -> ChatTokenizer:
    from transformers import AutoTokenizer

    bound_rendering()
    try:
        return cast("ChatTokenizer", AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise DataError(f"{folder}: transformers cannot load the tokenizer: {error}") from error
