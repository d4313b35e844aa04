"""What is known of a run to those that ask its engines: the functions of its rewards."""

from __future__ import annotations

import msgspec


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run."""

    max_response_tokens: int = 1024
    """The limit of the sampling."""
    run_folder: str = ""
    engine_addresses: tuple[str, ...] = ()
    """Of servers that run already, as the scenario names them."""
    teacher_addresses: tuple[str, ...] = ()
