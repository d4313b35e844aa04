"""The entries of the ledger. The Buffer returns them in ``Record``; a store makes them durable."""

from __future__ import annotations

from penstock.messages.base import Entry
from penstock.messages.flow import GrantSpan
from penstock.messages.samples import Group, SampleEnd
from penstock.messages.training import OnStale, UpdateMode


class GroupsGranted(Entry, frozen=True, kw_only=True):
    """These groups may start; written before ``DemandGranted`` is sent."""

    span: GrantSpan
    total: int


class GroupRecorded(Entry, frozen=True, kw_only=True):
    """A group was admitted, with its payload and the deadline that it has from here on."""

    group: Group
    deadline_version: int


class GroupClosed(Entry, frozen=True, kw_only=True):
    """Every sample of this group is terminal, and not by training."""

    group_id: int
    ended: tuple[SampleEnd, ...]


class BatchLeased(Entry, frozen=True, kw_only=True):
    """The batch that makes this version, fixed for good."""

    version: int
    group_ids: tuple[int, ...]


class StepRecorded(Entry, frozen=True, kw_only=True):
    """The receipt of a step: these groups are trained."""

    version: int
    group_ids: tuple[int, ...]
    num_trained_tokens: int
    max_staleness: int


class CheckpointRecorded(Entry, frozen=True, kw_only=True):
    """A checkpoint that the run can be resumed from."""

    version: int
    path: str


class VersionRecorded(Entry, frozen=True, kw_only=True):
    """Enough engines serve this version."""

    version: int


class PolicyRecorded(Entry, frozen=True, kw_only=True):
    """The staleness policy that new grants follow from here on."""

    policy: str
    max_staleness: int
    update_mode: UpdateMode
    on_stale: OnStale


LedgerEntry = (
    GroupsGranted
    | GroupRecorded
    | GroupClosed
    | BatchLeased
    | StepRecorded
    | CheckpointRecorded
    | VersionRecorded
    | PolicyRecorded
)
