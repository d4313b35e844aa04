"""Which weights a learner leaves as they are: ``learner.freeze``, and its complement ``learner.train_only``.

Invariants:

* A weight that is frozen has no gradient and no state of an optimizer, and is published with the bits that it had.
* The choice follows from names alone, so every rank comes to the same one.
* A weight that a checkpoint has as several tensors (the experts of a layer, or Megatron's queries, keys and values) is
  frozen whole or not at all.
* Looking for a pattern takes a time that is bounded by the third power of the length of a name.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Final

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.backends.learners.options import LearnerOptions

MAX_REPEATS: Final = 3
"""Of ``*``, ``+`` and ``{…}`` in one pattern."""
NUM_CLOSEST: Final = 3
_REPEAT: Final = re.compile(r"(?<!\\)(?:[*+]|\{\d*,\d*\})")
_REPEATED_GROUP: Final = re.compile(r"(?<!\\)\)(?:[*+]|\{\d*,\d*\})")
_NUMBER: Final = re.compile(r"\d+")


def wrong_pattern(pattern: str) -> str | None:
    """What stands against a pattern, for the message; None: nothing."""
    try:
        re.compile(pattern)
    except re.error as error:
        return f"{pattern!r} is no regular expression ({error}); .* stands for any characters, and \\. for a dot"
    if _REPEATED_GROUP.search(pattern) or len(_REPEAT.findall(pattern)) > MAX_REPEATS:
        return (
            f"{pattern!r} could take for ever to look for: expected at most {MAX_REPEATS} of * and +, none of them "
            "after a group; divide it into several patterns"
        )
    return None


def frozen_weights(options: LearnerOptions, weights: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """The weights of a model that are not trained.

    Args:
        options: the ``learner:`` block.
        weights: name in the learner's own model → names of its tensors in a checkpoint. A pattern may name either.

    Raises:
        UserFault: a pattern names nothing or a part of a weight, or nothing is left to train.
    """
    key, patterns = ("freeze", options.freeze) if options.freeze else ("train_only", options.train_only)
    if not patterns:
        return frozenset()
    named: set[str] = set()
    hits: dict[str, set[str]] = {own: set() for own in weights}
    for pattern in patterns:
        is_in = re.compile(pattern).search
        found = {own: {name for name in (own, *names) if is_in(name)} for own, names in weights.items()}
        if not any(found.values()):
            raise UserFault(f"learner.{key}: {pattern!r} is in the name of no weight; {_closest(pattern, weights)}")
        for own, those in found.items():
            hits[own] |= set(weights[own]) if own in those else those
    for own, names in weights.items():
        if missing := sorted(set(names) - hits[own]) if hits[own] else []:
            raise UserFault(
                f"learner.{key}: the learner has {min(hits[own])} and {missing[0]} in one weight, {own}, and only the "
                "first is named; name all of its tensors, or none"
            )
        if hits[own]:
            named.add(own)
    frozen = named if key == "freeze" else set(weights) - named
    if len(frozen) == len(weights):
        raise UserFault(f"learner.{key}: nothing is left to train, all {len(weights)} weights are frozen")
    return frozenset(frozen)


def _closest(pattern: str, weights: Mapping[str, Iterable[str]]) -> str:
    """Names that come nearest, one for all layers and experts."""
    kinds = {_NUMBER.sub("0", name): name for names in weights.values() for name in reversed(list(names))}
    words = re.sub(r"\\[dws]|[\\^$*+?(){}|\[\]]", "", pattern)

    def likeness(name: str) -> float:
        parts = [*name.split("."), name]
        return max(difflib.SequenceMatcher(None, words, part).ratio() for part in parts)

    return "the closest are " + ", ".join(sorted(kinds.values(), key=likeness, reverse=True)[:NUM_CLOSEST])
