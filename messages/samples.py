"""Prompts, samples and groups: what is generated, scored, filtered and trained.

Invariants:

* A part has as many log-probs as tokens, and its version spans add up to its tokens; a mask, where there is
  one, has one byte a token, and a teacher's log-probs, where there are some, are as many. Decoding checks this, so a
  wrong length never gets past the socket.
* Only an outcome that the model is responsible for has a field for a reward. An ``InfraError`` or a
  ``Cancelled`` cannot carry one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

import msgspec

from penstock.messages.arrays import LOGPROB_BYTES, TOKEN_BYTES, ArrayLengthError
from penstock.messages.base import Metric, Value
from penstock.messages.engine_counts import EngineCounts, added
from penstock.messages.kept_tokens import KeptTokens
from penstock.messages.top_logprobs import TopLogprobs

MAX_ANSWER_CHARACTERS: Final = 200
"""Of an extracted answer that travels and is written down."""
MAX_REWARD: Final = 1e9
"""Either way, as others give it: squares of it, summed over any batch, are still numbers in float32."""
MAX_COMPONENTS: Final = 64
"""That a function or an agent may report beside one reward."""


class Purpose(StrEnum):
    """What a sample is drawn for."""

    TRAIN = "train"
    EVALUATE = "evaluate"


class Loss(StrEnum):
    """What a sample is trained by."""

    OBJECTIVE = ""
    """The objective of the run."""
    SUPERVISED = "sft"
    """Maximum likelihood: it is imitated. It needs no reward, and none is asked for."""


class SampleKey(Value, frozen=True, array_like=True, order=True):
    """Identity of a sample. ``index`` counts from 0 in its group; a replacement for a failed sample ``i`` of a
    group of ``n`` has the index ``i + n``, then ``i + 2n``, and so on."""

    group_id: int
    index: int

    def __str__(self) -> str:
        return f"{group_name(self.group_id)}/{self.index}"


def evaluation_group_id(place: int) -> int:
    """The id of the group at this place among those of all evaluations, which are counted from 0."""
    return ~place


def evaluation_place(group_id: int) -> int:
    """The place of a group that has this id."""
    return ~group_id


def is_evaluation(group_id: int) -> bool:
    """Whether this group is drawn for an evaluation."""
    return group_id < 0


def group_name(group_id: int) -> str:
    """For people: ``12``, or ``e12`` for place 12 among the groups of evaluations."""
    return f"e{evaluation_place(group_id)}" if is_evaluation(group_id) else f"{group_id}"


class Media(Value, frozen=True, array_like=True):
    """An image, a video or a sound that belongs to a prompt, or an image of a later turn of an episode."""

    kind: Literal["image", "video", "audio"]
    reference: str
    """An http(s) address, an absolute path, or ``data:…;base64,…``."""
    digest: str = ""
    """SHA-256 of the bytes of an image that engine and learner compute; empty: a server fetches it."""
    at: int = 0
    """Index of the first of the tokens that stand for it: in a prompt, or counted from a part's first response token,
    negative then for what stands in its context."""
    num_tokens: int = 0
    """That stand for it, one after the other; 0: a server puts them there."""

    def moved(self, by: int) -> Media:
        """The same, counted from elsewhere."""
        return msgspec.structs.replace(self, at=self.at + by)


class Prompt(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One row of the dataset, tokenised."""

    row: int
    """Row of the dataset, counted from 0."""
    epoch: int
    tokens: bytes
    """int32 ids ``[P]``."""
    text: str = ""
    label: str = ""
    """What the reward function compares with; empty when the row has none."""
    metadata: bytes = b""
    """The row's further columns as a JSON object, for reward functions; empty when there are none."""
    messages: bytes = b""
    """What the text was rendered from, as a JSON list of chat messages, where an episode asks for it."""
    is_recorded: bool = False
    """The row holds the responses: an engine that knows the rows answers, and none generates."""
    loss: Loss = Loss.OBJECTIVE
    """Which loss its samples are trained with."""
    dataset: int | None = None
    """Index in the scenario's ``evaluation.datasets``, whose settings hold then; None: a row to train on."""
    media: tuple[Media, ...] = ()
    """In the order of their places in the text; the engine puts them there."""
    num_retries: int | None = None
    """How often a sample of it that failed by our fault is issued again; None: as often as that of any row."""
    teacher_tokens: bytes = b""
    """int32 ids of what a teacher reads in place of ``tokens``; empty: the same."""
    pushed: str = ""
    """Of a group that came finished from outside: the key that whoever pushed it gave it. Its samples have the versions
    that made them, so their ages are known."""

    def __post_init__(self) -> None:
        if len(self.tokens) % TOKEN_BYTES or len(self.teacher_tokens) % TOKEN_BYTES:
            _check_multiple(self.tokens, TOKEN_BYTES, "tokens")
            _check_multiple(self.teacher_tokens, TOKEN_BYTES, "teacher_tokens")

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class VersionSpan(Value, frozen=True, array_like=True):
    """``num_tokens`` successive tokens that the weights of ``version`` made."""

    version: int
    num_tokens: int


class ExpertChoices(Value, frozen=True, array_like=True):
    """Which experts the inputs of a part went to, as its engine chose them. Inputs are the tokens of context and
    response in order, all but the last one, which nothing was computed from."""

    num_layers: int
    """Layers that have experts."""
    per_token: int
    id_bytes: int
    """1 or 2: of one id."""
    ids: bytes
    """uint8 or uint16 ``[N, num_layers, per_token]`` of the first N inputs, each from 0; the highest value of the type
    stands where a choice is not known, for a whole layer of an input."""

    def __post_init__(self) -> None:
        if self.id_bytes not in (1, 2) or self.num_layers < 1 or self.per_token < 1:
            raise ArrayLengthError(
                f"experts: expected ids of 1 or 2 bytes, layers and experts per token from 1 on, got {self.id_bytes}, "
                f"{self.num_layers} and {self.per_token}"
            )
        _check_multiple(self.ids, self.input_bytes, "experts")

    @property
    def input_bytes(self) -> int:
        """Size of the expert ids of one input token, over all layers."""
        return self.num_layers * self.per_token * self.id_bytes

    @property
    def num_inputs(self) -> int:
        return len(self.ids) // self.input_bytes


class SavePoint(Value, frozen=True, array_like=True):
    """Where an episode can go on, at another engine too: after a complete turn of the model."""

    num_tokens: int
    """Tokens of the response up to there."""
    num_turns: int
    state: bytes
    """Of the episode, as its function has saved it."""


class Part(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One trainable stretch of tokens. A plain generation is one part; an episode may return several."""

    tokens: bytes = b""
    """int32 ids ``[T]``."""
    logprobs: bytes = b""
    """float32 ``[T]``, as the engine computed them when it sampled; NaN where nobody has: of responses that were
    recorded without."""
    spans: tuple[VersionSpan, ...] = ()
    """Which weights made which tokens, in order; adds up to T."""
    loss_mask: bytes = b""
    """uint8 ``[T]``, 0 where the model did not produce the token; empty means 1 everywhere."""
    context_tokens: bytes = b""
    """int32 ids that stand before this part, when these are not the prompt (later turns of an episode)."""
    teacher_logprobs: bytes = b""
    """float32 ``[T]``: of the same tokens under a teacher, at the temperature of the sampling; empty: none was asked.
    The Scorer adds them."""
    experts: ExpertChoices | None = None
    """Which experts made it; None: not recorded."""
    save_point: SavePoint | None = None
    """Of an episode that is under way, the last that its engine has told of; None: it begins again if it is lost."""
    teacher_top: TopLogprobs | None = None
    """What the teacher finds likeliest in the place of each token; None: it was not asked."""
    counts: EngineCounts | None = None
    """What its engine counted while it made it; None: the engine tells nothing, or the part is not whole."""
    media: tuple[Media, ...] = ()
    """Images in the order of their places: those that an episode put among its tokens, and, where ``context_tokens``
    are given, those that stand there. Only these tokens stand for images; the same id elsewhere is text."""
    kept: KeptTokens | None = None
    """Which tokens each was drawn from, and its log-prob is taken over; None: not recorded."""

    def __post_init__(self) -> None:
        n, rest = divmod(len(self.tokens), TOKEN_BYTES)
        if rest or self.context_tokens:  # calls cost as much as the checks, which whoever reads a part makes
            _check_multiple(self.tokens, TOKEN_BYTES, "tokens")
            _check_multiple(self.context_tokens, TOKEN_BYTES, "context_tokens")
        if len(self.logprobs) != n * LOGPROB_BYTES:
            raise ArrayLengthError(
                f"logprobs: expected {n * LOGPROB_BYTES} bytes for {n} tokens, got {len(self.logprobs)}"
            )
        if self.teacher_logprobs and len(self.teacher_logprobs) != n * LOGPROB_BYTES:
            raise ArrayLengthError(
                f"teacher_logprobs: expected {n * LOGPROB_BYTES} bytes for {n} tokens, got {len(self.teacher_logprobs)}"
            )
        if self.teacher_top is not None and self.teacher_top.num_tokens != n:
            raise ArrayLengthError(f"teacher_top: expected {n} tokens, got {self.teacher_top.num_tokens}")
        if self.kept is not None and self.kept.num_tokens != n:
            raise ArrayLengthError(f"kept: expected {n} tokens, got {self.kept.num_tokens}")
        if self.loss_mask and len(self.loss_mask) != n:
            raise ArrayLengthError(f"loss_mask: expected {n} bytes for {n} tokens, got {len(self.loss_mask)}")
        spans = self.spans
        spanned = spans[0].num_tokens if len(spans) == 1 else sum(span.num_tokens for span in spans)
        if spanned != n:
            raise ArrayLengthError(f"spans: expected {n} tokens in all, got {spanned}")

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_given_tokens(self) -> int:
        """Of these, tokens that the model did not make."""
        return self.loss_mask.count(0)

    def media_after(self, prompt: Prompt) -> tuple[Media, ...]:
        """All images of context and response, counted from the beginning of the context; ``prompt``: of its sample."""
        num_before = len(self.context_tokens or prompt.tokens) // TOKEN_BYTES
        own = tuple(each.moved(num_before) for each in self.media)
        return own if self.context_tokens else (*prompt.media, *own)


class StopReason(StrEnum):
    """Why a completed generation ended."""

    END_TOKEN = "end_token"
    """The model's end-of-sequence token, or a token that the scenario lists under ``stop_token_ids``."""
    STOP_STRING = "stop_string"
    EPISODE = "episode"
    """The environment said that the episode is over."""


class Reward(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What a reward function returned: one number, and its named components if it gave any."""

    value: float
    components: tuple[Metric, ...] = ()
    answer: str = ""
    """What the reward function took for the final answer, in a form in which equal answers are equal texts; empty: it
    found none, or tells none. It is the model's text, of at most :data:`MAX_ANSWER_CHARACTERS` characters."""


class Completed(Value, frozen=True, kw_only=True, tag="completed", omit_defaults=True):
    """The model ended its response."""

    stop: StopReason = StopReason.END_TOKEN
    reward: Reward | None = None


class Truncated(Value, frozen=True, kw_only=True, tag="truncated", omit_defaults=True):
    """The length limit ended the response."""

    reward: Reward | None = None


class PolicyError(Value, frozen=True, kw_only=True, tag="policy_error", omit_defaults=True):
    """The model did something wrong (a malformed tool call, say): that is its behaviour and may be trained on."""

    detail: str
    reward: Reward | None = None


class InfraError(Value, frozen=True, kw_only=True, tag="infra_error", omit_defaults=True):
    """We did something wrong (an engine, a network, a judge). It has no field for a reward, on purpose."""

    detail: str


class Cancelled(Value, frozen=True, kw_only=True, tag="cancelled", omit_defaults=True):
    """Nobody needs it any more."""

    cause: str


Outcome = Completed | Truncated | PolicyError | InfraError | Cancelled
ModelOutcome = Completed | Truncated | PolicyError


class Sample(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One response to a prompt, with what became of it."""

    key: SampleKey
    attempt: int = 0
    engine: str = ""
    parts: tuple[Part, ...]
    outcome: ModelOutcome
    loss: Loss = Loss.OBJECTIVE

    @property
    def num_tokens(self) -> int:
        return self.parts[0].num_tokens if len(self.parts) == 1 else sum(part.num_tokens for part in self.parts)

    @property
    def num_given_tokens(self) -> int:
        """Of these, tokens that the model did not make."""
        parts = self.parts
        return parts[0].num_given_tokens if len(parts) == 1 else sum(part.num_given_tokens for part in parts)

    @property
    def oldest_version(self) -> int | None:
        """The lowest version that made one of its tokens; None when it has no tokens."""
        bounds = self.version_bounds
        return None if bounds is None else bounds[0]

    @property
    def newest_version(self) -> int | None:
        """The highest version that made one of its tokens, which finished it; None when it has no tokens."""
        bounds = self.version_bounds
        return None if bounds is None else bounds[1]

    @property
    def version_bounds(self) -> tuple[int, int] | None:
        """The lowest and the highest version that made one of its tokens; None when it has no tokens."""
        if len(self.parts) == 1 and len(self.parts[0].spans) == 1:  # asked of every sample, and most are so
            span = self.parts[0].spans[0]
            return (span.version, span.version) if span.num_tokens else None
        versions = [span.version for part in self.parts for span in part.spans if span.num_tokens]
        return (min(versions), max(versions)) if versions else None

    @property
    def versions(self) -> set[int]:
        """Those that made its tokens."""
        if len(self.parts) == 1:
            spans = self.parts[0].spans
            if len(spans) == 1 and spans[0].num_tokens:  # as most are
                return {spans[0].version}
            return {span.version for span in spans if span.num_tokens}
        return {span.version for part in self.parts for span in part.spans if span.num_tokens}

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Of all its parts, in order, without those of no tokens."""
        return tuple(span for part in self.parts for span in part.spans if span.num_tokens)

    @property
    def reward(self) -> float | None:
        return None if self.outcome.reward is None else self.outcome.reward.value

    def images(self, prompt: Prompt) -> tuple[Media, ...]:
        """Those of its prompt and those that came in its episode, each once."""
        found = (*prompt.media, *(each for part in self.parts for each in part.media))
        return tuple({each.digest: each for each in found if each.digest}.values())

    @property
    def counts(self) -> EngineCounts | None:
        """What its engine counted; None: it tells nothing."""
        return self.parts[0].counts if len(self.parts) == 1 else added(part.counts for part in self.parts)


class TerminalState(StrEnum):
    """What became of a sample in the end."""

    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EVALUATED = "evaluated"


class SampleEnd(Value, frozen=True, kw_only=True, omit_defaults=True):
    """A sample that will not be trained: its terminal state, the cause, and the tokens it had cost."""

    key: SampleKey
    state: TerminalState
    cause: str
    num_tokens: int = 0
    num_given_tokens: int = 0
    """Of these, tokens that the model did not make."""
    reason: str = ""
    """What went wrong with it, in words from where it arose: exception, message, file and line. Empty where nothing
    did, and of runs that were recorded without."""

    @property
    def num_made_tokens(self) -> int:
        """Tokens that the model made."""
        return self.num_tokens - self.num_given_tokens


class CountedSample(Value, frozen=True, array_like=True):
    """A sample that a filter dropped after the group's statistics: its reward counts in them, nothing of it is
    trained."""

    index: int
    reward: float
    components: tuple[Metric, ...] = ()


class Group(Value, frozen=True, kw_only=True, omit_defaults=True):
    """A complete group: the samples to train on, and those of its samples that ended otherwise."""

    group_id: int
    prompt: Prompt
    samples: tuple[Sample, ...]
    ended: tuple[SampleEnd, ...] = ()
    counted: tuple[CountedSample, ...] = ()
    """Those of ``ended`` whose rewards belong to the group's mean and spread all the same."""

    @property
    def num_tokens(self) -> int:
        """Response tokens of the samples to be trained."""
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def oldest_version(self) -> int | None:
        versions = [v for sample in self.samples if (v := sample.oldest_version) is not None]
        return min(versions, default=None)


def _check_multiple(data: bytes, width: int, name: str) -> None:
    if len(data) % width:
        raise ArrayLengthError(f"{name}: expected a multiple of {width} bytes, got {len(data)}")
