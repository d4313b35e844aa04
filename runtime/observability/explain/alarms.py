"""What makes a run's result doubtful, whatever its speed: alarms in the order of their weight.

Each rule looks at the newest :data:`NEWEST` steps, or at the whole run where it says so. A figure that the run does
not report raises no alarm.
"""

from __future__ import annotations

import math
import sqlite3
import statistics
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.learners.objectives.unequal_weights import ESS, HEAVY_WEIGHT, unequal
from penstock.backends.learners.spec import is_modelled
from penstock.backends.ledger.kept_samples import SAMPLES_FILE, read_kept
from penstock.backends.ledger.sqlite import asked_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault
from penstock.messages.samples import TerminalState
from penstock.runtime.observability.explain.causes import Evidence
from penstock.runtime.observability.figures import REWARD, REWARD_STD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from penstock.runtime.observability.trackers import StepRow
    from penstock.runtime.scenario.structure import Scenario

NEWEST: Final = 10
STEPS: Final = "metrics.jsonl"
LENGTH_BIAS: Final = 0.15
"""Of the mean length of trained samples, against all that were generated."""
MIN_DROPPED: Final = 30
COLLAPSED: Final = 0.5
"""Of the best mean reward of :data:`NEWEST` steps in a row."""
CERTAIN: Final = 4.0
"""Standard errors of the difference between two means, the better of which was chosen among all."""
DUPLICATES: Final = 0.1
LATE_VERSIONS: Final = 2.0
FAILED: Final = 0.01
_TERMS: Final = (
    ("kl_coef", "train/kl_loss"),
    ("opd_kl_coef", "train/opd_reverse_kl"),
    ("entropy_coef", "train/entropy_loss"),
)
"""Coefficients of the objective, and the figure that each moves."""


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """Something is wrong with what the run learns from."""

    name: str
    text: str
    evidence: tuple[Evidence, ...]


def alarms_of(run_folder: Path, scenario: Scenario, steps: Sequence[StepRow]) -> tuple[Alarm, ...]:
    """The alarms of a run, the heaviest first.

    Raises:
        UserFault: ledger or kept samples are damaged.
    """
    if not steps:
        return ()
    found = (
        _mismatch(steps),
        _effective(steps),
        length_bias(_lengths(run_folder)),
        _collapse(steps),
        _duplicates(run_folder),
        _late_versions(steps),
        _full_buffer(steps, scenario),
        _failing_reward(steps),
        _idle_terms(steps, scenario),
    )
    return tuple(alarm for alarm in found if alarm is not None)


def _newest(steps: Sequence[StepRow], name: str) -> float | None:
    values = [value for row in steps[-NEWEST:] if (value := row.metrics.get(name)) is not None]
    return statistics.fmean(values) if values else None


def _alarm(name: str, text: str, *evidence: Evidence) -> Alarm:
    return Alarm(name=name, text=text, evidence=evidence)


def _mismatch(steps: Sequence[StepRow]) -> Alarm | None:
    alarmed = [row for row in steps[-NEWEST:] if row.metrics.get("train/mismatch_alarm")]
    if not alarmed:
        return None
    difference = alarmed[-1].metrics.get("train/fresh_logprob_abs_diff") or 0.0
    return _alarm(
        "mismatch",
        "Engine and learner compute different models from the same weights.",
        Evidence("steps with train/mismatch_alarm, of the newest ten", len(alarmed), "steps", STEPS),
        Evidence("train/fresh_logprob_abs_diff", difference, "nats", STEPS),
    )


def _effective(steps: Sequence[StepRow]) -> Alarm | None:
    reason = unequal(partial(_newest, steps))
    if reason is None:
        return None
    worth = Evidence(ESS, 100 * (_newest(steps, ESS) or 0.0), "%", STEPS)
    if reason == "few":
        return _alarm(
            "effective sample size",
            "A few tokens weigh so much that they decide a step, though the policy is near what drew the others.",
            worth,
            Evidence(HEAVY_WEIGHT, 100 * (_newest(steps, HEAVY_WEIGHT) or 0.0), "%", STEPS),
        )
    return _alarm(
        "effective sample size",
        "Old samples weigh so unequally that a few of them decide a step.",
        worth,
        Evidence("mean age of trained samples", _newest(steps, "buffer/staleness_mean") or 0.0, "versions", STEPS),
    )


class Lengths(NamedTuple):
    """Samples of a run that have tokens, without those of evaluations."""

    num_trained: int = 0
    trained: float = 0.0
    """Mean tokens, as ``dropped``."""
    num_dropped: int = 0
    dropped: float = 0.0


def length_bias(lengths: Lengths) -> Alarm | None:
    """Whether what is trained is of another length than what was generated."""
    num_trained, trained, num_dropped, dropped = lengths
    if num_dropped < MIN_DROPPED or not num_trained:
        return None
    generated = (num_trained * trained + num_dropped * dropped) / (num_trained + num_dropped)
    if abs(trained / generated - 1) <= LENGTH_BIAS:
        return None
    kind = "shorter" if trained < generated else "longer"
    return _alarm(
        "length bias",
        f"What is trained is {kind} than what was generated: samples are dropped by their length.",
        Evidence("mean length of trained samples", trained, "tokens", LEDGER_FILE),
        Evidence("mean length of all that ended", generated, "tokens", LEDGER_FILE),
    )


def _lengths(run_folder: Path) -> Lengths:
    query = (
        "SELECT sum(state = 'trained'), coalesce(avg(CASE state WHEN 'trained' THEN num_tokens END), 0), "
        "sum(state != 'trained'), coalesce(avg(CASE state WHEN 'trained' THEN NULL ELSE num_tokens END), 0) "
        "FROM samples WHERE state != 'evaluated' AND num_tokens > 0"
    )
    path = run_folder / LEDGER_FILE
    if not path.is_file():
        return Lengths()
    with asked_ledger(path) as database:
        row = database.execute(query).fetchone()
    return Lengths() if row[0] is None else Lengths(*row)


def _collapse(steps: Sequence[StepRow]) -> Alarm | None:
    rewards = [value for row in steps if (value := row.metrics.get(REWARD)) is not None]
    if len(rewards) < 2 * NEWEST:
        return None
    best, last = max(_stretches(rewards), key=statistics.fmean), rewards[-NEWEST:]
    fall = statistics.fmean(best) - statistics.fmean(last)
    chance = math.sqrt((statistics.variance(best) + statistics.variance(last)) / NEWEST)
    is_lower = fall > COLLAPSED * statistics.fmean(best) > 0 and fall > CERTAIN * chance
    spreads = [row.metrics.get(REWARD_STD) or 0.0 for row in steps]
    is_flat = _newest(steps, REWARD_STD) == 0 and any(map(statistics.median_low, _stretches(spreads)))
    if not is_lower and not is_flat:
        return None
    return _alarm(
        "reward collapse",
        "All samples of the newest steps earn the same." if is_flat else "The reward has fallen from its best.",
        Evidence("mean reward of the best ten steps", statistics.fmean(best), "", STEPS),
        Evidence("mean reward of the newest ten", statistics.fmean(last), "", STEPS),
    )


def _stretches(values: Sequence[float]) -> Iterator[Sequence[float]]:
    """Each :data:`NEWEST` in a row."""
    return (values[end - NEWEST : end] for end in range(NEWEST, len(values) + 1))


def _duplicates(run_folder: Path) -> Alarm | None:
    """A row that comes again, in another epoch or on purpose, is no duplicate; another row with its prompt is."""
    try:
        prompts = {sample.row: sample.prompt for sample in read_kept(run_folder) if sample.group_id >= 0}
    except (sqlite3.Error, *UNREADABLE) as error:
        raise UserFault(f"{run_folder}: kept samples cannot be read: {error}") from None
    num_again = len(prompts) - len(set(prompts.values()))
    if not prompts or num_again <= DUPLICATES * len(prompts):
        return None
    return _alarm(
        "duplicate prompts",
        "Different rows of the dataset have the same prompt.",
        Evidence("rows of kept samples with the prompt of another", 100 * num_again / len(prompts), "%", SAMPLES_FILE),
    )


def _late_versions(steps: Sequence[StepRow]) -> Alarm | None:
    lag = _newest(steps, "buffer/announced_lag")
    if lag is None or lag <= LATE_VERSIONS:
        return None
    return _alarm(
        "publish lag",
        "Engines get new weights versions after they were trained.",
        Evidence("versions trained and not announced, at a step's end", lag, "versions", STEPS),
    )


def _full_buffer(steps: Sequence[StepRow], scenario: Scenario) -> Alarm | None:
    ready = _newest(steps, "buffer/ready_groups")
    batch = scenario.learner.groups_per_batch
    if ready is None or ready < 2 * batch:
        return None
    return _alarm(
        "back-pressure",
        "Whole batches lie ready and grow old: the learner does not keep up with the engines.",
        Evidence("groups that are ready", ready, "groups", STEPS),
        Evidence("groups of a batch", batch, "groups", "scenario.yaml"),
    )


def _failing_reward(steps: Sequence[StepRow]) -> Alarm | None:
    ended = steps[-1].balance.ended
    num_failed = sum(c.num_samples for c in ended if c.state == TerminalState.FAILED and c.cause.startswith("scoring"))
    share = num_failed / max(1, sum(count.num_samples for count in ended))
    if share < FAILED:
        return None
    return _alarm(
        "failing reward",
        "The reward fails on samples, which are then not trained; penstock samples --failed shows why.",
        Evidence("samples without a reward", 100 * share, "%", STEPS),
    )


def _idle_terms(steps: Sequence[StepRow], scenario: Scenario) -> Alarm | None:
    objective = scenario.learner.objective
    idle = [
        key for key, figure in _TERMS if getattr(objective, key) and not any(row.metrics.get(figure) for row in steps)
    ]
    if is_modelled(scenario.learner) or not idle:
        return None
    return _alarm(
        "terms without effect",
        f"Configured, and 0 in every step: {', '.join(f'learner.objective.{key}' for key in idle)}.",
        *(Evidence(figure, 0.0, "", STEPS) for key, figure in _TERMS if key in idle),
    )
