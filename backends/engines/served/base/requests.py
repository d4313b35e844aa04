"""One sample at a served engine: what it has so far, what is still to be asked for, and how it ended.

Invariants:

* A sample may take several requests at the server (one that was queued at a swap is sent again under the new weights).
  Each has an id of its own, and what the ones before it made is the end of its input.
* Reports begin where the one before them ended; the end has all tokens.
* Version spans of reports are never newer than the truth; those of the end are the server's own account.
* A stop string counts wherever it begins: the server sees only what it made itself, so a response that goes on from a
  prefix is watched here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from penstock.backends.engines.expert_choices import pack_experts
from penstock.backends.engines.served.base.calls import EndReason, Failure, GenerateCall, VersionTokens
from penstock.backends.engines.served.base.http import BadReply
from penstock.backends.engines.served.base.versions import label_of, spans_of
from penstock.backends.engines.torch.stopping import StopStringWatch
from penstock.messages.arrays import TOKEN_BYTES, tokens_view
from penstock.messages.engine_counts import EngineCounts
from penstock.messages.local import GenerationAdvanced, GenerationEnded
from penstock.messages.parts import cut, join
from penstock.messages.samples import (
    Cancelled,
    Completed,
    InfraError,
    Part,
    PolicyError,
    StopReason,
    Truncated,
)
from penstock.messages.turn_sampling import TurnSampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.engines.expert_choices import ExpertShape
    from penstock.backends.engines.served.base.calls import Chunk, Generated
    from penstock.backends.engines.served.base.generator import DrawnImageError
    from penstock.backends.engines.torch.sampling_parameters import SamplingParameters
    from penstock.backends.engines.torch.stopping import StopStrings
    from penstock.messages.commands import Generate
    from penstock.messages.samples import ExpertChoices, Outcome
    from penstock.messages.weights import WeightManifest

LOST: Final = (Failure.NO_CONNECTION, Failure.CUT_OFF)
"""The server has probably died; then it is no fault of the request."""
FIRST_PRIORITY: Final = 1 << 30
NO_WISHES: Final = TurnSampling()
INT32_BYTES: Final = 4


@dataclass(frozen=True, kw_only=True)
class RequestRules:
    """What holds for every request of an engine."""

    tag: str
    """Of this engine's incarnation: a server may still end what an earlier one has asked it for."""
    sampling: SamplingParameters
    """Sampling parameters of the run."""
    by_dataset: tuple[SamplingParameters, ...] = ()
    """Sampling parameters of each dataset of an evaluation."""
    max_context: int
    timeout_s: float
    is_seeded: bool = False
    has_priorities: bool = False
    experts: ExpertShape | None = None
    """Of the model, where the server is to say which of them it chose."""


class OpenRequest:
    """One ``Generate`` that has not been answered yet."""

    def __init__(self, command: Generate, rules: RequestRules) -> None:
        self.command: Final = command
        self.part = command.prefix or Part()
        """What it has, as far as its requests have ended."""
        self.cause = ""
        """Why we end it: ``aborted``, ``interrupted``."""
        self.rid = self.label = ""
        """Of the request that is at the server; empty: none is."""
        self.has_tokens = False
        """That request has made some."""
        self.is_sent_again = False
        """It is ended only to be sent again."""
        self._rules = rules
        self._prompt = self.part.context_tokens or command.prompt.tokens
        room = rules.max_context - len(self._prompt) // TOKEN_BYTES
        dataset = command.prompt.dataset
        self._sampling = rules.sampling if dataset is None else rules.by_dataset[dataset]
        self._limit = min(self._sampling.sampling.max_response_tokens, command.max_new_tokens or room, room)
        self._num_reported = self.part.num_tokens
        self._num_sent = 0
        self._version = 0
        self._stops: _StopFollower | None = None

    @property
    def num_held(self) -> int:
        """Tokens that its server holds for it, as far as they were reported."""
        return len(self._prompt) // TOKEN_BYTES + self._num_reported

    # --- asking -----------------------------------------------------------------------------------------------

    def already_over(self) -> Outcome | None:
        """How a response has ended that has nothing to be asked for any more."""
        tokens = tokens_view(self.part.tokens)
        if len(tokens) and tokens[-1] in self._sampling.stop_token_ids:
            return Completed(stop=StopReason.END_TOKEN)
        if len(tokens) and self._sampling.stop_strings is not None:
            self._stops = _StopFollower(self._sampling.stop_strings)
            if self._stops.follow(0, self.part.tokens) is not None:
                return Completed(stop=StopReason.STOP_STRING)
        return Truncated() if len(tokens) >= self._limit else None

    def behind_drawn_image(self, error: DrawnImageError) -> Outcome:
        """No server goes on behind the token of an image that the model has drawn. In an earlier turn that is what the
        model did, and is trained as such; in this one it is our doing, as it was interrupted there."""
        detail = f"sample {self.command.key}: {error}"
        is_earlier = error.place < len(self._prompt) // TOKEN_BYTES
        return PolicyError(detail=detail) if is_earlier else InfraError(detail=detail)

    def call(self, manifest: WeightManifest) -> GenerateCall:
        """What to ask the server for next, under these weights."""
        rules, command = self._rules, self.command
        asked = command.sampling or NO_WISHES
        own = msgspec.structs.replace(self._sampling.sampling, **asked.drawn_by())
        self.rid = f"{rules.tag}-{command.key.group_id}-{command.key.index}-{command.attempt}-{self._num_sent}"
        self.has_tokens = self.is_sent_again = False
        self._num_sent += 1
        self._version, self.label = manifest.version, label_of(manifest)
        return GenerateCall(
            rid=self.rid,
            input_ids=self._prompt + self.part.tokens,
            max_new_tokens=self._limit - self.part.num_tokens,
            temperature=own.temperature,
            top_p=own.top_p,
            top_k=own.top_k,
            min_p=own.min_p,
            json_schema=asked.json_schema,
            regex=asked.regex,
            # What is drawn otherwise than the run says is not trained.
            max_kept=0 if asked.is_constrained or not own.temperature else own.replay_kept or 0,
            stop=own.stop,
            stop_token_ids=tuple(sorted(self._sampling.stop_token_ids)),
            seed=command.seed & 0x7FFF_FFFF if rules.is_seeded else None,
            adapter="" if manifest.low_rank is None else self.label,
            extra_key=self.label,
            priority=self._priority() if rules.has_priorities else None,
            deadline_s=rules.timeout_s,
            routing_key=f"group-{command.key.group_id}",
            media=command.prompt.media,
            with_experts=rules.experts is not None,
        )

    @property
    def _is_constrained(self) -> bool:
        """A server would begin with the schema anew, and so cannot go on from a prefix."""
        return self.command.sampling is not None and self.command.sampling.is_constrained

    def _priority(self) -> int:
        """Higher goes first: what must be trained soonest. An evaluation has a late deadline of its own, so training
        goes before it for some versions, and not for ever."""
        return FIRST_PRIORITY - self.command.deadline_version

    # --- answers ----------------------------------------------------------------------------------------------

    def advance(self, chunk: Chunk) -> GenerationAdvanced | None:
        """Tokens came; None when a stop string ends before or in them, and the request is to be aborted."""
        self.has_tokens = True
        if self._stops is not None and self._stops.follow(self.part.num_tokens + chunk.from_token, chunk.tokens):
            return None
        version = VersionTokens(chunk.version, len(chunk.tokens) // TOKEN_BYTES)
        begin = self._num_reported
        # What an earlier request had left unreported comes first.
        report = join((cut(self.part, begin), self._new_part(chunk, [version])))
        self._num_reported += report.num_tokens
        return GenerationAdvanced(key=self.command.key, attempt=self.command.attempt, from_token=begin, chunk=report)

    def take(self, generated: Generated) -> Outcome | None:
        """A request has ended; how the sample has, or None when it is to be sent again."""
        begin, self.rid = self.part.num_tokens, ""
        num_read = (len(self._prompt) + len(self.part.tokens)) // TOKEN_BYTES
        new = self._new_part(generated, generated.versions)
        self.part = join((self.part, msgspec.structs.replace(new, counts=_counts(num_read, generated))))
        outcome = self._outcome(begin, generated)
        try:
            experts = self._experts(generated)
        except BadReply as error:
            self.part = msgspec.structs.replace(self.part, experts=None)
            return InfraError(detail=f"{Failure.BAD_REPLY}: {error.message}")
        self.part = msgspec.structs.replace(self.part, experts=experts)
        return outcome

    def _outcome(self, begin: int, generated: Generated) -> Outcome | None:
        if self._stops is not None and (end := self._stops.follow(begin, generated.tokens)) is not None:
            self.part = msgspec.structs.replace(cut(self.part, 0, end), counts=self.part.counts)
            return Completed(stop=StopReason.STOP_STRING)
        match generated.end:
            case EndReason.STOP_TOKEN:
                return Completed(stop=StopReason.END_TOKEN)
            case EndReason.STOP_STRING:
                return Completed(stop=StopReason.STOP_STRING)
            case EndReason.LENGTH:
                return Truncated()
            case EndReason.ABORTED if self.cause:
                return Cancelled(cause=self.cause)
            case EndReason.ABORTED if self.is_sent_again and self.part.num_tokens and self._is_constrained:
                return InfraError(detail="new weights came in the middle of a turn that is held to a schema")
            case EndReason.ABORTED if self.is_sent_again:
                return None
            case EndReason.ABORTED:
                return InfraError(detail=f"the server aborted request {generated.detail}")
            case EndReason.FAILED:
                return InfraError(detail=f"{generated.failure or 'failed'}: {generated.detail}")

    def _experts(self, generated: Generated) -> ExpertChoices | None:
        """A request begins with the prompt, whatever had been generated before, so its record is of all of it.

        Raises:
            BadReply: it is of something else.
        """
        shape, data = self._rules.experts, generated.routed_experts
        if shape is None or not data:
            return None
        num_inputs = (len(self._prompt) + len(self.part.tokens)) // TOKEN_BYTES - 1
        width = shape.num_layers * shape.per_token
        if len(data) % (width * INT32_BYTES) or len(data) < num_inputs * width * INT32_BYTES:
            raise BadReply(
                f"the server names experts in {len(data)} bytes for {num_inputs} tokens of {shape.num_layers} layers "
                f"and {shape.per_token} experts each"
            )
        chosen = np.frombuffer(data, dtype="<i4").reshape(-1, shape.num_layers, shape.per_token)
        return pack_experts(chosen[:num_inputs], num_experts=shape.num_experts)

    def ended(self, outcome: Outcome) -> GenerationEnded:
        """The answer to the actor."""
        return GenerationEnded(key=self.command.key, attempt=self.command.attempt, outcome=outcome, part=self.part)

    def _new_part(self, made: Chunk | Generated, versions: Sequence[VersionTokens]) -> Part:
        return Part(tokens=made.tokens, logprobs=made.logprobs, spans=spans_of(versions, self._version), kept=made.kept)


def _counts(num_read: int, generated: Generated) -> EngineCounts | None:
    """Of one request; None: the server was lost, or says nothing."""
    said = (generated.cached_tokens, generated.drafted_tokens, generated.accepted_tokens)
    return None if said == (None, None, None) else EngineCounts(num_read, *said)


class _StopFollower:
    """Watches a response for stop strings, whichever request made its tokens."""

    def __init__(self, stops: StopStrings) -> None:
        self._watch = StopStringWatch(stops)
        self._num_seen = 0
        self._end: int | None = None

    def follow(self, start: int, tokens: bytes) -> int | None:
        """Take the tokens that stand at ``start`` of the response, of which some may be known; how many tokens there
        are up to and with the one that completes a stop string, if one has."""
        for place, token in enumerate(tokens_view(tokens), start):
            if self._end is None and place >= self._num_seen:
                self._num_seen = place + 1
                if self._watch.push(token):
                    self._end = place + 1
        return self._end
