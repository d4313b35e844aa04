"""The names of the actors, which are also their addresses."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Final


class Role(StrEnum):
    """The seven roles, the supervisor that runs them, and those of models whose weights never change."""

    PROMPT_SOURCE = "prompt_source"
    ENGINE_WORKER = "engine_worker"
    SCORER = "scorer"
    FILTER = "filter"
    BUFFER = "buffer"
    LEARNER = "learner"
    WEIGHT_PUBLISHER = "weight_publisher"
    SUPERVISOR = "supervisor"
    TEACHER = "teacher"
    """An EngineWorker that generates nothing: it says how likely given tokens are."""
    REWARD_MODEL = "reward_model"
    """An EngineWorker that generates nothing: it says how good a response is."""


PROMPT_SOURCE: Final = "prompt_source"
SCORER: Final = "scorer"
FILTER: Final = "filter"
BUFFER: Final = "buffer"
LEARNER: Final = "learner"
WEIGHT_PUBLISHER: Final = "weight_publisher"
SUPERVISOR: Final = "supervisor"

ENGINE_PREFIX: Final = "engine/"
TEACHER_PREFIX: Final = "teacher/"
REWARD_MODEL_PREFIX: Final = "reward_model/"


def engine_name(index: int) -> str:
    """The name of the engine with this index, counted from 0."""
    return f"{ENGINE_PREFIX}{index}"


def engine_index(name: str) -> int:
    """The index in the name of an engine."""
    return int(name.removeprefix(ENGINE_PREFIX))


def is_engine(name: str) -> bool:
    """Whether this is the name of an EngineWorker."""
    return name.startswith(ENGINE_PREFIX)


def teacher_name(index: int) -> str:
    """The name of the teacher with this index, counted from 0."""
    return f"{TEACHER_PREFIX}{index}"


def teacher_index(name: str) -> int:
    """The index in the name of a teacher."""
    return int(name.removeprefix(TEACHER_PREFIX))


def is_teacher(name: str) -> bool:
    """Whether this is the name of a teacher. It is not that of an engine: nobody waits for it to take new weights, and
    nothing is generated there."""
    return name.startswith(TEACHER_PREFIX)


def reward_model_name(index: int) -> str:
    """The name of the reward model with this index, counted from 0."""
    return f"{REWARD_MODEL_PREFIX}{index}"


def is_reward_model(name: str) -> bool:
    """Whether this is the name of a reward model."""
    return name.startswith(REWARD_MODEL_PREFIX)


@cache
def has_lane(name: str) -> bool:
    """Whether the time of this actor is accounted: it has a device, or workers. Asked after every turn of a simulation,
    so each name is looked at once."""
    return name in (LEARNER, SCORER) or is_engine(name) or is_teacher(name) or is_reward_model(name)


def role_of(name: str) -> Role:
    """The role of the actor of this name.

    Raises:
        ValueError: the name belongs to no role.
    """
    if is_engine(name):
        return Role.ENGINE_WORKER
    if is_reward_model(name):
        return Role.REWARD_MODEL
    return Role.TEACHER if is_teacher(name) else Role(name)
