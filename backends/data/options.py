"""The ``data:`` block of a scenario."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol

import msgspec
from msgspec import Meta

from penstock.messages.base import Options
from penstock.messages.option_keys import DataSourceKey, RowsKey

if TYPE_CHECKING:
    from collections.abc import Iterable

PUSHED: Final = "pushed"
"""As ``data.source``: groups come finished from outside. Their journal has this folder in that of a run."""
Scalar = str | int | float | bool
HOST_FORM: Final = r"[a-z0-9.-]+|\[[0-9a-f:.]+\]"
"""Of a host in an address, in small letters; the second is IPv6."""
HostName = Annotated[str, Meta(pattern=rf"^({HOST_FORM})$")]
SourceName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class MediaKeys(Options, frozen=True, kw_only=True):
    """Columns with what belongs to a prompt and is no text. Each holds one reference or a list of them: an http(s)
    address (see media_hosts), a path (of a file in the folder of the rows), ``data:…;base64,…``, or the bytes."""

    image: str | None = None
    """Column with images. Where it is the column with the prompt, the parts of its chat messages hold them."""
    video: str | None = None
    """Column with videos."""
    audio: str | None = None
    """Column with sounds."""


class RecordedOptions(Options, frozen=True, kw_only=True):
    """Responses that the rows hold already, for engines of the backend `recorded`. The page docs/learner.md has the
    forms of rows."""

    path: RowsKey | None = None
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
    """Column with the reward, or one for each response: numbers, or true and false for 1 and 0. null: reward.function
    scores them, unless they are imitated."""
    loss: Literal["objective", "sft"] = "objective"
    """What the responses are trained by: ``objective``, that of the run; ``sft``, imitated."""
    loss_key: str | None = None
    """Column that says so for each row, with the same two words; null, and an empty one: as ``loss`` says."""


class SourceOptions(Options, frozen=True, kw_only=True):
    """One of several sources of prompts. What is null here is as the ``data:`` block says for all."""

    path: RowsKey
    """Written as data.path, with all its forms."""
    name: SourceName | None = None
    """In figures and messages; null: the name of the file without its endings."""
    weight: Annotated[float, Meta(gt=0)] | None = None
    """Share of the prompts, relative to that of the other sources. In any stretch of prompts each source has its share
    to within two. null, and then in all: the sources are gone through as one dataset."""
    prompt_key: str | None = None
    """null: data.prompt_key."""
    label_key: str | None = None
    """null: data.label_key; an empty text: the rows have no label."""
    metadata_keys: tuple[str, ...] | None = None
    """null: data.metadata_keys."""
    metadata: dict[str, Scalar] | None = None
    """Added to data.metadata, the same for each row of this source: ``{reward: math}``."""
    chat_template: bool | None = None
    """null: data.chat_template."""
    template_arguments: dict[str, Scalar] | None = None
    """null: data.template_arguments."""
    system_prompt: str | None = None
    """null: data.system_prompt; an empty text: none."""
    tools_key: str | None = None
    """null: data.tools_key; an empty text: none."""
    multimodal_keys: MediaKeys | None = None
    """null: data.multimodal_keys."""
    max_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    """null: data.max_prompt_tokens."""
    skip_bad_rows: bool | None = None
    """null: data.skip_bad_rows."""
    skip_long_prompts: bool | None = None
    """null: data.skip_long_prompts."""


class DataOptions(Options, frozen=True, kw_only=True):
    """Where the prompts come from."""

    path: RowsKey | None = None
    """``rows.jsonl`` (also compressed: ``.jsonl.gz``, ``.jsonl.zst``), ``rows.parquet``, a folder that Hugging Face
    ``datasets`` has saved, a file of a repository on the Hugging Face hub (``hub:openai/gsm8k/main/train.parquet``, and
    ``ORG/NAME`` where it has one for training), each with ``@[a:b]`` for a slice (``@[-500:]``: the last 500 rows);
    ``lines:N`` for N rows of the quickstart's task; ``sums:N`` of the calculator's; ``shapes:N`` of
    shapes whose colour is asked for; ``reasoning_gym:NAME:N`` for N rows
    of a reasoning-gym task. null: see ``sources``."""
    sources: tuple[SourceOptions, ...] = ()
    """Several sources, in place of ``path``."""
    source: DataSourceKey | None = None
    """``file.py:Class``: a class that makes rows as the run asks for them, and is told what became of them, in place of
    ``path``. Its rows come in its own order; ``shuffle`` says nothing. ``pushed``: finished groups come from
    outside over HTTP (docs/gateway.md), for engines of the backend `recorded`."""
    source_options: dict[str, Scalar] = msgspec.field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    """What the class is called with."""
    source_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """For one call of it, also one that waits for rows; a longer one ends the run."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    label_key: str | None = "label"
    """Column with what the reward compares with; null when the rows have none."""
    metadata_keys: tuple[str, ...] = ()
    """Further columns that the reward function wants to see."""
    metadata: dict[str, Scalar] = msgspec.field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    """What it sees besides, the same for each row."""
    num_retries_key: str | None = None
    """A column (of ``metadata_keys``), or a field of ``metadata``, with how often a sample of the row whose generation
    failed is issued again, from 0 to 1000. null, and rows without it: ``prompt_source.num_retries``."""
    chat_template: bool = False
    """Render prompts with the tokenizer's chat template; a string becomes one user message."""
    template_arguments: dict[str, Scalar] = msgspec.field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    """Variables for the chat template (``enable_thinking: false``)."""
    system_prompt: str | None = None
    """A system message before the messages of each row that has none of its own; needs the chat template."""
    tools_key: str | None = None
    """Column with the tools that the model may call, for the chat template: a list of their schemas, or such a list as
    a text in JSON; null when the rows have none, and empty in rows without."""
    multimodal_keys: MediaKeys = MediaKeys()
    """Columns with images, videos and sounds, for engines that take them: ``{image: images}`` (docs/vision.md)."""
    media_hosts: tuple[HostName, ...] = ()
    """Hosts, in small letters, that engines may fetch images, videos and sounds of rows from, where a server looks at
    them by itself (docs/data.md). An address of another host makes the row a bad one: rows would say whom the engines
    ask, behind your firewall too. Redirections are followed to these hosts alone."""
    max_media_bytes: Annotated[int, Meta(ge=1)] = 20_000_000
    """Of one file that a prompt refers to, or of what stands in the row itself; more makes the row a bad one."""
    max_image_pixels: Annotated[int, Meta(ge=1)] = 16_777_216
    """Of one image that engine and learner compute, before it is decoded; more makes the row a bad one."""
    num_epochs: Annotated[int, Meta(ge=1)] | None = None
    """How often the dataset may be gone through (of several sources with weights: each at least so often); null means
    as often as the run needs."""
    shuffle: bool = True
    """Draw each epoch's rows in an order of its own, by run.seed; false: as they stand."""
    skip_bad_rows: bool = False
    """Skip and count rows that cannot be read, instead of stopping with their line."""
    skip_long_prompts: bool = False
    """Skip and count rows whose prompts are too long, and these only."""
    teacher_prompt_key: str | None = None
    """Column with what the teacher reads in place of the prompt (the prompt and a worked answer, say), of the same form
    as the prompt; null: the prompt. What is longer there must have room in model.max_context beside the response."""
    max_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Rows with longer prompts count as bad; null: whatever leaves room for one response token."""
    stream: bool = False
    """Keep an index of the rows and read each when it is wanted, for data larger than memory: plain JSON lines, Parquet
    and folders of ``datasets``. The shuffle then goes through the rows by blocks."""
    prefetch_rows: Annotated[int, Meta(ge=0, le=65536)] = 256
    """With ``stream``: rows that are read before they are wanted."""
    recorded: RecordedOptions = RecordedOptions()
    """Responses that the rows hold already."""


class RowMetadata(Protocol):
    """A block that says what is kept of rows beside prompt and label."""

    @property
    def metadata_keys(self) -> tuple[str, ...] | None: ...

    @property
    def metadata(self) -> dict[str, Scalar] | None: ...


def metadata_names(blocks: Iterable[RowMetadata]) -> frozenset[str]:
    """What the metadata of a row under these blocks may have: columns that are kept, and what is the same for each."""
    return frozenset(name for block in blocks for name in (*(block.metadata_keys or ()), *(block.metadata or {})))
