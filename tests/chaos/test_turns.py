"""A learner of two ranks over two engines, one step off: either side is killed in its own turn and in the other's."""

from __future__ import annotations

from pathlib import Path
from shutil import copy

import pytest
from chaos_run import assert_replays
from live_run import LiveRun
from turn_faults import FAULTS, mark_of

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.training import Activity
from penstock.runtime.observability.trackers import read_activity

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
NUM_STEPS = 10
SHARED = (
    "engines.placement=colocate",
    "learner.num_ranks=2",
    "staleness={policy: one_step_off, update_mode: interrupt}",
    "episode={kind: function, idle_timeout_s: 15, tool_timeout_s: 10}",
    "learner.warm_start=null",
    "learner.groups_per_batch=4",
    "learner.save_every=3",
    "sampling.max_response_tokens=48",
    f"run.num_steps={NUM_STEPS}",
    "observability.record=true",
)


def test_either_side_may_be_lost_in_either_turn(tmp_path: Path) -> None:
    file = Path(copy(HERE / "turn_faults.py", tmp_path))
    functions = (f"episode.generate={file}:episode", f"learner.objective.advantage_function={file}:advantages")
    with LiveRun(HERE / "torch.yaml", tmp_path, (*SHARED, *functions)) as run:
        summary = run.finish()
        lanes = read_activity(run.folder)
    assert all(mark_of(tmp_path, number).exists() for number in range(len(FAULTS))), "a fault did not come"
    restarts = {restart.name: restart.count for restart in summary.restarts}
    assert restarts == {"engine/0": 1, "engine/1": 1, "learner": 2}
    assert summary.completed
    assert summary.version == NUM_STEPS
    assert summary.max_staleness == 1
    assert summary.balance.in_system == 0
    assert audit_ledger(run.folder / LEDGER_FILE).findings == ()
    assert_replays(run.folder)
    for engine in ("engine/0", "engine/1"):
        both = [
            (ours, theirs)
            for ours in lanes["learner"]
            for theirs in lanes[engine]
            if ours.activity is theirs.activity is Activity.WORKING
            and min(ours.end_s, theirs.end_s) - max(ours.start_s, theirs.start_s) > 0
        ]
        assert not both, "both work at once"
