"""The driver's book about its run: every report goes in once, and files, metrics, terminal and summary follow.

Invariants:

* Each report is written before it is shown.
* ``finish`` may be called after any failure; what was reported until then is in the files and in the summary.
"""

from __future__ import annotations

import logging
import sqlite3
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from penstock import __version__
from penstock.backends.ledger.kept_samples import read_kept
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault
from penstock.messages.names import Role
from penstock.runtime.observability.accounting import read_accounts
from penstock.runtime.observability.actors_file import ActorsFile
from penstock.runtime.observability.component_names import ComponentNames
from penstock.runtime.observability.evaluations import evaluation_row, outcomes_of, read_evaluations
from penstock.runtime.observability.facts import REPORT_FILE, Start, write_start
from penstock.runtime.observability.figures import RunFigures, mean
from penstock.runtime.observability.operations import policies_of
from penstock.runtime.observability.report import write_report
from penstock.runtime.observability.samples import sample_lines
from penstock.runtime.observability.summary import (
    ActorCost,
    ActorRestarts,
    HeldPolicy,
    RunSummary,
    generated_tokens,
    set_summary_aside,
    trained_tokens,
    wasted_tokens,
    write_summary,
)
from penstock.runtime.observability.trackers import METRICS_FILE, ActivityLog, MetricsLog, StepRow, read_steps
from penstock.runtime.observability.training_time import TrainingTime
from penstock.runtime.safe_text import terminal_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from penstock.backends.ledger.kept_samples import KeptSample
    from penstock.messages.evaluation import EvaluationFinished
    from penstock.messages.training import ActivitySpan, ActorReported, FailuresCounted, RunFinished, StepReported
    from penstock.messages.waits import WaitsReported
    from penstock.runtime.observability.evaluations import EvaluationRow
    from penstock.runtime.observability.facts import RunFacts
    from penstock.runtime.observability.live import LiveView
    from penstock.runtime.observability.metrics import RunMetrics
    from penstock.runtime.observability.tracking import Trackers

MAX_WARNINGS: Final = 20
"""In the summary: the first ones tell what is wrong."""

_log: Final = logging.getLogger(__name__)


class RunRecorder:
    """Takes what the supervisor hears. For one thread."""

    def __init__(
        self,
        run_folder: Path,
        facts: RunFacts,
        *,
        view: LiveView | None = None,
        metrics: RunMetrics | None = None,
        trackers: Trackers | None = None,
        started_at: datetime | None = None,
        resumes: bool = False,
        segment_bytes: int = 0,
        own_cpu_s: Callable[[], float] | None = None,
    ) -> None:
        """
        Args:
            run_folder: where the files go.
            facts: about the run.
            view: the terminal, where there is one to show.
            metrics: what ``/metrics`` serves, where it is served.
            trackers: of experiments, which are told of every line.
            started_at: when the run began; now by default.
            resumes: go on with the figures and files that an earlier drive of this run left.
            segment_bytes: from what size on the time accounting goes on in another file; 0: never.
            own_cpu_s: says what CPU time the process that supervises the run has taken; None: it is not told.

        Raises:
            UserFault: what it left is damaged.
        """
        self.figures = RunFigures(progress_tokens=facts.progress_tokens)
        self._own_cpu_s = own_cpu_s
        self._folder = run_folder
        self._facts = facts
        self._view = view
        self._metrics = metrics
        self._trackers = trackers
        self._started_at = started_at or datetime.now(UTC).astimezone()
        self.training = TrainingTime()
        """Who knows that everyone is up tells it so."""
        self._warnings: list[str] = []
        self._shown: KeptSample | None = None
        self._evaluations: dict[int, EvaluationRow] = {}
        self._components = ComponentNames()
        if resumes:
            self._restore(run_folder)
        now = datetime.now(UTC).astimezone() if resumes else self._started_at
        write_start(run_folder, Start(at=now.isoformat(timespec="seconds"), facts=facts))
        self._steps = MetricsLog(run_folder)
        self._activity = ActivityLog(run_folder, resumes=resumes, segment_bytes=segment_bytes)
        self._actors = ActorsFile(run_folder)

    def _restore(self, run_folder: Path) -> None:
        rows, summary = read_steps(run_folder), set_summary_aside(run_folder)
        self.figures.restore(rows, summary)
        times = [0.0 if summary is None else summary.training_s, *(row.training_s for row in rows[-1:])]
        self.training.before_s = max(times)
        evaluations = read_evaluations(run_folder)
        self._evaluations = {row.evaluation: row for row in evaluations}
        self._components = ComponentNames(chain(*(row.metrics for row in rows), *(e.metrics for e in evaluations)))
        self._warnings += () if summary is None else summary.warnings
        if self._view is not None:
            self._view.restore(rows, summary)

    def actor(self, report: ActorReported, now_s: float) -> None:
        """An actor has reported.

        Args:
            now_s: seconds since the start of the run, here and below.
        """
        self.training.hear(report)
        self.figures.actor(report, now_s)
        tiles = self._activity.append(report)
        self._actors.actor(report, now_s)
        if self._metrics is not None:
            self._metrics.actor(report)
            self._metrics.activity(report.name, tiles)
        if self._view is not None:
            self._view.actor(report)
        if self._trackers is not None:
            self._complain(self._trackers.hear())

    def step(self, report: StepReported, now_s: float) -> None:
        """A step is recorded."""
        self.training.step()
        report = replace(report, metrics=tuple(each for each in report.metrics if self._components.follows(each.name)))
        row = StepRow.of(
            now_s,
            report,
            tokens_generated=generated_tokens(report.balance),
            training_s=self.training.at(now_s),
            counted=self.figures.counted,
            cpu_s=self._cpu_s(now_s),
            core_wait_s=self.figures.core_waits_by_role_s(now_s),
        )
        self._append(row)
        self._activity.flush()
        self.figures.step(report, row)
        if self._metrics is not None:
            self._metrics.step(report)
        if self._view is not None:
            self._view.step(report)

    def _cpu_s(self, now_s: float) -> dict[str, float]:
        own = {} if self._own_cpu_s is None else {Role.SUPERVISOR.value: round(self._own_cpu_s(), 6)}
        return self.figures.cpu_by_role_s(now_s) | own

    def evaluated(self, finished: EvaluationFinished, now_s: float) -> None:
        """An evaluation is done; of one that is reported again nothing more is written."""
        if finished.number in self._evaluations:
            return
        facts = self._facts
        row = evaluation_row(finished, facts.evaluation, now_s, first_version=facts.first_version)
        row = replace(
            row, metrics={name: value for name, value in row.metrics.items() if self._components.follows(name)}
        )
        self._evaluations[row.evaluation] = row
        self._append(row)
        if self._metrics is not None:
            self._metrics.evaluated(row)
        if self._view is not None:
            self._view.evaluated(row)

    def failures(self, counted: FailuresCounted) -> None:
        """Samples have failed, for these reasons."""
        self.figures.failures = counted
        if self._metrics is not None:
            self._metrics.failures(counted)
        if self._view is not None:
            self._view.failures(counted)

    def show_sample(self) -> None:
        """Show the newest sample that was kept, if it has not been shown. What cannot be read now is not shown: it is
        for people to look at, and no reason to end a run."""
        if self._view is None:
            return
        try:
            newest = next(iter(read_kept(self._folder, limit=1)), None)
        except (sqlite3.Error, *UNREADABLE) as error:
            _log.warning("no sample can be shown: %s", error)
            return
        if newest is not None and newest != self._shown:
            self._shown = newest
            self._view.sample(sample_lines(newest))

    def lost(self, name: str, story: str) -> None:
        """An actor is given up and will be replaced; the story is for people."""
        tokens = self.figures.lost(name)
        self._activity.lost(name)
        self._actors.lost(name, story)
        if self._metrics is not None:
            self._metrics.lost(name, tokens)
        if self._view is not None:
            self._view.actor_lost(name)
            self._view.note(story)

    def joins(self, name: str, now_s: float) -> None:
        """An engine comes into the run."""
        self._tiled(name, self._activity.joins(name, now_s))

    def leaves(self, name: str, now_s: float) -> None:
        """An engine goes out of it."""
        self._tiled(name, self._activity.leaves(name, now_s))
        self.figures.leaves(name)
        self._actors.leaves(name)
        if self._view is not None:
            self._view.actor_left(name)

    def _tiled(self, name: str, tiles: list[ActivitySpan]) -> None:
        if self._metrics is not None:
            self._metrics.activity(name, tiles)

    def waits(self, report: WaitsReported) -> None:
        """An actor says what it has waited for too long."""
        self._actors.waits(report)

    def warn(self, text: str) -> None:
        """Something is wrong with the run, and it goes on."""
        if text not in self._warnings and len(self._warnings) < MAX_WARNINGS:
            self._warnings.append(text)

    def finish(self, finished: RunFinished, now_s: float) -> RunSummary:
        """The run is over: complete the files, write ``summary.json`` and ``report.html``, show the summary.

        Raises:
            OSError: a file cannot be written.
        """
        self._steps.close()
        self._actors.write()
        added = self._activity.close(now_s, self._facts.devices)
        if self._metrics is not None:
            for name, tiles in added.items():
                self._metrics.activity(name, tiles)
        summary = self._summary(finished, now_s)
        write_summary(self._folder, summary)
        if self._facts.report:
            write_report(self._folder)
        if self._trackers is not None and (told := self._trackers.finish()):
            self._complain(told)
            summary = self._summary(finished, now_s)
            write_summary(self._folder, summary)
            if self._facts.report:
                write_report(self._folder)
        if self._view is not None:
            self._view.finish(summary, read_accounts(self._folder))
        return summary

    def abandon(self) -> None:
        """Close the files as they are, of a run that cannot be finished; after ``finish`` it does nothing."""
        self._steps.close()
        self._activity.abandon()

    def _append(self, row: StepRow | EvaluationRow) -> None:
        if (told := self._components.warning()) is not None:
            self._complain([told])
        self._steps.append(row)
        if self._trackers is not None:
            self._trackers.grown()

    def _complain(self, texts: Iterable[str]) -> None:
        for text in texts:
            _log.warning("%s", terminal_lines(text))
            self.warn(text)
            if self._view is not None:
                self._view.note(text)

    def _summary(self, finished: RunFinished, now_s: float) -> RunSummary:
        facts, figures = self._facts, self.figures
        restarts = sorted(figures.restarts.items())
        try:
            policies = policies_of(self._folder)
        except UserFault as error:  # the ledger cannot be read, which may be what ended the run
            self.warn(f"what an operator changed is not known: {error}")
            policies = (HeldPolicy(from_step=1, policy=facts.policy, max_staleness=facts.staleness_bound),)
        return RunSummary(
            scenario=facts.scenario,
            penstock_version=__version__,
            seed=facts.seed,
            policy=policies[-1].policy,
            policies=policies,
            staleness_bound=max(figures.staleness_bound, *(each.max_staleness for each in policies)),
            started_at=self._started_at.isoformat(timespec="seconds"),
            machine=facts.machine,
            completed=finished.completed,
            story=finished.story,
            warnings=tuple(self._warnings),
            version=finished.version,
            num_steps=facts.num_steps,
            wall_s=now_s,
            training_s=self.training.at(now_s),
            first10_reward=figures.first_reward,
            last10_reward=figures.last_reward,
            mean_staleness=figures.mean_staleness,
            max_staleness=finished.max_staleness,
            mean_logprob_abs_diff=mean(figures.logprob_diffs),
            max_logprob_abs_diff=max(figures.logprob_diffs, default=None),
            balance=finished.balance,
            tokens_generated=generated_tokens(finished.balance),
            tokens_trained=trained_tokens(finished.balance),
            tokens_wasted=wasted_tokens(finished.balance),
            tokens_lost_estimate=figures.lost_tokens,
            tokens_reported=figures.tokens_reported,
            restarts=tuple(ActorRestarts(name=name, count=count) for name, count in restarts),
            costs=tuple(ActorCost(name=name, cpu_s=cpu_s) for name, cpu_s in sorted(figures.cpu_s.items())),
            failures=figures.failures.counts,
            num_failures=figures.failures.num_samples,
            evaluations=outcomes_of([row for _, row in sorted(self._evaluations.items())]),
            checkpoint=finished.checkpoint,
            report=str(self._folder / REPORT_FILE) if facts.report else "",
            metrics=str(self._folder / METRICS_FILE),
        )
