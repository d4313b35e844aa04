"""Options of rewards that ask a service over HTTP: ``remote`` and ``judge``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from penstock.messages.base import Options
from penstock.messages.option_keys import FileKey

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]


class ServiceOptions(Options, frozen=True, kw_only=True):
    """How a service is asked, and what is done when it fails."""

    timeout_s: Seconds = 120.0
    """Of one sample, all tries and waits together; reward.timeout_s does not count here."""
    request_timeout_s: Seconds = 60.0
    """Of one request, from the connection to the last byte of the answer."""
    num_retries: Annotated[int, Meta(ge=0)] = 4
    """Requests that are made again, after one that failed in a way that may pass."""
    backoff_s: Seconds = 0.5
    """Before the first of them; each later wait is twice as long, up to max_backoff_s, less a random part of up to
    half. What the service says itself (``Retry-After``) is the least."""
    max_backoff_s: Seconds = 20.0
    """Longest wait between two requests for one sample."""
    max_concurrent: Annotated[int, Meta(ge=1, le=4096)] = 32
    """Requests at a time; further samples wait, and their time has not begun."""
    auth_env: str | None = None
    """Environment variable with the key, sent as ``Authorization: Bearer …``. The key itself never stands in a
    scenario or in a run's folder."""
    repeats: bool = True
    """The service may be sent the same request twice: it answers and changes nothing. false: a request that may have
    reached it is not made again."""
    breaker_failures: Count = 8
    """Failures in a row after which nothing more is sent for breaker_open_s. Then one request is tried: if it is
    answered all goes on, else the pause begins anew. Samples wait meanwhile, as long as their time allows."""
    breaker_open_s: Seconds = 15.0
    """How long the pause after ``breaker_failures`` lasts."""
    max_answer_bytes: Annotated[int, Meta(ge=64)] = 1 << 20
    """A longer answer is refused."""


class RemoteOptions(ServiceOptions, frozen=True, kw_only=True):
    """The reward ``remote``: a service that scores."""

    url: str = ""
    """Where samples are posted to, as JSON."""
    batch_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Samples in one request. From 2 on the body is a list, and so is the answer, in the same order."""
    batch_wait_s: Annotated[float, Meta(ge=0)] = 0.05
    """How long a batch that is not full waits for more."""
    fields: tuple[str, ...] = ("prompt", "response", "label")
    """What is sent of each sample: any of what a reward function may ask for."""


class ModelScoreOptions(ServiceOptions, frozen=True, kw_only=True):
    """The reward ``reward_model``: how the run's own reward models, the block ``reward_model``, are asked."""

    timeout_s: Seconds = 600.0
    """Of one sample, with the time in which a reward model starts, or is replaced."""
    max_concurrent: Annotated[int, Meta(ge=1, le=4096)] = 128
    """Samples that are asked about at a time."""


class JudgeOptions(ServiceOptions, frozen=True, kw_only=True):
    """The reward ``judge``: a model that is asked for a verdict, through any OpenAI-compatible endpoint."""

    url: str | None = None
    """Of the endpoint, up to and with ``/v1``."""
    engine: Literal["self", "teacher"] | None = None
    """The run's own engines instead of a url. ``self``: the policy judges itself, with the weights that it has at the
    moment, on engines of torch and sglang; ``teacher``: the teacher's server, whose weights never change and which has
    to be SGLang, as an embedded teacher only scores."""
    model: str = "default"
    """As the endpoint calls it."""
    template: FileKey | None = None
    """A file with the question; ``{{prompt}}``, ``{{response}}``, ``{{label}}`` and ``{{metadata.COLUMN}}`` are put
    in. null: a question about right or wrong, answered with yes or no."""
    system: str | None = None
    """A system message before it."""
    score: str | None = None
    r"""A regular expression with one group, the number: ``Score:\s*(-?\d+(?:\.\d+)?)``. Nothing
    else may stand on the last line of the judge's answer; a ``/ 10`` behind it where ``highest`` is 10."""
    verdicts: dict[str, float] | None = None
    """Words and what each is worth, instead of ``score``, in any case. One stands alone on the last line of the
    judge's answer, and no other alone on a line before. null, with no ``score`` either: yes is 1 and no is 0."""
    lowest: float = 0.0
    """The number that is worth 0."""
    highest: float = 1.0
    """Numbers outside are no verdict; those inside become (number − lowest) ÷ (highest − lowest)."""
    max_tokens: Count = 512
    """Of the judge's answer. One that was cut off there has no verdict."""
    temperature: Annotated[float, Meta(ge=0)] = 0.0
    """Of the judge's answer; 0 takes the likeliest token, so that it judges alike each time."""
    body: dict[str, str | int | float | bool] = field(default_factory=dict[str, str | int | float | bool])
    """Further entries of each request, as they are. Engines of torch know ``top_p``, ``top_k``, ``min_p``, ``stop``
    (one text) and ``seed``."""
