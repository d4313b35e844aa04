"""A scenario as a simulation plays it: with modelled engines, learner and teacher in place of real ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.runtime.scenario.load import overridden_source, scenario_from
from penstock.runtime.scenario.source import read_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.scenario.source import Plain, Source
    from penstock.runtime.scenario.structure import Scenario

REAL_ONLY: Final = {
    "engines": ("addresses", "options", "router", "sglang"),
    "learner": (
        "critic_ranks",
        "freeze",
        "lora",
        "megatron",
        "num_ranks",
        "options",
        "shard_size",
        "tensor_parallel",
        "train_only",
        "true_on_policy",
        "warm_start",
    ),
    "teacher": ("addresses", "sglang"),
}
"""Of each block that is modelled: the keys that a model has no use for. None decides about the order of events."""


def load_modelled(file: Path, overrides: Sequence[str] = ()) -> tuple[Scenario, list[str]]:
    """As ``load_scenario``, for a simulation; see :func:`modelled_from`."""
    return modelled_from(overridden_source(read_source(file), overrides))


def modelled_from(source: Source) -> tuple[Scenario, list[str]]:
    """Check and resolve what was read, for a simulation.

    Returns:
        The scenario, and the keys whose values are not those of the file and the overrides.

    Raises:
        UserFault: as ``load_scenario``.
    """
    changed = ["reward_model"] if _drop(source.data, "reward_model") else []
    episode = source.data.get("episode")
    if isinstance(episode, dict) and episode.get("kind", "single") != "single":
        # Nobody plays: turns and tools are those of engines.simulated.episode.
        changed += ["episode"] if _drop(source.data, "episode") else []
    for name, keys in REAL_ONLY.items():
        block = source.data.get(name, None if name == "teacher" else {})
        if not isinstance(block, dict):
            continue  # there is no teacher; anything else is refused below
        if block.get("backend") != "simulated":
            source.override(f"{name}.backend=simulated", Path.cwd())
            changed.append(f"{name}.backend")
        changed += [f"{name}.{key}" for key in keys if _drop(block, key)]
        others = block.get("more")
        for index, group in enumerate(others if isinstance(others, list) else ()):
            if isinstance(group, dict):
                group["backend"] = "simulated"
                path = f"{name}.more.{index}"
                changed += [f"{path}.backend", *(f"{path}.{key}" for key in keys if _drop(group, key))]
    return scenario_from(source), changed


def _drop(block: dict[str, Plain], key: str) -> bool:
    return block.pop(key, None) is not None
