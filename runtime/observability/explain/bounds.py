"""The bound of a schedule: how long a step takes at least, by what its generation and its training need.

Per step, with engines and Learner on devices of their own, ``g`` the generation of a batch with all slots in use, ``L``
the longest response of a batch, ``t`` the training, ``s`` the export of weights, and ``η`` the bound of staleness:

==============  ===========================
schedule        step
==============  ===========================
η = 0           ``g + L + t + s``
η ≥ 1, drained  ``max(g + L, t + s)``
η ≥ 1           ``max(g + L / (η + 1), t + s)``
==============  ===========================

``L`` is an upper bound of what the last responses of a batch add (some of them run while others do, and are in ``g``
too), so a measured step may be shorter; it is never shorter than without it. The export is the Learner's work, and
engines generate meanwhile: it is exposed where the Learner is what a step takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from penstock.runtime.observability.explain.facts import Facts


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of a step's bound, in seconds."""

    formula: str
    generation_s: float
    """g"""
    tail_s: float | None
    """What of L counts; None where no lengths were recorded."""
    training_s: float
    """t"""
    exposed_s: float
    """s"""
    least_s: float
    """The bound without L: no schedule of this kind is quicker on these devices."""
    most_s: float | None
    """The bound with L."""
    measured_s: float
    active: Literal["generation", "training", "both, one after the other"]
    """Which term is the larger one."""
    slack_s: float
    """By how much the other term is smaller."""


class Terms(NamedTuple):
    """What a bound is made of, in seconds a step."""

    generation_s: float
    longest_s: float | None
    """L; None where no lengths are known."""
    training_s: float
    exposed_s: float
    measured_s: float
    max_staleness: int
    drains: bool
    """Engines are empty before each swap, so the tail counts whole."""
    is_colocated: bool


def bound_of(facts: Facts) -> Bound:
    """The bound of the schedule that these facts are of."""
    return bound_from(
        Terms(
            generation_s=facts.generation_s,
            longest_s=None if facts.samples is None else facts.samples.generate_longest,
            training_s=facts.training_s,
            exposed_s=facts.exposed_s,
            measured_s=facts.step_s,
            max_staleness=facts.max_staleness,
            drains=facts.update_mode is UpdateMode.DRAIN,
            is_colocated=facts.is_colocated,
        )
    )


def bound_from(terms: Terms) -> Bound:
    """The bound of a schedule with these terms."""
    generation_s, training_s, exposed_s, longest_s = (
        terms.generation_s, terms.training_s, terms.exposed_s, terms.longest_s
    )  # fmt: skip
    is_serial = terms.max_staleness == 0 or terms.is_colocated
    if is_serial:
        formula, tail_s = "g + L + t + s", longest_s
        least_s = generation_s + training_s + exposed_s
        most_s = None if tail_s is None else least_s + tail_s
    else:
        formula = "max(g + L, t + s)" if terms.drains else "max(g + L/(η + 1), t + s)"
        counted = 1 if terms.drains else terms.max_staleness + 1
        tail_s = None if longest_s is None else longest_s / counted
        least_s = max(generation_s, training_s + exposed_s)
        most_s = None if tail_s is None else max(generation_s + tail_s, training_s + exposed_s)
    with_tail_s, learner_s = generation_s + (tail_s or 0.0), training_s + exposed_s
    return Bound(
        formula=formula,
        generation_s=generation_s,
        tail_s=tail_s,
        training_s=training_s,
        exposed_s=exposed_s,
        least_s=least_s,
        most_s=most_s,
        measured_s=terms.measured_s,
        active="both, one after the other" if is_serial else "training" if learner_s >= with_tail_s else "generation",
        slack_s=0.0 if is_serial else abs(learner_s - with_tail_s),
    )
