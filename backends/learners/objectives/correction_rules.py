"""Which weights between engine and learner make no sense."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.learners.options import MisOptions, ObjectiveOptions


def correction_problems(o: ObjectiveOptions) -> Iterator[tuple[str, str]]:
    """The key to change, and what is wrong with it."""
    if o.correction in ("icepop", "mis") and o.old_logprobs == "engine":
        yield (
            "correction",
            f"{o.correction} has no effect with old_logprobs: engine, where the ratio is taken to the engine's "
            "log-probs already; set old_logprobs: recompute, or correction: none",
        )
    if o.icepop_low >= o.icepop_high:
        yield "icepop_low", f"must be below icepop_high = {o.icepop_high:g}; found {o.icepop_low:g}"
    if o.tis_clip is not None and o.tis_clip_low >= o.tis_clip:
        yield "tis_clip_low", f"must be below tis_clip = {o.tis_clip:g}; found {o.tis_clip_low:g}"
    yield from _mis(o.mis)


def _mis(mis: MisOptions) -> Iterator[tuple[str, str]]:
    if mis.normalize and mis.level == "geometric":
        yield "mis", "normalize makes no sense for a geometric mean, which is no importance weight; set it to false"
    bounds = (
        ("upper", "lower", mis.upper, mis.lower),
        ("reject_upper", "reject_lower", mis.reject_upper, mis.reject_lower),
    )
    for high_key, low_key, high, low in bounds:
        least = 1.0 / high if low is None else low
        applies = mis.mode != "truncate" if low_key == "lower" else mis.reject_level is not None
        if applies and least >= high:
            yield "mis", f"{low_key} of {least:g} must be below {high_key} of {high:g}; change one of them"
    if mis.lower is not None and mis.mode == "truncate":
        yield "mis", "lower has no effect with mode: truncate; remove it, or set mode: clip or mask"
    if mis.veto is not None and mis.veto >= 1.0:
        yield "mis", f"veto is the ratio below which a token rejects its sequence, far below 1; found {mis.veto:g}"
