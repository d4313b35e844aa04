"""Runs that stand still on the virtual host: the watchdog says who waits for whom, and names whom it all hangs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from trials.draws import draw_trial
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun
from trials.trial import OVERDUE_AFTER_S, Trial

from penstock.backends.learners.options import SimulatedLearnerOptions
from penstock.messages.names import BUFFER, FILTER, PROMPT_SOURCE, SCORER
from penstock.messages.training import UpdateMode
from penstock.messages.waits import WaitsReported
from penstock.runtime.hosts.virtual.host import IdleWatcher
from penstock.runtime.hosts.virtual.links import LinkModel
from penstock.runtime.observability.wait_graph import wait_graph

if TYPE_CHECKING:
    from penstock.backends.simulated.engine import SimulatedEngine
    from penstock.messages.base import Event
    from penstock.runtime.hosts.virtual.process import Process

NEVER_S = 1e6


def trial(*faults: Fault, **fields: Any) -> Trial:  # noqa: ANN401 - fields of a trial
    values: dict[str, Any] = {
        "seed": 3,
        "policy": "fully_async",
        "max_staleness": 2,
        "update_mode": UpdateMode.IN_FLIGHT,
        "num_steps": 6,
        "lease_timeout_s": NEVER_S,
        "faults": faults,
    }
    return Trial(**(values | fields))


class Reports(IdleWatcher):
    """The newest report of each actor, as the supervisor has them."""

    def __init__(self, run: TrialRun) -> None:
        self.newest: dict[str, WaitsReported] = {}
        self.num = 0
        run.host.watch(self, events=False)

    def heard(self, process: Process, event: Event) -> None:
        if isinstance(event, WaitsReported):
            self.newest[event.name] = event
            self.num += 1


def standing_still(one: Trial, *, frozen: str = "") -> list[str]:
    """The graph, line by line, after the run has stood still for a while."""
    run = TrialRun(one, with_digest=False)
    reports = Reports(run)
    run.host.run(5.0)
    if frozen:
        cast("SimulatedEngine", run.host.supervisor.processes[frozen].backend).is_frozen = True
    assert run.host.run(5.0 + 4 * OVERDUE_AFTER_S) is None, "the run was to stand still"
    return wait_graph(reports.newest.values(), run.host.clock.now_s).splitlines()


def roots(graph: list[str]) -> list[str]:
    return [line.removeprefix("at the root: ").split(" (")[0] for line in graph if line.startswith("at the root: ")]


def test_an_engine_whose_backend_hangs_is_the_root() -> None:
    graph = standing_still(trial(num_engines=1), frozen="engine/0")
    assert roots(graph) == ["engine/0's backend"], graph
    chain = [line.split(" waits for ")[0] for line in graph if " waits for " in line]
    assert {"learner", BUFFER, PROMPT_SOURCE, "engine/0"} <= set(chain), graph


def test_a_learner_whose_backend_hangs_is_the_root() -> None:
    learner = SimulatedLearnerOptions(publish_s=0.2, step_s=NEVER_S)
    graph = standing_still(trial(learner=learner))
    assert "learner's backend" in roots(graph), graph
    assert any(line.startswith("buffer waits for receipt of batch 1 from learner") for line in graph), graph


def test_a_line_that_carries_nothing_is_found_at_its_sender() -> None:
    """The Filter has sent its groups, and waits for nothing itself."""
    graph = standing_still(trial(Fault(at_s=0.0, kind=FaultKind.CUT, target=FILTER, peer=BUFFER)))
    assert FILTER in roots(graph), graph
    assert any(line.startswith("buffer waits for group ") for line in graph), graph


def test_a_scorer_that_cannot_be_reached_is_found_behind_the_groups_that_wait_for_it() -> None:
    graph = standing_still(trial(Fault(at_s=2.0, kind=FaultKind.CUT, target=SCORER, peer=FILTER)))
    assert any(line.startswith("buffer waits for group ") for line in graph), graph
    assert roots(graph), graph


def test_runs_that_go_on_report_nothing() -> None:
    run = TrialRun(trial(num_steps=100, lease_timeout_s=40.0), with_digest=False)
    reports = Reports(run)
    run.run()
    assert run.host.clock.now_s > OVERDUE_AFTER_S
    assert reports.num == 0


@pytest.mark.parametrize("seed", [1, 2, 4])
@pytest.mark.parametrize("policy", ["sync", "fully_async"])
def test_watching_changes_nothing_of_what_actors_do(policy: str, seed: int) -> None:
    trained: list[object] = []
    link = LinkModel(min_delay_s=0.001, max_delay_s=0.001)  # or each report takes a draw from the messages after it
    for overdue_after_s in (0.5, NEVER_S):
        run = TrialRun(msgspec.structs.replace(draw_trial(policy, seed), link=link), with_digest=False)
        run.host.settings = msgspec.structs.replace(run.host.settings, overdue_after_s=overdue_after_s)
        reports = Reports(run)
        run.run()
        trained.append((run.oracle.trained, run.oracle.ends))
        assert (reports.num > 0) == (overdue_after_s == 0.5)
    assert trained[0] == trained[1]
