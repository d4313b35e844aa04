"""How quick a candidate should be by the bound of its schedule, in microseconds: what is simulated first.

The terms of :mod:`penstock.runtime.observability.explain.bounds` from the models: ``g`` with as many requests side by
side as slots, KV budget and the bound of staleness allow, ``L`` of the longest response that a batch can be expected to
have. Between the bound without ``L`` and the one with it the middle is taken. Queues, chance and what actors say to
each other are not in it: that is what simulations are for.

Beside it stands what no simulation of the candidate passes: where one that was played is better, it need not be played.
"""

from __future__ import annotations

import math
from statistics import NormalDist, fmean, pstdev
from typing import TYPE_CHECKING, Final

from penstock.backends.simulated.lengths import quantile
from penstock.messages.training import UpdateMode
from penstock.runtime.observability.explain.bounds import Bound, Terms, bound_from

if TYPE_CHECKING:
    from penstock.backends.engines.options import LatencyOptions
    from penstock.runtime.scenario import Scenario

_NORMAL: Final = NormalDist()
_NUM_POINTS: Final = 400


class Estimator:
    """Of scenarios that have the lengths, batches and rewards of one."""

    def __init__(self, scenario: Scenario) -> None:
        """
        Args:
            scenario: modelled.
        """
        sampling, learner = scenario.sampling, scenario.learner
        model, most = scenario.engines.simulated, sampling.max_response_tokens
        self._batch_samples = learner.groups_per_batch * sampling.samples_per_group
        self._samples_per_group = sampling.samples_per_group
        lengths = [_length(model, most, (i + 0.5) / _NUM_POINTS) for i in range(_NUM_POINTS)]
        self._mean = fmean(lengths)
        self._deviation = pstdev(lengths) / self._mean
        self._alike = 1 + (sampling.samples_per_group - 1) * model.response_tokens_correlation
        self._longest = _length(model, most, 1 - 1 / (self._batch_samples + 1))
        self._made_share = 1 / max(1e-3, 1 - _turned_away(scenario))

    def chance(self, num_steps: int) -> float:
        """Three standard deviations of the mean length over the samples of so many steps, as a share of it."""
        return 3 * self._deviation * math.sqrt(self._alike / (self._batch_samples * num_steps))

    def tokens_per_s(self, scenario: Scenario) -> float:
        """Trained tokens a second of this modelled scenario, about."""
        engines, learner = scenario.engines, scenario.learner.simulated
        model = engines.simulated
        running = self._running(scenario)
        swap_s = model.apply_weights_s + model.apply_byte_s * learner.size_bytes
        is_colocated = engines.placement == "colocate"
        turn_s = model.sleep_s + model.wake_s + learner.sleep_s + learner.wake_s if is_colocated else 0.0
        publish_s = learner.publish_s + learner.publish_byte_s * learner.size_bytes
        bound = self._bound(scenario, self._generation_s(scenario, running) + swap_s, publish_s + turn_s, running)
        most_s = bound.least_s if bound.most_s is None else bound.most_s
        return self._batch_samples * self._mean / ((bound.least_s + most_s) / 2)

    def most_tokens_per_s(self, scenario: Scenario) -> float:
        """What none of its simulations passes, but for the lengths of its samples (:meth:`chance`): slots that are
        never empty, no last response to wait for, swaps and publishing that take no time."""
        full = self._running(scenario)
        generation_s = min(self._generation_s(scenario, running) for running in (1.0, full))
        bound = self._bound(scenario, generation_s / scenario.staleness.reuse, 0.0, full)
        return self._batch_samples * self._mean / max(1e-9, bound.least_s)

    def _bound(self, scenario: Scenario, generation_s: float, exposed_s: float, running: float) -> Bound:
        staleness = scenario.staleness
        return bound_from(
            Terms(
                generation_s=generation_s,
                longest_s=scenario.engines.simulated.prefill_s + self._longest * self._token_s(scenario, running),
                training_s=self._training_s(scenario),
                exposed_s=exposed_s,
                measured_s=0.0,
                max_staleness=staleness.max_staleness or 0,
                drains=staleness.update_mode is UpdateMode.DRAIN,
                is_colocated=scenario.engines.placement == "colocate",
            )
        )

    def _training_s(self, scenario: Scenario) -> float:
        """With even shares, in micro-batches that are full."""
        model, tokens = scenario.learner.simulated, self._batch_samples * self._mean
        rounds = math.ceil(tokens / (scenario.learner.max_tokens_per_micro_batch * model.num_ranks))
        return model.step_s + model.micro_batch_s * rounds + model.token_s * tokens

    def _generation_s(self, scenario: Scenario, running: float) -> float:
        """Of a batch, with so many requests on every engine all the time. It falls or grows with their number, all
        along, so none between two numbers is quicker than the quicker of both."""
        engines, model = scenario.engines, scenario.engines.simulated
        once = 1 / self._samples_per_group
        read = once * model.prompt_tokens + (1 - once) * min(model.prompt_reread_tokens, model.prompt_tokens)
        prompt_s = model.prefill_token_s * read / engines.simulated_speed
        sample_s = model.prefill_s + self._mean * self._token_s(scenario, running) + running * prompt_s
        return self._batch_samples * self._made_share * sample_s / (engines.count * running)

    def _token_s(self, scenario: Scenario, running: float) -> float:
        model = scenario.engines.simulated
        held = running * (model.prompt_tokens + self._mean / 2)
        token_s = model.token_s + max(0.0, running - 1) * model.token_load_s + held * model.context_token_s
        return token_s / scenario.engines.simulated_speed

    def _running(self, scenario: Scenario) -> float:
        """Requests that an engine runs side by side at most, as a mean over all engines."""
        engines, model = scenario.engines, scenario.engines.simulated
        granted = self._batch_samples * ((scenario.staleness.max_staleness or 0) + 1) / engines.count
        fitting = math.inf if model.kv_tokens is None else model.kv_tokens / (model.prompt_tokens + self._mean / 2)
        return min(granted, max(1.0, min(engines.slots, fitting)))


def _length(model: LatencyOptions, most: int, share: float) -> float:
    if model.response_tokens_quantiles:
        length = quantile(model.response_tokens_quantiles, share)
    else:
        length = model.response_tokens_median * math.exp(model.response_tokens_sigma * _NORMAL.inv_cdf(share))
    return max(1.0, min(float(most), length))


def _turned_away(scenario: Scenario) -> float:
    """Share of the groups that the filter turns away, as their samples all earn the same."""
    if not scenario.filter.drop_zero_spread:
        return 0.0
    reward, size = scenario.reward.simulated, scenario.sampling.samples_per_group
    by_chance = reward.success_rate**size + (1 - reward.success_rate) ** size
    return reward.constant_rate + (1 - reward.constant_rate) * by_chance
