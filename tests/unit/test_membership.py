"""Who is alive: fences and members, whatever order the news come in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.messages.membership import ActorEpoch, ActorLost, ActorReturned, EngineJoined, EngineLost
from penstock.runtime.shell.membership import Membership

NEWS = st.lists(st.tuples(st.sampled_from(("lost", "returned")), st.integers(0, 4)), max_size=30)


def tell(membership: Membership, name: str, news: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Tell all of it; what the membership made of it, as (what, epoch)."""
    heard: list[tuple[str, int]] = []
    for what, epoch in news:
        for event in membership.lost(name, epoch) if what == "lost" else membership.returned(name, epoch):
            match event:
                case ActorLost() | EngineLost():
                    heard.append(("lost", event.epoch))
                case ActorReturned() | EngineJoined():
                    heard.append(("returned", event.epoch))
                case _:
                    raise AssertionError(event)
        membership.validate()
    return heard


def test_loss_fences_the_epoch_at_once_and_not_when_a_successor_appears() -> None:
    membership = Membership()
    membership.returned("scorer", 0)
    assert membership.lost("scorer", 0) == [ActorLost(name="scorer", epoch=0)]
    assert not membership.admits("scorer", 0)
    assert membership.admits("scorer", 1)
    assert membership.epoch_of("scorer") is None


def test_loss_of_an_incarnation_that_was_never_seen_fences_it_too() -> None:
    membership = Membership()
    assert membership.lost("filter", 2) == []
    assert membership.returned("filter", 2) == []
    assert membership.returned("filter", 3) == [ActorReturned(name="filter", epoch=3)]


def test_return_implies_the_loss_of_every_incarnation_below() -> None:
    membership = Membership()
    membership.returned("engine/1", 0)
    assert membership.returned("engine/1", 1) == [
        EngineLost(name="engine/1", epoch=0),
        EngineJoined(name="engine/1", epoch=1),
    ]


def test_loss_that_comes_after_the_return_of_the_successor_changes_nothing() -> None:
    membership = Membership()
    membership.returned("engine/1", 0)
    membership.returned("engine/1", 1)
    assert membership.lost("engine/1", 0) == []
    assert membership.epoch_of("engine/1") == 1


def test_news_told_twice_are_no_news() -> None:
    membership = Membership()
    membership.returned("scorer", 0)
    assert membership.returned("scorer", 0) == []
    membership.lost("scorer", 0)
    assert membership.lost("scorer", 0) == []


def test_lost_members_name_the_newest_incarnation_that_was_given_up() -> None:
    membership = Membership()
    membership.returned("scorer", 0)
    membership.lost("scorer", 0)
    membership.lost("engine/0", 3)
    membership.returned("filter", 0)
    assert membership.lost_members() == (ActorEpoch("scorer", 0), ActorEpoch("engine/0", 3))
    assert membership.members() == (ActorEpoch("filter", 0),)


@given(NEWS)
def test_losses_and_returns_alternate_and_epochs_go_up(news: list[tuple[str, int]]) -> None:
    heard = tell(Membership(), "scorer", news)
    assert [what for what, _ in heard] == ["returned", "lost"] * (len(heard) // 2) + ["returned"] * (len(heard) % 2)
    returned = [epoch for what, epoch in heard if what == "returned"]
    assert returned == sorted(set(returned))


@given(NEWS)
def test_state_depends_on_the_newest_news_alone(news: list[tuple[str, int]]) -> None:
    membership = Membership()
    tell(membership, "scorer", news)
    lost = max((epoch for what, epoch in news if what == "lost"), default=-1)
    returned = max((epoch for what, epoch in news if what == "returned"), default=-1)
    assert membership.epoch_of("scorer") == (returned if returned > lost else None)
    assert not membership.admits("scorer", lost)
    assert membership.admits("scorer", max(lost + 1, returned))
