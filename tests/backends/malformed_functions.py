"""Functions that do what no function should: which one, the response (or the row) says."""

from __future__ import annotations

import ast
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.backends.episodes.play import Play


def misbehave(what: str) -> Any:  # noqa: ANN401 - that is what it is for
    """Do it."""
    match what:
        case "raises":
            raise ValueError("no such thing")
        case "raises nothing to say":
            raise RuntimeError
        case "asserts":
            assert len(what) == 0, "it is not"
        case "exits":
            sys.exit(3)
        case "interrupts":
            raise KeyboardInterrupt
        case "recurses":
            return misbehave("recurses")
        case "divides":
            return 1 / 0
        case "returns itself":
            found: list[Any] = []
            found.append(found)
            return found
        case "returns a function":
            return misbehave
        case "returns complex":
            return 1j
        case "returns too much":
            return 10**400
        case "returns what cannot be shown":
            return Unshown()
        case "prints":
            print("x" * 100_000)
            return float("nan")
        case "hangs":
            time.sleep(3600)
        case "hangs where nothing stops it":
            while True:
                pass
        case _:
            return ast.literal_eval(what)
    return None


class Unshown:
    """Has no repr."""

    def __repr__(self) -> str:
        raise ValueError("secret")


def score(response: str) -> Any:  # noqa: ANN401
    """A reward function."""
    return misbehave(response)


async def episode(play: Play) -> Any:  # noqa: ANN401
    """An episode."""
    await play.generate()
    return misbehave(str(play.task.metadata["do"]))


not_a_function = 7


def asks_for_more(response: str, reference_answer: str) -> float:
    """Asks for what nobody has."""
    return 0.0
