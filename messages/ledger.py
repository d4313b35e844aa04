"""The entries of the ledger. The Buffer returns them in ``Record``; a store makes them durable.

Invariants:

* The entries in their order are the whole state of the run, as far as the Buffer owns it: a Buffer that is built from
  them goes on where its predecessor stopped.
* A store may drop payloads (``GroupRecorded.payload``) that were released; every other field stays for ever.
"""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.messages.base import Entry, Value
from penstock.messages.engine_counts import EngineCounts
from penstock.messages.evaluation import EvaluationOpened, GroupEvaluated
from penstock.messages.flow import GrantSpan, GroupRow
from penstock.messages.samples import Group, SampleEnd
from penstock.messages.training import OnStale, UpdateMode

EPOCHS_PER_DRIVE: Final = 1000
"""A run may be driven several times, by ``run`` and then by ``resume``. The n-th drive, counted from 0, claims the
ledger with ``n`` times this; its actors begin with one more."""


class RunRecorded(Entry, frozen=True, kw_only=True):
    """The first entry: what must be the same when the run is resumed, or group ids would mean other prompts."""

    seed: int
    num_rows: int
    shuffle: bool
    samples_per_group: int
    groups_per_batch: int
    sources: str = ""
    """Of a mixture: each source with its rows and its share."""
    data_digest: str = ""
    """Of rows that are not kept in memory, so that a file that has changed is noticed."""


class GroupsGranted(Entry, frozen=True, kw_only=True):
    """These groups may start; written before ``DemandGranted`` is sent."""

    span: GrantSpan
    total: int
    max_staleness: int
    """η of the policy that they were granted under."""


class SampleNote(Value, frozen=True, array_like=True):
    """What the ledger keeps of a sample when its payload has gone."""

    index: int
    attempt: int
    engine: str
    outcome: str
    num_tokens: int
    oldest_version: int | None
    newest_version: int | None
    reward: float | None
    num_given_tokens: int = 0
    """Of its tokens, those that the model did not make."""
    counts: EngineCounts | None = None
    """What its engine counted; None: it tells nothing."""

    @property
    def num_made_tokens(self) -> int:
        """Tokens that the model made."""
        return self.num_tokens - self.num_given_tokens


class GroupRecorded(Entry, frozen=True, kw_only=True):
    """A group was admitted, with the deadline that it has from here on."""

    group_id: int
    deadline_version: int
    samples: tuple[SampleNote, ...]
    """Those to be trained."""
    ended: tuple[SampleEnd, ...] = ()
    """Those of its samples that ended otherwise."""
    payload: Group | None = None
    """Always there when it is written."""
    kept_cause: str = ""
    """The Filter had turned it away for this cause, and it was kept because too little was left to train on."""
    pushed: str = ""
    """It came finished from outside, under this key."""

    def without_payload(self) -> GroupRecorded:
        """What the log has of it."""
        return msgspec.structs.replace(self, payload=None)

    @property
    def oldest_version(self) -> int | None:
        """That made a token of it."""
        return min((note.oldest_version for note in self.samples if note.oldest_version is not None), default=None)


class GroupClosed(Entry, frozen=True, kw_only=True):
    """Every sample of this group is terminal, and not by training."""

    group_id: int
    ended: tuple[SampleEnd, ...]
    is_requeued: bool = False
    """Whether its prompt will be granted anew."""
    rejected_cause: str = ""
    """Why the Filter turned it away; empty: it ended otherwise."""
    mean_reward: float | None = None
    """Of the samples of a group that was turned away, where they have rewards."""


class FailuresNoted(Entry, frozen=True, kw_only=True):
    """Samples that have failed, and why, before their groups have ended. It changes no balance: the end of each follows
    with its group, or it is issued anew when the run is resumed."""

    ends: tuple[SampleEnd, ...]


class RowsRecorded(Entry, frozen=True, kw_only=True):
    """These groups are drawn from these rows; written before they are issued."""

    rows: tuple[GroupRow, ...]


class BatchLeased(Entry, frozen=True, kw_only=True):
    """The batch that makes this version, fixed for good; with what its offer said, so that it can be said again."""

    version: int
    group_ids: tuple[int, ...]
    max_staleness: int
    mask_stale: bool = False
    mask_old_tokens: bool = False
    update_mode: UpdateMode
    is_last: bool = False
    uses: tuple[int, ...] = ()
    """Of each group, which use of it this is, from 1; empty: the first of every one."""
    max_uses: int = 1
    """Of a group, in all batches; the bound that this one has to keep (``staleness.reuse``)."""

    @property
    def again(self) -> dict[int, int]:
        """The groups that were trained before, with which use of them this is."""
        return further_uses(self.group_ids, self.uses)


class StepRecorded(Entry, frozen=True, kw_only=True):
    """The receipt of a step: these groups are trained."""

    version: int
    group_ids: tuple[int, ...]
    num_trained_tokens: int
    num_masked_tokens: int = 0
    max_staleness: int
    uses: tuple[int, ...] = ()
    """As in its lease."""

    @property
    def again(self) -> dict[int, int]:
        """As of its lease."""
        return further_uses(self.group_ids, self.uses)


def further_uses(group_ids: tuple[int, ...], uses: tuple[int, ...]) -> dict[int, int]:
    """Those of these groups that were trained before, with which use of them this is."""
    return {group_id: use for group_id, use in zip(group_ids, uses, strict=True) if use > 1} if uses else {}


class CheckpointRecorded(Entry, frozen=True, kw_only=True):
    """A checkpoint that the run can be resumed from."""

    version: int
    path: str


class PayloadsReleased(Entry, frozen=True, kw_only=True):
    """No checkpoint that the run can be resumed from needs the payloads of the batches up to this version."""

    through_version: int
    kept: tuple[int, ...] = ()
    """But these groups of them: a later batch has them again, or may."""


class VersionRecorded(Entry, frozen=True, kw_only=True):
    """Enough engines serve this version."""

    version: int


class PolicyRecorded(Entry, frozen=True, kw_only=True):
    """The staleness policy that new grants follow from here on."""

    policy: str
    max_staleness: int
    update_mode: UpdateMode
    on_stale: OnStale


class PauseRecorded(Entry, frozen=True, kw_only=True):
    """From here on nothing more is granted for training, or it is again."""

    is_paused: bool


class EnginesRecorded(Entry, frozen=True, kw_only=True):
    """From here on these are the engines of the run. Written by runs whose engines may join and leave."""

    engines: tuple[str, ...]
    """By their index."""
    reason: str = ""
    """Of a change that ``engines.scale: by_bound`` has made, or the loss of an engine for good; empty: an operator, or
    the scenario, says so."""


class EngineNoted(Entry, frozen=True, kw_only=True):
    """How an incarnation of an engine came up: that it has taken over the server of the one before, or why that was
    started anew; that it waits for its GPUs. It changes nothing."""

    engine: str
    engine_epoch: int
    text: str


class BatchesFixed(Entry, frozen=True, kw_only=True):
    """The batches of this run are known beforehand, and so are their groups: it trains what another run has recorded.
    No other batch is formed, and nothing more is granted."""

    batches: tuple[BatchLeased, ...]
    """Batches in order, from version 1."""
    source: str
    """Folder of the other run."""


LedgerEntry = (
    RunRecorded
    | GroupsGranted
    | GroupRecorded
    | GroupClosed
    | FailuresNoted
    | RowsRecorded
    | BatchLeased
    | StepRecorded
    | CheckpointRecorded
    | PayloadsReleased
    | VersionRecorded
    | PolicyRecorded
    | PauseRecorded
    | EnginesRecorded
    | EngineNoted
    | BatchesFixed
    | EvaluationOpened
    | GroupEvaluated
)
