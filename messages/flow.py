"""The events of the main loop, from the grant of a group to its admission."""

from __future__ import annotations

from typing import ClassVar

from penstock.messages.base import Delivery, Event, Value
from penstock.messages.samples import Group, Outcome, Part, Prompt, Purpose, Sample, SampleEnd, SampleKey


class GrantSpan(Value, frozen=True, array_like=True):
    """``num_groups`` successive groups that were granted alike."""

    first_group: int
    num_groups: int
    first_ordinal: int
    """Place in the (endless, shuffled) stream of prompts of the first of them; the others follow. A group that
    was granted anew for a stale one has the ordinal of that one."""
    min_version: int
    """Engines start these groups with this version or a newer one."""
    deadline_version: int
    """The last learner version at which a batch may take them."""


class SettledState(Value, frozen=True, array_like=True):
    """Which groups are settled, that is, written down by the Buffer for good."""

    sequence: int
    """Grows with every change."""
    floor: int
    """Every group below is settled."""
    above: tuple[int, ...]
    """Those settled above the floor, and groups of evaluations that are settled and not below theirs, ascending."""
    evaluation_floor: int = 0
    """Every group of an evaluation with a place below is settled."""


class GroupRow(Value, frozen=True, array_like=True):
    """Which row of the dataset a group is drawn from, where that does not follow from its place in the stream."""

    group_id: int
    row: int
    epoch: int
    """Pass over the dataset; of a row that was not taken from the stream, how often it had been seen."""
    position: int
    """Place in the stream of prompts that it took; −1: none, the row was chosen otherwise."""


class RowOutcome(Value, frozen=True, array_like=True):
    """What came of a group, for the history of its row."""

    row: int
    reward: float | None
    """Mean over its samples; None: no reward came."""
    is_rejected: bool
    """The Filter turned it away."""
    end: str = ""
    """What became of it after it came in, or instead: ``trained``, ``requeued`` (its row comes again), ``stale``,
    ``failed`` or ``cancelled``. Empty: it came in. Told to sources of the user's only."""
    cause: str = ""
    """Of a rejection or an end. As ``end``."""
    rewards: tuple[float, ...] = ()
    """Of the samples of a group that came in. As ``end``."""


class DemandGranted(Event, frozen=True, kw_only=True):
    """Buffer → PromptSource: groups 0 … total−1 may have started. A full snapshot each time, so losing one or
    hearing it late is harmless, and a PromptSource that was replaced needs nothing else."""

    total: int
    spans: tuple[GrantSpan, ...]
    """Covers every group that is granted and not settled."""
    settled: SettledState
    rows: tuple[GroupRow, ...] = ()
    """Where rows are chosen: those that are recorded, of every such group. A group is issued with its recorded row."""
    next_position: int = 0
    """Where rows are chosen: the first place in the stream of prompts that no recorded row has taken."""
    first_outcome: int = 0
    """Place in the run's list of outcomes of the first of ``outcomes``."""
    outcomes: tuple[RowOutcome, ...] = ()
    """Some that PromptSource has not said it knows, in the order in which they were recorded."""
    num_outcomes: int = 0
    """Outcomes in the whole list."""


class RowsChosen(Event, frozen=True, kw_only=True):
    """PromptSource → Buffer: rows for granted groups, all that are not recorded as far as it knows. They are issued
    when ``DemandGranted`` has brought them back, that is, when they are recorded."""

    rows: tuple[GroupRow, ...]
    num_outcomes: int
    """So many of the list of outcomes are known to it."""


class SamplesSettled(Event, frozen=True, kw_only=True):
    """Buffer → all who keep: forget these, and stop working on them."""

    settled: SettledState


class SampleIssued(Event, frozen=True, kw_only=True):
    """PromptSource → EngineWorker: generate this sample. PromptSource holds the lease, so it is not kept by the
    runtime; what an engine lost is found by the census."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    key: SampleKey
    attempt: int
    group_size: int
    purpose: Purpose = Purpose.TRAIN
    prompt: Prompt
    seed: int
    """Of this sample, from (run seed, group, index); token ``t`` draws with a counter of ``t``."""
    min_version: int
    deadline_version: int
    prefix: Part | None = None
    """What an earlier attempt had generated; generation goes on after it."""


class SampleRevoked(Event, frozen=True, kw_only=True):
    """PromptSource → EngineWorker: this attempt has stood still and goes on elsewhere; stop it. When this is lost, a
    census that finds the attempt there says it again."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    key: SampleKey
    attempt: int


class GenerationProgressed(Event, frozen=True, kw_only=True):
    """EngineWorker → PromptSource: tokens since the last report; with an outcome it is the last one."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    engine: str
    key: SampleKey
    attempt: int
    from_token: int
    """Index of the first token in ``chunk``."""
    chunk: Part
    num_tokens: int
    """Tokens so far in all."""


class GenerationClosed(Event, frozen=True, kw_only=True):
    """EngineWorker → PromptSource: this attempt is over here, with this outcome (no tokens travel with it)."""

    delivery: ClassVar[Delivery] = Delivery.DATA
    engine: str
    key: SampleKey
    attempt: int
    outcome: Outcome
    num_tokens: int


class SampleGenerated(Event, frozen=True, kw_only=True):
    """EngineWorker → Scorer: a response that the model is responsible for. Filter → Scorer, where a function scores
    whole groups: one of an unfinished group, for a Scorer that took the place of the one that had scored it."""

    delivery: ClassVar[Delivery] = Delivery.DATA
    sample: Sample
    group_size: int
    purpose: Purpose = Purpose.TRAIN
    prompt: Prompt


class SampleScored(Event, frozen=True, kw_only=True):
    """Scorer → Filter: the sample with its reward in the outcome."""

    delivery: ClassVar[Delivery] = Delivery.DATA
    sample: Sample
    group_size: int
    purpose: Purpose = Purpose.TRAIN
    prompt: Prompt


class ScoringFailed(Event, frozen=True, kw_only=True):
    """Scorer → Filter: there is a response and no reward, for this reason. Never a zero."""

    delivery: ClassVar[Delivery] = Delivery.DATA
    key: SampleKey
    attempt: int
    group_size: int
    purpose: Purpose = Purpose.TRAIN
    prompt: Prompt
    reason: str
    num_tokens: int
    num_given_tokens: int = 0
    """Of these, tokens that the model did not make."""
    sample: Sample | None = None
    """The response that has no reward, for people to look at; None: of a Scorer that did not send it."""


class PlacesGivenUp(Event, frozen=True, kw_only=True):
    """Filter → Scorer, where a reward function scores whole groups: samples that failed and are not replaced. The whole
    list each time, of the groups that are being put together."""

    places: tuple[SampleKey, ...]
    """With the index of the first sample of the place."""


class SampleFailed(Event, frozen=True, kw_only=True):
    """PromptSource → Scorer → Filter: the retry budget is spent. Travels as a sample does, so that its group is
    closed and nobody waits for it."""

    delivery: ClassVar[Delivery] = Delivery.DATA
    key: SampleKey
    attempt: int
    group_size: int
    purpose: Purpose = Purpose.TRAIN
    prompt: Prompt
    reason: str
    num_tokens: int = 0
    """Of the response, as far as it was reported."""
    num_given_tokens: int = 0
    """Of these, tokens that the model did not make."""


class FailuresTold(Event, frozen=True, kw_only=True):
    """Filter → Buffer: samples that have failed, as soon as they have. Their groups tell of them again when they go
    out, so losing this costs only time."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    ends: tuple[SampleEnd, ...]
    has_scored: bool
    """Samples with a reward wait here for the others of their groups."""


class RefillAsked(Event, frozen=True, kw_only=True):
    """Filter → PromptSource: these replacements for failed samples are still missing. The whole list each time."""

    missing: tuple[SampleKey, ...]


class GroupAdmitted(Event, frozen=True, kw_only=True):
    """Filter → Buffer: complete and worth training on."""

    delivery: ClassVar[Delivery] = Delivery.DATA
    group: Group


class GroupRejected(Event, frozen=True, kw_only=True):
    """Filter → Buffer: complete, and turned away."""

    delivery: ClassVar[Delivery] = Delivery.DATA
    group_id: int
    cause: str
    ended: tuple[SampleEnd, ...]
    """Every sample of the group."""
    mean_reward: float | None = None
    group: Group | None = None
    """As it would have been admitted; where the Buffer may keep it because too little is left to train on."""
