"""From a raw row to what is tokenised, the same for data in memory, in a stream, and looked at before a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.backends.data.media import media_columns, media_of, taken_out, with_places
from penstock.backends.data.problems import LONG_PROMPT
from penstock.backends.data.row import (
    BadColumnError,
    Message,
    known_tokens,
    label_of,
    metadata_of,
    num_retries_of,
    prompt_of,
    tools_of,
    with_system,
)
from penstock.backends.data.sources import parse_source
from penstock.messages.arrays import pack_tokens
from penstock.messages.samples import Prompt

if TYPE_CHECKING:
    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.images import ImageIntake
    from penstock.backends.data.mixture import NamedSource
    from penstock.backends.data.options import DataOptions
    from penstock.backends.data.row import RawRow
    from penstock.backends.data.tokenizer import TextTokenizer
    from penstock.messages.samples import Media


class ParsedRow(NamedTuple):
    """A row that is right as far as can be said without a tokenizer and a template."""

    prompt: str | list[Message]
    """A text where there is no template."""
    tools: list[Message]
    label: str
    metadata: bytes
    media: tuple[Media, ...]
    num_retries: int | None
    teacher_prompt: str | list[Message]
    """Empty: the prompt."""


class CheckedRow(NamedTuple):
    """A row that is right but for its length in tokens."""

    place: str
    text: str
    label: str
    metadata: bytes
    messages: bytes
    """JSON; empty where nobody asks for them."""
    media: tuple[Media, ...] = ()
    num_retries: int | None = None
    """None: the row says nothing of it."""
    teacher_text: str = ""
    """What a teacher reads in place of the text; empty: the text."""

    def prompt(self, row: int, *, tokens: bytes, teacher_tokens: bytes) -> Prompt:
        """It, by the number ``row``, for the first time through the dataset, with its int32 ids."""
        return Prompt(
            row=row,
            epoch=0,
            tokens=tokens,
            text=self.text,
            label=self.label,
            metadata=self.metadata,
            messages=self.messages,
            media=self.media,
            num_retries=self.num_retries,
            teacher_tokens=teacher_tokens,
        )


class TokenLimit(NamedTuple):
    """How long a prompt may be."""

    max_tokens: int
    advice: str

    @classmethod
    def of(cls, options: DataOptions, max_context: int) -> TokenLimit:
        """The smaller of what the scenario allows and what leaves room for one response token."""
        if options.max_prompt_tokens is not None and options.max_prompt_tokens < max_context:
            return cls(options.max_prompt_tokens, "data.max_prompt_tokens")
        return cls(max_context - 1, f"model.max_context, {max_context}, less one for the response")

    def check_text(self, text: str, tokenizer: TextTokenizer) -> None:
        """Before the text of a prompt is tokenised, which takes a second for a megabyte.

        Raises:
            BadColumnError: it becomes too many tokens in any case.
        """
        num_tokens = tokenizer.min_tokens(text)
        if num_tokens > self.max_tokens:
            raise self._too_long(f"has {len(text)} characters, which are {num_tokens} tokens or more")

    def checked(self, ids: list[int] | str) -> list[int]:
        """The ids of a prompt as the tokenizer gave them.

        Raises:
            BadColumnError: there are none, or too many, or the tokenizer gave a reason instead.
        """
        tokens = known_tokens(ids)
        if not tokens:
            raise BadColumnError("the prompt has no tokens", "the prompt becomes no token at all")
        if len(tokens) > self.max_tokens:
            raise self._too_long(f"has {len(tokens)} tokens")
        return tokens

    def _too_long(self, found: str) -> BadColumnError:
        return BadColumnError(LONG_PROMPT, f"the prompt {found}; at most {self.max_tokens} fit ({self.advice})")


class RowReader:
    """Reads the rows of one source."""

    def __init__(
        self,
        source: NamedSource,
        template: ChatTemplate | None,
        *,
        keeps_messages: bool = False,
        images: ImageIntake | None = None,
    ) -> None:
        """``template``: the checkpoint's, where there is one; whether it is used is the source's to say. ``images``:
        looks at those that engine and learner compute; None: a server does."""
        self.options = source.options
        self.name = source.name
        self._folder = _folder_of(source.path)
        self._template = template if source.options.chat_template else None
        self._images = images
        self._keeps_messages = keeps_messages and self._template is not None

    @property
    def adds_special(self) -> bool:
        """The tokenizer puts around a text what it puts there: a template writes that itself."""
        return not self.options.chat_template

    def parsed(self, row: RawRow) -> ParsedRow:
        """What the row holds.

        Raises:
            BadColumnError: a column is missing or not what it should be.
        """
        options = self.options
        prompt, inline = taken_out(
            self._prompt(row, options.prompt_key, "prompt_key"), options.multimodal_keys, options.prompt_key
        )
        media = media_of(
            row, options.multimodal_keys, folder=self._folder, max_bytes=options.max_media_bytes,
            hosts=options.media_hosts, inline={options.prompt_key: inline},
        )  # fmt: skip
        if not isinstance(prompt, str) and media_columns(options.multimodal_keys):
            prompt = with_places(prompt, media)
        key = options.teacher_prompt_key
        return ParsedRow(
            prompt,
            [] if options.tools_key is None else tools_of(row, options.tools_key),
            "" if options.label_key is None else label_of(row, options.label_key),
            metadata_of(row, options.metadata_keys, options.metadata),
            media,
            num_retries_of(row, options),
            "" if key is None else self._prompt(row, key, "teacher_prompt_key"),
        )

    def _prompt(self, row: RawRow, key: str, option: str) -> str | list[Message]:
        """The messages of this column, or its text where there is no template."""
        options = self.options
        prompt = prompt_of(row, key, chat_template=options.chat_template, option=f"data.{option}")
        if not options.chat_template:
            return prompt
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return with_system(messages, options.system_prompt)

    def checked(self, row: RawRow) -> CheckedRow:
        """The row as the text that is tokenised.

        Raises:
            BadColumnError: a column is missing or not what it should be, or the template refuses it.
        """
        parsed = self.parsed(row)
        of_chat = None if isinstance(parsed.prompt, str) or not self._keeps_messages else parsed.prompt
        media: tuple[Media, ...] = parsed.media
        if self._images is not None:
            media = self._images.taken(media, self.options.max_image_pixels)
        return CheckedRow(
            row.place,
            self._text(parsed.prompt, parsed.tools),
            parsed.label,
            parsed.metadata,
            b"" if of_chat is None else _as_json(of_chat, self.options.prompt_key),
            media,
            parsed.num_retries,
            self._text(parsed.teacher_prompt, parsed.tools),
        )

    def seen(self, row: CheckedRow, ids: list[int] | str) -> tuple[CheckedRow, list[int] | str]:
        """The row with the places of its images, and the ids of its prompt as the model sees them; what the tokenizer
        gave, where a server looks at images.

        Raises:
            BadColumnError: the template has not written one place for each image.
        """
        if self._images is None or isinstance(ids, str):
            return row, ids
        tokens, media = self._images.tokens(ids, row.media)
        return row._replace(media=media), tokens

    def _text(self, prompt: str | list[Message], tools: list[Message]) -> str:
        if isinstance(prompt, str):
            return prompt
        assert self._template is not None, "parsing leaves a text where there is none"
        return self._template.render_messages(prompt, tools, arguments=self.options.template_arguments)


def teacher_tokens(row: CheckedRow, tokenizer: TextTokenizer, limit: TokenLimit, *, special: bool) -> bytes:
    """int32 ids of what a teacher reads in place of the prompt; empty: the prompt.

    Raises:
        BadColumnError: there are none, or too many, or the tokenizer gave a reason instead.
    """
    if not row.teacher_text:
        return b""
    try:
        limit.check_text(row.teacher_text, tokenizer)
        (ids,) = tokenizer.encode([row.teacher_text], special=special)
        return pack_tokens(limit.checked(ids))
    except BadColumnError as error:
        raise BadColumnError(f"for the teacher: {error.kind}", f"for the teacher: {error.message}") from None


def _as_json(messages: list[Message], key: str) -> bytes:
    try:
        return msgspec.json.encode(messages)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadColumnError("the messages have no form in JSON", f"{key!r} has no form in JSON: {error}") from None


def _folder_of(path: str) -> Path:
    file = Path(parse_source(path).path).expanduser()
    return file if file.is_dir() else file.parent
