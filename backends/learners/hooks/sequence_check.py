"""What is wrong with a sequence that a conversion returned."""

# What a user's function put in place of an array is of any type:
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.backends.learners.batch.sequences import TrainSequence


def sequence_problem(returned: TrainSequence, given: TrainSequence) -> str:
    """In words, to follow "returned a sequence …"; empty: nothing.

    Args:
        returned: by the user's function.
        given: to it.
    """
    return _array_problem(returned) or _place_problem(returned) or _origin_problem(returned, given)


def _array_problem(s: TrainSequence) -> str:
    count = len(s.trained) if isinstance(s.trained, np.ndarray) else 0  # pyright: ignore[reportUnnecessaryIsInstance]
    arrays: list[tuple[str, object, type[np.generic], int | None]] = [
        ("tokens", s.tokens, np.int32, None),
        ("trained", s.trained, np.int64, None),
        ("rollout_logprobs", s.rollout_logprobs, np.float32, count),
        ("positions", s.positions, np.int64, count),
        ("versions", s.versions, np.int64, count),
    ]
    if s.teacher_logprobs is not None:
        arrays.append(("teacher_logprobs", s.teacher_logprobs, np.float32, count))
    if s.teacher_top is not None and {len(array) for array in s.teacher_top} != {count}:
        return f"whose teacher_top is not of {count} tokens, as many as there are in `trained`"
    if s.kept is not None and (len(s.kept.counts) != count or s.kept.lacks(s.tokens[s.trained])):
        return f"whose kept is not of the {count} tokens in `trained`; kept.at(places) takes some of them"
    for name, value, dtype, length in arrays:
        expected = f"expected a NumPy array of {np.dtype(dtype)} with one dimension"
        if not isinstance(value, np.ndarray):
            return f"whose {name} is {type(value).__name__}; {expected}"
        if value.dtype != dtype or value.ndim != 1:
            return f"whose {name} has dtype {value.dtype} and shape {list(value.shape)}; {expected}"
        if length is not None and len(value) != length:
            return f"whose {name} has {len(value)} entries; expected {length}, one for each of `trained`"
    return ""


def _place_problem(s: TrainSequence) -> str:
    if not 1 <= s.num_context <= len(s.tokens):
        return f"with num_context {s.num_context}; expected 1 to {len(s.tokens)}, as many tokens as there are"
    if (s.tokens < 0).any():
        return f"with token {int(s.tokens.min())}; ids are not negative"
    if not len(s.trained):
        return ""
    if s.trained[0] < 1 or s.trained[-1] >= len(s.tokens) or (np.diff(s.trained) < 1).any():
        return f"whose places in `trained` are not ascending within 1 … {len(s.tokens) - 1}"
    if s.trained[-1] != len(s.tokens) - 1:
        return (
            f"of {len(s.tokens)} tokens whose last trained one stands at place {int(s.trained[-1])}; cut `tokens` "
            "after it, as nothing behind it can matter"
        )
    if (np.diff(s.positions) < 1).any():
        return "whose positions are not ascending"
    return ""


def _origin_problem(s: TrainSequence, given: TrainSequence) -> str:
    """What is trained is some of what would have been."""
    if not len(s.trained):
        return ""
    if not np.isin(s.positions, given.positions).all():
        position = int(s.positions[~np.isin(s.positions, given.positions)][0])
        return (
            f"that trains the token at position {position} of the response, which is none of those it was given: the "
            "model did not make it, or it is too old; leave it out"
        )
    index = np.searchsorted(given.positions, s.positions)
    problems: tuple[tuple[str, NDArray[np.generic], NDArray[np.generic]], ...] = (
        ("token", s.tokens[s.trained], given.tokens[given.trained[index]]),
        ("version", s.versions, given.versions[index]),
    )
    for what, found, wanted in problems:
        if (found != wanted).any():
            place = int(np.flatnonzero(found != wanted)[0])
            return (
                f"that gives the token at position {int(s.positions[place])} the {what} {found[place]}; it is "
                f"{wanted[place]}"
            )
    if np.isnan(s.rollout_logprobs).any() and not np.isnan(given.rollout_logprobs).any():
        return "with log-probs that are not numbers; leave tokens without them out of `trained`"
    return ""
