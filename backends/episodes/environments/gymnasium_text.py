"""Environments of the Gymnasium package, played in words.

Needs the extra ``gymnasium``. The environment's actions have to be a finite choice (``Discrete``): the model names one
by its word or its number. What it is shown is the environment's own text where it renders one (``render_mode="ansi"``),
else the observation as it is.

Invariants:

* An answer that names no action, or two different ones, is ``ToolError``: the environment does not move.
* The same seed and the same actions make the same episode, so that one can be put back by playing it again.
* An environment's code runs in a thread; where it hangs, the deadline of the call ends the wait, not the thread.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import TYPE_CHECKING, Any, Final, cast

import gymnasium

from penstock.backends.episodes.interfaces import EpisodeInfraError, JsonObject, Observation, Task, ToolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_SEED_BITS: Final = 31
_COLORED: Final = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m")
_BACKGROUNDS: Final = frozenset(str(code) for code in range(41, 48))
"""They mark where the player stands; models get brackets instead. Other colours say nothing."""


class GymnasiumText:
    """One environment, for one episode; see the module.

    ```python
    def environment():  # episode.environment: this_file.py:environment
        return GymnasiumText("FrozenLake-v1", action_names=("left", "down", "right", "up"), is_slippery=False)
    ```
    """

    def __init__(
        self,
        environment_id: str,
        *,
        action_names: Sequence[str] = (),
        instructions: str = "",
        text_of: Callable[[Any], str] | None = None,
        **options: object,
    ) -> None:
        """
        Args:
            environment_id: as Gymnasium knows it.
            action_names: a word for each action, in their order; without them the model has to say the number.
            instructions: shown before the first observation.
            text_of: makes the text of an observation, instead of the environment's own.
            options: given to ``gymnasium.make``.

        Raises:
            ValueError: there is no such environment, or its actions are no finite choice.
        """
        self._environment = _made(environment_id, options, own_text=text_of is None)
        space = self._environment.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{environment_id}: its actions are {space}; expected a finite choice (Discrete)")
        first = int(space.start)
        self._actions = range(first, first + int(space.n))
        if action_names and len(action_names) != len(self._actions):
            raise ValueError(
                f"action_names: {environment_id} has {len(self._actions)} actions, got {len(action_names)}"
            )
        self._names: Mapping[str, int] = {
            **{str(action): action for action in self._actions},
            **{name.lower(): action for name, action in zip(action_names, self._actions, strict=False)},
        }
        self._shown_names = list(action_names) or [str(action) for action in self._actions]
        self._instructions = instructions
        self._text_of = text_of
        self._seed = 0
        self._played: list[int] = []

    async def reset(self, task: Task) -> Observation:
        """See :class:`~penstock.backends.episodes.interfaces.Environment`."""
        self._seed, self._played = task.seed % (1 << _SEED_BITS), []
        text = await asyncio.to_thread(self._begun)
        choice = f"Actions: {', '.join(self._shown_names)}. Answer with one of them."
        return Observation(messages=[_user("\n".join(part for part in (self._instructions, text, choice) if part))])

    async def step(self, action: str) -> Observation:
        """See :class:`~penstock.backends.episodes.interfaces.Environment`."""
        chosen = self._action_in(action)
        text, reward, is_over = await asyncio.to_thread(self._moved, chosen)
        if not math.isfinite(reward):
            raise EpisodeInfraError(f"the environment gave a reward of {reward}; expected a finite number")
        self._played.append(chosen)
        return Observation(messages=[_user(text)], reward=reward, is_over=is_over)

    async def close(self) -> None:
        """See :class:`~penstock.backends.episodes.interfaces.Environment`."""
        await asyncio.to_thread(self._environment.close)

    def save(self) -> JsonObject:
        """See :class:`~penstock.backends.episodes.interfaces.Restorable`."""
        return {"seed": self._seed, "actions": list(self._played)}

    def restore(self, state: JsonObject) -> None:
        """See :class:`~penstock.backends.episodes.interfaces.Restorable`."""
        self._seed, actions = cast("int", state["seed"]), cast("list[int]", state["actions"])
        self._begun()
        for action in actions:
            self._moved(action)
        self._played = list(actions)

    def _begun(self) -> str:
        observation, _ = self._environment.reset(seed=self._seed)
        return self._text(observation)

    def _moved(self, action: int) -> tuple[str, float, bool]:
        observation, reward, is_terminated, is_truncated, _ = self._environment.step(action)
        return self._text(observation), float(reward), bool(is_terminated or is_truncated)

    def _text(self, observation: object) -> str:
        if self._text_of is not None:
            return self._text_of(observation)
        if self._environment.render_mode == "ansi":
            return _COLORED.sub(_uncolored, str(self._environment.render())).strip("\n")
        return str(observation)

    def _action_in(self, text: str) -> int:
        words = re.findall(r"[\w-]+", text.lower())
        named = {self._names[word] for word in words if word in self._names}
        if len(named) == 1:
            return named.pop()
        found = "more than one" if named else "none"
        raise ToolError(f"expected one action of {', '.join(self._shown_names)}; found {found}")


def _made(environment_id: str, options: Mapping[str, Any], *, own_text: bool) -> gymnasium.Env[Any, Any]:
    try:
        made: gymnasium.Env[Any, Any] = gymnasium.make(environment_id, **options)
        if own_text and "render_mode" not in options and "ansi" in made.metadata.get("render_modes", ()):
            made.close()
            made = gymnasium.make(environment_id, render_mode="ansi", **options)
    except gymnasium.error.Error as error:
        raise ValueError(f"{environment_id}: Gymnasium cannot make this environment: {error}") from error
    return made


def _uncolored(match: re.Match[str]) -> str:
    return f"[{match[2]}]" if _BACKGROUNDS & set(match[1].split(";")) else match[2]


def _user(text: str) -> JsonObject:
    return {"role": "user", "content": text}
