"""Groups that are trained again (``staleness.reuse``), under the oracle: exactly once for each use, none too old, none
too often, whoever dies; and the rules that make it so, each with the trials that fail without it."""

# ruff: noqa: ANN401 - what stands in for a part takes whatever the part took, and reaches into it
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import pytest
from trials.draws import draw_trial
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun
from trials.trial import Trial

from penstock.actors.buffer import decisions
from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.reuse import UsedGroups
from penstock.backends.engines.options import LatencyOptions
from penstock.backends.learners.options import SimulatedLearnerOptions
from penstock.messages.names import BUFFER, LEARNER
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

NUM_TRIALS = 30


def slow_engines(seed: int = 0, **fields: Any) -> Trial:
    """A learner that would wait most of the time, and is killed now and then, as the Buffer is."""
    trial = Trial(
        seed=seed,
        policy="fully_async",
        max_staleness=5,
        update_mode=UpdateMode.IN_FLIGHT,
        num_steps=12,
        num_engines=1,
        num_slots=2,
        reuse=3,
        save_every=2,
        keep_checkpoints=1 + seed % 2,
        latency=LatencyOptions(response_tokens_median=14.0, token_s=0.2, apply_weights_s=0.05, fetch_weights_s=0.05),
        learner=SimulatedLearnerOptions(step_s=0.2, publish_s=0.05),
    )
    return msgspec.structs.replace(trial, **fields)


def killed(seed: int) -> Trial:
    rng = random.Random(seed)
    kinds = ((FaultKind.KILL, BUFFER), (FaultKind.KILL, LEARNER), (FaultKind.MACHINE, ""))
    faults: list[Fault] = []
    for _ in range(rng.randint(1, 3)):
        kind, target = rng.choice(kinds)
        faults.append(Fault(at_s=rng.uniform(0.5, 30.0), kind=kind, target=target))
    return slow_engines(seed, faults=tuple(faults))


def drawn(seed: int) -> Trial:
    """A drawn trial, which uses groups again where its bound allows that."""
    trial = draw_trial("fully_async", 50_000 + seed)
    uses = min(2 + seed % 3, trial.max_staleness + 1)
    return trial if trial.over_sampling > 1.0 else msgspec.structs.replace(trial, reuse=uses)


def ran(trial: Trial) -> TrialRun:
    run = TrialRun(trial, with_digest=False)
    run.run()
    return run


def fails(trial: Trial) -> bool:
    try:
        ran(trial)
    except (AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return True
    return False


def test_a_learner_that_would_wait_trains_used_groups_and_fewer_new_ones_are_generated() -> None:
    once, thrice = ran(slow_engines(reuse=1)), ran(slow_engines())
    assert once.oracle.num_used_again == 0
    assert len(once.oracle.groups) == 24
    assert len(thrice.oracle.groups) == 24 - thrice.oracle.num_used_again < 24
    assert thrice.host.clock.now_s < once.host.clock.now_s
    assert {group.is_closed for group in thrice.oracle.groups.values()} == {True}
    assert sum(1 for state in thrice.oracle.ends.values() if state.value == "cancelled") == 0


def test_nothing_is_lost_or_used_too_often_or_too_old_whoever_dies() -> None:
    runs = [ran(killed(seed)) for seed in range(NUM_TRIALS // 2)] + [ran(drawn(seed)) for seed in range(NUM_TRIALS)]
    assert sum(run.oracle.num_used_again for run in runs) > 60
    assert sum(run.host.supervisor.num_restarts > 0 for run in runs) > 15


def uses_without_end() -> AbstractContextManager[Any]:
    def usable(self: UsedGroups, group: Any, version: int) -> bool:
        return bool(version - group.oldest_version <= group.max_staleness)

    return patch.object(UsedGroups, "_is_usable", usable)


def forgets_the_age() -> AbstractContextManager[Any]:
    def usable(self: UsedGroups, version: int, max_staleness: int) -> list[int]:
        return [g for g, used in self._groups.items() if used.num_uses < self.max_uses]

    def is_usable(self: UsedGroups, group: Any, version: int) -> bool:
        return bool(group.num_uses < self.max_uses)

    return patch.multiple(UsedGroups, usable=usable, _is_usable=is_usable)


def fills_without_looking_ahead() -> AbstractContextManager[Any]:
    def places(table: Any, pacing: Any, *, version: int) -> int:
        return int(max(0, pacing.groups_per_batch - table.num_ready))

    return patch.object(decisions, "places_to_fill", places)


def forgets_its_uses() -> AbstractContextManager[Any]:
    """A Buffer that is built from the ledger takes every trained group for one that was used once."""
    leased, init = UsedGroups.leased, Buffer.__init__

    def built(self: Buffer, *args: Any, **more: Any) -> None:
        with patch.object(UsedGroups, "leased", lambda *_: None):
            init(self, *args, **more)

    assert leased is UsedGroups.leased
    return patch.object(Buffer, "__init__", built)


def lets_payloads_go() -> AbstractContextManager[Any]:
    return patch.object(UsedGroups, "needed", lambda *_: ())


RULES = (uses_without_end, forgets_the_age, fills_without_looking_ahead, forgets_its_uses, lets_payloads_go)


@pytest.mark.parametrize("plant", RULES, ids=lambda plant: plant.__name__)
def test_without_this_rule_a_trial_fails(plant: Callable[[], AbstractContextManager[Any]]) -> None:
    with plant(), patch.object(Buffer, "validate", lambda _: None):
        assert any(fails(killed(seed)) or fails(drawn(seed)) for seed in range(NUM_TRIALS // 2))
