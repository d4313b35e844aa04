"""SkyPilot's six runs of slime: a coding agent, Qwen3-14B, 1 to 3 engines of an H100 each, four H100 that train.

Published are the times of two steps of each run, of which the second is steady, and how many requests SGLang ran and
had in its queue (``llm/slime/benchmark`` in skypilot-org/skypilot). Fitted are the synchronous runs with the fewest and
the most engines; the other one and the three that train one step off are predicted.

slime's ``train_async.py`` finishes the next batch before it takes new weights, so that a step takes
``max(generation, training) + weights``; no policy here waits for that. What ``one_step_off`` would take as it is here
is simulated beside it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.benchmarks.published._model import Setting, bisected

GENERATION_S: Final = {1: 1267.9, 2: 643.3, 3: 620.0}
"""Of the synchronous runs, by engines."""
TRAINING_S: Final = {1: 396.2, 2: 371.1, 3: 377.7}
PUBLISH_S: Final = {1: 31.6, 2: 31.0, 3: 32.2}
MEASURED_S: Final = {
    ("sync", 1): 1697.5, ("sync", 2): 1047.1, ("sync", 3): 1031.6,
    ("one_step_off", 1): 1200.4, ("one_step_off", 2): 840.3, ("one_step_off", 3): 660.8,
}  # fmt: skip
"""Step, by policy and engines."""
SLOTS: Final = 54
"""Requests that the only engine of the first run ran, as a mean over the tenths of the run in which 20 or more waited:
what its memory takes."""
LOAD_SHARE: Final = 0.005
"""token_load_s ÷ token_s: the simulated engine's default."""
MEDIAN: Final = 1000.0
"""Of the length of a whole episode, turns and tools together; its unit does not matter."""


class Predicted(NamedTuple):
    """Seconds a step."""

    as_slime: dict[tuple[str, int], float]
    """Of the runs that nothing was fitted to, by policy and engines."""
    as_here: dict[int, float]
    """With this system's ``one_step_off``, by engines."""


def setting(engines: int, sigma: float, slots: int, token_s: float = 0.01) -> Setting:
    """The synchronous run with so many engines, without training."""
    return Setting(
        engines=engines, group_size=8, groups_per_batch=23, median=MEDIAN, sigma=sigma, token_s=token_s,
        token_load_s=LOAD_SHARE * token_s, slots=slots, num_steps=9,
    )  # fmt: skip


def predicted(seed: int, fitted_on: tuple[int, int] = (1, 3), slots: int = SLOTS) -> Predicted:
    """Fit two parameters to two times of generation, and play the rest.

    Args:
        seed: of the simulations.
        fitted_on: engines of the two synchronous runs, fewer and more.
        slots: requests that an engine runs at a time.
    """
    few, many = fitted_on

    def ratio(sigma: float) -> float:
        return setting(few, sigma, slots).step_time_s(seed) / setting(many, sigma, slots).step_time_s(seed)

    # The longer the tail, the less further engines help; the time of a token then scales everything.
    sigma = bisected(GENERATION_S[few] / GENERATION_S[many], ratio, 0.02, 0.6, rounds=6)
    generation_s = {engines: setting(engines, sigma, slots).step_time_s(seed) for engines in TRAINING_S}
    unit = sum(GENERATION_S[each] / generation_s[each] for each in fitted_on) / 2
    training_s = sum(TRAINING_S[each] for each in fitted_on) / 2
    publish_s = sum(PUBLISH_S[each] for each in fitted_on) / 2
    as_slime: dict[tuple[str, int], float] = {}
    for policy, engines in MEASURED_S:
        made_s = unit * generation_s[engines]
        if policy == "one_step_off":
            as_slime[policy, engines] = max(made_s, training_s) + publish_s
        elif engines not in fitted_on:
            synchronous = setting(engines, sigma, slots, 0.01 * unit)
            as_slime[policy, engines] = synchronous._replace(step_s=training_s, publish_s=publish_s).step_time_s(seed)
    as_here = {
        engines: setting(engines, sigma, slots, 0.01 * unit)
        ._replace(step_s=training_s, publish_s=publish_s, policy="one_step_off")
        .step_time_s(seed)
        for engines in TRAINING_S
    }
    return Predicted(as_slime, as_here)
