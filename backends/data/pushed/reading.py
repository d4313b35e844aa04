"""From a group as it was pushed to one as it is kept: everything that can be wrong with it is found here.

Invariants:

* Token ids are taken as they are and lie within the vocabulary; texts and messages become tokens as those of rows do.
* Whatever is unknown is said to be unknown: log-probs that nobody gave are NaN, a reward that nobody gave is left to
  the Scorer.
* Every token has the version that made it; one that the model did not make has that of the token before it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from penstock.backends.data.dataset import open_template
from penstock.backends.data.mixture import named_sources
from penstock.backends.data.pushed.forms import MAX_METADATA_BYTES, PushedRow
from penstock.backends.data.reading import TokenLimit
from penstock.backends.data.recorded_rows import RecordedRow, Response
from penstock.backends.data.recording import RecordedGroup, Recorder
from penstock.backends.data.row import BadColumnError, RawRow, metadata_of, prompt_of, with_system
from penstock.backends.data.special_tokens import read_special_tokens
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.messages.arrays import floats_view, pack_floats, pack_tokens
from penstock.messages.samples import Loss, VersionSpan

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.data.options import DataOptions
    from penstock.backends.data.pushed.forms import PushedGroup, PushedSample
    from penstock.backends.data.recorded_rows import RecordedSettings
    from penstock.backends.data.recording import RecordedSample
    from penstock.backends.data.row import Message

KIND = "a pushed group is wrong"


def _wrong(message: str) -> BadColumnError:
    return BadColumnError(KIND, message)


class PushReader:
    """Reads the groups of one run."""

    def __init__(
        self, options: DataOptions, settings: RecordedSettings, recorder: Recorder, tokenizer: TextTokenizer
    ) -> None:
        """``settings``: ``ratio_objective`` names an objective that needs the log-probs of what drew a response."""
        self._options, self._settings = options, settings
        self._recorder, self._tokenizer = recorder, tokenizer

    def row(self, pushed: PushedGroup, digest: str) -> PushedRow:
        """
        Raises:
            BadColumnError: it cannot be used; the message says which field, and what to do.
        """
        self._check_group(pushed)
        imitates = self._settings.imitates
        prompt = self._prompt(pushed)
        row = RecordedRow(
            place=pushed.key,
            prompt=prompt,
            label=pushed.label,
            metadata=metadata_of(RawRow(pushed.key, {}, pushed.metadata), (), self._options.metadata),
            responses=tuple(self._response(index, each, prompt) for index, each in enumerate(pushed.samples)),
            loss=Loss.SUPERVISED if imitates else Loss.OBJECTIVE,
            num_retries=None,
        )
        (found,) = self._recorder.groups([self._recorder.rendered(row, pushed.prompt_tokens)])
        if not isinstance(found, RecordedGroup):
            raise found[1]
        samples = tuple(
            _dated(index, made, each, pushed.version)
            for index, (made, each) in enumerate(zip(found.samples, pushed.samples, strict=True))
        )
        return PushedRow(
            key=pushed.key,
            digest=digest,
            version=pushed.version,
            text=found.text,
            tokens=pack_tokens(found.prompt_ids),
            label=found.label,
            metadata=found.metadata,
            loss=found.loss,
            samples=samples,
        )

    def _check_group(self, pushed: PushedGroup) -> None:
        size = self._settings.group_size
        if len(pushed.samples) != size:
            raise _wrong(f"samples: found {len(pushed.samples)}, and a group has {size} (sampling.samples_per_group)")
        if (pushed.prompt is None) == (pushed.prompt_tokens is None):
            raise _wrong("prompt: give either prompt (a text or chat messages) or prompt_tokens (token ids)")
        if (size := len(msgspec.json.encode(pushed.metadata))) > MAX_METADATA_BYTES:
            raise _wrong(f"metadata: {size:,} bytes as JSON, at most {MAX_METADATA_BYTES:,} are taken")
        ids = pushed.prompt_tokens or []
        if (highest := max(ids, default=0)) >= self._tokenizer.num_tokens:
            raise _wrong(f"prompt_tokens: {highest} is no token; ids are below {self._tokenizer.num_tokens}")
        is_scored = not self._settings.imitates and any(each.reward is None for each in pushed.samples)
        if is_scored and self._options.label_key is not None and not pushed.label:
            raise _wrong(
                "label: it is missing, and samples without a reward are scored by the run's reward function; give it, "
                "give each sample a reward, or set data.label_key: null"
            )

    def _prompt(self, pushed: PushedGroup) -> str | list[Message]:
        if pushed.prompt is None:
            return self._tokenizer.decode(pushed.prompt_tokens or [])
        has_template = self._options.chat_template
        row = RawRow(pushed.key, {"prompt": pushed.prompt})
        prompt = prompt_of(row, "prompt", chat_template=has_template, option="prompt")
        if not has_template:
            return prompt
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return with_system(messages, self._options.system_prompt)

    def _response(self, index: int, sample: PushedSample, prompt: str | list[Message]) -> Response:
        at = f"samples[{index}]"
        if sum(given is not None for given in (sample.tokens, sample.text, sample.messages)) != 1:
            raise _wrong(f"{at}: give one of tokens, text and messages")
        if sample.tokens is None and (sample.logprobs, sample.spans, sample.versions) != (None, None, None):
            raise _wrong(f"{at}: logprobs, spans and versions are of token ids; give tokens")
        if sample.logprobs is None and self._settings.ratio_objective:
            raise _wrong(
                f"{at}.logprobs: they are missing, and learner.objective: {self._settings.ratio_objective} compares "
                "the policy with whatever drew the tokens; give them, or let the learner compute its own with "
                "learner.objective.old_logprobs: recompute, correction: none and allow_unbounded: true"
            )
        content: str | tuple[int, ...] | tuple[Message, ...]
        if sample.messages is not None:
            if isinstance(prompt, str) or sample.messages[-1].get("role") != "assistant":
                raise _wrong(
                    f"{at}.messages: they follow the messages of the prompt, with data.chat_template: true, and end "
                    "with the assistant's"
                )
            for message in sample.messages:
                if not isinstance(message.get("role"), str) or "content" not in message:
                    raise _wrong(f"{at}.messages: each is an object with 'role' and 'content'")
            content = (*prompt, *sample.messages)
        elif sample.text is not None:
            content = sample.text
        else:
            content = tuple(sample.tokens or ())
        logprobs = None if sample.logprobs is None else tuple(sample.logprobs)
        if logprobs is not None and len(logprobs) != len(content):
            raise _wrong(f"{at}.logprobs: found {len(logprobs)} for {len(content)} tokens")
        return Response(content, logprobs, sample.reward)


def _dated(index: int, made: RecordedSample, pushed: PushedSample, version: int) -> RecordedSample:
    """With the versions that made it, and the tokens that the model did not make left out of the loss."""
    part, at = made.part, f"samples[{index}]"
    spans = tuple(VersionSpan(*span) for span in pushed.versions or [(version, part.num_tokens)] if span[1])
    if sum(span.num_tokens for span in spans) != part.num_tokens:
        raise _wrong(f"{at}.versions: they are of {sum(s.num_tokens for s in spans)} tokens, not {part.num_tokens}")
    if max(span.version for span in spans) > version:
        raise _wrong(f"{at}.versions: none is above the group's version, {version}; that is the newest")
    mask, logprobs = part.loss_mask, list(floats_view(part.logprobs))
    if pushed.spans is not None:
        bounds = [0, *(place for span in pushed.spans for place in span), part.num_tokens]
        if any(first > after for first, after in pairwise(bounds)) or not any(a < b for a, b in pushed.spans):
            raise _wrong(f"{at}.spans: expected [first, end] ascending within {part.num_tokens} tokens, and one of any")
        of_model = {place for first, end in pushed.spans for place in range(first, end)}
        mask = bytes(place in of_model for place in range(part.num_tokens))
        logprobs = [logprob if is_made else 0.0 for logprob, is_made in zip(logprobs, mask, strict=True)]
    part = msgspec.structs.replace(part, spans=spans, loss_mask=mask, logprobs=pack_floats(logprobs))
    is_truncated = made.is_truncated if pushed.is_truncated is None else pushed.is_truncated
    return msgspec.structs.replace(made, part=part, is_truncated=is_truncated, is_dated=True)


def open_reader(
    options: DataOptions, settings: RecordedSettings, model_folder: Path, *, max_context: int
) -> PushReader:
    """Reads for the run of this model.

    Raises:
        DataError: the tokenizer or its chat template cannot be used.
    """
    tokenizer = TextTokenizer(model_folder)
    template = open_template(model_folder, named_sources(options))
    limit = TokenLimit.of(options, max_context)
    recorder = Recorder(
        tokenizer,
        template,
        read_special_tokens(model_folder),
        settings,
        max_context=max_context,
        check_prompt=limit.checked,
    )
    return PushReader(options, settings, recorder, tokenizer)
