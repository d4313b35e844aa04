"""Fits the models of the simulation to the metrics of steps, which say less than a recorded run does.

A batch of S responses on E engines, n = S/E on each, all of which it runs at once, decodes in as many rounds as its
longest response L has tokens, and a round takes ``token_s + (r − 1) · token_load_s`` with r still running. So

    generation_s = prefill_s + L · token_s + (n · mean − L) · token_load_s

whatever the other lengths are. An engine of k < n slots takes at most L + (n · mean − L)/k rounds (Graham 1969), which
stand in the place of L. Of one response beside r − 1 others, ``sample_s = prefill_s + mean · (token_s + (r − 1) ·
token_load_s)``, with r by Little's law: responses of a step times their mean time, divided by the time of a step.

Invariants:

* Values are fitted to all steps, and their errors are those of the same fit on steps that it has not seen.
* What the log could not say is in ``unknown``, with what was assumed instead.
"""

from __future__ import annotations

import math
import statistics
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock import __version__
from penstock.backends.engines.options import LatencyOptions
from penstock.backends.learners.options import SimulatedLearnerOptions
from penstock.backends.rewards.options import SimulatedRewardOptions
from penstock.runtime.prediction.fitting import Error, error_of, fit_line
from penstock.runtime.prediction.imports.lengths import LogNormal, log_normal_of
from penstock.runtime.prediction.lengths_fit import correlation_of, drift_of, quantiles_of
from penstock.runtime.prediction.models import FitResult, Models, SourceRun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.runtime.prediction.imports.measured import Measured
    from penstock.runtime.prediction.recorded import SampleSeen

    Floats = NDArray[np.float64]

LOAD_SHARE: Final = 0.005
"""token_load_s ÷ token_s where a log does not tell them apart: that of the simulated engine's own defaults."""
HIDDEN: Final = 0.02
"""Share of a step that the learner waits for: with less, generation may have been quicker than it shows."""
MOST_NAMED: Final = 8
"""Steps that are left out."""
NOTHING: Final = Error(typical=None, bias=None, count=0)


def fit(run: Measured, file: Path, rollouts: Sequence[SampleSeen] = ()) -> Models:
    """Everything that can be fitted, in the form that calibration writes.

    Args:
        run: what the log says.
        file: of the log, for people.
        rollouts: single responses, where there are any.

    Raises:
        UserFault: generation or training cannot be told.
    """
    fits = _Fits(run, rollouts)
    engines, learner, reward = fits.engines(), fits.learner(), fits.reward()
    truncated = run.mean_of("truncated")
    if truncated is None:
        fits.unknown.append("the share of responses that were cut off: none is taken to be")
    fits.unknown.append("starts, replacements, failures: none is modelled; set start_s and failure_rate by hand")
    on_engine = math.ceil(float(run.num_samples.max()) / run.about.engines)
    source = SourceRun(
        folder=str(file), started_at="", policy=f"{run.policy} ({run.system})", num_steps=len(run.steps), num_cpus=0,
        gpus=(), learner_ranks=run.about.learner_ranks,
    )  # fmt: skip
    return Models(
        penstock_version=__version__,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        model=f"as logged by {run.system}",
        max_response_tokens=run.max_response_tokens,
        truncated_share=truncated or 0.0,
        most_running=max(1, min(run.about.slots or on_engine, on_engine)),
        engines=engines,
        learner=learner,
        reward=reward,
        fits=tuple(fits.results),
        unknown=tuple(fits.unknown),
        runs=(source,),
    )


class _Fits:
    """The fits, one after the other, with what they could not say."""

    def __init__(self, run: Measured, rollouts: Sequence[SampleSeen]) -> None:
        self.results: list[FitResult] = []
        self.unknown: list[str] = []
        if run.left_out:
            numbers = ", ".join(f"{step.number:,}" for step in run.left_out[:MOST_NAMED])
            more = " …" * (len(run.left_out) > MOST_NAMED)
            self.unknown.append(f"step {numbers}{more}: left out, as a figure is missing there that the others have")
        self._run = run
        self._rollouts = rollouts

    # --- engines ------------------------------------------------------------------------------------------------------

    def engines(self) -> LatencyOptions:
        """Lengths and decoding."""
        run = self._run
        prompt = run.mean_of("prompt_tokens")
        if prompt is None:
            self.unknown.append("engines.prompt_tokens: 64 are modelled")
        if run.about.slots is None:
            self.unknown.append(
                "how many requests an engine runs at a time (about: slots was not given): all of a batch were taken to "
                "run"
            )
        self.unknown.append(
            "prefill_token_s, context_token_s, kv_tokens: what prompts and long contexts cost lies in token_s and "
            "token_load_s, and no limit is modelled"
        )
        decode = self._decode()
        lengths = self._lengths()
        model = LatencyOptions(
            response_tokens_median=lengths.median,
            response_tokens_sigma=lengths.sigma,
            response_tokens_quantiles=quantiles_of([each.num_tokens for each in self._rollouts])
            if self._rollouts
            else (),
            response_tokens_correlation=(correlation_of(self._rollouts) or 0.0) if self._rollouts else 0.0,
            prompt_tokens=64 if prompt is None else max(1, round(prompt)),
            prefill_s=decode.get("prefill_s", 0.0),
            token_s=decode["token_s"],
            token_load_s=decode["token_load_s"],
            fetch_weights_s=0.0,
            apply_weights_s=0.0,
            sleep_s=0.0,
            wake_s=0.0,
        )
        groups = np.cumsum(run.num_samples) / run.about.group_size  # up to the end of each step
        drift = drift_of(groups, run.mean)
        return model if drift is None else drift.modelled(model)

    def _decode(self) -> dict[str, float]:
        run = self._run
        seconds = run.generation_s()
        if seconds is not None:
            if not run.knows("generation_s"):
                share = 100 * (run.about.generation_share or 0.0)
                self.unknown.append(f"how long generation took: {share:.0f} % of each step, as was said")
            return self._rounds_fit(seconds)
        if run.knows("sample_s"):
            sample_s, slots = run.column("sample_s"), run.about.slots or math.inf
            running = run.num_samples * sample_s / (run.step_s * run.about.engines)  # Little's law
            beside = run.mean * np.maximum(0.0, np.minimum(running, slots) - 1)
            return self._line("generation, a response", sample_s, run.mean, beside)
        waited_s = run.mean_of("waited_s") or 0.0
        is_hidden = waited_s < HIDDEN * run.step_s.mean()
        self.unknown.append(
            "how long a response or a batch took: a batch is taken to last for a whole step"
            + ("; the learner hardly waited, so it may have been quicker" if is_hidden else "")
        )
        return self._rounds_fit(run.step_s - run.others_s())

    def _rounds_fit(self, seconds: Floats) -> dict[str, float]:
        run = self._run
        on_engine, slots = run.num_samples / run.about.engines, run.about.slots or math.inf
        if run.knows("max_tokens"):
            longest = np.maximum(run.column("max_tokens"), run.mean)
        else:
            longest = np.full_like(run.mean, run.max_response_tokens)
            self.unknown.append(f"the longest response of each step: taken to be {run.max_response_tokens:,} tokens")
        tokens = np.maximum(on_engine * run.mean, longest)
        rounds = np.where(on_engine > slots, longest + (tokens - longest) / slots, longest)
        return self._line("generation, a batch", seconds, rounds, tokens - rounds)

    def _line(self, what: str, seconds: Floats, rounds: Floats, beside: Floats) -> dict[str, float]:
        columns = {"token_s": rounds, "token_load_s": beside, "prefill_s": np.ones_like(rounds)}
        line = fit_line(seconds, columns, self._run.is_even)
        values = line.values
        if "token_load_s" not in values:
            line = fit_line(seconds, {"token_s": rounds + LOAD_SHARE * beside}, self._run.is_even)
            values = {"token_s": line.values["token_s"], "token_load_s": LOAD_SHARE * line.values["token_s"]}
            self.unknown.append(
                "engines.token_load_s: what one more request costs is not told by these steps, in which longest "
                f"response and load went together: {100 * LOAD_SHARE:g} % of token_s is modelled. A log with another "
                "batch size would tell"
            )
        self._add(what, values, line.error)
        return values

    def _lengths(self) -> LogNormal:
        run = self._run
        by_odd = run.mean[~run.is_even].mean() if not run.is_even.all() else run.mean.mean()
        error = error_of(run.mean, np.full_like(run.mean, by_odd), run.is_even)
        if self._rollouts:
            lengths = [sample.num_tokens for sample in self._rollouts]
            self._add("length of a response", {"response_tokens_mean": statistics.fmean(lengths)}, error)
            return LogNormal(statistics.median(lengths), 0.0)
        longest = run.mean_of("max_tokens") or float(run.max_response_tokens)
        num_samples = float(run.num_samples.mean())
        found = log_normal_of(run.mean_tokens, longest, num_samples, run.mean_of("truncated") or 0.0)
        self.unknown.append(
            "single lengths (no rollouts were given): the log has their mean and longest: a log-normal with these is "
            "modelled, in a group independent of each other"
        )
        values = {"response_tokens_median": found.median, "response_tokens_sigma": found.sigma}
        self._add("length of a response", values, error)
        return found

    # --- learner and rewards ------------------------------------------------------------------------------------------

    def learner(self) -> SimulatedLearnerOptions:
        """Steps and new weights."""
        run = self._run
        seconds, tokens = run.training_s(), run.num_samples * run.mean
        line = fit_line(seconds, {"step_s": np.ones_like(tokens), "token_s": tokens}, run.is_even)
        if why := line.dropped.get("token_s"):
            line = fit_line(seconds, {"token_s": tokens}, run.is_even)
            self.unknown.append(f"learner.step_s: {why}, as tokens have hardly varied: all time is theirs")
        self._add("training, a step", line.values, line.error, "learner.")
        jitter = min(10.0, float(np.std(np.log(np.maximum(seconds, 1e-9) / np.maximum(line.fitted, 1e-9)))))
        even_out = math.exp(-jitter * jitter / 2)  # of the noise, whose mean is above 1
        publish_s = run.mean_of("publish_s")
        if publish_s is None:
            self.unknown.append("learner.publish_s: no time of new weights is logged apart: 0 is modelled")
        else:
            self.unknown.append(
                "engines.fetch_weights_s, engines.apply_weights_s: the log has one time for new weights, modelled as "
                "the learner's (publish_s); engines are not held meanwhile"
            )
            self._add("new weights", {"publish_s": publish_s}, NOTHING, "learner.")
        return SimulatedLearnerOptions(
            step_s=line.values.get("step_s", 0.0) * even_out,
            token_s=line.values["token_s"] * even_out,
            jitter_sigma=jitter,
            publish_s=publish_s or 0.0,
            snapshot_s=run.mean_of("checkpoint_s") or 0.0,  # its loop waits until it is written
            checkpoint_s=0.0,
            sleep_s=0.0,
            wake_s=0.0,
        )

    def reward(self) -> SimulatedRewardOptions:
        """Times, and what decides which groups a filter turns away."""
        run = self._run
        reward_s, success = run.mean_of("reward_s"), run.mean_of("reward")
        if reward_s is None:
            self.unknown.append("reward.latency_s: no time of rewards is logged apart: 0 is modelled")
        else:
            self.unknown.append(
                f"reward.latency_s: those of a step took {reward_s:.3g} s in one go: a sample's share is modelled, of "
                "one worker beside generation"
            )
        if success is None or not 0 <= success <= 1:
            self.unknown.append("reward.success_rate: no mean reward in [0, 1] is logged: half of them get 1")
            success = 0.5
        measured = run.mean_of("zero_spread")
        if measured is None and self._rollouts:
            groups: dict[int, list[float]] = {}
            for sample in self._rollouts:
                groups.setdefault(sample.group_id, []).append(sample.reward or 0.0)
            measured = statistics.fmean(min(each) == max(each) for each in groups.values())
        by_chance = success**run.about.group_size + (1 - success) ** run.about.group_size
        if measured is None:
            self.unknown.append("reward.constant_rate: groups of equal rewards are not logged: chance alone")
            measured = by_chance
        return SimulatedRewardOptions(
            latency_s=0.0 if reward_s is None else reward_s / float(run.num_samples.mean()),
            success_rate=success,
            constant_rate=min(1.0, max(0.0, (measured - by_chance) / (1 - by_chance))) if by_chance < 1 else 0.0,
        )

    def _add(self, what: str, values: Mapping[str, float], error: Error, prefix: str = "engines.") -> None:
        told = {prefix + key: value for key, value in values.items()}
        count = len(self._run.steps)
        self.results.append(FitResult(what=what, values=told, count=count, error=error.typical, bias=error.bias))
