"""``engines.scale: by_bound``: what readings come to where a step is what its formula says, and how they are taken."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from penstock.messages.names import LEARNER, engine_name
from penstock.messages.training import Activity, ActivitySpan, ActorReported
from penstock.runtime.shell import engine_scaling
from penstock.runtime.shell.engine_scaling import BoundPolicy, EngineScaler, Reading, ScalingSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.operator import EnginesAsked

SETTINGS = ScalingSettings(fewest=1, most=8, hold_s=10.0)


def read(num_engines: int, load: float, noise: float = 0.0, rng: random.Random | None = None) -> Reading:
    """Of a run whose generation of a batch takes ``load`` engines as long as its training takes."""
    rng = rng or random.Random(0)
    step = max(load / num_engines, 1.0)
    waited = min(1.0, max(0.0, 1 - 1 / step + rng.gauss(0, noise)))
    used = min(1.0, max(0.0, load / num_engines / step + rng.gauss(0, noise)))
    return Reading(num_engines=num_engines, duration_s=60.0, waited=waited, used=used)


def played(load: Callable[[int], float], num_engines: int, num_readings: int, noise: float = 0.0) -> list[int]:
    """The engines that there are after each change, from those of the start on."""
    policy, rng, found = BoundPolicy(SETTINGS), random.Random(3), [num_engines]
    for number in range(num_readings):
        wanted, reason = policy.verdict(read(found[-1], load(number), noise, rng))
        assert bool(reason) == (wanted != found[-1]), "a change has a reason, and nothing else has"
        assert SETTINGS.fewest <= wanted <= SETTINGS.most
        if wanted != found[-1]:
            found.append(wanted)
    return found


@pytest.mark.parametrize("load", [0.3, 1.0, 1.7, 2.5, 3.3, 4.0, 5.2, 6.6, 7.9, 20.0])
@pytest.mark.parametrize("first", [1, 3, 8])
def test_it_settles_within_one_of_the_least_number_that_does_not_bind(load: float, first: int) -> None:
    found = played(lambda _: load, first, 200)
    best = min(8, -int(-load // 1))
    assert abs(found[-1] - best) <= 1, found
    assert len(found) <= 5, found
    assert found == sorted(found) or found == sorted(found, reverse=True), "it goes there, and not back and forth"


@pytest.mark.parametrize("load", [1.0, 2.6, 3.5, 4.1, 6.0])
def test_noise_changes_nothing_for_a_thousand_readings(load: float) -> None:
    first = played(lambda _: load, 4, 100)[-1]
    found = played(lambda _: load, first, 1000, noise=0.04)
    assert len(found) <= 2, found


def test_it_follows_a_learner_that_becomes_slower_and_one_that_becomes_quicker() -> None:
    found = played(lambda number: 6.0 if number < 100 else 2.0 if number < 200 else 5.0, 1, 300)
    assert max(found) in (5, 6)
    assert found[-1] in (4, 5)
    assert min(found[found.index(max(found)) :]) in (2, 3)
    assert len(found) <= 9


def without_hysteresis(load: float) -> list[int]:
    """The planted bug: both directions at one threshold, and every reading counts."""
    with patch.multiple(engine_scaling, WAITS=0.02, WAITS_LONG=0.0, FULL=0.0, ROOM=1.0, READINGS=1, MAX_READINGS=1):
        return played(lambda _: load, 3, 1000, noise=0.04)


def test_without_hysteresis_noise_would_make_it_flap() -> None:
    assert len(without_hysteresis(4.0)) > 20


def test_where_slots_are_free_and_the_learner_waits_engines_stay() -> None:
    policy = BoundPolicy(SETTINGS)
    reading = Reading(num_engines=4, duration_s=60.0, waited=0.7, used=0.3)
    assert all(policy.verdict(reading).num_engines == 4 for _ in range(50))


def lent(num_lent: int, steps_per_s: float, waited: float = 0.5) -> Reading:
    """Of two engines and so many that are lent the learner's device."""
    return Reading(
        num_engines=2 + num_lent, duration_s=60.0, waited=waited, used=0.99, num_lent=num_lent, steps_per_s=steps_per_s
    )


def lending() -> BoundPolicy:
    return BoundPolicy(ScalingSettings(fewest=2, most=3, hold_s=10.0, lent=frozenset(("engine/2",))))


def test_devices_are_lent_where_generation_binds_and_stay_so_where_that_pays() -> None:
    policy = lending()
    assert policy.verdict(lent(0, 1.0)).num_engines == 3
    assert all(policy.verdict(lent(1, steps_per_s)).num_engines == 3 for steps_per_s in (1.1, 0.9, 1.1))


def test_devices_that_were_lent_in_vain_are_lent_again_ever_more_seldom() -> None:
    policy, num_lent, waits = lending(), 0, list[int]()
    for number in range(60):
        wanted, reason = policy.verdict(lent(num_lent, 1.0))
        if wanted == 3 and not num_lent:
            waits.append(number)
        elif wanted == 2 and num_lent:
            assert reason.startswith("lending does not pay: 3,600 steps/h with the learner's devices lent")
        num_lent = wanted - 2
    assert [late - early for early, late in itertools.pairwise(waits)] == [
        engine_scaling.LEND_AGAIN + 1,
        4 * engine_scaling.LEND_AGAIN + 1,
    ]


def test_a_learner_that_does_not_wait_lends_nothing() -> None:
    policy = lending()
    assert policy.verdict(lent(0, 1.0, waited=0.1)).num_engines == 2


def test_engines_that_are_missed_come_back_and_are_let_go_ever_more_seldom() -> None:
    """Slots are free as a mean and not when they are needed, so what looks superfluous is not."""
    policy, num_engines, changes = BoundPolicy(SETTINGS), 6, [0]
    for number in range(300):
        waited = 0.02 if num_engines >= 6 else 0.25
        wanted, _ = policy.verdict(Reading(num_engines=num_engines, duration_s=60.0, waited=waited, used=0.5))
        if wanted != num_engines:
            num_engines = wanted
            changes.append(number)
    assert num_engines in (5, 6)
    pauses = [later - earlier for earlier, later in zip(changes[::2], changes[1::2], strict=False)]
    assert pauses == sorted(pauses)
    assert len(changes) < 14, "of 300 readings"


# --- readings ---------------------------------------------------------------------------------------------------------


class Told:
    """A scaler, and the reports of a run whose actors do the same all the time."""

    def __init__(self, num_engines: int) -> None:
        self.scaler = EngineScaler(SETTINGS)
        self.now_s = 0.0
        self.orders: list[EnginesAsked] = []
        self.engines = tuple(map(engine_name, range(num_engines)))
        self.scaler.engines_are(self.engines)

    def say(self, name: str, activity: Activity, occupancy: float = 1.0) -> None:
        span = ActivitySpan(activity, self.now_s - 1.0, self.now_s, occupancy)
        order = self.scaler.hear(ActorReported(name=name, epoch=1, state="", activities=(span,)))
        if order is not None:
            self.orders.append(order)

    def second(self, learner: Activity, occupancy: float = 1.0, *, but: str = "", step: bool = True) -> None:
        self.now_s += 1.0
        self.say(LEARNER, learner)
        for name in self.engines:
            if name != but:
                self.say(name, Activity.WORKING, occupancy)
        if step:
            self.scaler.step()


def test_an_order_names_who_is_there_and_the_lowest_free_numbers_and_says_why() -> None:
    told = Told(2)
    while not told.orders and told.now_s < 60:
        told.second(Activity.WAITING_FOR_SAMPLES)
    assert told.orders[0].engines == ("engine/0", "engine/1", "engine/2", "engine/3")
    assert told.orders[0].reason.startswith("generation binds")
    assert 20 <= told.now_s <= 23, "the time to settle, and that of a reading"


def test_nothing_is_read_while_a_newcomer_starts_nor_before_it_shows() -> None:
    told = Told(2)
    while not told.orders:
        told.second(Activity.WAITING_FOR_SAMPLES)
    told.engines = told.orders.pop().engines
    told.scaler.engines_are(told.engines)
    for _ in range(100):
        told.second(Activity.WAITING_FOR_SAMPLES, but="engine/3")
        told.say("engine/3", Activity.STARTING)
    assert not told.orders
    ready_s = told.now_s
    while not told.orders:
        told.second(Activity.WAITING_FOR_SAMPLES)
    assert told.now_s >= ready_s + 20


def test_a_run_that_makes_no_steps_or_is_not_heard_changes_nothing() -> None:
    still, deaf = Told(2), Told(2)
    for _ in range(100):
        still.second(Activity.WAITING_FOR_SAMPLES, step=False)
        deaf.second(Activity.WAITING_FOR_SAMPLES, but="engine/1" if deaf.now_s > 15 else "")
    assert still.orders == deaf.orders == []


def test_an_operator_who_changes_the_engines_begins_a_new_reading() -> None:
    told = Told(2)
    for _ in range(19):
        told.second(Activity.WAITING_FOR_SAMPLES)
    told.engines = ("engine/0", "engine/5")
    told.scaler.engines_are(told.engines)
    changed_s = told.now_s
    while not told.orders:
        told.second(Activity.WAITING_FOR_SAMPLES)
    assert told.now_s >= changed_s + 20
    assert told.orders[0].engines == ("engine/0", "engine/1", "engine/2", "engine/5")


def test_engines_leave_from_the_highest_number_down_to_the_fewest() -> None:
    told = Told(3)
    while len(told.orders) < 2 and told.now_s < 300:
        told.second(Activity.WORKING, 0.1)
        if told.orders and told.engines != told.orders[-1].engines:
            told.engines = told.orders[-1].engines
            told.scaler.engines_are(told.engines)
    assert [order.engines for order in told.orders] == [("engine/0", "engine/1"), ("engine/0",)]
    assert "training binds" in told.orders[0].reason


def test_who_was_given_up_is_not_ordered_and_makes_fewer_that_there_may_be() -> None:
    told = Told(2)
    given_up = frozenset(map(engine_name, range(2, SETTINGS.most - 1)))
    told.scaler.engines_are(told.engines, but=given_up)
    while not told.orders and told.now_s < 100:
        told.second(Activity.WAITING_FOR_SAMPLES)
    assert told.orders[0].engines == ("engine/0", "engine/1", engine_name(SETTINGS.most - 1))
    alone = Told(2)
    alone.scaler.engines_are(alone.engines, but=frozenset(map(engine_name, range(2, SETTINGS.most))))
    for _ in range(100):
        alone.second(Activity.WAITING_FOR_SAMPLES)
    assert not alone.orders
