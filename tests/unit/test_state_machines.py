"""The transition tables: every step that a machine takes is in its table, and every one of a table is taken.

Steps of the Buffer are taken by its own tests, those of the others by random walks (``state_walks.py``), and by
tests of what walks hardly ever come to.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest
import test_actor_buffer_admission
import test_actor_buffer_ends
import test_actor_buffer_parts
import test_actor_buffer_phases
import test_actor_buffer_recovery
import test_actor_evaluation
import test_actor_lending
import test_actor_weight_publisher
from engine_bench import issued
from state_walks import EngineWalk, LearnerWalk, PublisherWalk
from test_actor_buffer_failures import test_a_run_whose_first_samples_all_fail_for_one_reason_ends_with_it
from test_actor_learner import test_one_checkpoint_is_written_at_a_time_and_no_version_that_is_due_is_passed_over
from test_actor_weight_publisher import PublisherBench

from penstock.actors.engine_worker.phases import EMPTYING, Phase
from penstock.actors.transitions import Steps
from penstock.actors.weight_publisher.phases import Phase as PublisherPhase
from penstock.messages.flow import SampleRevoked, SamplesSettled, SettledState
from penstock.messages.local import GenerationEnded
from penstock.messages.names import engine_name
from penstock.messages.samples import SampleKey, evaluation_group_id
from penstock.messages.training import DeviceTurned, Holder, UpdateMode
from penstock.runtime.cli.state_machines import MACHINES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from penstock.actors.transitions import State

TESTS = (
    test_actor_buffer_admission, test_actor_buffer_ends, test_actor_buffer_parts, test_actor_buffer_phases,
    test_actor_buffer_recovery, test_actor_evaluation, test_actor_lending, test_actor_weight_publisher,
)  # fmt: skip
NEW = SampleKey(1, 0)


def plain_tests(*modules: ModuleType) -> Iterator[Callable[[], None]]:
    """Those that take nothing."""
    for module in modules:
        for name, value in vars(module).items():
            if name.startswith("test_") and inspect.isfunction(value) and not inspect.signature(value).parameters:
                yield value


def take_away(walk: EngineWalk, cause: type) -> None:
    """The only request of training leaves the engine, or does not run any more."""
    hear = walk.bench.hear
    if cause is GenerationEnded:
        walk.bench.end(1)
    elif cause is SampleRevoked:
        hear(SampleRevoked(key=NEW, attempt=0))
    elif cause is SamplesSettled:
        hear(SamplesSettled(settled=SettledState(1, 0, (1,), 0)))
    else:
        hear(issued(1, attempt=1))


def shared_engine(*requests: int) -> EngineWalk:
    """An engine that shares its device, serves version 1, and runs these."""
    walk = EngineWalk(0, takes_turns=True, retracts=False)
    bench = walk.bench
    bench.hear(DeviceTurned(turn=1, holder=Holder.ENGINES))
    bench.opened()
    bench.stage(1)
    bench.commit(1)
    bench.swap()
    for group_id in requests:
        bench.issue(group_id)
    return walk


def take_over(walk: EngineWalk) -> None:
    """The learner wants the device."""
    walk.bench.hear(DeviceTurned(turn=2, holder=Holder.LEARNER))


def visit(walk: EngineWalk, phase: Phase) -> None:
    """From serving into this phase, with what runs still running."""
    bench = walk.bench
    if phase is Phase.SERVING:
        return
    bench.stage(2)
    modes = {Phase.DRAINING: UpdateMode.DRAIN, Phase.INTERRUPTING: UpdateMode.INTERRUPT}
    bench.commit(2, modes.get(phase, UpdateMode.IN_FLIGHT))
    if phase is Phase.SPOILT:
        bench.swap(digest="another")
        bench.stage(3)
        bench.commit(3)


EVALUATED = evaluation_group_id(0)


@pytest.mark.parametrize("phase", [Phase.SERVING, Phase.DRAINING, Phase.INTERRUPTING, Phase.SPOILT])
def test_an_engine_that_runs_dry_swaps_or_sleeps_whatever_has_ended_its_last_request(phase: Phase) -> None:
    for cause in EMPTYING:
        walk = shared_engine(1)
        visit(walk, phase)
        take_away(walk, cause)
        assert walk.bench.worker.phase is (Phase.SERVING if phase is Phase.SERVING else Phase.APPLYING)
        walk = shared_engine(1)
        visit(walk, phase)
        take_over(walk)
        take_away(walk, cause)
        assert walk.bench.worker.phase is Phase.SLEEPING


def test_an_engine_interrupts_what_is_evaluated_when_nothing_else_runs_any_more() -> None:
    for cause in EMPTYING:
        walk = shared_engine(1, EVALUATED)
        visit(walk, Phase.DRAINING)
        take_away(walk, cause)
        assert walk.bench.worker.phase is Phase.INTERRUPTING
        walk = shared_engine(1, EVALUATED)
        take_over(walk)
        take_away(walk, cause)
        assert walk.bench.worker.phase is Phase.INTERRUPTING


def test_an_engine_whose_swap_is_superseded_gives_way_to_the_learner() -> None:
    for requests, before, after in (
        ((1,), Phase.DRAINING, Phase.SLEEPING),
        ((1, EVALUATED), Phase.DRAINING, Phase.INTERRUPTING),
        ((1,), Phase.INTERRUPTING, Phase.SLEEPING),
    ):
        walk = shared_engine(*requests)
        visit(walk, before)
        walk.bench.stage(3)
        walk.bench.end(1)
        assert walk.bench.worker.phase is before
        take_over(walk)
        assert walk.bench.worker.phase is after


def test_an_engine_that_is_told_of_the_next_swap_in_the_middle_of_one_begins_it_when_that_is_done() -> None:
    bench = shared_engine(EVALUATED).bench
    bench.stage(2)
    bench.commit(2, UpdateMode.IN_FLIGHT)
    bench.stage(3)
    bench.commit(3, UpdateMode.DRAIN)
    bench.swap()
    assert bench.worker.phase is Phase.INTERRUPTING


def test_engines_give_back_what_has_gone_with_its_learner_however_far_they_are() -> None:
    bench = PublisherBench()
    bench.ready(0, 1, 2)
    bench.export(1, version=5)
    bench.fetched(0, 1, version=5)
    bench.fetched(1, 1, version=5)
    phases = [bench.publisher.engines.by_name[engine_name(index)].phase for index in range(3)]
    assert phases == [PublisherPhase.COMMITTING, PublisherPhase.STAGED, PublisherPhase.STAGING]
    bench.export(2, version=4)  # another Learner goes over old batches again
    for _ in range(3):
        bench.fetched(2, 1, version=5, error="gone")
    assert {engine.target.manifest.publish for engine in bench.publisher.engines.ready() if engine.target} == {2}


# --- the tables -------------------------------------------------------------------------------------------------------


def test_every_step_of_the_tables_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[tuple[State, type, State]] = set()
    take = Steps.take

    def noted(self: Steps, before: State, after: State) -> None:
        take(self, before, after)
        if before is not after:
            taken.add((before, self.cause, after))

    monkeypatch.setattr(Steps, "take", noted)
    for test in plain_tests(*TESTS):
        test()
    test_a_run_whose_first_samples_all_fail_for_one_reason_ends_with_it()
    test_one_checkpoint_is_written_at_a_time_and_no_version_that_is_due_is_passed_over()
    for phase in (Phase.SERVING, Phase.DRAINING, Phase.INTERRUPTING, Phase.SPOILT):
        test_an_engine_that_runs_dry_swaps_or_sleeps_whatever_has_ended_its_last_request(phase)
    test_an_engine_interrupts_what_is_evaluated_when_nothing_else_runs_any_more()
    test_an_engine_whose_swap_is_superseded_gives_way_to_the_learner()
    test_an_engine_that_is_told_of_the_next_swap_in_the_middle_of_one_begins_it_when_that_is_done()
    test_engines_give_back_what_has_gone_with_its_learner_however_far_they_are()
    for seed in range(8):
        for flag in (False, True):
            EngineWalk(seed, takes_turns=flag, retracts=False).go(1000)
            EngineWalk(seed, takes_turns=flag, retracts=True).go(200)
            LearnerWalk(seed, shares=flag).go(1000)
        EngineWalk(seed, takes_turns=True, retracts=False, is_lent=True).go(1000)
        LearnerWalk(seed, shares=True, lends=True).go(1000)
        for num_steps in range(5, 400, 5):
            walk = EngineWalk(seed, takes_turns=False, retracts=False)
            walk.go(num_steps)
            walk.leave()
            walk.go(20)
    for seed in range(25):
        PublisherWalk(seed, leaves=False).go(1000)
        PublisherWalk(seed, leaves=True).go(2000)
        PublisherWalk(seed, leaves=False, lends=True).go(500)
    dead = [
        f"{machine.title}: {state} → {after} on {cause.__name__}"
        for machine in MACHINES
        for (state, cause), following in machine.table.items()
        for after in following
        if (state, cause, after) not in taken
    ]
    assert not dead, "\n".join(dead)


def test_a_step_that_no_table_has_is_found() -> None:
    steps = Steps({(Phase.SERVING, SampleRevoked): (Phase.SLEEPING,)})
    steps.cause = SampleRevoked
    steps.take(Phase.SERVING, Phase.SLEEPING)
    steps.validate()
    steps.take(Phase.SERVING, Phase.ASLEEP)
    with pytest.raises(AssertionError, match="serving → asleep on SampleRevoked is no step"):
        steps.validate()
