"""The ``data:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.messages.base import Options


class DataOptions(Options, frozen=True, kw_only=True):
    """Where the prompts come from."""

    path: str
    """``rows.jsonl``, ``rows.parquet``, either with ``@[a:b]`` for a slice; ``lines:N`` for N rows of the quickstart's
    task; ``reasoning_gym:NAME:N`` for N rows of a reasoning-gym task."""
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
