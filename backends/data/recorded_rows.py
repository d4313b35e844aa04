"""Rows that hold their responses: for imitation, for pairs of a better and a worse one, for samples drawn elsewhere.

| columns | responses |
|---|---|
| prompt, ``response_key`` | a text, token ids, or a list of as many as a group has samples |
| prompt, ``chosen_key``, ``rejected_key`` | two, with the rewards 1 and 0 |
| prompt: chat messages of which the assistant's is the last | one: every turn of the assistant, the others masked |

Where there are both, the objective decides: DPO takes the pair.

Invariants:

* A row is understood here without a tokenizer and without a template, so that it can be checked before a run.
* Nothing is guessed: a column that the scenario names is there, and has one of the forms above.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from penstock.backends.data.row import (
    BadColumnError,
    Message,
    label_of,
    metadata_of,
    num_retries_of,
    prompt_of,
    shown,
    text_of,
    value_of,
)
from penstock.messages.samples import MAX_REWARD, Loss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.data.options import DataOptions, RecordedOptions
    from penstock.backends.data.row import RawRow

BLOCK = "data.recorded"


class RecordedSettings(NamedTuple):
    """What the run makes of rows with responses."""

    group_size: int
    max_response_tokens: int
    are_all_recorded: bool
    """Whether no engine of the run generates, so that every row must hold its responses."""
    imitates: bool
    """Whether the objective of the run is imitation."""
    prefers_pairs: bool = False
    """Whether it is one of pairs, so that in a row with both a response and a pair the pair is meant."""
    ratio_objective: str = ""
    """Name of the objective of the run, if it needs the log-probs under which a response was drawn."""


class Response(NamedTuple):
    """One response as its row gives it."""

    content: str | tuple[int, ...] | tuple[Message, ...]
    """A text, token ids, or a whole conversation with its prompt."""
    logprobs: tuple[float, ...] | None
    reward: float | None


class RecordedRow(NamedTuple):
    """A row that is right but for its lengths in tokens."""

    place: str
    prompt: str | list[Message]
    label: str
    metadata: bytes
    responses: tuple[Response, ...]
    loss: Loss
    num_retries: int | None


def recorded_columns(options: DataOptions) -> tuple[list[str], list[str]]:
    """The columns that rows with responses must have, and those that they may have."""
    recorded = options.recorded
    named = [recorded.logprobs_key, recorded.reward_key, recorded.loss_key]
    label = [] if options.label_key is None else [options.label_key]
    must = [options.prompt_key, *(key for key in named if key is not None), *options.metadata_keys]
    return must, [recorded.response_key, recorded.chosen_key, recorded.rejected_key, *label]


def dataset_paths(options: DataOptions, recorded: RecordedSettings | None) -> tuple[str, ...]:
    """The sources of the rows of a run: the second one, if there is one, has only rows that hold their responses."""
    assert options.path is not None, "of one source"
    second = None if recorded is None else options.recorded.path
    return (options.path,) if second is None else (options.path, second)


def dataset_columns(
    options: DataOptions, recorded: RecordedSettings | None, *, source: int
) -> tuple[list[str], list[str]]:
    """The columns that the rows of one of :func:`dataset_paths` must have, and those that they may have."""
    label = [] if options.label_key is None else [options.label_key]
    tools = [] if options.tools_key is None else [options.tools_key]
    keys = options.multimodal_keys
    media = [key for key in (keys.image, keys.video, keys.audio) if key is not None]
    teacher = [] if options.teacher_prompt_key is None else [options.teacher_prompt_key]
    must = [options.prompt_key, *label, *options.metadata_keys, *tools, *media, *teacher]
    if recorded is None:
        return must, []
    of_recorded, may = recorded_columns(options)
    if source == 1 or recorded.are_all_recorded:
        return of_recorded, may
    return must, [] if options.recorded.path is not None else [*of_recorded, *may]


def is_recorded_row(row: RawRow, options: DataOptions, recorded: RecordedSettings | None, *, source: int) -> bool:
    """Whether the row is one that holds its responses. ``source``: which of :func:`dataset_paths` it is from."""
    if recorded is None:
        return False
    if options.recorded.path is not None:
        return source == 1
    return recorded.are_all_recorded or holds_responses(row, options)


def holds_responses(row: RawRow, options: DataOptions) -> bool:
    """Whether a row of a dataset for engines of both kinds is one for those that answer with what it holds."""
    recorded = options.recorded
    if any(value_of(row, key) is not None for key in (recorded.response_key, recorded.chosen_key)):
        return True
    return _is_conversation(value_of(row, options.prompt_key))


def recorded_row(row: RawRow, options: DataOptions, settings: RecordedSettings) -> RecordedRow:
    """What a row holds.

    Raises:
        BadColumnError: a column is missing or not what it should be, or the objective cannot use what there is.
    """
    loss = _loss_of(row, options.recorded, settings)
    value = value_of(row, options.prompt_key)
    prompt: str | list[Message]
    if _is_conversation(value):
        prompt, responses = _conversation(row, options)
    else:
        prompt = prompt_of(row, options.prompt_key, chat_template=options.chat_template, option="data.prompt_key")
        responses = _responses(row, options.recorded, prefers_pairs=settings.prefers_pairs)
    responses = _with_rewards(row, options.recorded, responses)
    _check_number(len(responses), loss, settings)
    if loss is Loss.OBJECTIVE and settings.ratio_objective and any(each.logprobs is None for each in responses):
        raise BadColumnError(
            "the response has no log-probs",
            f"the response has no log-probs, and learner.objective: {settings.ratio_objective} compares the policy "
            f"with whatever drew it. Name their column in {BLOCK}.logprobs_key, imitate the row with {BLOCK}.loss: "
            "sft, or take an objective that needs none (sft, dpo, kto, rejection_sampling, reward_weighted)",
        )
    is_scored = loss is Loss.OBJECTIVE and any(each.reward is None for each in responses)
    return RecordedRow(
        place=row.place,
        prompt=prompt,
        label=_label(row, options.label_key, is_needed=is_scored),
        metadata=metadata_of(row, options.metadata_keys, options.metadata),
        responses=responses,
        loss=loss,
        num_retries=num_retries_of(row, options),
    )


def _is_conversation(value: object) -> bool:
    """Whether these are chat messages of which the last is the assistant's own."""
    if not isinstance(value, list) or not value:
        return False
    last = cast("list[object]", value)[-1]
    return isinstance(last, dict) and cast("Message", last).get("role") == "assistant"


def _conversation(row: RawRow, options: DataOptions) -> tuple[list[Message], tuple[Response, ...]]:
    """The messages before the assistant's first turn, and all of them as the one response."""
    key = options.prompt_key
    recorded = options.recorded
    for other in (recorded.response_key, recorded.chosen_key):
        if value_of(row, other) is not None:
            raise BadColumnError(
                "two responses",
                f"{key!r} ends with the assistant's answer and {other!r} holds another; leave one of them out",
            )
    messages = cast("list[object]", value_of(row, key))
    first = next(index for index, message in enumerate(messages) if _role(message) == "assistant")
    if not first:
        raise BadColumnError(f"{key!r} begins with the assistant", f"{key!r} begins with the assistant: no prompt")
    before = row._replace(columns={**row.columns, key: messages[:first]})
    prompt = prompt_of(before, key, chat_template=options.chat_template, option="data.prompt_key")
    assert isinstance(prompt, list)  # a list of messages stays one, or is refused
    for index, message in enumerate(messages):
        if not isinstance(_role(message), str) or "content" not in cast("Message", message):
            raise BadColumnError(
                f"{key!r} has a malformed message",
                f"message {index} of {key!r} is {shown(message)}; expected an object with 'role' and 'content'",
            )
    return prompt, (Response(tuple(cast("list[Message]", messages)), None, None),)


def _listed(value: object) -> list[object] | None:
    """The same, where it is a list."""
    return cast("list[object]", value) if isinstance(value, list) else None


def _role(message: object) -> object:
    return cast("Message", message).get("role") if isinstance(message, dict) else None


def _responses(row: RawRow, recorded: RecordedOptions, *, prefers_pairs: bool) -> tuple[Response, ...]:
    key, better, worse = recorded.response_key, recorded.chosen_key, recorded.rejected_key
    if value_of(row, better) is not None and (prefers_pairs or value_of(row, key) is None):
        pair = [_content(_text_or_ids(row, name), name) for name in (better, worse)]
        return tuple(Response(content, None, reward) for content, reward in zip(pair, (1.0, 0.0), strict=True))
    if (given := value_of(row, key)) is None:
        present = ", ".join(repr(name) for name in row.columns)
        raise BadColumnError(
            "no response",
            f"there is no response: neither {key!r} nor {better!r} and {worse!r} (columns here are {present}). Set "
            f"{BLOCK}.response_key, or {BLOCK}.chosen_key and {BLOCK}.rejected_key",
        )
    values = _several(given, key)
    logprobs = _logprobs(row, recorded, [_content(value, key) for value in values])
    return tuple(Response(_content(value, key), lp, None) for value, lp in zip(values, logprobs, strict=True))


def _text_or_ids(row: RawRow, key: str) -> object:
    value = value_of(row, key)
    return value if _listed(value) is not None else text_of(row, key, f"{BLOCK} names it as the column of a response")


def _several(value: object, key: str) -> list[object]:
    """The responses of a column: a list of texts or of lists of ids is several, a list of ids is one."""
    if not isinstance(value, list):
        return [value]
    items = cast("list[object]", value)
    if not items:
        raise BadColumnError(f"{key!r} is empty", f"{key!r} is an empty list")
    return items if all(isinstance(item, str | list) for item in items) else [items]


def _content(value: object, key: str) -> str | tuple[int, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise BadColumnError(f"{key!r} is empty", f"{key!r} is empty")
        return value
    if (items := _listed(value)) and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return tuple(cast("list[int]", items))
    raise BadColumnError(
        f"{key!r} has the wrong type",
        f"{key!r} is {shown(value)}; expected a text, a list of token ids, or a list of these",
    )


def _logprobs(
    row: RawRow, recorded: RecordedOptions, contents: Sequence[str | tuple[int, ...]]
) -> list[tuple[float, ...] | None]:
    key = recorded.logprobs_key
    value = None if key is None else value_of(row, key)
    if key is None or value is None:
        return [None] * len(contents)
    lists = _listed(value) or [value]
    if not all(isinstance(item, list) for item in lists):
        lists = [lists]
    if len(lists) != len(contents):
        raise BadColumnError(
            f"{key!r} has the wrong length", f"{key!r} is for {len(lists)} responses, and the row holds {len(contents)}"
        )
    found: list[tuple[float, ...] | None] = []
    for each, content in zip(lists, contents, strict=True):
        if isinstance(content, str):
            raise BadColumnError(
                f"{key!r} without token ids",
                f"{key!r} is given for a response that is a text; log-probs belong to tokens, so give their ids",
            )
        numbers = _numbers(each, key)
        if len(numbers) != len(content):
            raise BadColumnError(
                f"{key!r} has the wrong length", f"{key!r} has {len(numbers)} values for {len(content)} tokens"
            )
        if any(number > 0 for number in numbers):
            raise BadColumnError(f"{key!r} above 0", f"{key!r} holds {max(numbers):g}; a log-prob is at most 0")
        found.append(numbers)
    return found


def _with_rewards(row: RawRow, recorded: RecordedOptions, responses: tuple[Response, ...]) -> tuple[Response, ...]:
    key = recorded.reward_key
    value = None if key is None else value_of(row, key)
    if key is None or value is None:
        return responses
    given = _listed(value) or [value]
    rewards = _numbers([float(each) if isinstance(each, bool) else each for each in given], key)
    if len(rewards) != len(responses):
        raise BadColumnError(
            f"{key!r} has the wrong length",
            f"{key!r} holds {len(rewards)} rewards, and the row {len(responses)} responses",
        )
    return tuple(response._replace(reward=reward) for response, reward in zip(responses, rewards, strict=True))


def _numbers(value: object, key: str) -> tuple[float, ...]:
    items = _listed(value)
    if items is not None and all(isinstance(item, int | float) and not isinstance(item, bool) for item in items):
        numbers = cast("list[float]", items)
        if all(abs(number) <= MAX_REWARD for number in numbers):  # and so neither infinite nor NaN, in float32 too
            return tuple(map(float, numbers))
    raise BadColumnError(
        f"{key!r} has the wrong type",
        f"{key!r} is {shown(value)}; expected numbers from -{MAX_REWARD:g} to {MAX_REWARD:g}",
    )


def _loss_of(row: RawRow, recorded: RecordedOptions, settings: RecordedSettings) -> Loss:
    if settings.imitates:
        return Loss.SUPERVISED
    key = recorded.loss_key
    value = (None if key is None else value_of(row, key)) or recorded.loss
    match value:
        case "sft":
            return Loss.SUPERVISED
        case "objective":
            return Loss.OBJECTIVE
        case _:
            raise BadColumnError(
                f"{key!r} is no loss", f"{key!r} is {shown(value)}; expected 'sft', 'objective' or nothing"
            )


def _label(row: RawRow, key: str | None, *, is_needed: bool) -> str:
    if key is None or (not is_needed and value_of(row, key) is None):
        return ""
    return label_of(row, key)


def _check_number(number: int, loss: Loss, settings: RecordedSettings) -> None:
    size = settings.group_size
    if number == size or (number == 1 and loss is Loss.SUPERVISED):
        return
    advice = "" if loss is Loss.SUPERVISED else f", or imitate single responses with {BLOCK}.loss: sft"
    raise BadColumnError(
        "the number of responses is not that of a group",
        f"the row holds {number} responses, and a group has {size} samples (sampling.samples_per_group); make both the "
        f"same{advice}",
    )
