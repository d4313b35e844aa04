"""The ``sampling:`` and ``engines:`` blocks of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.messages.base import Options


class SamplingOptions(Options, frozen=True, kw_only=True):
    """How responses are drawn."""

    samples_per_group: Annotated[int, Meta(ge=1, le=4096)] = 8
    temperature: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """0 takes the likeliest token; log-probs are then those of temperature 1."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    """0: all."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    max_response_tokens: Annotated[int, Meta(ge=1)] = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Besides the tokenizer's end-of-sequence token."""


class LatencyOptions(Options, frozen=True, kw_only=True):
    """The model of a simulated engine: log-normal response lengths, a time per token that grows with the load."""

    response_tokens_median: Annotated[float, Meta(gt=0)] = 400.0
    response_tokens_sigma: Annotated[float, Meta(ge=0)] = 0.8
    prefill_s: Annotated[float, Meta(ge=0)] = 0.05
    token_s: Annotated[float, Meta(gt=0)] = 0.01
    """Of one token with one request running."""
    token_load_s: Annotated[float, Meta(ge=0)] = 0.00005
    """Added per token for every further request that runs beside it."""
    apply_weights_s: Annotated[float, Meta(ge=0)] = 0.5
    fetch_weights_s: Annotated[float, Meta(ge=0)] = 1.0
    failure_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of generations that end as ``infra_error``."""


class EnginesOptions(Options, frozen=True, kw_only=True):
    """How many engines, of what kind."""

    backend: Literal["torch", "simulated"] = "torch"
    count: Annotated[int, Meta(ge=1, le=65536)] = 1
    slots: Annotated[int, Meta(ge=1)] = 64
    """Requests that one engine decodes side by side."""
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1``; ``auto`` takes a GPU where Ray assigns one."""
    num_threads: Annotated[int, Meta(ge=1)] = 1
    progress_tokens: Annotated[int, Meta(ge=1)] = 64
    """A running request reports its tokens after every so many."""
    start_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    simulated: LatencyOptions = LatencyOptions()
