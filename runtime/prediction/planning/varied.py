"""What a plan may choose besides: keys that change what is learnt, or how weights are taken, and that somebody names.

Each combination of their values is a scenario with a space of its own (:mod:`.space`); all of them are searched as one.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from penstock.actors.buffer.policies import BUILTIN
from penstock.messages.errors import UserFault
from penstock.runtime.prediction.planning.space import Space

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.prediction.models import Models
    from penstock.runtime.prediction.planning.candidate import Asked, Candidate
    from penstock.runtime.scenario import Scenario
    from penstock.runtime.scenario.source import Source

UPDATE_MODE: Final = "staleness.update_mode"
GROUPS: Final = "learner.groups_per_batch"
SAMPLES: Final = "sampling.samples_per_group"
KEYS: Final = (UPDATE_MODE, GROUPS, SAMPLES)
ASYNCHRONOUS: Final = "fully_async"
_SIZES: Final = "samples_per_group, groups_per_batch, "
_MODES: Final = "update modes"
"""How a space begins what it says of these under ``not_searched``."""


def read_varied(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Read ``learner.groups_per_batch=32,64``, one for each key.

    Raises:
        UserFault: one cannot be read, or is of a key that a plan does not vary.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, mark, listed = text.partition("=")
        values = tuple(dict.fromkeys(value.strip() for value in listed.split(",")))
        if not mark or not all(values):
            raise UserFault(f"--vary: cannot read '{text}'; write KEY=VALUE,VALUE, such as {GROUPS}=32,64")
        if key not in KEYS:
            raise UserFault(f"--vary: '{key}' is not varied; {', '.join(KEYS)} are, and the rest is searched anyway")
        if key in found:
            raise UserFault(f"--vary: {key} is there twice; write all of its values in one: {key}=VALUE,VALUE")
        found[key] = values
    return found


class VariedSpace:
    """The choices of several spaces, told apart by what each sets of the varied keys."""

    def __init__(
        self,
        source: Source,
        models: Models | None,
        asked: Asked,
        varied: dict[str, tuple[str, ...]],
    ) -> None:
        """
        Raises:
            UserFault: a value is refused by the scenario's rules, or one of the spaces is empty.
        """
        combinations = itertools.product(*([f"{key}={value}" for value in values] for key, values in varied.items()))
        self._spaces = {each: Space(source, each, models, asked) for each in combinations}
        self._varied = varied
        first = next(iter(self._spaces.values()))
        self.real, self.modelled = first.real, first.modelled
        if UPDATE_MODE in varied and self.real.staleness.policy in BUILTIN.keys() - {ASYNCHRONOUS}:
            raise UserFault(
                f"--vary: {UPDATE_MODE}: {self.real.staleness.policy} has one of its own; set "
                f"staleness.policy={ASYNCHRONOUS}"
            )
        self.not_searched = self._left_out(first)
        self.candidates = tuple(
            replace(one, varied=each)
            for each, space in self._spaces.items()
            for one in space.candidates
            if self._is_another(one, each)
        )
        self._known = frozenset(self.candidates)

    def real_of(self, candidate: Candidate) -> Scenario:
        """See :meth:`.Space.real_of`."""
        return self._space(candidate).real_of(_plain(candidate))

    def modelled_of(self, candidate: Candidate) -> Scenario:
        """See :meth:`.Space.modelled_of`."""
        return self._space(candidate).modelled_of(_plain(candidate))

    def sketch_of(self, candidate: Candidate) -> Scenario:
        """See :meth:`.Space.sketch_of`."""
        return self._space(candidate).sketch_of(_plain(candidate))

    def neighbours(self, candidate: Candidate, spacing: int) -> list[Candidate]:
        """See :meth:`.Space.neighbours`; and the same choice with another value of one of the varied keys."""
        near = [
            replace(one, varied=candidate.varied)
            for one in self._space(candidate).neighbours(_plain(candidate), spacing)
        ]
        others = (
            replace(candidate, varied=each)
            for each in self._spaces
            if sum(one != other for one, other in zip(each, candidate.varied, strict=True)) == 1
        )
        return [one for one in (*near, *others) if one in self._known]

    def assumed(self, candidate: Candidate) -> list[str]:
        """See :meth:`.Space.assumed`."""
        found = self._space(candidate).assumed(_plain(candidate))
        if self._varied.keys() & {GROUPS, SAMPLES}:
            found.append("sizes of batches and groups: what they do to what is learnt is not in it, only tokens are")
        return found

    def _space(self, candidate: Candidate) -> Space:
        return self._spaces[candidate.varied]

    def _is_another(self, candidate: Candidate, varied: tuple[str, ...]) -> bool:
        """Policies that have an update mode of their own are the same choice with each value of it."""
        if UPDATE_MODE not in self._varied or candidate.policy not in BUILTIN.keys() - {ASYNCHRONOUS}:
            return True
        return f"{UPDATE_MODE}={self._varied[UPDATE_MODE][0]}" in varied

    def _left_out(self, space: Space) -> list[str]:
        gone = [_MODES] * (UPDATE_MODE in self._varied) + [_SIZES] * ({GROUPS, SAMPLES} <= self._varied.keys())
        return [text for text in space.not_searched if not text.startswith(tuple(gone))]


def _plain(candidate: Candidate) -> Candidate:
    """As its own space knows it."""
    return replace(candidate, varied=())
