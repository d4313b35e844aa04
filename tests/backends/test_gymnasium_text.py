"""Environments of Gymnasium, played in words."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from penstock.backends.episodes.environments.gymnasium_text import GymnasiumText
from penstock.backends.episodes.interfaces import Restorable, Task, ToolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.episodes.interfaces import Observation

NAMES = ("left", "down", "right", "up")
WAY = ("down", "down", "right", "right", "down", "right")


def task(seed: int) -> Task:
    return Task(prompt="", messages=[], label="", group_id=0, index=0, attempt=0, seed=seed)


def lake(*, is_slippery: bool = False) -> GymnasiumText:
    return GymnasiumText("FrozenLake-v1", action_names=NAMES, is_slippery=is_slippery)


def played(environment: GymnasiumText, actions: Sequence[str], seed: int = 0) -> list[Observation]:
    async def everything() -> list[Observation]:
        shown = [await environment.reset(task(seed))]
        for action in actions:
            shown.append(await environment.step(action))
            if shown[-1].is_over:
                break
        await environment.close()
        return shown

    return asyncio.run(everything())


def text(observation: Observation) -> str:
    return str(observation.messages[0]["content"])


def test_the_lake_is_shown_and_crossed() -> None:
    shown = played(lake(), WAY)
    assert text(shown[0]).startswith("[S]FFF\nFHFH\n")
    assert "left, down, right, up" in text(shown[0])
    assert "\x1b" not in "".join(map(text, shown))
    assert [one.reward for one in shown] == [None, 0, 0, 0, 0, 0, 1.0]
    assert [one.is_over for one in shown] == [False] * 6 + [True]


def test_a_hole_ends_it_without_reward() -> None:
    shown = played(lake(), ("right", "I think I should go down.", "down"))
    assert (shown[-1].reward, shown[-1].is_over, len(shown)) == (0.0, True, 3)


@pytest.mark.parametrize("answer", ["", "jump", "left or right", "9", "rightmost"])
def test_an_answer_that_names_no_action_does_not_move(answer: str) -> None:
    environment = lake()

    async def everything() -> None:
        await environment.reset(task(0))
        with pytest.raises(ToolError, match="left, down, right, up"):
            await environment.step(answer)
        assert "[F]" in text(await environment.step("2 right"))

    asyncio.run(everything())


def test_an_episode_is_put_back_in_another_object() -> None:
    actions = ("down", "right", "up", "left") * 5
    for seed in range(5):
        whole = played(lake(is_slippery=True), actions, seed)
        broken, other = lake(is_slippery=True), lake(is_slippery=True)

        async def halves(seed: int, broken: GymnasiumText, other: GymnasiumText, num_whole: int) -> list[str]:
            shown = [text(await broken.reset(task(seed)))]
            for action in actions[: num_whole // 2]:
                shown.append(text(await broken.step(action)))  # noqa: PERF401 - one after the other
            other.restore(broken.save())
            for action in actions[num_whole // 2 : num_whole]:
                shown.append(text(await other.step(action)))  # noqa: PERF401
            return shown

        assert asyncio.run(halves(seed, broken, other, len(whole) - 1)) == [text(one) for one in whole]
    assert isinstance(lake(), Restorable)


def test_an_environment_without_a_text_of_its_own_shows_its_observation() -> None:
    first = played(GymnasiumText("Blackjack-v1", action_names=("stick", "hit"), instructions="21!"), (), seed=1)[0]
    assert text(first).startswith("21!\n(")
    told = GymnasiumText("Blackjack-v1", text_of=lambda seen: f"you have {seen[0]}")
    assert "you have " in text(played(told, ())[0])


@pytest.mark.parametrize(
    ("name", "action_names", "says"),
    [
        ("NoSuchThing-v0", (), "cannot make"),
        ("MountainCarContinuous-v0", (), "finite choice"),
        ("FrozenLake-v1", ("left",), "has 4 actions, got 1"),
    ],
)
def test_what_cannot_be_played_is_refused(name: str, action_names: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        GymnasiumText(name, action_names=action_names)
