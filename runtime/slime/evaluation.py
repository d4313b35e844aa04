"""Slime's flags about evaluation that mean something with others only, as the ``evaluation:`` block."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.runtime.slime.mapping import Plain
    from penstock.runtime.slime.script import Flag

DATA: Final = "eval-prompt-data"
CONFIG: Final = "eval-config"
SKIP_FIRST: Final = "skip-eval-before-train"
MAPPED: Final = (
    "eval-interval", "n-samples-per-eval-prompt", "eval-temperature", "eval-top-p", "eval-top-k",
    "eval-max-response-len", "eval-max-prompt-len", "eval-input-key", "eval-label-key", "eval-tool-key", SKIP_FIRST,
)  # fmt: skip
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")


class EvaluationFlags(NamedTuple):
    """What comes of them."""

    block: dict[str, Plain] | None
    """``evaluation:``; None: nothing is evaluated."""
    left: tuple[tuple[Flag, str], ...]
    """Flags that have no place in it, with the reason."""


def evaluation_block(
    flags: Mapping[str, Flag], mapped: dict[str, Plain], max_context: Plain, *, generates: bool
) -> EvaluationFlags:
    """The block.

    Args:
        flags: by name.
        mapped: what single flags have put into the block.
        max_context: ``model.max_context``, where it is known.
        generates: the run has engines that generate.
    """
    left: list[tuple[Flag, str]] = []
    if config := flags.get(CONFIG):
        left.append((config, "its datasets go under evaluation.datasets, its defaults under evaluation.defaults"))
    datasets = _datasets(flags.get(DATA), left)
    if not datasets or not generates:
        reason = (
            "no datasets are named (--eval-prompt-data), and nothing is evaluated without"
            if generates
            else "the run's engines generate nothing; evaluate its checkpoints with: penstock evaluate RUN --data PATH"
        )
        named = MAPPED if generates else (*MAPPED, DATA)
        left += [(flags[name], reason) for name in named if name in flags]
        return EvaluationFlags(None, tuple(left))
    block: dict[str, Plain] = {**mapped}
    block["before_first"] = "eval-interval" in flags and SKIP_FIRST not in flags
    block["datasets"] = datasets
    _fit(block, flags, max_context, left)
    return EvaluationFlags(block, tuple(left))


def _datasets(flag: Flag | None, left: list[tuple[Flag, str]]) -> list[Plain]:
    """Names and paths take turns."""
    if flag is None:
        return []
    if len(flag.values) == 1:
        flag = flag._replace(values=("aime", *flag.values))  # as slime takes it
    if len(flag.values) % 2:
        left.append((flag, f"expected pairs of name and path, found {len(flag.values)} values"))
        return []
    datasets: list[Plain] = []
    for place in range(0, len(flag.values), 2):
        name, path = flag.values[place : place + 2]
        name = _NO_NAME.sub("-", name).strip("-._")[:64] or f"set{place // 2}"
        datasets.append({"name": name, "path": path})
    return datasets


def _fit(block: dict[str, Plain], flags: Mapping[str, Flag], max_context: Plain, left: list[tuple[Flag, str]]) -> None:
    """Take out what the scenario would be refused for."""
    defaults = block.get("defaults")
    if not isinstance(defaults, dict):
        return
    sampling = defaults.get("sampling")
    if not isinstance(sampling, dict):
        return
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    samples = defaults.get("samples_per_prompt")
    if sampling.get("temperature") == 0 and isinstance(samples, int) and samples > 1:
        defaults["samples_per_prompt"] = 1
        left.append((flags["n-samples-per-eval-prompt"], "at temperature 0 all answers are the same, so one is drawn"))
    tokens = sampling.get("max_response_tokens")
    if isinstance(tokens, int) and isinstance(max_context, int) and tokens >= max_context:
        del sampling["max_response_tokens"]
        left.append((flags["eval-max-response-len"], f"answers have no room beyond model.max_context, {max_context}"))
