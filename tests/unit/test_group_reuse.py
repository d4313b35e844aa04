"""Groups that are trained again within the bound: what the Buffer forms, what the ledger keeps of it, and what audit
and certificate say of one use too many and of a wrong age."""

from __future__ import annotations

import json
import shutil
import sqlite3
from io import StringIO
from typing import TYPE_CHECKING, Any

import actor_driver as drive
import msgspec
import pytest
from buffer_bench import NUM_SAMPLES, Bench, announced, states_of
from older_ledger import make_older
from rich.console import Console

from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.policies import refusal
from penstock.backends.ledger import verify_certificate as verifier
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.protocol import PayloadGoneError
from penstock.backends.ledger.sqlite import SqliteReader, SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.base import Metric
from penstock.messages.commands import FetchBatch, Record
from penstock.messages.errors import UserFault
from penstock.messages.ledger import (
    BatchLeased,
    CheckpointRecorded,
    GroupRecorded,
    PayloadsReleased,
    RunRecorded,
    StepRecorded,
)
from penstock.messages.local import BatchFetched, Started, WeightsPublished
from penstock.messages.operator import GrantsPaused, PolicyChanged
from penstock.messages.training import (
    BatchReady,
    CheckpointSaved,
    LearnerReady,
    OnStale,
    StepFinished,
    StepReported,
    UpdateMode,
)
from penstock.messages.weights import WeightManifest
from penstock.runtime.cli.audit import show_audit
from penstock.runtime.launch.runs import SCENARIO_NAME, close_record, open_record
from penstock.runtime.observability.weights_log import WeightsLog
from penstock.runtime.scenario.load import load_scenario
from penstock.runtime.scenario.shipped import shipped_scenarios

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.messages.commands import AnyCommand
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.samples import Group

SIZE = 1
"""Groups of a batch."""
TOKENS = 4
SYNC = ["staleness.policy=sync", "staleness.max_staleness=null"]
QUICKSTART = shipped_scenarios()["quickstart"]


class Run:
    """A Buffer of one group a batch that uses groups again, and a ledger that outlives it."""

    def __init__(self, *, uses: int = 2, eta: int = 3, target: int | None = 2, **fields: Any) -> None:  # noqa: ANN401
        self.bench = Bench(eta=eta, groups_per_batch=SIZE, target=target, **fields)
        old = self.bench.buffer
        settings = msgspec.structs.replace(
            old.settings,
            max_uses=uses,
            identity=RunRecorded(
                seed=0, num_rows=9, shuffle=True, samples_per_group=NUM_SAMPLES, groups_per_batch=SIZE
            ),
        )
        self.bench.driver = drive.Driver(Buffer(settings, old.policy))
        self.entries: list[LedgerEntry] = []
        self.payloads: dict[int, Group] = {}
        self._keep(self.bench.started().commands)
        self.entries = [settings.identity, *self.entries] if settings.identity else self.entries
        self.hear()

    @property
    def buffer(self) -> Buffer:
        return self.bench.buffer

    def _keep(self, commands: list[AnyCommand]) -> list[AnyCommand]:
        self.entries += [entry for c in drive.every(commands, Record) for entry in c.entries]
        self.payloads |= {e.group_id: e.payload for e in self.entries if isinstance(e, GroupRecorded) and e.payload}
        return commands

    def hear(self, *events: Any) -> list[AnyCommand]:  # noqa: ANN401 - any event
        return self._keep(self.bench.hear(*events))

    def admit(self, group_id: int) -> list[AnyCommand]:
        return self._keep(self.bench.admit(group_id))

    @property
    def lease(self) -> BatchLeased | None:
        return self.buffer.books.open_lease

    def train(self, *, announces: bool = True) -> list[AnyCommand]:
        """The open batch is trained; where it has used groups, after they were fetched."""
        lease = self.lease
        assert lease is not None
        groups = [self.payloads[group_id] for group_id in lease.group_ids]
        fetched = self.hear(BatchFetched(version=lease.version, groups=tuple(groups))) if lease.again else []
        offered = drive.sent(fetched, BatchReady)
        assert [batch.uses for batch in offered] == ([lease.uses] if lease.again else [])
        receipt = StepFinished(
            version=lease.version,
            group_ids=lease.group_ids,
            num_trained_tokens=sum(group.num_tokens for group in groups),
            max_staleness=max(lease.version - 1 - (group.oldest_version or 0) for group in groups),
            uses=lease.uses,
        )
        commands = self.hear(receipt)
        return [*commands, *self.hear(announced(self.buffer.version))] if announces else commands


def again(run: Run) -> dict[int, int]:
    return {} if run.lease is None else run.lease.again


# --- what a batch is --------------------------------------------------------------------------------------------------


def test_a_used_group_fills_a_batch_that_would_be_waited_for_and_a_new_one_goes_first() -> None:
    run = Run()
    run.admit(0)
    commands = run.train()
    lease = run.lease
    assert lease is not None
    assert (lease.group_ids, lease.uses, lease.max_uses, lease.max_staleness) == ((0,), (2,), 2, 3)
    assert drive.every(commands, FetchBatch) == [FetchBatch(2, (0,))]
    run.admit(1)
    run.train()
    assert run.lease is not None
    assert (run.lease.group_ids, run.lease.uses) == ((1,), ())


def test_without_reuse_the_learner_waits() -> None:
    run = Run(uses=1)
    run.admit(0)
    run.train()
    assert run.lease is None


def test_a_group_is_used_as_often_as_it_may_be_and_ends_once() -> None:
    run = Run(uses=3, eta=8)
    run.admit(0)
    uses: list[int] = []
    while run.lease is not None:
        uses.append(run.lease.uses[0] if run.lease.uses else 1)
        report = drive.one_sent(run.train(), StepReported)
        figures = {metric.name: metric.value for metric in report.metrics}
        assert figures["reuse/num_groups"] == (len(uses) > 1)
        assert figures["reuse/num_tokens"] == (len(uses) > 1) * NUM_SAMPLES * TOKENS
        assert report.response_lengths == (() if len(uses) > 1 else (TOKENS,) * NUM_SAMPLES)
        assert sum(report.staleness_counts) == NUM_SAMPLES, "each use has an age"
        assert report.staleness_counts[len(uses) - 1] == NUM_SAMPLES
    assert uses == [1, 2, 3]
    assert states_of(run.bench) == {("trained", ""): NUM_SAMPLES}


@pytest.mark.parametrize(("eta", "last_age"), [(1, 1), (2, 2), (4, 4)])
def test_no_use_is_older_than_the_bound(eta: int, last_age: int) -> None:
    run = Run(uses=64, eta=eta, target=1)
    run.hear(GrantsPaused(is_paused=True))
    run.admit(0)
    while run.lease is not None:
        run.train(announces=False)
    steps = [entry for entry in run.entries if isinstance(entry, StepRecorded)]
    assert steps[-1].max_staleness == last_age
    assert len(steps) == last_age + 1


def test_used_groups_do_not_make_those_that_are_on_their_way_too_old() -> None:
    """η = 1: a group that started at version 0 must be trained at 1 at the latest, so that batch is waited for."""
    run = Run(eta=1)
    run.admit(0)
    run.train()
    assert run.buffer.books.table.num_outstanding
    assert run.lease is None
    run.admit(1)
    assert run.lease is not None
    assert run.lease.group_ids == (1,)


def test_no_use_is_older_than_the_bound_of_the_grant_whatever_policy_holds_since() -> None:
    run = Run(uses=3, eta=1)
    run.admit(0)
    run.train()
    assert run.lease is None, "1 is on its way, and due"
    run.hear(PolicyChanged(policy="fully_async", max_staleness=4, update_mode=UpdateMode.IN_FLIGHT))
    run.admit(1)
    run.train()
    assert run.buffer.version == 2
    assert 0 not in again(run)
    assert run.buffer.books.used.usable(2, 4) == []
    assert len(run.buffer.books.used) == 0, "what is too old is forgotten"


def test_a_release_keeps_what_may_be_used_again_and_is_in_no_batch_yet() -> None:
    run = Run(eta=1)
    run.admit(0)
    run.train()
    assert run.lease is None
    commands = run.hear(CheckpointSaved(version=1, path="c1"))
    assert drive.recorded(commands, PayloadsReleased) == [PayloadsReleased(through_version=1, kept=(0,))]


def test_a_release_of_a_run_without_reuse_takes_nothing_that_its_checkpoint_does_not_cover() -> None:
    run = Run(uses=1)
    for group_id in (0, 1):
        run.admit(group_id)
        run.train()
    commands = run.hear(CheckpointSaved(version=1, path="c1"))
    assert drive.recorded(commands, PayloadsReleased) == [PayloadsReleased(through_version=1)]
    resumed = Buffer(msgspec.structs.replace(run.buffer.settings, max_uses=2), run.buffer.policy, run.entries)
    assert resumed.books.used.usable(2, 3) == [1]


def test_what_was_used_as_often_as_it_may_be_is_forgotten_when_its_payload_is_released() -> None:
    run = Run(uses=2, eta=3, target=1)
    run.hear(GrantsPaused(is_paused=True))
    run.admit(0)
    run.train()
    run.train()
    assert (run.lease, len(run.buffer.books.used)) == (None, 1)
    run.hear(CheckpointSaved(version=2, path="c2"))
    assert len(run.buffer.books.used) == 0


def test_what_is_on_its_way_at_the_end_of_the_run_is_trained_and_not_left_over() -> None:
    run = Run(num_steps=2)
    run.admit(0)
    run.train()
    assert run.lease is None, "the last batch is for the group that was granted for it"
    run.admit(1)
    run.train()
    assert run.buffer.books.version == 2
    assert states_of(run.bench) == {("trained", ""): 2 * NUM_SAMPLES}


def test_a_policy_under_which_nothing_could_be_used_so_often_is_refused() -> None:
    event = PolicyChanged(policy="one_step_off", max_staleness=1, update_mode=UpdateMode.DRAIN, on_stale=OnStale.WAIT)
    assert refusal(event, publish_every=1, max_uses=2) == ""
    assert "staleness.reuse is 3, that needs a max_staleness of at least 2" in refusal(
        event, publish_every=1, max_uses=3
    )


def test_figures_of_samples_that_were_there_before_have_a_name_of_their_own() -> None:
    run = Run()
    run.admit(0)
    run.train()
    lease = run.lease
    assert lease is not None
    run.hear(BatchFetched(version=2, groups=(run.payloads[0],)))
    metrics = (Metric("rollout/raw_reward", 0.5), Metric("train/loss", 1.0))
    receipt = StepFinished(
        version=2, group_ids=(0,), num_trained_tokens=1, max_staleness=1, uses=lease.uses, metrics=metrics
    )
    report = drive.one_sent(run.hear(receipt), StepReported)
    names = {metric.name for metric in report.metrics}
    assert {"reuse/rollout/raw_reward", "train/loss"} <= names
    assert "rollout/raw_reward" not in names


# --- after a loss -----------------------------------------------------------------------------------------------------


def used_run(num_steps: int = 5) -> Run:
    """Some batches, of new and of used groups in turn."""
    run = Run(eta=5)
    for _ in range(num_steps):
        if run.lease is None:
            table = run.buffer.books.table
            run.admit(next(t.group_id for t in table.outstanding() if t.record is None))
        run.train()
        if run.buffer.version in (1, 3):
            run.hear(CheckpointSaved(version=run.buffer.version, path=f"checkpoints/{run.buffer.version}"))
    return run


def test_a_new_buffer_knows_every_use_from_the_ledger() -> None:
    run = used_run()
    assert any(entry.again for entry in run.entries if isinstance(entry, StepRecorded))
    settings, policy = run.buffer.settings, run.buffer.policy
    for end in range(1, len(run.entries) + 1):
        Buffer(settings, policy, run.entries[:end]).validate()
    new = Buffer(settings, policy, run.entries)
    assert drive.snapshot(new.books.used) == drive.snapshot(run.buffer.books.used)


def test_an_open_batch_with_used_groups_is_fetched_and_offered_again_unchanged() -> None:
    run = Run()
    run.admit(0)
    run.train()
    driver = drive.Driver(Buffer(run.buffer.settings, run.buffer.policy, run.entries))
    commands = driver.hear(Started(epoch=1), LearnerReady(epoch=1, version=1))
    assert drive.one(commands, FetchBatch) == FetchBatch(2, (0,))
    assert drive.recorded(commands, BatchLeased) == []
    (offer,) = drive.sent(driver.hear(BatchFetched(version=2, groups=(run.payloads[0],))), BatchReady)
    assert (offer.version, offer.groups, offer.uses) == (2, (run.payloads[0],), (2,))


def test_a_run_that_goes_on_without_reuse_ends_the_batch_that_has_used_groups() -> None:
    run = Run()
    run.admit(0)
    run.train()
    settings = msgspec.structs.replace(run.buffer.settings, max_uses=1)
    run.bench.driver = drive.Driver(Buffer(settings, run.buffer.policy, run.entries))
    run.hear(Started(epoch=1), LearnerReady(epoch=1, version=1))
    run.train()
    assert (run.buffer.version, run.lease) == (2, None)


def test_a_release_leaves_what_may_be_used_again_and_what_a_later_batch_has() -> None:
    run = used_run()
    released = [entry for entry in run.entries if isinstance(entry, PayloadsReleased)]
    assert any(entry.kept for entry in released)
    for number, entry in enumerate(run.entries):
        if isinstance(entry, PayloadsReleased):
            leases = [e for e in run.entries if isinstance(e, BatchLeased) and e.version > entry.through_version]
            trained = {g for e in run.entries[:number] if isinstance(e, StepRecorded) for g in e.group_ids}
            assert {g for lease in leases for g in lease.again} & trained <= set(entry.kept)


# --- the ledger, the audit and the certificate ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reused")
    run = used_run()
    store = SqliteStore(folder / LEDGER_FILE)
    store.claim(1)
    for entry in run.entries:
        store.commit([entry])
    store.close()
    for version in (1, 3):
        (folder / "checkpoints" / str(version)).mkdir(parents=True)
    (folder / SCENARIO_NAME).write_text("run: {name: made}\n")
    log = WeightsLog(folder)
    for version in range(run.buffer.version + 1):
        log.saw(
            WeightsPublished(
                manifest=WeightManifest(
                    version=version, publish=version, learner_epoch=1, transport="disk", location="w", size_bytes=8,
                    digest=f"{version:064x}",
                )
            )
        )  # fmt: skip
    log.close()
    close_record(folder, open_record(folder, "made"), 0)
    text = StringIO()
    code = show_audit(folder, Console(file=text, width=200), certificate=folder / "certificate.json")
    assert code == 0, text.getvalue()
    return folder


@pytest.fixture
def facts(made: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((made / "certificate.json").read_bytes())
    return read


def wrong(certificate: dict[str, Any]) -> list[str]:
    """What the verifier finds, the digest and figures of a forger who knows how they are made being right."""
    ledger = certificate["ledger"]
    ledger.update(verifier.derived(ledger))
    return list(verifier.findings_of({**certificate, "digest": verifier.seal(certificate)}))


def test_audit_and_certificate_have_every_use_with_its_age(made: Path, facts: dict[str, Any]) -> None:
    report = audit_ledger(made / LEDGER_FILE)
    assert report.findings == ()
    assert report.balance.is_balanced
    ledger = facts["ledger"]
    assert [row[1:] for row in ledger["reuses"]] == [[2, 2, 2], [2, 4, 2]]
    assert sum(count for _, _, count, _ in ledger["ages_of_reuses"]) == 2 * NUM_SAMPLES
    assert all(age for age, *_ in ledger["ages_of_reuses"])
    assert sum(count for _, _, count, _ in ledger["ages"]) == 3 * NUM_SAMPLES, "new samples only"
    assert wrong(facts) == []


def test_the_verifier_refuses_one_use_too_many(facts: dict[str, Any]) -> None:
    group = facts["ledger"]["reuses"][0][0]
    facts["ledger"]["reuses"].insert(1, [group, 3, 5, 2])
    assert f"ledger.reuses: use 3 of group {group} follows use 2, at most 2 are allowed" in wrong(facts)


def test_the_verifier_refuses_a_use_that_is_left_out_or_told_twice(facts: dict[str, Any]) -> None:
    first = facts["ledger"]["reuses"][0]
    facts["ledger"]["reuses"].insert(1, first)
    assert any("follows use 2" in text for text in wrong(facts))
    facts["ledger"]["reuses"] = []
    assert any("the receipt says" in text and "step 2" in text for text in wrong(facts))


def test_the_verifier_refuses_a_wrong_age(facts: dict[str, Any]) -> None:
    place = next(place for place, step in enumerate(facts["ledger"]["steps"]) if step[0] == 2)
    facts["ledger"]["steps"][place][4] -= 1
    assert any("step 2: the receipt says age" in text for text in wrong(facts))


def test_the_verifier_refuses_a_use_before_the_first(facts: dict[str, Any]) -> None:
    facts["ledger"]["reuses"][0][0] = 77
    assert any("was not trained before" in text for text in wrong(facts))


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("UPDATE reuses SET use = 3", "the table of reuses"),
        ("DELETE FROM reuses", "the table of reuses lacks"),
        ("UPDATE reuses SET max_uses = 9", "the table of reuses"),
    ],
)
def test_the_audit_compares_the_table_of_reuses_with_the_log(
    made: Path, tmp_path: Path, statement: str, told: str
) -> None:
    shutil.copytree(made, tmp_path / "run")
    database = sqlite3.connect(tmp_path / "run" / LEDGER_FILE, isolation_level=None)
    database.execute(statement)
    database.close()
    findings = audit_ledger(tmp_path / "run" / LEDGER_FILE).findings
    assert any(told in finding.text for finding in findings)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"uses": (3,)}, "is use 3 of group 0, which had 1; the bound is 2"),
        ({"max_uses": 1}, "is use 2 of group 0, which had 1; the bound is 1"),
        ({"uses": ()}, "group 0 is leased when it is trained already"),
    ],
)
def test_the_audit_finds_a_use_that_must_not_be(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    store = SqliteStore(tmp_path / LEDGER_FILE)
    store.claim(1)
    for entry in used_run(2).entries:
        is_reuse = isinstance(entry, BatchLeased | StepRecorded) and bool(entry.again)
        fields = {name: value for name, value in changes.items() if hasattr(entry, name)}
        store.commit([msgspec.structs.replace(entry, **fields) if is_reuse else entry])
    store.close()
    assert any(told in finding.text for finding in audit_ledger(tmp_path / LEDGER_FILE).findings)


def test_a_file_keeps_the_payloads_that_a_release_names_until_one_that_does_not(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / LEDGER_FILE)
    store.claim(1)
    for entry in used_run(2).entries:
        if not isinstance(entry, PayloadsReleased | CheckpointRecorded):
            store.commit([entry])
    store.commit([PayloadsReleased(through_version=2, kept=(0,))])
    assert [group.group_id for group in SqliteReader(tmp_path / LEDGER_FILE).payloads((0,))] == [0]
    store.commit([PayloadsReleased(through_version=3)])
    with pytest.raises(PayloadGoneError, match="payload of group 0 was never recorded or has been released"):
        store.payloads((0,))
    store.close()


def test_a_ledger_from_before_reuse_is_audited_certified_and_written_on(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "run")
    file = tmp_path / "run" / LEDGER_FILE
    file.unlink()
    run = Run(uses=1)
    run.admit(0)
    run.train()
    store = SqliteStore(file)
    store.claim(1)
    store.commit(run.entries)
    store.close()
    make_older(file, 5)
    assert audit_ledger(file).findings == ()
    assert "reuses" not in verifier.read_ledger(file)
    store = SqliteStore(file)
    store.close()
    assert audit_ledger(file).findings == ()


# --- scenarios --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (SYNC, "staleness.max_staleness is 0: nothing can be trained again, found 2; set it to 1"),
        (["staleness.max_staleness=1", "staleness.reuse=3"], "it is in 2 batches at most, found 3; set it to 2"),
        (["staleness.over_sampling=1.5"], "staleness.over_sampling makes new ones to throw away"),
        (
            ["learner.objective.old_logprobs=recompute", "learner.objective.correction=none"],
            "has to be weighed by how far the policy has moved",
        ),
        (
            [
                "learner.objective.old_logprobs=recompute",
                "learner.objective.correction=none",
                "learner.objective.allow_unbounded=true",
            ],
            "has to be weighed by how far the policy has moved",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_key_and_the_remedy(overrides: list[str], told: str) -> None:
    with pytest.raises(UserFault) as caught:
        load_scenario(QUICKSTART, ["staleness.policy=fully_async", "staleness.reuse=2", *overrides])
    assert told in str(caught.value)


def test_true_on_policy_refuses_reuse() -> None:
    with pytest.raises(UserFault, match=r"staleness\.reuse: .*nothing can be trained again"):
        load_scenario(QUICKSTART, [*SYNC, "learner.true_on_policy=true", "staleness.reuse=2"])


def test_a_scenario_with_reuse_is_taken_and_reaches_the_buffer() -> None:
    scenario = load_scenario(QUICKSTART, ["staleness.policy=fully_async", "staleness.reuse=3"])
    assert scenario.staleness.reuse == 3
