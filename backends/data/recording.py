"""Responses that rows hold, as the samples that a ``recorded`` engine answers with.

Invariants:

* A unit of the dataset is a group: as many samples as every group of the run has. A row with so many responses is one;
  rows with a single one, which are imitated and compared with nothing, are put together in the order of the file, each
  with its own prompt as context. Where the last of these groups is not full, the first such rows fill it.
* A text ends with the end-of-sequence token; token ids are taken as they are.
* Of a conversation every turn of the assistant is trained, up to the token that ends it, and nothing else. Each turn is
  tokenised by itself, as it is when a model makes it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.data.row import BadColumnError, known_tokens
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.base import Value
from penstock.messages.samples import Loss, Part, Reward, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.recorded_rows import RecordedRow, RecordedSettings, Response
    from penstock.backends.data.row import Message
    from penstock.backends.data.special_tokens import SpecialTokens
    from penstock.backends.data.tokenizer import TextTokenizer

UNKNOWN: Final = math.nan
"""The log-prob of a token that nobody has computed."""


class RecordedSample(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One response, without the version that it is given when it is asked for."""

    part: Part
    """The response as one part, with one span of version 0."""
    reward: Reward | None = None
    is_truncated: bool = False
    """Its token ids do not end with one that ends a response."""
    is_dated: bool = False
    """The spans of its part name the versions of this run that made it, and it keeps them."""


class RecordedGroup(NamedTuple):
    """What a unit of the dataset answers with."""

    text: str
    prompt_ids: list[int]
    label: str
    metadata: bytes
    samples: tuple[RecordedSample, ...]
    loss: Loss
    num_retries: int | None = None
    place: str = ""


class _Stretch(NamedTuple):
    """Successive tokens that the assistant made, or did not."""

    content: str | tuple[int, ...]
    is_made: bool


class RenderedRow(NamedTuple):
    """A row as texts and token ids."""

    row: RecordedRow
    text: str
    responses: tuple[tuple[_Stretch, ...], ...]
    prompt_ids: list[int] | None = None
    """Where the prompt was given as token ids."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(tuple[RecordedSample, ...])


def pack_samples(samples: tuple[RecordedSample, ...]) -> bytes:
    """For :func:`unpack_samples`."""
    return _ENCODER.encode(samples)


def unpack_samples(data: bytes) -> tuple[RecordedSample, ...]:
    """The opposite of :func:`pack_samples`."""
    return _DECODER.decode(data)


class Recorder:
    """From checked rows to groups, in the order of the file."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: ChatTemplate | None,
        special: SpecialTokens,
        settings: RecordedSettings,
        *,
        max_context: int,
        check_prompt: Callable[[list[int] | str], list[int]],
    ) -> None:
        """``check_prompt``: the ids of a prompt, as the tokenizer gave them or a reason instead; raises where there are
        too many, or none."""
        self._tokenizer = tokenizer
        self._template = template
        self._special = special
        self._settings = settings
        self._max_context = max_context
        self._check_prompt = check_prompt
        self._singles: list[RecordedGroup] = []
        self._first_singles: list[RecordedGroup] = []
        """As many as could fill the last group."""

    def rendered(self, row: RecordedRow, prompt_ids: list[int] | None = None) -> RenderedRow:
        """The row as texts. ``prompt_ids``: its prompt, where that was given as token ids and not as a text.

        Raises:
            BadColumnError: the template refuses it, or writes a turn otherwise once another has followed.
        """
        if isinstance(row.prompt, str) and (self._template is None or prompt_ids is not None):
            text = row.prompt
        else:
            assert self._template is not None  # messages are refused without one
            text = self._template.render(row.prompt)
        return RenderedRow(
            row, text, tuple(tuple(self._stretches(text, response)) for response in row.responses), prompt_ids
        )

    def groups(self, rows: Sequence[RenderedRow]) -> Iterator[RecordedGroup | tuple[RecordedRow, BadColumnError]]:
        """The groups that are full with these rows, and the rows that cannot be used."""
        # A template writes the begin-of-sequence token itself.
        prompts = self._tokenizer.encode([row.text for row in rows], special=self._template is None)
        texts = [
            stretch.content
            for row in rows
            for response in row.responses
            for stretch in response
            if isinstance(stretch.content, str)
        ]
        encoded = iter(self._tokenizer.encode(texts, special=False))
        for row, prompt in zip(rows, prompts, strict=True):
            pieces = [
                [next(encoded) if isinstance(s.content, str) else list(s.content) for s in response]
                for response in row.responses
            ]
            try:
                group = self._group(row, prompt if row.prompt_ids is None else row.prompt_ids, pieces)
            except BadColumnError as error:
                yield row.row, error
                continue
            if len(group.samples) == self._settings.group_size:
                yield group
            else:
                yield from self._single(group)

    def last_group(self) -> Iterator[RecordedGroup]:
        """The one that is not full yet, if there is one, filled."""
        if self._singles:
            missing = self._settings.group_size - len(self._singles)
            known = self._first_singles
            self._singles += [known[index % len(known)] for index in range(missing)]
            yield from self._bundled()

    def _single(self, group: RecordedGroup) -> Iterator[RecordedGroup]:
        self._singles.append(group)
        if len(self._first_singles) < self._settings.group_size:
            self._first_singles.append(group)
        if len(self._singles) == self._settings.group_size:
            yield from self._bundled()

    def _bundled(self) -> Iterator[RecordedGroup]:
        singles, self._singles = self._singles, []
        first, *others = singles
        after = [
            msgspec.structs.replace(
                sample, part=msgspec.structs.replace(sample.part, context_tokens=pack_tokens(other.prompt_ids))
            )
            for other in others
            for sample in other.samples
        ]
        yield first._replace(samples=(*first.samples, *after))

    def _group(self, row: RenderedRow, prompt: list[int] | str, pieces: list[list[list[int] | str]]) -> RecordedGroup:
        prompt_ids = self._check_prompt(prompt)
        samples = tuple(
            self._sample(len(prompt_ids), response, stretches, [known_tokens(piece) for piece in found])
            for response, stretches, found in zip(row.row.responses, row.responses, pieces, strict=True)
        )
        of = row.row
        return RecordedGroup(
            row.text, prompt_ids, of.label, of.metadata, samples, of.loss, of.num_retries, place=of.place
        )

    def _sample(
        self, num_context: int, response: Response, stretches: tuple[_Stretch, ...], pieces: list[list[int]]
    ) -> RecordedSample:
        ids: list[int] = []
        mask: list[bool] = []
        for index, (stretch, piece) in enumerate(zip(stretches, pieces, strict=True)):
            is_last = index == len(stretches) - 1
            tokens, made = self._made(piece, stretch, is_last=is_last) if stretch.is_made else (piece, 0)
            ids += tokens
            mask += [place < made for place in range(len(tokens))]
        self._check(ids, num_context)
        logprobs = response.logprobs or [UNKNOWN] * len(ids)
        part = Part(
            tokens=pack_tokens(ids),
            logprobs=pack_floats(logprobs),
            spans=(VersionSpan(0, len(ids)),),
            loss_mask=b"" if all(mask) else bytes(mask),
        )
        reward = None if response.reward is None else Reward(value=response.reward)
        return RecordedSample(part=part, reward=reward, is_truncated=ids[-1] not in self._special.stop_ids)

    def _made(self, piece: list[int], stretch: _Stretch, *, is_last: bool) -> tuple[list[int], int]:
        """The tokens of a stretch that the assistant made, and how many of them, from the first on, are trained: those
        up to the one that ends its turn. What a template writes after that one is not the assistant's."""
        if not isinstance(stretch.content, str):
            return piece, len(piece)
        ends = [place for place, token in enumerate(piece) if token in self._special.stop_ids]
        if not is_last:
            return piece, ends[-1] + 1 if ends else len(piece)
        whole = piece[: ends[-1] + 1] if ends else [*piece, self._special.eos_id]
        return whole, len(whole)

    def _check(self, ids: list[int], num_context: int) -> None:
        if not ids:
            raise BadColumnError("the response has no tokens", "the response becomes no token at all")
        if unknown := [token for token in ids if not 0 <= token < self._tokenizer.num_tokens]:
            raise BadColumnError(
                "a token id is unknown",
                f"the response has the token id {unknown[0]}; the tokenizer knows those below "
                f"{self._tokenizer.num_tokens}",
            )
        most = self._settings.max_response_tokens
        if len(ids) > most:
            raise BadColumnError(
                "the response is too long",
                f"the response has {len(ids)} tokens; at most {most} are allowed (sampling.max_response_tokens)",
            )
        if num_context + len(ids) > self._max_context:
            raise BadColumnError(
                "prompt and response are too long",
                f"prompt and response have {num_context + len(ids)} tokens; at most {self._max_context} fit "
                "(model.max_context)",
            )

    def _stretches(self, prompt_text: str, response: Response) -> Iterator[_Stretch]:
        """What follows the prompt."""
        content = response.content
        if isinstance(content, str):
            yield _Stretch(content, is_made=True)
            return
        messages = [message for message in content if isinstance(message, dict)]
        if len(messages) < len(content) or not messages:
            yield _Stretch(tuple(token for token in content if isinstance(token, int)), is_made=True)
            return
        yield from self._turns(prompt_text, messages)

    def _turns(self, done: str, messages: list[Message]) -> Iterator[_Stretch]:
        template = self._template
        assert template is not None  # conversations are refused without one
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = template.render_messages(messages[:index])
            yield from _follows(done, before, is_made=False)
            done = template.render_messages(messages[: index + 1], begins_answer=False)
            yield from _follows(before, done, is_made=True)


def _follows(done: str, longer: str, *, is_made: bool) -> Iterator[_Stretch]:
    if not longer.startswith(done):
        raise BadColumnError(
            "the chat template rewrites earlier turns",
            "the chat template writes what stands before a turn of the assistant otherwise once another turn follows, "
            "so a conversation cannot be trained as the model meets it; give its turns as rows of their own",
        )
    if len(longer) > len(done):
        yield _Stretch(longer[len(done) :], is_made=is_made)
