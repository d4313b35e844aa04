"""What a reward function has to know of the run around it."""

from __future__ import annotations

import msgspec

from penstock.backends.rewards.options import FunctionOptions


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run."""

    max_response_tokens: int = 1024
    """The limit of the sampling."""
    run_folder: str = ""
    engine_addresses: tuple[str, ...] = ()
    """Of servers that run already, as the scenario names them."""
    teacher_addresses: tuple[str, ...] = ()


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """What the process of a reward function is told."""

    function: FunctionOptions
    surroundings: Surroundings
