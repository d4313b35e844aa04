"""What makes a comparison of runs less than fair, in sentences."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from penstock.messages.texts import does
from penstock.runtime.observability.compared_runs import UNSET, circumstances_changed, may_differ_within_an_arm
from penstock.runtime.observability.summary import policies_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.runtime.observability.compared_runs import ComparedArm, ComparedRun, Difference

_EVALUATED: Final = "evaluation.datasets"
_WHAT_REWARDS_ARE: Final = ("reward.", "data.", "episode.", "sampling.", "filter.", _EVALUATED)
"""Blocks of a scenario that say which questions are asked, what an answer earns, and whose reward is shown."""
_HOW_THEY_ARE_MADE: Final = ("timeout_s", ".num_workers", ".num_retries", ".stop_after", ".max_running")
"""Ends of keys of these blocks that say how long and how many at a time: the rewards are the same."""
_MEANS: Final = {
    "model": "The runs did not train the same model: neither rewards nor wall times are comparable.",
    "machine": "The runs did not run on the same kind of machine: wall times and rates are no fair comparison.",
    "software": "The runs ran with different versions of software: wall times and rates are no fair comparison.",
    "policies switched to": "Operators switched the policies of the runs differently while they went on.",
    "commit": "The commits of the folders where the runs were started differ; so may functions of yours.",
}


def cautions_of(
    arms: Sequence[ComparedArm], keys: Sequence[Difference], circumstances: Sequence[Difference]
) -> Iterator[str]:
    """Each as a sentence, the weightiest first."""
    runs = [run for arm in arms for run in arm.runs]
    yield from (_MEANS[each.name] for each in circumstances)
    if unknown := [run.name for run in runs if not run.starts]:
        yield f"Model, machine and software are not known of {_listed(unknown)}, which has no starts.jsonl."
    if differ := [key.name for key in keys if _is_of_rewards(key.name) and not _is_of_some(key)]:
        yield f"Rewards do not measure the same thing where {_listed(differ)} {does(len(differ), 'differ')}."
    yield from (text for run in runs for text in _of_run(run))
    if beside := _at_once(runs):
        yield f"While {_listed(beside)} ran, others of these did; if on one machine, they slowed each other down."
    for arm in arms:
        seeds = Counter(run.seed for run in arm.runs)
        if twice := [seed for seed, num in seeds.items() if num > 1]:
            yield f"Arm {arm.name} has several runs of seed {_listed(twice)}: they are no independent draws."
        if watched := [key.name for key in keys if _splits_watching(key, arms.index(arm))]:
            yield f"The runs of arm {arm.name} differ in {_listed(watched)}, which is taken for no difference."
    if alone := [f"arm {arm.name}" for arm in arms if len(arm.runs) == 1]:
        yield f"Of {_listed(alone)} there is one run, so nothing says how much of a difference is chance."


def _is_of_rewards(key: str) -> bool:
    return key.startswith(_WHAT_REWARDS_ARE) and not key.endswith(_HOW_THEY_ARE_MADE)


def _is_of_some(key: Difference) -> bool:
    """Whether it is of a dataset that only some of the runs evaluate: of that the others have no figure at all."""
    return key.name.startswith(_EVALUATED) and any(UNSET in values for values in key.values)


def _of_run(run: ComparedRun) -> Iterator[str]:
    if not run.steps:
        yield f"{run.name} made no step, so its arm has no figures; leave it out to see those of the others."
    elif run.summary is None:
        yield f"{run.name} goes on, or was cut off: it is compared as far as it has come."
    elif not run.summary.completed:
        yield f"{run.name} did not complete: {run.summary.story}"
    if run.steps and run.steps[-1].training_s <= 0:
        yield f"{run.name} did not write down its time of training, so it has no figure over wall time."
    if len(run.starts) > 1:
        yield f"{run.name} was started {len(run.starts)} times; steps that it made again count in its time and tokens."
    if len(run.policies) > 1:
        yield f"{run.name} followed several policies: {policies_text(run.policies)}."
    for name in circumstances_changed(run):
        yield f"{run.name} changed its {name} when it was resumed; the last one is shown."


def _splits_watching(key: Difference, place: int) -> bool:
    """Whether runs of one arm differ in a key of the block that watches a run; it may cost time."""
    return key.name.startswith("observability.") and may_differ_within_an_arm(key.name) and len(key.values[place]) > 1


def _at_once(runs: Sequence[ComparedRun]) -> list[str]:
    """Names of the runs whose last drives overlap with that of another on a machine of the same kind."""
    timed = [(*_drive(run), run) for run in runs if run.starts and run.summary is not None]
    return [
        one.name
        for start, end, one in timed
        if any(
            start < other_end and other_start < end and one.starts[-1].facts.machine == other.starts[-1].facts.machine
            for other_start, other_end, other in timed
            if other is not one
        )
    ]


def _drive(run: ComparedRun) -> tuple[datetime, datetime]:
    assert run.summary is not None, "its caller asks for runs that ended"
    start = datetime.fromisoformat(run.starts[-1].at)
    return start, start + timedelta(seconds=run.summary.wall_s)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(", ".join(names).rsplit(", ", 1))
