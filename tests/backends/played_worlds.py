"""Tools and environments, as users write them. Loaded by tests from the process that plays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.episodes.interfaces import EpisodePolicyError, Observation, ToolError

if TYPE_CHECKING:
    from penstock.backends.episodes.interfaces import JsonObject, Task


class Multiply:
    def __init__(self) -> None:
        self.name = "multiply"
        self.description = "Multiply two numbers."
        self.parameters: JsonObject = {"type": "object", "properties": {"a": {"type": "integer"}}}

    async def call(self, arguments: JsonObject) -> str:
        match arguments:
            case {"a": int(left), "b": int(right)}:
                return str(left * right)
            case {"a": "number"}:
                return 42  # type: ignore[return-value]  # a tool with a fault
            case {"a": "broken"}:
                raise OSError("the disk is full")
            case _:
                raise ToolError("a and b must be integers")


class Guess:
    """Guess a letter; it can be put back."""

    def __init__(self) -> None:
        self.letter = ""
        self.tries = 0

    async def reset(self, task: Task) -> Observation:
        self.letter = task.label
        return Observation(messages=[{"role": "user", "content": "guess "}])

    async def step(self, action: str) -> Observation:
        self.tries += 1
        if action == self.letter:
            return Observation(messages=[], reward=1.0, is_over=True, components={"tries": self.tries})
        if not action.isalpha():
            raise ToolError("a letter")
        if action == "cheat":
            raise EpisodePolicyError("it cheated")
        return Observation(messages=[{"role": "user", "content": f" not {action} "}], reward=-0.25)

    async def close(self) -> None:
        self.letter = ""

    def save(self) -> JsonObject:
        return {"letter": self.letter, "tries": self.tries}

    def restore(self, state: JsonObject) -> None:
        self.letter, self.tries = str(state["letter"]), int(str(state["tries"]))
