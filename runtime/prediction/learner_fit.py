"""How long a step of the learner takes: fixed, by round of micro-batches, by token.

Invariants:

* Rounds and shares are those of the lengths in the ledger, divided by the function that learners divide with. Runs
  whose learners have divided their batches over different numbers of ranks tell of tokens alone.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.backends.learners.batch.step_load import SequenceLength, StepLoad, step_load
from penstock.backends.learners.spec import is_modelled
from penstock.runtime.prediction.fitting import fit_line
from penstock.runtime.prediction.planning.scaling import data_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.prediction.fitting import Line
    from penstock.runtime.prediction.recorded import Recording, SampleSeen
    from penstock.runtime.scenario import Scenario


class StepsFit(NamedTuple):
    """Of the steps of all runs."""

    line: Line
    """``step_s``, ``token_s``, ``micro_batch_s``."""
    num_ranks: int
    """That sequences were divided over; 1 where runs differ."""
    why_no_packing: str
    """Why micro-batches were not counted; empty: they were."""


def fit_snapshot(recordings: Sequence[Recording], whole_s: float) -> float | None:
    """Seconds of a checkpoint's ``whole_s`` in which its state is copied; None: nobody has timed that."""
    told = [recording.snapshot_s for recording in recordings if recording.snapshot_s is not None]
    return min(statistics.fmean(told), whole_s) if told else None


def fit_steps(recordings: Sequence[Recording]) -> StepsFit:
    """Fit to all traced steps; there is one at least."""
    works = [(index, work) for index, recording in enumerate(recordings) for work in recording.work.get("step", ())]
    sizes = np.array([work.size for _, work in works], dtype=np.float64)
    columns = {"step_s": np.ones_like(sizes), "token_s": sizes}
    ranks = {_ranks_of(recording.scenario) for recording in recordings}
    loads = [loads_of(recording) for recording in recordings]
    found = [loads[index].get(work.version) for index, work in works]
    known = [load for load in found if load is not None and load.num_rounds]
    why = ""
    if len(ranks) > 1:
        why = f"learners divided their batches over {', '.join(map(str, sorted(ranks)))} ranks"
    elif len(known) < len(works):
        why = f"the ledger has the lengths of {len(known):,} of {len(works):,} steps"
    else:
        columns["token_s"] = sizes * np.array([load.imbalance for load in known])
        columns["micro_batch_s"] = np.array([load.num_rounds for load in known], dtype=np.float64)
    seconds = np.array([work.duration_s for _, work in works])
    line = fit_line(seconds, columns, np.array([work.version % 2 == 0 for _, work in works]))
    return StepsFit(line, 1 if why else ranks.pop(), why)


def _ranks_of(scenario: Scenario) -> int:
    learner = scenario.learner
    if is_modelled(learner):
        return learner.simulated.num_ranks
    return data_ranks(learner, learner.num_ranks, learner.critic_ranks)


def loads_of(recording: Recording) -> dict[int, StepLoad]:
    """By version. A sample counts as one sequence, with as many tokens before it as the least of its group has read."""
    contexts: dict[int, int] = {}
    batches: defaultdict[int, list[SampleSeen]] = defaultdict(list)
    for sample in recording.samples:
        if sample.num_read is not None:
            contexts[sample.group_id] = min(sample.num_read, contexts.get(sample.group_id, sample.num_read))
        if sample.version is not None and sample.state == "trained":
            batches[sample.version].append(sample)
    num_ranks = _ranks_of(recording.scenario)
    most = recording.scenario.learner.max_tokens_per_micro_batch
    return {
        version: step_load(
            [SequenceLength(each.group_id, contexts.get(each.group_id, 1), each.num_tokens) for each in samples],
            num_ranks=num_ranks,
            max_tokens=most,
        )
        for version, samples in batches.items()
    }
