"""The ``data:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.messages.base import Options


class RecordedOptions(Options, frozen=True, kw_only=True):
    """Responses that the rows hold already, for engines of the backend `recorded`. The page docs/learner.md has the
    forms of rows."""

    path: str | None = None
    """Rows with responses, beside those of data.path, for which engines generate; written as data.path. null: the rows
    of data.path hold the responses, and where other engines are in the run too, those that hold none are for these."""
    response_key: str = "response"
    """Column with the response: a text, token ids, or a list of as many of these as a group has samples. Chat messages
    that end with the assistant's hold it themselves."""
    chosen_key: str = "chosen"
    """Column with the better of two responses, in rows without ``response_key``, and with ``learner.objective: dpo`` in
    any; with rewards 1 and 0 the two are a group."""
    rejected_key: str = "rejected"
    """Column with the other one."""
    logprobs_key: str | None = None
    """Column with the log-probs of responses that are token ids, one a token, as whatever drew them reported; null:
    nobody knows them."""
    reward_key: str | None = None
    """Column with the reward, or one for each response; null: reward.function scores them, unless they are imitated."""
    loss: Literal["objective", "sft"] = "objective"
    """What the responses are trained by: ``objective``, that of the run; ``sft``, imitated."""
    loss_key: str | None = None
    """Column that says so for each row, with the same two words; null, and an empty one: as ``loss`` says."""


class DataOptions(Options, frozen=True, kw_only=True):
    """Where the prompts come from."""

    path: str
    """``rows.jsonl`` (also compressed: ``.jsonl.gz``, ``.jsonl.zst``), ``rows.parquet``, a folder that Hugging Face
    ``datasets`` has saved, each with ``@[a:b]`` for a slice (``@[-500:]``: the last 500 rows); ``lines:N`` for N rows
    of the quickstart's task; ``reasoning_gym:NAME:N`` for N rows of a reasoning-gym task."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    label_key: str | None = "label"
    """Column with what the reward compares with; null when the rows have none."""
    metadata_keys: tuple[str, ...] = ()
    """Further columns that the reward function wants to see."""
    chat_template: bool = False
    """Render prompts with the tokenizer's chat template; a string becomes one user message."""
    num_epochs: Annotated[int, Meta(ge=1)] | None = None
    """How often the dataset may be gone through; null means as often as the run needs."""
    shuffle: bool = True
    skip_bad_rows: bool = False
    """Skip and count rows that cannot be read, instead of stopping with their line."""
    max_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Rows with longer prompts count as bad; null: whatever leaves room for one response token."""
    recorded: RecordedOptions = RecordedOptions()
    """Responses that the rows hold already."""
