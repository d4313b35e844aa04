"""What the Buffer relies on of every ledger store; see :mod:`penstock.backends.ledger.protocol`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, get_args

import msgspec
import pytest

from penstock.backends.ledger.protocol import LedgerStoreError, StaleEpochError
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.base import Metric
from penstock.messages.evaluation import (
    EvaluatedRow,
    EvaluatedSample,
    Evaluation,
    EvaluationOpened,
    EvaluationShape,
    GroupEvaluated,
)
from penstock.messages.flow import GrantSpan, GroupRow
from penstock.messages.ledger import (
    BatchesFixed,
    BatchLeased,
    CheckpointRecorded,
    EngineNoted,
    EnginesRecorded,
    FailuresNoted,
    GroupClosed,
    GroupRecorded,
    GroupsGranted,
    LedgerEntry,
    PauseRecorded,
    PayloadsReleased,
    PolicyRecorded,
    RowsRecorded,
    RunRecorded,
    SampleNote,
    StepRecorded,
    VersionRecorded,
)
from penstock.messages.samples import (
    Completed,
    Group,
    Part,
    Prompt,
    Reward,
    Sample,
    SampleEnd,
    SampleKey,
    TerminalState,
    VersionSpan,
    evaluation_group_id,
)
from penstock.messages.training import OnStale, UpdateMode

if TYPE_CHECKING:
    from penstock.backends.ledger.protocol import LedgerStore


class Open(Protocol):
    """Opens one more handle on the same ledger."""

    def __call__(self) -> LedgerStore: ...


def sample(group_id: int, index: int) -> Sample:
    part = Part(tokens=pack_tokens([5, 6]), logprobs=pack_floats([-0.5, -1.5]), spans=(VersionSpan(3, 2),))
    return Sample(key=SampleKey(group_id, index), parts=(part,), outcome=Completed(reward=Reward(value=0.5)))


def group(group_id: int) -> Group:
    prompt = Prompt(row=0, epoch=0, tokens=pack_tokens([1]))
    return Group(group_id=group_id, prompt=prompt, samples=(sample(group_id, 0),))


def recorded(group_id: int) -> GroupRecorded:
    notes = (SampleNote(0, 0, "engine_worker/0", "completed", 2, 3, 3, 0.5),)
    return GroupRecorded(group_id=group_id, deadline_version=3, samples=notes, payload=group(group_id))


def closed(group_id: int) -> GroupClosed:
    end = SampleEnd(key=SampleKey(group_id, 0), state=TerminalState.FILTERED, cause="zero_spread", num_tokens=3)
    return GroupClosed(group_id=group_id, ended=(end,))


def leased(version: int, *group_ids: int) -> BatchLeased:
    return BatchLeased(version=version, group_ids=group_ids, max_staleness=3, update_mode=UpdateMode.DRAIN)


def trained(version: int, *group_ids: int) -> StepRecorded:
    return StepRecorded(version=version, group_ids=group_ids, num_trained_tokens=2, max_staleness=0)


def every_kind() -> list[LedgerEntry]:
    """One of each; group 1 is admitted and stays open."""
    return [
        RunRecorded(seed=0, num_rows=9, shuffle=True, samples_per_group=1, groups_per_batch=1),
        BatchesFixed(batches=(leased(1, 0),), source="runs/other"),
        PauseRecorded(is_paused=True),
        EnginesRecorded(engines=("engine/0", "engine/1")),
        EngineNoted(engine="engine/1", engine_epoch=2, text="has taken over its running SGLang server, in 0.8 s"),
        PolicyRecorded(policy="sync", max_staleness=0, update_mode=UpdateMode.DRAIN, on_stale=OnStale.WAIT),
        GroupsGranted(span=GrantSpan(0, 3, 0, 0, 2), total=3, max_staleness=2),
        RowsRecorded(rows=(GroupRow(0, 3, 0, 0),)),
        recorded(0),
        recorded(1),
        FailuresNoted(ends=(failed(2, "ValueError: 7 (r.py:3)"),)),
        closed(2),
        leased(1, 0),
        trained(1, 0),
        CheckpointRecorded(version=1, path="checkpoints/1"),
        PayloadsReleased(through_version=1),
        VersionRecorded(version=1),
        EvaluationOpened(evaluation=evaluation()),
        evaluated(0),
    ]


def failed(group_id: int, reason: str, index: int = 0) -> SampleEnd:
    key = SampleKey(group_id, index)
    return SampleEnd(key=key, state=TerminalState.FAILED, cause="scoring_failed", num_tokens=2, reason=reason)


def evaluation() -> Evaluation:
    """Of one row of each of two datasets."""
    shapes = tuple(EvaluationShape(name=name, num_rows=1, samples_per_prompt=2) for name in ("easy", "hard"))
    return Evaluation(number=0, version=1, deadline_version=4, first_place=0, datasets=shapes)


def evaluated(place: int) -> GroupEvaluated:
    """One answer is there, one is missing."""
    group_id = evaluation_group_id(place)
    answer = EvaluatedSample(0, 1, "engine/0", "completed", 3, 1, 0.5, (VersionSpan(1, 3),), (Metric("format", 1.0),))
    missing = SampleEnd(key=SampleKey(group_id, 1), state=TerminalState.FAILED, cause="scoring_failed", num_tokens=2)
    return GroupEvaluated(group_id=group_id, evaluation=0, dataset=place, row=EvaluatedRow(0, (answer,), (missing,)))


def without_payload(entry: LedgerEntry) -> LedgerEntry:
    return msgspec.structs.replace(entry, payload=None) if isinstance(entry, GroupRecorded) else entry


def payload_ids(store: LedgerStore) -> set[int]:
    return {e.group_id for e in store.entries() if isinstance(e, GroupRecorded) and e.payload is not None}


class StoreContract:
    """Derive from it, and override ``open_store``."""

    @pytest.fixture
    def open_store(self) -> Open:
        """Opens handles on a ledger that is empty at first."""
        raise NotImplementedError("override the fixture 'open_store' with the store that is meant")

    def test_entries_of_every_kind_come_back_in_order_to_any_handle(self, open_store: Open) -> None:
        store = open_store()
        store.claim(1)
        store.commit(every_kind()[:3])
        store.commit([])
        store.commit(every_kind()[3:])
        expected = [entry if entry == recorded(1) else without_payload(entry) for entry in every_kind()]
        assert {type(entry) for entry in expected} == set(get_args(LedgerEntry))
        assert list(store.entries()) == expected
        assert list(open_store().entries()) == expected

    def test_nothing_is_written_without_a_claim(self, open_store: Open) -> None:
        store = open_store()
        with pytest.raises(StaleEpochError, match="not claimed"):
            store.commit([VersionRecorded(version=1)])
        assert not list(store.entries())

    @pytest.mark.parametrize("epoch", [3, 2, 0])
    def test_a_claim_must_be_above_the_last_one(self, open_store: Open, epoch: int) -> None:
        open_store().claim(3)
        with pytest.raises(StaleEpochError, match=f"epoch {epoch} is not above"):
            open_store().claim(epoch)

    def test_an_older_incarnation_writes_nothing_after_a_newer_one_has_claimed(self, open_store: Open) -> None:
        old, new = open_store(), open_store()
        old.claim(1)
        old.commit([VersionRecorded(version=1)])
        new.claim(2)
        with pytest.raises(StaleEpochError, match="this is epoch 1"):
            old.commit([VersionRecorded(version=2)])
        new.commit([VersionRecorded(version=3)])
        assert list(open_store().entries()) == [VersionRecorded(version=1), VersionRecorded(version=3)]

    def test_a_refused_claim_leaves_the_claimant_in_place(self, open_store: Open) -> None:
        holder, other = open_store(), open_store()
        holder.claim(2)
        with pytest.raises(StaleEpochError):
            other.claim(1)
        holder.commit([VersionRecorded(version=1)])
        assert list(holder.entries()) == [VersionRecorded(version=1)]

    def test_a_closed_handle_may_be_closed_again(self, open_store: Open) -> None:
        store = open_store()
        store.claim(1)
        store.close()
        store.close()
        with pytest.raises(LedgerStoreError):
            store.commit([VersionRecorded(version=1)])

    def test_entries_have_the_payloads_of_open_groups_and_of_no_others(self, open_store: Open) -> None:
        store = open_store()
        store.claim(1)
        store.commit([recorded(group_id) for group_id in range(4)])
        assert payload_ids(store) == {0, 1, 2, 3}
        store.commit([leased(1, 0, 1)])
        assert payload_ids(store) == {0, 1, 2, 3}
        store.commit([trained(1, 0, 1), closed(2)])
        assert payload_ids(open_store()) == {3}

    def test_payloads_come_in_the_order_asked_for_while_a_batch_may_be_trained_again(self, open_store: Open) -> None:
        store = open_store()
        store.claim(1)
        store.commit([recorded(group_id) for group_id in range(3)])
        store.commit([leased(1, 2, 0), trained(1, 2, 0)])
        assert open_store().payloads((2, 0, 1)) == (group(2), group(0), group(1))
        assert store.payloads(()) == ()

    def test_a_release_drops_what_was_trained_up_to_its_version_and_nothing_else(self, open_store: Open) -> None:
        store = open_store()
        store.claim(1)
        store.commit([recorded(group_id) for group_id in range(4)])
        for version in (1, 2):
            store.commit([leased(version, version), trained(version, version)])
        store.commit([leased(3, 3), PayloadsReleased(through_version=1)])
        assert store.payloads((0, 2, 3)) == (group(0), group(2), group(3))
        with pytest.raises(LedgerStoreError, match="payload of group 1 was never recorded or has been released"):
            store.payloads((0, 1))

    def test_a_closed_group_has_no_payload_and_one_that_never_came_has_none(self, open_store: Open) -> None:
        store = open_store()
        store.claim(1)
        store.commit([recorded(0), closed(0)])
        for group_id in (0, 7):
            with pytest.raises(LedgerStoreError, match=f"payload of group {group_id} was never"):
                store.payloads((group_id,))

    def test_receipts_are_found_by_version(self, open_store: Open) -> None:
        store = open_store()
        store.claim(1)
        for version in range(1, 5):
            store.commit([recorded(version), leased(version, version), trained(version, version)])
        assert open_store().receipts(2, 3) == (trained(2, 2), trained(3, 3))
        assert store.receipts(4, 99) == (trained(4, 4),)
        assert store.receipts(5, 4) == ()

    def test_a_reader_of_its_own_sees_commits_and_goes_on_when_the_writer_closes(self, open_store: Open) -> None:
        store = open_store()
        store.claim(1)
        reader = store.reader()
        store.commit([recorded(0)])
        assert list(reader.entries()) == [recorded(0)]
        store.close()
        assert reader.payloads((0,)) == (group(0),)
        reader.close()
