"""How one turn of an episode is drawn, where whoever plays it asks for something else than the scenario."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from penstock.messages.base import Value

DRAWN_BY: Final = ("temperature", "top_p", "top_k", "min_p")


class TurnSampling(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What is None, or empty, is as the scenario has it."""

    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 30)] | None = None
    """0: all. A server keeps it in 32 bits, and one that is larger could end it."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """Of this turn, in place of one that follows from the sample's. The tokens are of the same distribution."""
    json_schema: str = ""
    """A JSON schema that the turn's text has to follow."""
    regex: str = ""
    """A regular expression that the whole of it has to match."""

    def drawn_by(self) -> dict[str, Any]:
        """What differs from the scenario, by the names of its block ``sampling:``."""
        return {name: value for name in DRAWN_BY if (value := getattr(self, name)) is not None}

    @property
    def is_constrained(self) -> bool:
        """Whether the engine has to leave tokens out that the model could have said."""
        return bool(self.json_schema or self.regex)
