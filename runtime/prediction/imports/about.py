"""What no log says of its run, and the user does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import msgspec
from msgspec import Meta

from penstock.messages.base import Options
from penstock.messages.errors import UserFault
from penstock.runtime.scenario.keys import dotted, misfit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.runtime.scenario.source import Plain

Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class About(Options, frozen=True, kw_only=True):
    """Facts of a run that was logged by another system."""

    engines: Count = 1
    """Copies of the model that generated, each on as many devices as it took."""
    slots: Count | None = None
    """Requests that one engine runs at most at a time; None: all that it had of a batch ran at once."""
    samples: Count | None = None
    """Of a step; None: as the log says."""
    group_size: Count = 8
    """Samples of a prompt."""
    learner_ranks: Count = 1
    """Devices that trained."""
    colocated: bool = False
    """Engines and learner had the same devices, in turns."""
    generation_share: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Of the time of a step, where the log does not tell generation from training."""
    max_response_tokens: Count | None = None
    """Where responses were cut off; None: at the longest that was logged."""


def read_about(pairs: Sequence[str]) -> About:
    """From ``key=value``, each key once.

    Raises:
        UserFault: a key that there is not, a value out of bounds, or no ``=``.
    """
    given: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or key in given:
            raise UserFault(f"--about {pair}: expected KEY=VALUE, each key once; keys are {', '.join(_keys())}")
        given[key] = value
    return about_of(given)


def about_of(given: Mapping[str, object]) -> About:
    """From keys and their values, which may be texts.

    Raises:
        UserFault: a key that there is not, or a value out of bounds.
    """
    data = cast("dict[str, Plain]", dict(given))
    if unknown := [key for key in data if key not in _keys()]:
        raise UserFault(f"--about {unknown[0]}: no such key; keys are {', '.join(_keys())}")
    try:
        return msgspec.convert(data, About, strict=False)
    except msgspec.ValidationError as error:
        path, text = misfit(error, data, About)
        raise UserFault(f"--about {dotted(path)}: {text}") from None


def _keys() -> list[str]:
    return [field.name for field in msgspec.structs.fields(About)]
