"""Prompts with responses, for supervised steps. They take the same road as the prompts of the run."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from penstock.backends.data.dataset import batches, rendered
from penstock.backends.data.problems import Problems, RowProblem
from penstock.backends.data.row import BadColumnError, known_tokens, text_of
from penstock.backends.data.sources import parse_source, read_rows
from penstock.backends.data.special_tokens import read_special_tokens
from penstock.backends.data.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.row import RawRow

BLOCK = "learner.warm_start"


class Demonstration(NamedTuple):
    """One prompt and the response to imitate."""

    prompt_ids: array[int]
    """int32 ``[P]``."""
    response_ids: array[int]
    """int32 ``[T]``; the last one is the end-of-sequence token."""


class _Texts(NamedTuple):
    place: str
    prompt: str
    response: str


def load_demonstrations(
    path: str,
    prompt_key: str,
    response_key: str,
    tokenizer_folder: Path,
    *,
    seed: int,
    chat_template: bool = False,
    template_arguments: Mapping[str, object] | None = None,
    system_prompt: str | None = None,
    max_tokens: int | None = None,
) -> list[Demonstration]:
    """Read demonstrations; ``path`` is as in ``data.path``, ``lines:N`` gives noisy answers to the quickstart's task.

    ``seed`` (the run's) makes generated rows. ``template_arguments`` and ``system_prompt`` are for the chat template,
    as in the ``data:`` block. With ``max_tokens`` a row whose prompt and response together are
    longer is an error, not cut: a demonstration without its end teaches a model never to end.

    Raises:
        DataError: the source, the tokenizer or a row cannot be used.
    """
    source = parse_source(path)
    tokenizer = TextTokenizer(tokenizer_folder)
    template = _open_template(tokenizer_folder, template_arguments) if chat_template else None
    eos_id = read_special_tokens(tokenizer_folder).eos_id
    problems = Problems(skip=False, skip_key="")
    demonstrations: list[Demonstration] = []
    raw = read_rows(source, [prompt_key, response_key], seed=seed)
    for rows in batches(_checked(raw, prompt_key, response_key, template, system_prompt, problems)):
        prompts = tokenizer.encode([row.prompt for row in rows], special=template is None)
        responses = tokenizer.encode([row.response for row in rows], special=False)
        for row, prompt, response in zip(rows, prompts, responses, strict=True):
            try:
                demonstrations.append(_joined(prompt, response, eos_id, max_tokens))
            except BadColumnError as error:
                problems.add(error.at(row.place))
    problems.settle(num_good=len(demonstrations), source=str(source))
    return demonstrations


def _checked(
    raw: Iterable[RawRow | RowProblem],
    prompt_key: str,
    response_key: str,
    template: ChatTemplate | None,
    system_prompt: str | None,
    problems: Problems,
) -> Iterator[_Texts]:
    advice = f"Set {BLOCK}.response_key to the column with the response"
    for row in raw:
        if isinstance(row, RowProblem):
            problems.add(row)
            continue
        try:
            yield _Texts(
                row.place, rendered(row, prompt_key, template, BLOCK, system_prompt), text_of(row, response_key, advice)
            )
        except BadColumnError as error:
            problems.add(error.at(row.place))


def _open_template(folder: Path, arguments: Mapping[str, object] | None) -> ChatTemplate:
    from penstock.backends.data.chat import ChatTemplate  # here, as it brings transformers

    return ChatTemplate(folder, arguments)


def _joined(prompt: list[int] | str, response: list[int] | str, eos_id: int, max_tokens: int | None) -> Demonstration:
    prompt_ids, response_ids = known_tokens(prompt), known_tokens(response)
    if not prompt_ids:
        raise BadColumnError("the prompt has no tokens", "the prompt becomes no token at all")
    if not response_ids or response_ids[-1] != eos_id:  # some data sets write the token out
        response_ids = [*response_ids, eos_id]
    num_tokens = len(prompt_ids) + len(response_ids)
    if max_tokens is not None and num_tokens > max_tokens:
        raise BadColumnError(
            "the demonstration is too long",
            f"prompt and response have {num_tokens} tokens; at most {max_tokens} fit (model.max_context)",
        )
    return Demonstration(array("i", prompt_ids), array("i", response_ids))
