"""Where two runs part: the first step, the first column in the order of cause and effect, the first sequence and token.

Of a step the columns are compared one after the other over all sequences: an advantage that differs follows from a
token of another sample of the group, so that token comes first wherever it stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from penstock.backends.learners.step_dumps import DUMP_FOLDER, FIGURES, DumpedSequence, dumped_steps, read_step
from penstock.messages.errors import UserFault
from penstock.runtime.run_folder import folder_of_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

SAMPLES: Final = "samples"
"""Stands for which samples a step trains: follows from what was generated, and comes before what is computed."""
ORDER: Final = ("context", "tokens", SAMPLES, "mask", "versions", *FIGURES)

Value = float | None


class StepDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference of two runs."""

    step: int
    column: str
    """One of the file's columns, or ``samples``."""
    sample: str
    """Group and index, such as ``12/3``."""
    position: int | None
    """Of the token, in the response (in the context where that differs); None: the sequence is in one run only."""
    values: tuple[Value, Value]
    """Of both runs; None where there is none, or the sequence has ended."""
    tokens: tuple[int | None, int | None]
    """Ids of the token there."""
    num_different: int
    """Tokens of the step in which the column differs (sequences, of ``samples``)."""
    num_sequences: int
    """Sequences that have such a token."""


class StepsCompared(msgspec.Struct, frozen=True, kw_only=True):
    """What ``penstock diff-steps --json`` prints."""

    runs: tuple[str, str]
    steps: tuple[int, ...]
    """That both have written down and that were asked for; none is looked at beyond the first that differs."""
    tolerance: float
    difference: StepDifference | None


def compare_steps(first: Path, second: Path, *, step: int | None, tolerance: float) -> StepsCompared:
    """Look for the first difference.

    Args:
        first: a run's folder.
        second: the other's.
        step: the only one to be looked at; None: all that both have.
        tolerance: by which figures may differ; ids, masks and versions may not.

    Raises:
        UserFault: a run has written no steps down, both have none in common, or a file cannot be read.
    """
    both = [_steps_of(run, step) for run in (first, second)]
    steps = sorted(set(both[0]) & set(both[1]))
    if not steps:
        told = " and ".join(f"{run}: {_told(found)}" for run, found in zip((first, second), both, strict=True))
        raise UserFault(f"no step is written down in both runs ({told}); set learner.dump alike in both")
    for number in steps:
        found = difference_of(number, read_step(first, number), read_step(second, number), tolerance)
        if found is not None:
            break
    else:
        found = None
    return StepsCompared(runs=(str(first), str(second)), steps=tuple(steps), tolerance=tolerance, difference=found)


def _steps_of(run: Path, step: int | None) -> tuple[int, ...]:
    steps = dumped_steps(folder_of_run(run))
    if not steps:
        raise UserFault(
            f"{run / DUMP_FOLDER}: this run has written no steps down; learner.dump says which ones are: "
            "penstock run SCENARIO learner.dump.last_step=20"
        )
    if step is None:
        return steps
    if step not in steps:
        raise UserFault(f"{run / DUMP_FOLDER}: step {step} is not written down (learner.dump); found {_told(steps)}")
    return (step,)


def _told(steps: Sequence[int]) -> str:
    return f"steps {', '.join(map(str, steps[:8]))}{' …' if len(steps) > 8 else ''}"


def difference_of(
    step: int, first: Sequence[DumpedSequence], second: Sequence[DumpedSequence], tolerance: float
) -> StepDifference | None:
    """The first difference between what two runs have written down of a step."""
    others = {row.key: row for row in second}
    pairs = [(row, others[row.key]) for row in first if row.key in others]
    for column in ORDER:
        if column == SAMPLES:
            if (missing := _missing(step, first, second)) is not None:
                return missing
            continue
        places = [_differing(_column(a, column), _column(b, column), tolerance) for a, b in pairs]
        at = [index for index, found in enumerate(places) if len(found)]
        if at:
            (a, b), place = pairs[at[0]], int(places[at[0]][0])
            ids = "context" if column == "context" else "tokens"
            return StepDifference(
                step=step,
                column=column,
                sample=a.name,
                position=place,
                values=(_value(_column(a, column), place), _value(_column(b, column), place)),
                tokens=(_token(_column(a, ids), place), _token(_column(b, ids), place)),
                num_different=sum(len(found) for found in places),
                num_sequences=len(at),
            )
    return None


def _missing(step: int, first: Sequence[DumpedSequence], second: Sequence[DumpedSequence]) -> StepDifference | None:
    ours, theirs = {row.key: row.name for row in first}, {row.key: row.name for row in second}
    apart = sorted(ours.keys() ^ theirs.keys())
    if not apart:
        return None
    return StepDifference(
        step=step,
        column=SAMPLES,
        sample=(ours | theirs)[apart[0]],
        position=None,
        values=(float(apart[0] in ours), float(apart[0] in theirs)),
        tokens=(None, None),
        num_different=len(apart),
        num_sequences=len(apart),
    )


def _column(row: DumpedSequence, name: str) -> NDArray[Any]:
    values: NDArray[Any] = row.figures[name] if name in FIGURES else getattr(row, name)
    return values


def _differing(a: NDArray[Any], b: NDArray[Any], tolerance: float) -> NDArray[np.int64]:
    """Places in which they differ; what one is longer by differs."""
    length = min(len(a), len(b))
    x, y = a[:length].astype(np.float64), b[:length].astype(np.float64)
    within = np.abs(x - y) <= (tolerance if a.dtype == np.float32 else 0.0)
    same = within | (x == y) | (np.isnan(x) & np.isnan(y))
    beyond = np.arange(length, max(len(a), len(b)))
    return np.concatenate([np.flatnonzero(~same), beyond]).astype(np.int64)


def _value(values: NDArray[Any], place: int) -> Value:
    if place >= len(values) or np.isnan(values[place]):
        return None
    return float(values[place])


def _token(ids: NDArray[np.int32], place: int) -> int | None:
    return int(ids[place]) if place < len(ids) else None
