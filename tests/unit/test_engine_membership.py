"""Which engines are there, which leave, which are replaced: the rules that every supervisor keeps."""

from __future__ import annotations

from penstock.messages.membership import ActorEpoch
from penstock.runtime.shell.engine_membership import EngineMembership


def test_until_engines_are_recorded_all_stay_and_are_replaced() -> None:
    engines = EngineMembership(5.0)
    assert engines.is_replaced("engine/7")
    assert engines.surplus({"engine/7"}) == engines.missing(set()) == []


def test_who_is_wanted_and_not_there_is_missing_and_who_is_there_and_not_wanted_leaves_once() -> None:
    engines = EngineMembership(5.0)
    engines.want(("engine/1", "engine/2"))
    present = {"engine/0", "engine/1"}
    assert engines.missing(present) == ["engine/2"]
    assert engines.surplus(present) == ["engine/0"]
    engines.leaves("engine/0", 10.0)
    assert engines.surplus(present) == []
    assert engines.is_leaving("engine/0")
    assert not engines.is_replaced("engine/0")
    assert engines.is_replaced("learner")


def test_a_leaver_whose_time_is_up_is_late_until_it_is_gone() -> None:
    engines = EngineMembership(5.0)
    engines.want(("engine/1",))
    engines.leaves("engine/0", 10.0)
    assert engines.late(14.9) == []
    assert engines.late(15.0) == ["engine/0"]
    engines.gone("engine/0")
    assert engines.late(20.0) == []


def test_a_leaver_that_is_wanted_again_goes_first_and_comes_back_as_another_incarnation() -> None:
    engines = EngineMembership(5.0)
    engines.want(("engine/1",))
    engines.leaves("engine/0", 10.0)
    engines.want(("engine/0", "engine/1"))
    assert engines.is_leaving("engine/0")
    assert not engines.is_replaced("engine/0")
    assert engines.missing({"engine/0", "engine/1"}) == []
    engines.gone("engine/0")
    assert engines.missing({"engine/1"}) == ["engine/0"]
    assert engines.is_replaced("engine/0")


def test_who_loses_its_machine_leaves_within_the_notice_and_comes_back_after_it() -> None:
    engines = EngineMembership(30.0)
    assert engines.noticed("engine/0", 10.0, 5.0)
    assert engines.is_leaving("engine/0")
    assert engines.is_taken("engine/0")
    assert not engines.is_replaced("engine/0")
    assert not engines.noticed("engine/0", 11.0, 4.0), "it is told once"
    assert engines.late(14.9) == []
    assert engines.late(15.0) == ["engine/0"]
    assert engines.returns() == [], "it is there still"
    engines.gone("engine/0")
    assert engines.returns() == [("engine/0", 15.0)]
    assert engines.returns() == []
    assert engines.is_replaced("engine/0")


def test_a_leaver_that_loses_its_machine_leaves_earlier_and_does_not_come_back_unless_it_is_wanted() -> None:
    engines = EngineMembership(30.0)
    engines.want(("engine/1",))
    engines.leaves("engine/0", 10.0)
    assert not engines.noticed("engine/0", 12.0, 5.0)
    assert engines.late(17.0) == ["engine/0"]
    engines.gone("engine/0")
    assert engines.returns() == []


# --- engines that are lost too often ----------------------------------------------------------------------------------


def test_one_that_is_given_up_is_not_started_until_it_is_asked_for_again() -> None:
    engines = EngineMembership(5.0, fewest=1)
    engines.want(("engine/0", "engine/1"))
    assert engines.give_up("engine/1", 7, "it dies")
    stale = engines.want(("engine/0", "engine/1"))
    assert (stale, engines.missing({"engine/0"}), engines.is_replaced("engine/1")) == ([], [], False)
    assert [(each.engine, each.engine_epoch, each.reason) for each in engines.unrecorded()] == [
        ("engine/1", 7, "it dies")
    ]
    assert engines.want(("engine/0",)) == ["engine/1"]
    assert engines.unrecorded() == []
    assert engines.done_without == {"engine/1"}
    assert engines.want(("engine/0", "engine/1")) == []
    assert engines.missing({"engine/0"}) == ["engine/1"]
    assert engines.done_without == frozenset()


def test_one_that_is_asked_for_again_before_its_end_was_told_comes_back() -> None:
    """Word of what the run is to have replaces earlier word, so between two requests it may never be heard."""
    engines, both = EngineMembership(5.0, fewest=1), ("engine/0", "engine/1")
    engines.want(both)
    assert engines.give_up("engine/1", 7, "it dies")
    assert engines.want(both, [ActorEpoch("engine/1", 6)]) == [], "that was its predecessor"
    assert engines.want(both, [ActorEpoch("engine/1", 7)]) == ["engine/1"]
    assert (engines.unrecorded(), engines.done_without) == ([], frozenset())
    assert engines.missing({"engine/0"}) == ["engine/1"]


def test_none_is_given_up_that_the_run_cannot_do_without() -> None:
    fixed, early = EngineMembership(5.0), EngineMembership(5.0, fewest=1)
    fixed.want(("engine/0", "engine/1"))
    assert not fixed.give_up("engine/1", 7, "")
    assert not early.give_up("engine/1", 7, ""), "nobody knows yet which are recorded"
    two = EngineMembership(5.0, fewest=2)
    two.want(("engine/0", "engine/1", "engine/2"))
    assert not two.can_spare("learner")
    assert two.give_up("engine/0", 7, "")
    assert not two.give_up("engine/1", 7, "")


def test_where_others_were_let_go_meanwhile_too_few_are_left_and_it_says_why() -> None:
    engines = EngineMembership(5.0, fewest=2)
    engines.want(("engine/0", "engine/1", "engine/2"))
    assert engines.give_up("engine/2", 7, "it dies")
    assert engines.shortage() == ""
    engines.want(("engine/1", "engine/2"))
    assert engines.shortage() == "it dies"
