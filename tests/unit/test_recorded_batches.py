"""Batches of one run as the beginning of the ledger of another, trained again by the Buffer that finds them there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ledger_entries as make
import msgspec
import pytest

from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.pacing import PacingSettings
from penstock.actors.buffer.policies import builtin_policy
from penstock.actors.buffer.settings import BufferSettings
from penstock.backends.ledger.archive import archive_groups, archive_samples
from penstock.backends.ledger.archived_groups import read_archived
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.recorded_batches import RecordedBatches
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.base import Metric
from penstock.messages.commands import FetchBatch, Record, Send
from penstock.messages.errors import UserFault
from penstock.messages.ledger import BatchesFixed, GroupRecorded, PayloadsReleased, VersionRecorded
from penstock.messages.local import BatchFetched, Started
from penstock.messages.samples import (
    Completed,
    ExpertChoices,
    Group,
    Loss,
    Media,
    Part,
    PolicyError,
    Prompt,
    Reward,
    Sample,
    SampleKey,
    StopReason,
    Truncated,
    VersionSpan,
)
from penstock.messages.training import (
    BatchReady,
    CheckpointDemanded,
    CheckpointSaved,
    LearnerReady,
    OnStale,
    RunFinished,
    StepFinished,
    StepReported,
    UpdateMode,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from penstock.messages.base import Event
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.samples import ModelOutcome


def written(folder: Path, *parts: Sequence[LedgerEntry]) -> SqliteStore:
    """A ledger in this folder, as a Buffer of the first drive would have written it."""
    folder.mkdir(parents=True)
    store = SqliteStore(folder / LEDGER_FILE)
    store.claim(0)
    for part in parts:
        store.commit(part)
    return store


def whole_run() -> list[LedgerEntry]:
    """Batch 1 of the groups 0 and 1, batch 2 of 3 and 4; both can still be trained again."""
    return [entry for entry in make.whole_run() if not isinstance(entry, PayloadsReleased)]


def collected(*group_ids: int) -> list[LedgerEntry]:
    """A run that has granted four groups and admitted these."""
    return [make.run(), VersionRecorded(version=0), make.granted(0, 4), *map(make.admitted, group_ids)]


class Retraining:
    """A run that trains what another one recorded: a Buffer on its ledger, and a Learner that always says yes."""

    def __init__(self, source: Path, folder: Path, *, num_steps: int = 100) -> None:
        recorded = RecordedBatches(source, num_steps=num_steps, groups_per_batch=2)
        self.folder = folder
        self.store = written(folder, *recorded.entries())
        recorded.close()
        pacing = PacingSettings(
            num_steps=num_steps,
            groups_per_batch=2,
            target_outstanding=None,
            engine_capacity_groups=1,
            max_concurrent=None,
            over_sampling=1.0,
        )
        settings = BufferSettings(pacing=pacing, samples_per_group=2, engines=(), num_prompts=None, keep_checkpoints=9)
        policy = builtin_policy("sync", max_staleness=0, update_mode=UpdateMode.DRAIN, on_stale=OnStale.WAIT)
        self.buffer = Buffer(settings, policy, self.store.entries())
        self.offers: list[BatchReady] = []
        self.reports: list[StepReported] = []
        self.finished: RunFinished | None = None

    def run(self) -> None:
        """To its end."""
        events: list[Event] = [Started(epoch=1), LearnerReady(epoch=1, version=-1), LearnerReady(epoch=1, version=0)]
        while events:
            commands = self.buffer.handle(events.pop(0))  # type: ignore[arg-type]  # what it sends is what it is told
            self.buffer.validate()
            for command in commands:
                match command:
                    case Record(entries=entries):
                        self.store.commit(entries)
                    case FetchBatch(version=version, group_ids=ids):
                        events.append(BatchFetched(version=version, groups=self.store.payloads(ids)))
                    case Send(event=event):
                        events += self._answer(event)
                    case _:
                        pass

    def _answer(self, event: Event) -> list[Event]:
        match event:
            case BatchReady():
                self.offers.append(event)
                ages = [event.version - 1 - (group.oldest_version or 0) for group in event.groups]
                return [
                    StepFinished(
                        version=event.version,
                        group_ids=tuple(group.group_id for group in event.groups),
                        num_trained_tokens=sum(group.num_tokens for group in event.groups),
                        max_staleness=max(ages),
                    )
                ]
            case CheckpointDemanded(version=version):
                return [CheckpointSaved(version=version, path=f"simulated/{version}")]
            case StepReported():
                self.reports.append(event)
            case RunFinished():
                self.finished = event
            case _:
                pass
        return []


def payloads(entries: Iterable[LedgerEntry]) -> dict[int, Group]:
    return {e.group_id: e.payload for e in entries if isinstance(e, GroupRecorded) and e.payload is not None}


def test_the_same_groups_are_trained_in_the_same_order_and_the_new_ledger_is_clean(tmp_path: Path) -> None:
    entries = whole_run()
    written(tmp_path / "source", entries).close()
    again = Retraining(tmp_path / "source", tmp_path / "again")
    again.run()
    given = payloads(entries)
    assert [[group.group_id for group in offer.groups] for offer in again.offers] == [[0, 1], [3, 4]]
    assert [list(offer.groups) for offer in again.offers] == [[given[0], given[1]], [given[3], given[4]]]
    assert again.offers[-1].is_last
    assert again.finished is not None
    assert again.finished.completed
    assert again.finished.story == "2 batches trained of 100: no more were recorded"
    assert [report.num_steps for report in again.reports] == [2, 2]
    report = audit_ledger(again.folder / LEDGER_FILE)
    assert report.findings == ()
    assert report.balance.in_system == 0
    ends = {(count.state, count.cause): count.num_samples for count in report.balance.ended}
    assert ends == {("trained", ""): 8, ("failed", "reward_timeout"): 1, ("filtered", "zero_spread"): 2}


def test_a_batch_that_was_offered_and_never_trained_is_one_of_them(tmp_path: Path) -> None:
    cut = whole_run()[:-2]  # without the last receipt and the checkpoint behind it
    written(tmp_path / "source", cut).close()
    again = Retraining(tmp_path / "source", tmp_path / "again")
    again.run()
    assert [offer.version for offer in again.offers] == [1, 2]


def test_fewer_batches_can_be_trained_than_were_recorded(tmp_path: Path) -> None:
    written(tmp_path / "source", whole_run()).close()
    again = Retraining(tmp_path / "source", tmp_path / "again", num_steps=1)
    again.run()
    assert [offer.version for offer in again.offers] == [1]
    assert again.finished is not None
    assert again.finished.story == "1 batch trained"
    assert audit_ledger(again.folder / LEDGER_FILE).findings == ()


def test_a_buffer_that_dies_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    written(tmp_path / "source", whole_run()).close()
    again = Retraining(tmp_path / "source", tmp_path / "again")
    first = again.buffer
    for event in (Started(epoch=1), LearnerReady(epoch=1, version=0)):
        for command in first.handle(event):
            if isinstance(command, Record):
                again.store.commit(command.entries)
    again.buffer = Buffer(first.settings, first.policy, again.store.entries())
    again.run()
    assert [offer.version for offer in again.offers] == [1, 2]


def test_samples_that_the_ledger_has_let_go_of_are_read_from_the_files_that_kept_them(tmp_path: Path) -> None:
    source = tmp_path / "source"
    store = written(source, whole_run())
    archive_samples(store, source / "samples", 1, 2)
    store.commit([PayloadsReleased(through_version=1)])
    store.close()
    again = Retraining(source, tmp_path / "again")
    again.run()
    given = payloads(whole_run())
    assert [list(offer.groups) for offer in again.offers] == [[given[0], given[1]], [given[3], given[4]]]
    assert audit_ledger(again.folder / LEDGER_FILE).findings == ()


def test_samples_that_are_gone_are_named_with_what_would_have_kept_them(tmp_path: Path) -> None:
    written(tmp_path / "source", make.whole_run()).close()
    with pytest.raises(UserFault, match=r"the samples of batch 1 are gone: .* --keep-samples"):
        RecordedBatches(tmp_path / "source", num_steps=9, groups_per_batch=2)


def test_groups_that_were_only_collected_make_batches_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    written(tmp_path / "source", collected(2, 0, 3)).close()
    again = Retraining(tmp_path / "source", tmp_path / "again")
    again.run()
    assert [[group.group_id for group in offer.groups] for offer in again.offers] == [[2, 0], [3]]
    report = audit_ledger(again.folder / LEDGER_FILE)
    assert report.findings == ()
    assert report.max_staleness == 1, "the second batch is trained one version after the model that made it"
    ends = {(count.state, count.cause): count.num_samples for count in report.balance.ended}
    assert ends == {("trained", ""): 6, ("cancelled", "not_in_a_batch"): 2}


def test_a_token_that_the_model_does_not_know_is_named(tmp_path: Path) -> None:
    written(tmp_path / "source", whole_run()).close()
    for vocab_size in (9, 8):  # prompts have the tokens 7 and 8
        recorded = RecordedBatches(tmp_path / "source", num_steps=9, groups_per_batch=2, vocab_size=vocab_size)
        if vocab_size == 9:
            assert len(list(recorded.entries())) > 1
        else:
            with pytest.raises(UserFault, match=r"group 0 has the token 8, .* knows 8: .* another tokenizer"):
                list(recorded.entries())
        recorded.close()


def test_batches_keep_their_size(tmp_path: Path) -> None:
    written(tmp_path / "source", whole_run()).close()
    with pytest.raises(UserFault, match=r"groups_per_batch is 3, .* have 2 groups; .* set it to 2"):
        RecordedBatches(tmp_path / "source", num_steps=9, groups_per_batch=3)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([], "its ledger is empty"),
        (collected(), "no batch and no complete group was recorded"),
        ([make.run(), BatchesFixed(batches=(), source="runs/first")], "trains batches of runs/first itself"),
    ],
)
def test_a_run_without_batches_of_its_own_is_refused(entries: list[LedgerEntry], why: str, tmp_path: Path) -> None:
    written(tmp_path / "source", entries).close()
    with pytest.raises(UserFault, match=why):
        RecordedBatches(tmp_path / "source", num_steps=9, groups_per_batch=2)


def test_the_audit_finds_a_batch_that_is_another_one_than_was_fixed(tmp_path: Path) -> None:
    written(tmp_path / "source", whole_run()).close()
    recorded = RecordedBatches(tmp_path / "source", num_steps=9, groups_per_batch=2)
    store = written(tmp_path / "again", *recorded.entries(), [make.leased(1, 1, 0)])
    recorded.close()
    store.close()
    (finding,) = audit_ledger(tmp_path / "again" / LEDGER_FILE).findings
    assert finding.text == "batch 1 is another one than was fixed beforehand"


# --- files of samples -------------------------------------------------------------------------------------------


def rich_group() -> Group:
    """Everything that a sample can have."""
    plain = Part(
        tokens=pack_tokens([5, 6, 7]),
        logprobs=pack_floats([-0.1, -1e-30, -7.25]),
        spans=(VersionSpan(3, 1), VersionSpan(4, 2)),
    )
    taught = pack_floats([-0.25, -0.5, -3.0])
    masked = msgspec.structs.replace(
        plain, loss_mask=b"\x01\x00\x01", spans=(VersionSpan(4, 3),), teacher_logprobs=taught
    )
    later = Part(
        tokens=pack_tokens([9]),
        logprobs=pack_floats([-2.0]),
        spans=(VersionSpan(5, 1),),
        context_tokens=pack_tokens([1, 2, 3]),
        experts=ExpertChoices(num_layers=2, per_token=2, id_bytes=1, ids=bytes(range(12))),
        media=(Media("image", "/b", "b", -2, 1), Media("image", "/c", "c", 0, 1)),
    )
    reward = Reward(value=0.1 + 0.2, components=(Metric("format", 1.0),))
    outcomes: tuple[tuple[ModelOutcome, tuple[Part, ...], Loss], ...] = (
        (Completed(stop=StopReason.STOP_STRING, reward=reward), (plain,), Loss.OBJECTIVE),
        (Truncated(reward=Reward(value=-1.0)), (masked, later), Loss.OBJECTIVE),
        (PolicyError(detail="no such tool"), (plain,), Loss.SUPERVISED),
    )
    samples = tuple(
        Sample(key=SampleKey(4, index), attempt=index, engine="engine/1", parts=parts, outcome=outcome, loss=loss)
        for index, (outcome, parts, loss) in enumerate(outcomes)
    )
    prompt = Prompt(row=8, epoch=1, tokens=pack_tokens([3, 1]), text="é?", label="42", metadata=b'{"a": "\xc3\xa9"}')
    prompt = msgspec.structs.replace(prompt, media=(Media("image", "/a", "a", 1, 1),))
    return Group(group_id=4, prompt=prompt, samples=samples)


def test_groups_come_back_from_a_file_bit_for_bit(tmp_path: Path) -> None:
    group = rich_group()
    record = msgspec.structs.replace(make.admitted(4), payload=group)
    store = written(tmp_path / "run", [make.run(), VersionRecorded(version=0), make.granted(0, 5), record])
    file = archive_groups(store, tmp_path / "samples", [4])
    assert list(read_archived(file)) == [group]


def test_only_the_versions_that_are_asked_for_are_read(tmp_path: Path) -> None:
    store = written(tmp_path / "run", whole_run())
    file = archive_samples(store, tmp_path / "samples", 1, 2)
    assert file is not None
    assert [group.group_id for group in read_archived(file, [2])] == [3, 4]


def test_what_is_no_file_of_samples_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "steps-0000001-0000002.parquet"
    file.write_bytes(b"PAR1 nothing")
    with pytest.raises(UserFault, match=r"steps-0000001-0000002.parquet: no file of samples"):
        list(read_archived(file))
