"""What a turn may be drawn with, and when its tokens can be trained.

A learner computes log-probs of the whole distribution at the scenario's temperature. Tokens that were drawn otherwise,
because a call asked for another temperature, for other cut-offs or for a schema, are of a distribution that it does not
know, so no weight could correct them: they stay in the conversation and are not trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.episodes.api import ChatRequest
from penstock.backends.episodes.dialogue import MalformedError
from penstock.backends.protocol import Capability
from penstock.messages.turn_sampling import TurnSampling

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.backends.engines.options import SamplingOptions
    from penstock.backends.episodes.api import CompletionRequest

OTHER_SAMPLING: Final = "other_sampling"
CONSTRAINED: Final = "constrained"
CAUSES: Final[tuple[str, ...]] = (OTHER_SAMPLING, CONSTRAINED)
MAX_CONSTRAINT_CHARS: Final = 1 << 16
NO_SAMPLING: Final = TurnSampling()


def checked(asked: TurnSampling | None, can: Collection[str], name: str = "sampling") -> TurnSampling | None:
    """What a call asks for; None where it asks for nothing.

    Raises:
        MalformedError: a value is out of range, or the engine cannot do it.
    """
    if asked is None or asked == NO_SAMPLING:
        return None
    try:
        msgspec.convert(msgspec.to_builtins(asked), TurnSampling)  # the ranges, which a constructor does not look at
    except msgspec.ValidationError as error:
        raise MalformedError(f"{name}: {error}") from None
    if problem := _problem(asked, can):
        raise MalformedError(f"{name}: {problem}")
    return asked


def _problem(asked: TurnSampling, can: Collection[str]) -> str:
    if asked.is_constrained:
        if Capability.CONSTRAINED not in can:
            return "this engine cannot hold a turn to a JSON schema or a regular expression; engines of sglang can"
        if asked.json_schema and asked.regex:
            return "json_schema and regex exclude each other; give one"
        if len(asked.json_schema) + len(asked.regex) > MAX_CONSTRAINT_CHARS:
            return f"json_schema, regex: at most {MAX_CONSTRAINT_CHARS} characters are taken"
        try:
            msgspec.json.decode(asked.json_schema or "{}", type=dict[str, object])
        except (msgspec.DecodeError, RecursionError):
            return "json_schema: expected the text of a JSON object"
    if Capability.SAMPLES_PER_CALL not in can and asked.drawn_by():
        return "this engine draws as the scenario's block sampling: says, and not as a call does; set it there"
    if asked.seed is not None and not {Capability.SAMPLES_PER_CALL, Capability.SEEDED_SAMPLING} <= set(can):
        return "seed: what this engine draws does not follow from a seed; leave it out"
    return ""


def follows_seed(request: ChatRequest | CompletionRequest, can: Collection[str]) -> bool:
    """Whether its seed can count: several answers by one would be the same."""
    return Capability.SEEDED_SAMPLING in can and request.n in (None, 1)


def requested(request: ChatRequest | CompletionRequest, can: Collection[str], *, follows: bool) -> TurnSampling | None:
    """What a request of OpenAI's protocol asks for. ``follows``: its temperature and the like count.

    Raises:
        MalformedError: see :func:`checked`.
    """
    asked, name = NO_SAMPLING, "sampling"
    if follows:
        top_k = None if request.top_k is None else max(request.top_k, 0)  # -1 is what some servers call all
        seed = request.seed if follows_seed(request, can) else None
        asked = TurnSampling(
            temperature=request.temperature, top_p=request.top_p, top_k=top_k, min_p=request.min_p, seed=seed
        )
    wanted = request.response_format if isinstance(request, ChatRequest) else None
    if wanted is not None and wanted.type != "text":
        name = "response_format"
        schema: object = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema
        asked = msgspec.structs.replace(asked, json_schema=msgspec.json.encode(schema).decode())
    return checked(asked, can, name)


def why_masked(asked: TurnSampling | None, run: SamplingOptions) -> str:
    """Why the tokens of such a turn are not trained; empty: they are."""
    if asked is None:
        return ""
    if asked.is_constrained:
        return CONSTRAINED
    differs = any(value != getattr(run, name) for name, value in asked.drawn_by().items())
    return OTHER_SAMPLING if differs else ""
