"""The ``episode:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.messages.base import Options
from penstock.messages.option_keys import EpisodePartKey


class NamedEpisodeOptions(Options, frozen=True, kw_only=True):
    """A function that rows can name."""

    name: Annotated[str, Meta(min_length=1)]
    """As it stands in the rows."""
    generate: EpisodePartKey
    """As ``episode.generate``."""


class EpisodeOptions(Options, frozen=True, kw_only=True):
    """What becomes of an issued sample: one generation, or a conversation with a function or an agent of yours."""

    kind: Literal["single", "function", "gateway"] = "single"
    """``single``: one response to the prompt. ``function``: ``generate`` plays, turn by turn. ``gateway``: an agent
    outside takes the sample as a session and talks to the model through an OpenAI-compatible endpoint."""
    generate: EpisodePartKey | None = None
    """With ``function``: ``file.py:function``, see docs/episodes.md; or ``multi_turn``, a ready one that gives the
    model ``tools`` or an ``environment``."""
    function_key: str | None = None
    """A column (of data.metadata_keys), or a field of a source's metadata, that names the function of each row among
    ``functions``; rows without it take ``generate``."""
    functions: tuple[NamedEpisodeOptions, ...] = ()
    """The functions that rows can name."""
    tools: tuple[EpisodePartKey, ...] = ()
    """What the model can call with ``multi_turn``: ``file.py:Tool`` each, or the name of a ready one."""
    environment: EpisodePartKey | None = None
    """What answers the model with ``multi_turn``: ``file.py:Class``, or the name of a ready one."""
    images: bool = False
    """With ``function``: tools, environments and functions may show images to a model that sees; with ``gateway``
    requests of agents may (docs/vision.md). Where rows have images (data.multimodal_keys) they may without it."""
    max_images_gb: Annotated[float, Meta(gt=0)] | None = 100.0
    """What ``images/`` in the run's folder may take of the disk, in 10⁹ bytes, before a further image of an episode is
    refused: none is removed while the run goes on. null: it is not bounded. Images that rows bring are not refused."""
    max_turns: Annotated[int, Meta(ge=1)] = 32
    """Responses of the model in one episode; the next request is refused, and the sample counts as truncated."""
    max_parts: Annotated[int, Meta(ge=1)] = 8
    """Conversations that one episode may have, each a part of the sample. With ``gateway`` a request whose history was
    changed begins one; with 1 it is refused."""
    follow_sampling: bool = False
    """With ``gateway``: temperature, top_p, top_k, min_p and seed of a request are followed where they are given. What
    is drawn otherwise than block ``sampling:`` says is not trained. false: block ``sampling:`` holds."""
    tool_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """For one call of a tool or an environment, where the function says nothing else."""
    stall_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """A function that lets no other run for so long (it blocks, or hangs in C code) costs the process that it shares
    with the other episodes of its engine; all of them are issued again."""
    take_timeout_s: Annotated[float, Meta(gt=0)] = 240.0
    """A session that no agent takes for so long fails and is issued again."""
    idle_timeout_s: Annotated[float, Meta(gt=0)] = 180.0
    """An episode that asks the model for nothing for so long is abandoned: it fails and is issued again."""
    timeout_s: Annotated[float, Meta(gt=0)] = 1800.0
    """For a whole episode; of a session from when an agent takes it."""
    tool_format: Literal["hermes", "json", "none"] = "hermes"
    """How the model writes tool calls. ``hermes``: JSON between ``<tool_call>`` tags (Qwen and many others); ``json``:
    the whole response is one JSON object (Llama 3); ``none``: tools are not parsed."""
    host: str = "127.0.0.1"
    """Address that the engines' gateways listen on; ``0.0.0.0`` for agents on other machines."""
