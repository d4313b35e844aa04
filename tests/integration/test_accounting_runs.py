"""Time and tokens of real runs whose engines are killed: nothing is missing, and every place says the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live_run import LiveRun

from penstock.backends.ledger.sqlite import open_read_only
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.training import Activity
from penstock.runtime.observability.accounting import LOST, read_accounts
from penstock.runtime.observability.ledger_counts import ledger_counts
from penstock.runtime.observability.summary import read_summary, trained_tokens
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from penstock.runtime.observability.accounting import Accounts

pytestmark = pytest.mark.timeout(600)

MODELLED = Path(__file__).parents[1] / "chaos" / "modelled.yaml"


def assert_whole(folder: Path) -> Accounts:
    """The accounts of a run that has ended, which agree with its ledger, its receipts and every one of its steps."""
    accounts, summary = read_accounts(folder), read_summary(folder)
    assert summary is not None
    assert accounts.has_ended
    assert {lane.name for lane in accounts.lanes} >= {"learner", "engine/0", "engine/1", "scorer"}
    for lane in accounts.lanes:
        assert abs(lane.remainder_s) <= 0.005 * accounts.wall_s, lane
        assert lane.occupied_s <= lane.seconds[Activity.WORKING] + 1e-6
    tokens = accounts.tokens
    assert tokens.remainder == 0
    assert tokens.generated == summary.tokens_generated >= summary.tokens_trained == tokens.trained > 0
    with closing(open_read_only(folder / LEDGER_FILE)) as database:
        assert ledger_counts(database).balance() == summary.balance
        query = "SELECT sum(num_trained_tokens) + sum(num_masked_tokens) FROM steps"
        assert database.execute(query).fetchone() == (tokens.trained,), "what the Learner says that it has trained"
    for row in read_steps(folder):
        assert row.balance.is_balanced
        assert row.balance.generated_tokens == row.tokens_generated >= trained_tokens(row.balance)
    costs = sum(waste.device_s for waste in accounts.waste)
    working_s = sum(lane.seconds[Activity.WORKING] for lane in accounts.lanes if lane.name.startswith("engine/"))
    assert 0 <= costs < working_s
    return accounts


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("sync", marks=pytest.mark.long_run),
        pytest.param("one_step_off", marks=pytest.mark.slow),
        pytest.param("fully_async", marks=pytest.mark.both_hosts),
    ],
)
def test_states_and_tokens_add_up_while_a_run_goes_on_and_when_its_engine_was_killed(
    policy: str, tmp_path: Path
) -> None:
    bound = {"sync": 0, "one_step_off": 1}.get(policy, 2)
    overrides = (f"staleness.policy={policy}", f"staleness.max_staleness={bound}", "run.num_steps=10")
    with LiveRun(MODELLED, tmp_path, overrides) as run:
        run.await_steps(3)
        live = read_accounts(run.folder)
        os.kill(run.pid_of("engine/0"), signal.SIGKILL)
        summary = run.finish()
        output = run.output
    assert not live.has_ended
    assert live.tokens.remainder == 0 < live.tokens.trained
    accounts = assert_whole(run.folder)
    assert [restart.name for restart in summary.restarts] == ["engine/0"]
    killed = next(lane for lane in accounts.lanes if lane.name == "engine/0")
    assert killed.seconds[Activity.DOWN] + killed.seconds[Activity.STARTING] > 0
    assert {waste.state for waste in accounts.tokens.lost} <= {LOST}
    assert all(waste.is_estimate for waste in accounts.tokens.lost)
    for text in ("where the time went", "where the tokens went", f"{accounts.tokens.generated:,}", "scorer"):
        assert text in output
    shown = subprocess.run(
        [sys.executable, "-m", "penstock.runtime.cli", "status", str(run.folder)],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert f"{accounts.tokens.generated:,}" in shown.stdout
