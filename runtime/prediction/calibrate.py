"""Fits the models of the simulation to recorded runs, several together.

Invariants:

* Each measurement counts once; runs with more of them weigh more.
* Values are fitted to all steps. Their errors are those of the same fit to the steps with an odd number, on the steps
  with an even one, which it has not seen.
* What the runs could not say is in ``unknown``, with what was done instead.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from penstock import __version__
from penstock.backends.engines.options import LatencyOptions, engine_groups
from penstock.backends.learners.options import SimulatedLearnerOptions
from penstock.backends.rewards.functions_asked import num_workers
from penstock.backends.rewards.options import SimulatedRewardOptions
from penstock.messages.errors import UserFault
from penstock.messages.names import SCORER
from penstock.runtime.observability.shares import Shares
from penstock.runtime.prediction.cores_fit import at_own_speed, fit_cores, why_no_cores
from penstock.runtime.prediction.decode_fit import fit_decode
from penstock.runtime.prediction.episode_fit import fit_episodes
from penstock.runtime.prediction.fitting import CERTAIN, MIN_COUNT, Error, error_of, fit_line
from penstock.runtime.prediction.learner_fit import fit_snapshot, fit_steps
from penstock.runtime.prediction.lengths_fit import correlation_of, drift_of_samples, quantiles_of
from penstock.runtime.prediction.models import FitResult, Models
from penstock.runtime.prediction.prompts_fit import fit_reread
from penstock.runtime.prediction.recorded import starts_s
from penstock.runtime.prediction.sources import alike, model_of, source, timed_on_shared_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.engines.options import EpisodeModelOptions
    from penstock.runtime.prediction.cores_fit import CoresFit
    from penstock.runtime.prediction.decode_fit import DecodeFit
    from penstock.runtime.prediction.fitting import Line
    from penstock.runtime.prediction.recorded import Recording, SampleSeen, Work

QUEUED: Final = 2.0
"""Times as long as the work of a worker, from which on the time of a reward is mostly a wait for one."""
FOREIGN: Final = 0.1
"""Of the time that threads waited for a core, more than the run explains, from which on it is told."""
FEW: Final = 2
"""Requests side by side; where more ran all the time, what fewer take is told to be extrapolated."""
MEDIAN_SPREAD: Final = 1.2533
"""√(π/2): standard error of a median over that of a mean, of what is normal."""


def calibrate(recordings: Sequence[Recording]) -> Models:
    """Fit everything.

    Args:
        recordings: of runs of one model with the same backends.

    Raises:
        UserFault: they are of different models or backends, or hold nothing to fit.
    """
    alike(recordings)
    fits = _Fits(recordings)
    cores, hop_s = fits.cores(), fits.hop_s()
    engines, learner, reward = fits.engines(), fits.learner(), fits.reward()
    if cores is not None:
        engines = replace(engines, cores=cores.engine, cold_cost=cores.cold_cost)
        learner = replace(learner, cores=cores.learner)
    samples = fits.samples
    return Models(
        penstock_version=__version__,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        model=model_of(recordings[0]),
        max_response_tokens=max(each.scenario.sampling.max_response_tokens for each in recordings),
        truncated_share=sum(sample.outcome == "truncated" for sample in samples) / len(samples),
        most_running=fits.most_running,
        fewest_running=fits.fewest_running,
        is_load_known=fits.is_load_known,
        engines=engines,
        learner=learner,
        reward=reward,
        cores=None if cores is None else cores.num_cores,
        hop_s=hop_s,
        fits=tuple(fits.results),
        unknown=tuple(fits.unknown),
        runs=tuple(map(source, recordings)),
    )


class _Fits:
    """The fits, one after the other, with what they could not say."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.results: list[FitResult] = []
        self.unknown: list[str] = []
        self.most_running = self.fewest_running = 0
        self.is_load_known = True
        self.samples: list[SampleSeen] = [
            sample for each in recordings for sample in each.samples if sample.outcome in ("completed", "truncated")
        ]
        self._recordings = recordings
        """As if everybody had cores enough, once :meth:`cores` has told how quick each moment was."""
        if not self.samples:
            raise UserFault(f"{recordings[0].folder}: no response has come to its end, so there is nothing to fit")

    def cores(self) -> CoresFit | None:
        """What engines and learner want of the machine that they share; everything else is fitted without it."""
        if why := why_no_cores(self._recordings):
            self._unknown(f"engines.cores, learner.cores: {why}; each is modelled to have cores of its own")
            return None
        fit = fit_cores(self._recordings)
        if fit.waited > fit.slowed + FOREIGN:
            means = (
                "decode and training are fitted without it, and other times are those of a slower machine"
                if fit.is_measured
                else "times are those of a slower one, and overlap is taken to cost more than it does"
            )
            self._unknown(
                f"cores: threads of engines and learner waited for one for {100 * fit.waited:.0f} % of their time, and "
                f"the run's own actors explain {100 * fit.slowed:.0f} %: others used the machine, so {means}"
            )
        self._recordings = [at_own_speed(recording, fit) for recording in self._recordings]
        found = {
            "cores.engine": fit.engine,
            "cores.other_actors": fit.others,
            "cores.learner": fit.learner,
            "cores.machine": float(fit.num_cores),
            "cores.cold_cost": fit.cold_cost,
            "cores.alone": fit.alone,
            "cores.slowed_share": fit.slowed,
        }
        self._add("cores wanted", found, len(self._recordings), Error(typical=None, bias=None, count=0), "")
        return fit

    def hop_s(self) -> float | None:
        """How long a message takes with its handling; the middle one, as pauses of a machine make a few very long."""
        hops = [hop for recording in self._recordings for hop in recording.hops]
        seconds = np.array([hop.duration_s for hop in hops] or [0.0])
        typical = float(np.median(seconds))
        if len(hops) < MIN_COUNT or typical < CERTAIN * MEDIAN_SPREAD * float(seconds.std()) / math.sqrt(len(hops)):
            self._unknown(
                "hop_s: how long a message takes is not told apart from chance; that of a quick network is modelled"
            )
            return None
        unseen = np.array([hop.is_even for hop in hops])
        seen = seconds[~unseen] if not unseen.all() else seconds
        error = error_of(seconds, np.full_like(seconds, np.median(seen)), unseen)
        self._add("a message between actors", {"actors.hop_s": typical}, len(hops), error, "")
        return typical

    # --- engines ----------------------------------------------------------------------------------------------------

    def engines(self) -> LatencyOptions:
        """Lengths, decode, swaps, starts."""
        decode = fit_decode(self._recordings)
        if decode is None:
            raise UserFault(
                f"{self._recordings[0].folder}: no generation was traced as a whole after the first steps; raise "
                "observability.trace_fraction"
            )
        values = decode.line.values
        self._keep("decode and prefill, a response", decode.line, prefix="engines.")
        self._loads(decode)
        self._slots(decode.most_running)
        self._unknown(
            f"engines.kv_tokens: {decode.most_context:,} tokens were held at most, and no run says where the limit is; "
            "none is modelled"
        )
        generations = [each for recording in self._recordings for each in recording.generations]
        failed = sum(each.outcome == "infra_error" for each in generations) / max(1, len(generations))
        episodes = self._episodes()
        read = [sample.num_read for sample in self.samples if sample.num_read]
        if episodes is not None:
            firsts = [each.turns[0].num_context for recording in self._recordings for each in recording.episodes]
            read = [num_context for num_context in firsts if num_context]
        if not read:
            self._unknown("engines.prompt_tokens: engines did not say how many tokens they read; 64 are modelled")
        fetch = self._fetch()
        return replace(
            self._lengths(self.samples if episodes is None else self._turns()),
            episode=episodes,
            prompt_tokens=max(1, round(statistics.fmean(read))) if read else 64,
            prefill_s=values.get("prefill_s", 0.0),
            prefill_token_s=values.get("prefill_token_s", 0.0),
            prompt_reread_tokens=0.0 if episodes is not None else self._reread_tokens(),
            token_s=values["token_s"],
            token_load_s=values.get("token_load_s", 0.0),
            context_token_s=values.get("context_token_s", 0.0),
            apply_weights_s=self._mean("apply_weights", "apply_weights_s"),
            fetch_weights_s=fetch.get("fetch_weights_s", 0.0),
            fetch_shared_byte_s=fetch.get("fetch_shared_byte_s", 0.0),
            failure_rate=failed,
            start_s=self._start("engine", "engines.start_s"),
        )

    def _fetch(self) -> dict[str, float]:
        """How long new weights are on their way; of runs with several numbers of engines also what these share."""
        fetches: list[Work] = []
        for recording in self._recordings:
            sizes = [work.size for work in recording.work.get("publish", ())]
            copies = recording.scenario.engines.count * statistics.fmean(sizes or [0.0])
            fetches += [work._replace(size=copies) for work in recording.work.get("fetch_weights", ())]
        if len({work.size for work in fetches}) < 2:
            return {"fetch_weights_s": self._mean("fetch_weights", "fetch_weights_s")}
        line = self._line(fetches, {"fetch_weights_s": None, "fetch_shared_byte_s": "size"})
        self._keep("fetch weights", line, prefix="engines.")
        return line.values

    def _reread_tokens(self) -> float:
        fit = fit_reread(self._recordings)
        if fit is None:
            return 0.0  # no prompt was there twice
        error = Error(typical=None, bias=None, count=0)
        self._add("prompts read again", {"prompt_reread_tokens": fit.tokens}, fit.num_requests, error, "engines.")
        return fit.tokens

    def _loads(self, decode: DecodeFit) -> None:
        """How decoding goes with few requests: who says it, and where nobody has seen it."""
        if (passes := decode.passes) is not None:
            found = {"passes.fewest_running": passes.fewest, "passes.most_running": passes.most}
            found["responses_to_passes"] = decode.ratio
            error = Error(typical=passes.error, bias=None, count=passes.num_passes)
            self._add("decode passes by their requests", found, passes.num_passes, error, "decode.")
            if any(map(timed_on_shared_cores, self._recordings)):
                self._unknown(
                    "decode.passes: servers on a CPU time them by the wall clock, so what others took of the cores "
                    "meanwhile lies in them"
                )
        self.fewest_running = round(decode.fewest_running)
        values = decode.line.values
        if not {"token_load_s", "context_token_s"} & values.keys():
            self.is_load_known = decode.most_running < 2
        if not self.is_load_known:
            self._unknown(
                "engines.token_load_s: what a request costs is not told from what a token costs, so a response that "
                f"runs alone is modelled as slow as one beside {decode.most_running - 1:,} others; policies that leave "
                "few running (sync, one_step_off) are predicted too slow, if anything. Add a run under sync"
            )
        elif self.fewest_running > FEW:
            self._unknown(
                f"engines.token_s: {self.fewest_running:,} requests ran side by side at least; what a token takes "
                "beside fewer is extrapolated. A run under sync with responses of different lengths shows every load"
            )

    def _slots(self, most_running: int) -> None:
        self.most_running = most_running
        slots = max(recording.scenario.engines.slots for recording in self._recordings)
        if most_running < slots:
            self._unknown(
                f"engines.slots: at most {most_running} of {slots} were in use at a time; what a step takes with more "
                "is extrapolated"
            )
        if any(len(engine_groups(recording.scenario.engines)) > 1 for recording in self._recordings):
            self._unknown("engines.more: engines of several kinds were fitted as if they were one")

    def _episodes(self) -> EpisodeModelOptions | None:
        fit = fit_episodes(self._recordings)
        if fit is None:
            if any(recording.scenario.episode.kind != "single" for recording in self._recordings):
                self._unknown("engines.episode: no episode was traced as a whole; each is modelled as one response")
            return None
        model = fit.model
        mean = sum(number * share for number, share in enumerate(model.turns, start=1))
        found = {"turns_mean": mean, "tool_s": model.tool_s, "tool_sigma": model.tool_sigma, "end_s": model.end_s}
        found |= {"reply_tokens": float(model.reply_tokens), "reread_share": model.reread_share}
        self._add("turns and tools, an episode", found, fit.num_episodes, fit.error, "engines.")
        return model

    def _turns(self) -> list[SampleSeen]:
        """As if each were a sample."""
        return [
            each.sample._replace(num_tokens=turn.num_tokens)
            for recording in self._recordings
            for each in recording.episodes
            if each.sample is not None
            for turn in each.turns
            if turn.is_whole and turn.num_tokens
        ]

    def _lengths(self, samples: Sequence[SampleSeen]) -> LatencyOptions:
        drift = drift_of_samples(samples)
        if drift is not None:
            samples = [drift.without(sample) for sample in samples]
        odd = [sample.num_tokens for sample in samples if (sample.version or 1) % 2]
        even = [sample.num_tokens for sample in samples if not (sample.version or 1) % 2]
        of_odd = np.full(len(even), statistics.fmean(odd or even))
        error = error_of(np.array(even, dtype=np.float64), of_odd, np.ones(len(even), dtype=np.bool_))
        correlation = correlation_of(samples)
        if correlation is None:
            self._unknown(
                "engines.response_tokens_correlation: no group has samples of different lengths; 0 is modelled"
            )
        found = {
            "response_tokens_mean": statistics.fmean(odd + even),
            "response_tokens_correlation": correlation or 0.0,
        }
        if drift is not None:
            found |= {"response_tokens_first": drift.first, "response_tokens_last": drift.last}
        self._add("length of a response", found, len(odd + even), replace(error, typical=None), prefix="engines.")
        lengths = LatencyOptions(
            response_tokens_quantiles=quantiles_of(odd + even),
            response_tokens_median=statistics.median(odd + even),
            response_tokens_correlation=correlation or 0.0,
        )
        return lengths if drift is None else drift.modelled(lengths)

    # --- learner ----------------------------------------------------------------------------------------------------

    def learner(self) -> SimulatedLearnerOptions:
        """Steps, exports, checkpoints, start."""
        steps = self._work("step")
        if not steps:
            raise UserFault(f"{self._recordings[0].folder}: no step was traced; was observability.tracing false?")
        line, num_ranks, why_no_packing = fit_steps(self._recordings)
        self._keep("training, a step", line, prefix="learner.")
        if why_no_packing:
            self._unknown(f"learner.micro_batch_s: {why_no_packing}; 0 is modelled")
        seconds = np.array([work.duration_s for work in steps])
        jitter = float(np.std(np.log(np.maximum(seconds, 1e-9) / np.maximum(line.fitted, 1e-9))))
        even_out = math.exp(-jitter * jitter / 2)  # of the noise, whose mean is above 1
        publishes = self._work("publish")
        publish = self._line(publishes, {"publish_s": None, "publish_byte_s": "size"}) if publishes else None
        if publish is None:
            self._unknown("learner.publish_s: no export of weights was traced; 0 is modelled")
        else:
            self._keep("export of weights", publish, prefix="learner.")
        snapshot_s, checkpoint_s = self._checkpoint()
        return SimulatedLearnerOptions(
            step_s=line.values["step_s"] * even_out,
            token_s=line.values.get("token_s", 0.0) * even_out,
            micro_batch_s=line.values.get("micro_batch_s", 0.0) * even_out,
            num_ranks=num_ranks,
            jitter_sigma=jitter,
            publish_s=0.0 if publish is None else publish.values["publish_s"],
            publish_byte_s=0.0 if publish is None else publish.values.get("publish_byte_s", 0.0),
            size_bytes=round(statistics.fmean(work.size for work in publishes)) if publishes else 0,
            digest_s=self._mean("digest", "digest_s", prefix="learner.") if self._work("digest") else 0.0,
            snapshot_s=snapshot_s,
            checkpoint_s=checkpoint_s,
            start_s=self._start("learner", "learner.start_s"),
        )

    def _checkpoint(self) -> tuple[float, float | None]:
        if not (works := self._work("checkpoint")):
            self._unknown("learner.checkpoint_s: no checkpoint was written after the first steps; as publish_s")
            return 0.0, None
        line = self._line(works, {"whole_s": None})
        snapshot_s = fit_snapshot(self._recordings, line.values["whole_s"])
        if snapshot_s is None:
            self._unknown("learner.snapshot_s: no copy of the state was timed; 0 is modelled")
        found = {"snapshot_s": snapshot_s or 0.0, "checkpoint_s": line.values["whole_s"] - (snapshot_s or 0.0)}
        self._add("checkpoint", found, len(line.fitted), line.error, "learner.")
        return found["snapshot_s"], found["checkpoint_s"]

    # --- rewards ----------------------------------------------------------------------------------------------------

    def reward(self) -> SimulatedRewardOptions:
        """The time that a worker takes, and what decides which groups a filter turns away."""
        busy_s = sum(
            Shares(recording.activity.get(SCORER, ())).occupied_s * sum(num_workers(recording.scenario.reward))
            for recording in self._recordings
        )
        num_scored = sum(recording.num_scored for recording in self._recordings)
        mean_s = busy_s / max(1, num_scored)
        spans_s = np.maximum([each for recording in self._recordings for each in recording.scores_s] or [0.0], 1e-6)
        sigma = float(np.log(spans_s).std())
        if not mean_s or spans_s.mean() > QUEUED * mean_s:
            self._unknown(
                f"reward.latency_sigma: a worker took {mean_s:.3g} s a sample, and with the wait for one it was "
                f"{spans_s.mean():.3g} s: how much the work alone varies is not told; 0 is modelled"
            )
            sigma = 0.0
        # Of a log-normal time of this mean.
        median_s = mean_s * math.exp(-sigma * sigma / 2)
        found = {"latency_s": median_s, "latency_sigma": sigma}
        self._add("time of a reward", found, num_scored, Error(typical=None, bias=None, count=0), "reward.")
        rewards = [min(1.0, max(0.0, sample.reward)) for sample in self.samples if sample.reward is not None]
        success = statistics.fmean(rewards) if rewards else 0.5
        return SimulatedRewardOptions(
            latency_s=median_s,
            latency_sigma=sigma,
            success_rate=success,
            constant_rate=self._constant_rate(success),
        )

    def _constant_rate(self, success: float) -> float:
        """So that as many groups are without spread as in the runs, beside those that are by chance."""
        groups: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for run, recording in enumerate(self._recordings):
            for sample in recording.samples:
                if sample.reward is not None:
                    groups[run, sample.group_id].append(sample.reward)
        if not groups:
            self._unknown("reward.success_rate: no sample has a reward; half of them are modelled as 1")
            return 0.0
        measured = statistics.fmean(min(rewards) == max(rewards) for rewards in groups.values())
        by_chance = statistics.fmean(success ** len(each) + (1 - success) ** len(each) for each in groups.values())
        return max(0.0, (measured - by_chance) / (1 - by_chance)) if by_chance < 1 else 0.0

    # --- shared -----------------------------------------------------------------------------------------------------

    def _work(self, name: str) -> list[Work]:
        return [work for recording in self._recordings for work in recording.work.get(name, ())]

    def _line(self, works: Sequence[Work], columns: dict[str, str | None]) -> Line:
        seconds = np.array([work.duration_s for work in works])
        sizes = np.array([work.size for work in works], dtype=np.float64)
        is_even = np.array([work.version % 2 == 0 for work in works])
        return fit_line(
            seconds, {key: np.ones_like(sizes) if of is None else sizes for key, of in columns.items()}, is_even
        )

    def _mean(self, name: str, key: str, *, prefix: str = "engines.") -> float:
        works = self._work(name)
        if not works:
            self._unknown(f"{prefix}{key}: nothing of the kind was traced after the first steps; 0 is modelled")
            return 0.0
        line = self._line(works, {key: None})
        self._keep(name.replace("_", " "), line, prefix=prefix)
        return line.values[key]

    def _start(self, role: str, key: str) -> float:
        seconds = starts_s(self._recordings, role)
        if not seconds:
            self._unknown(f"{key}: no start was recorded; 0 is modelled")
            return 0.0
        if role == "engine" and not any(
            row.activity.value == "down" for each in self._recordings for lane in each.activity.values() for row in lane
        ):
            self._unknown(f"{key}: nobody was lost, so a replacement is modelled to take as long as the first start")
        return statistics.fmean(seconds)

    def _keep(self, what: str, line: Line, *, prefix: str) -> None:
        self._add(what, line.values, len(line.fitted), line.error, prefix)
        for key, why in line.dropped.items():
            self._unknown(f"{prefix}{key}: {why}; 0 is modelled, and what it costs lies in {', '.join(line.values)}")

    def _add(self, what: str, values: dict[str, float], count: int, error: Error, prefix: str) -> None:
        told = {f"{prefix}{key}": value for key, value in values.items()}
        self.results.append(FitResult(what=what, values=told, count=count, error=error.typical, bias=error.bias))

    def _unknown(self, text: str) -> None:
        self.unknown.append(text)
