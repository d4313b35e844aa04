"""Whether a converted scenario is the job that the script was."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from penstock.messages.errors import UserFault
from penstock.runtime.scenario.load import load_scenario

if TYPE_CHECKING:
    from penstock.runtime.slime.convert import Converted
    from penstock.runtime.slime.writer import Left

Kind = Literal["same job", "same job but for", "other job"]
NO_FILE: Final = "scenario.yaml"


class Verdict(NamedTuple):
    """What became of the job."""

    kind: Kind
    decided_by: tuple[Left, ...]
    """Empty for the same job."""
    refusal: str = ""
    """Why the scenario would not be taken; empty: it would."""

    def __str__(self) -> str:
        places = ", ".join(dict.fromkeys(left.place for left in self.decided_by))
        refused = f"the scenario is refused: {self.refusal}" if self.refusal else ""
        return ": ".join(filter(None, (self.kind, "; ".join(filter(None, (places, refused))))))


def verdict_on(converted: Converted) -> Verdict:
    """By the gravest thing that was left, and by whether the scenario would be taken."""
    refusal = _refusal(converted.text)
    graver = tuple(left for left in converted.left if left.effect == "other")
    if graver or refusal:
        return Verdict("other job", graver, refusal)
    lesser = tuple(left for left in converted.left if left.effect == "but_for")
    return Verdict("same job but for", lesser) if lesser else Verdict("same job", ())


def _refusal(text: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / NO_FILE
        path.write_text(text)
        try:
            load_scenario(path)
        except UserFault as error:
            return str(error).replace(f"{path}:", "line ")
    return ""
