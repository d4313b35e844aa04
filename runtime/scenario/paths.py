"""Which keys of a scenario may name files, and what else such a value can be.

The processes of a run have folders of their own to stand in, so every path is made absolute once, when the scenario
is loaded. ``run.folder`` is not among the keys: runs are written where the command is given.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.backends.registry import is_user_code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath, Plain

MODEL_PATH: KeyPath = ("model", "path")
MODEL_CONFIG: KeyPath = ("model", "config")
MODEL_MAKE: KeyPath = ("model", "make")
DATA_PATH: KeyPath = ("data", "path")
RECORDED_PATH: KeyPath = ("data", "recorded", "path")
WARM_START_PATH: KeyPath = ("learner", "warm_start", "path")
REWARD_FUNCTION: KeyPath = ("reward", "function")
FILTER_FUNCTION: KeyPath = ("filter", "function")
FILTER_SAMPLE_FUNCTION: KeyPath = ("filter", "sample_function")
FILTER_HOOK: KeyPath = ("filter", "all_samples_hook")
PRIORITY_FUNCTION: KeyPath = ("prompt_source", "priority")
STALENESS_POLICY: KeyPath = ("staleness", "policy")
RECORDED_RUN: KeyPath = ("run", "batches_from")
OBJECTIVE: KeyPath = ("learner", "objective")
OBJECTIVE_NAME: KeyPath = (*OBJECTIVE, "name")
HOOKS: tuple[KeyPath, ...] = (
    (*OBJECTIVE, "postprocess_function"),
    (*OBJECTIVE, "advantage_function"),
    (*OBJECTIVE, "reduction_function"),
    (*OBJECTIVE, "importance_function"),
    ("learner", "conversion_function"),
    ("learner", "rollout_log_function"),
    ("learner", "step_log_function"),
    ("weights", "names_function"),
)
"""Functions of the user's around the training; docs/hooks.md."""
TEACHER_MODEL_PATH: KeyPath = ("teacher", "model", "path")
TEACHER_WARM_START_PATH: KeyPath = ("teacher", "model", "warm_start", "path")
EPISODE_GENERATE: KeyPath = ("episode", "generate")
EPISODE_ENVIRONMENT: KeyPath = ("episode", "environment")
EACH: Final = "*"
"""In a path here: every item of the list."""
EPISODE_TOOLS: KeyPath = ("episode", "tools", EACH)
SOURCE_PATH: KeyPath = ("data", "sources", EACH, "path")
EVALUATION_DATASET: KeyPath = ("evaluation", "datasets", EACH)
EVALUATION_PATH: KeyPath = (*EVALUATION_DATASET, "path")
EVALUATION_FUNCTIONS: tuple[KeyPath, ...] = tuple(
    (*block, *key)
    for block in (("evaluation", "defaults"), EVALUATION_DATASET)
    for key in (("reward", "function"), ("generate",))
)

REWARD_FUNCTIONS: tuple[KeyPath, ...] = tuple(("reward", key, EACH, "function") for key in ("components", "functions"))
JUDGE_TEMPLATES: tuple[KeyPath, ...] = tuple(
    (*block, "judge", "template") for block in (("reward",), *(path[:-1] for path in REWARD_FUNCTIONS))
)

DATA_KEYS = (DATA_PATH, WARM_START_PATH, RECORDED_PATH, TEACHER_WARM_START_PATH)
EPISODE_FUNCTIONS: KeyPath = ("episode", "functions", EACH, "generate")
EPISODE_KEYS = (EPISODE_GENERATE, EPISODE_FUNCTIONS, EPISODE_ENVIRONMENT, EPISODE_TOOLS)
FUNCTION_KEYS = (
    *REWARD_FUNCTIONS,
    *(REWARD_FUNCTION, FILTER_FUNCTION, STALENESS_POLICY, OBJECTIVE_NAME),
    *(FILTER_SAMPLE_FUNCTION, FILTER_HOOK, PRIORITY_FUNCTION),
    *(*EPISODE_KEYS, *HOOKS, *EVALUATION_FUNCTIONS),
)
ROW_KEYS = (*DATA_KEYS, SOURCE_PATH, EVALUATION_PATH)
PATH_KEYS = (MODEL_PATH, MODEL_CONFIG, TEACHER_MODEL_PATH, RECORDED_RUN, *ROW_KEYS, *JUDGE_TEMPLATES, *FUNCTION_KEYS)

MADE_DATA = ("lines:", "sums:", "reasoning_gym:")
"""Prefixes of datasets that are made, not read."""


def blocks_at(data: Plain, pattern: KeyPath, path: KeyPath = ()) -> Iterator[tuple[KeyPath, dict[str, Plain]]]:
    """The blocks that are there, each with its path; one pattern fits several where it says :data:`EACH`."""
    if not pattern:
        if isinstance(data, dict):
            yield path, data
    elif pattern[0] == EACH:
        for index, item in enumerate(data if isinstance(data, list | tuple) else ()):
            yield from blocks_at(item, pattern[1:], (*path, index))
    elif isinstance(data, dict):
        yield from blocks_at(data.get(str(pattern[0])), pattern[1:], (*path, pattern[0]))


def absolute(key: KeyPath, value: str, folder: Path) -> str:
    """``value`` with its path, if it is one, made absolute from ``folder``; ``~`` is the user's folder.

    What follows the path (``@[a:b]``, ``:function``) stays as it is.
    """
    if key in ROW_KEYS and value.startswith(MADE_DATA):
        return value
    if key in FUNCTION_KEYS and not is_user_code(value):
        return value
    return str(folder / Path(value).expanduser())
