"""The ``episode:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.messages.base import Options


class EpisodeOptions(Options, frozen=True, kw_only=True):
    """What becomes of an issued sample: one generation, or a conversation with an agent of yours."""

    kind: Literal["single", "gateway"] = "single"
    """``single``: one response to the prompt. ``gateway``: an agent outside takes the sample as a session and talks to
    the model through an OpenAI-compatible endpoint."""
    max_turns: Annotated[int, Meta(ge=1)] = 32
    """Responses of the model in one session; the next request is refused, and the sample counts as truncated."""
    take_timeout_s: Annotated[float, Meta(gt=0)] = 240.0
    """A session that no agent takes for so long fails and is issued again."""
    idle_timeout_s: Annotated[float, Meta(gt=0)] = 180.0
    """A session whose agent asks for nothing for so long is abandoned: it fails and is issued again."""
    timeout_s: Annotated[float, Meta(gt=0)] = 1800.0
    """For a whole session, from when an agent takes it."""
    tool_format: Literal["hermes", "json", "none"] = "hermes"
    """How the model writes tool calls. ``hermes``: JSON between ``<tool_call>`` tags (Qwen and many others); ``json``:
    the whole response is one JSON object (Llama 3); ``none``: tools are not parsed."""
    host: str = "127.0.0.1"
    """Address that the engines' gateways listen on; ``0.0.0.0`` for agents on other machines."""
