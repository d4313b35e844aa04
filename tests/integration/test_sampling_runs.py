"""A run with everything that decides about sampling, with users' functions in processes, on Ray and ZMQ; then rejection
sampling to a file, and training from it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest
from live_run import SCENARIOS, LiveRun

from penstock.backends.ledger.archived_groups import read_archived
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.ledger import GroupClosed, GroupRecorded, RowsRecorded
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.messages.ledger import LedgerEntry

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MINE = textwrap.dedent(
    """
    from pathlib import Path

    def sift(response, reward):
        return (len(response) < 200, "rambles")

    def good(reward):
        return (reward > 0, "not_good_enough")

    def look(group, rewards, kept, cause):
        with (Path(__file__).parent / "seen.txt").open("a") as file:
            print(group.group_id, len(rewards), kept, cause or "-", file=file)
        if group.group_id == 0:
            raise RuntimeError("the first one is not looked at")

    def prefer(prompt, history):
        return -len(prompt) - (history.mean_reward or 0.0)
    """
)
SMALL = (
    "run.num_steps=4",
    "learner.groups_per_batch=4",
    "learner.warm_start.num_steps=40",
    "engines.count=1",
    "data.path=lines:200",
    "runtime.heartbeat_timeout_s=60",
)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def entries_of(folder: Path) -> list[LedgerEntry]:
    store = SqliteStore(folder / LEDGER_FILE)
    entries = list(store.entries())
    store.close()
    return entries


def test_a_run_with_all_of_it_trains_balances_and_says_what_it_did(tmp_path: Path, mine: Path) -> None:
    arguments = (
        *SMALL,
        "filter.drop_zero_spread=true",
        f"filter.sample_function={mine}:sift",
        "filter.drop_samples=after_statistics",
        f"filter.all_samples_hook={mine}:look",
        "filter.keep_when_insufficient=2",
        f"prompt_source.priority={mine}:prefer",
        "prompt_source.replay={fraction: 0.3, below_reward: 0.3}",
        "staleness.mask_old_tokens=true",
        "--keep-samples",
    )
    (tmp_path / "run").mkdir()
    with LiveRun("quickstart.yaml", tmp_path / "run", arguments) as run:
        summary = run.finish()
        folder = run.folder
    assert summary.completed
    assert audit_ledger(folder / LEDGER_FILE).findings == ()
    entries = entries_of(folder)
    rows = {row.group_id: row.row for entry in entries if isinstance(entry, RowsRecorded) for row in entry.rows}
    came = {entry.group_id for entry in entries if isinstance(entry, GroupRecorded)}
    rejected = [entry for entry in entries if isinstance(entry, GroupClosed) and entry.rejected_cause]
    assert came <= rows.keys()
    metrics = read_steps(folder)[-1].metrics
    told = {name.removeprefix("filter/rejected/"): n for name, n in metrics.items() if name.startswith("filter/rej")}
    assert sum(n or 0 for n in told.values()) <= len(rejected)
    assert set(told) <= {entry.rejected_cause for entry in rejected}
    seen = [line.split() for line in (tmp_path / "seen.txt").read_text().splitlines()]
    assert {int(group_id) for group_id, *_ in seen} >= came
    assert {len(line) for line in seen} == {4}
    for group in read_archived(next((folder / "samples").glob("*.parquet"))):
        assert group.prompt.row == rows[group.group_id]


def test_only_good_samples_are_collected_and_become_demonstrations(tmp_path: Path, mine: Path) -> None:
    collect = (
        *SMALL,
        "--only", "rollout", "--num-groups", "6",
        f"filter.sample_function={mine}:good",
        "filter.min_group_size=1",
        "staleness.max_rejected_batches=500",
    )  # fmt: skip
    (tmp_path / "rollout").mkdir()
    with LiveRun("quickstart.yaml", tmp_path / "rollout", collect) as run:
        run.finish()
        source = run.folder
    assert audit_ledger(source / LEDGER_FILE).findings == ()
    file = source / "samples" / "collected.parquet"
    groups = list(read_archived(file))
    num_samples = sum(len(group.samples) for group in groups)
    assert len(groups) == 6
    assert all((sample.reward or 0.0) > 0 for group in groups for sample in group.samples)
    train = (
        f"data.path={file}",
        "data.recorded.response_key=response_tokens",
        "learner.groups_per_batch=2",
        "runtime.heartbeat_timeout_s=60",
    )
    (tmp_path / "sft").mkdir()
    with LiveRun(SCENARIOS / "sft.yaml", tmp_path / "sft", train) as run:
        trained = run.finish()
        folder = run.folder
    assert audit_ledger(folder / LEDGER_FILE).findings == ()
    assert {(count.state, count.num_samples) for count in trained.balance.ended} == {("trained", num_samples)}
    made = sorted(sample.parts[0].tokens for group in groups for sample in group.samples)
    assert trained.tokens_trained == sum(len(tokens) // 4 for tokens in made)
