"""The counterexample to "earliest deadline first, and wait for what is due now", on the whole machine.

η = 2, B = 1. g0, g1 and g2 start at version 0 and are due at 2; g0 is trained; g3, born at version 1, is quick. Who
trains g3 next has g1 and g2 both due at 2, and one of them comes too late.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun
from trials.trial import Trial

from penstock.actors.buffer import batching
from penstock.backends.engines.options import LatencyOptions
from penstock.backends.learners.options import SimulatedLearnerOptions
from penstock.messages.training import UpdateMode


def counterexample() -> Trial:
    """Three engines, each with a group; g1 and g2 run where it is slow, and g3 comes to the engine that is not."""
    slow = [
        Fault(at_s=0.9, kind=FaultKind.SLOW, target=f"engine/{index}", amount=amount)
        for index, amount in ((1, 12.0), (2, 20.0))
    ]
    return Trial(
        seed=1,
        policy="fully_async",
        max_staleness=2,
        update_mode=UpdateMode.IN_FLIGHT,
        num_steps=5,
        groups_per_batch=1,
        samples_per_group=2,
        num_engines=3,
        num_slots=2,
        target_outstanding=3,
        latency=LatencyOptions(
            response_tokens_median=12, response_tokens_sigma=0, token_s=0.05, apply_weights_s=0.01, fetch_weights_s=0.01
        ),
        learner=SimulatedLearnerOptions(step_s=0.2, publish_s=0.01),
        faults=tuple(slow),
    )


def trained(run: TrialRun) -> list[int]:
    return [group_ids[0] for _, group_ids in run.oracle.trained]


def test_quick_group_waits_for_those_that_would_be_left_over() -> None:
    run = TrialRun(counterexample())
    outcome = run.run()
    order = trained(run)
    assert order[0] == 0
    assert set(order[1:3]) == {1, 2}, f"g1 and g2 are due at version 2, trained were {order}"
    assert order[3] == 3
    assert outcome.max_staleness == 2


def test_quick_group_is_ready_long_before_those_that_are_trained_first() -> None:
    """Otherwise the schedule would show nothing."""
    run = TrialRun(counterexample())
    while run.oracle.version < 2:
        run.host.run(run.host.clock.now_s + 0.05)
    assert run.oracle.groups[3].payload is not None
    assert run.oracle.groups[2].payload is None or run.oracle.groups[1].payload is None


def test_without_the_rule_one_of_them_comes_too_late() -> None:
    run = TrialRun(counterexample())
    with patch.object(batching, "forced_counts", return_value=[]), pytest.raises(AssertionError, match="in time"):
        run.run()
    assert trained(run) == [0]
