"""What an episode of yours is made of: the task it is given, tools and environments, and how it says what went wrong.

An error has an owner. ``ToolError`` is the model's doing: it is told to the model as the tool's result.
``EpisodePolicyError`` ends the episode as ``policy_error``, which may be trained on. Everything else that a tool or an
environment raises, and a deadline that passes, is ours: the sample ends as ``infra_error``, is issued again, and never
earns a reward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

JsonObject = dict[str, object]


class ToolError(Exception):
    """The model asked for something that cannot be done; the message is what it gets to read."""


class EpisodePolicyError(Exception):
    """The model did something that ends the episode; it may be trained on."""

    def __init__(self, detail: str, *, reward: float | None = None) -> None:
        super().__init__(detail)
        self.reward = reward
        """None: the scenario's reward function gives it."""


class EpisodeInfraError(Exception):
    """Something of ours failed: the sample is issued again and never earns a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the model is to do: one row of the dataset, drawn once."""

    prompt: str
    """The prompt as text, rendered if the scenario renders it."""
    messages: Sequence[JsonObject]
    """The chat messages it was rendered from; a prompt that is a string is one message of the user."""
    label: str
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])
    """The columns of ``data.metadata_keys``."""
    group_id: int
    index: int
    attempt: int
    seed: int
    """Of this sample, from the run's seed: the same in every attempt."""
    is_evaluation: bool = False
    images: Sequence[str] = ()
    """Files of the prompt's images, in their order."""


class Tool(Protocol):
    """Something the model can call."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> JsonObject:
        """JSON schema of the arguments, an object."""
        ...

    async def call(self, arguments: JsonObject) -> str | Sequence[JsonObject]:
        """What the model reads as the result: a text, or parts of a message with texts and images:
        ``{"type": "text", "text": …}`` and ``{"type": "image", "image": …}``, bytes, an image of Pillow or
        ``data:…;base64,…``.

        Raises:
            ToolError: the model called it wrongly.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an environment shows to the model."""

    messages: Sequence[JsonObject]
    """Chat messages to put after those that there are; their content may have images, as that of a tool."""
    reward: float | None = None
    """Of the last action; rewards of an episode are added up."""
    is_over: bool = False
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    """Named figures that are reported beside the reward."""


class Environment(Protocol):
    """A world that answers what the model says. One object plays one episode."""

    async def reset(self, task: Task) -> Observation:
        """Begin; the messages of the observation come after those of the task."""
        ...

    async def step(self, action: str) -> Observation:
        """What follows from what the model said.

        Raises:
            ToolError: the action is malformed; the model reads the message and goes on.
            EpisodePolicyError: it ends the episode.
        """
        ...

    async def close(self) -> None:
        """The episode is over, however it ended."""
        ...


@runtime_checkable
class Restorable(Protocol):
    """An environment, or an episode's own state, that can be put back where it was after a complete turn."""

    def save(self) -> JsonObject:
        """All that is needed, as JSON."""
        ...

    def restore(self, state: JsonObject) -> None:
        """Go back to there, also in another process."""
        ...
