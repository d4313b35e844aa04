"""Scenarios of runs that others have published, from few figures, and the one-dimensional fit that these allow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.runtime.prediction.forecast import play
from penstock.runtime.scenario.modelled import modelled_from
from penstock.runtime.scenario.source import Place, Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.runtime.prediction.steady import Steady

NO_LIMIT: Final = 1 << 20


class Setting(NamedTuple):
    """A run. Times are in seconds; the unit of lengths is whatever ``token_s`` is the time of."""

    engines: int
    group_size: int
    groups_per_batch: int
    median: float
    sigma: float
    token_s: float
    quantiles: tuple[float, ...] = ()
    """Of the lengths, in place of median and sigma."""
    token_load_s: float = 0.0
    context_token_s: float = 0.0
    slots: int = NO_LIMIT
    longest: int = NO_LIMIT
    step_s: float = 1e-6
    publish_s: float = 0.0
    apply_s: float = 0.0
    """Of new weights, while which requests are held."""
    policy: str = "sync"
    max_staleness: int | None = None
    update_mode: str | None = None
    on_stale: str = "wait"
    publish_every: int = 1
    num_steps: int = 12

    def played(self, seed: int) -> Steady:
        """The steady part of it."""
        given = {"max_staleness": self.max_staleness, "update_mode": self.update_mode}
        staleness = {"policy": self.policy, "on_stale": self.on_stale} | {
            key: value for key, value in given.items() if value is not None
        }
        data = {
            "run": {"name": "published", "num_steps": self.num_steps},
            "model": {"max_context": 2 * self.longest},
            "data": {"path": "lines:1000000"},
            "sampling": {"samples_per_group": self.group_size, "max_response_tokens": self.longest},
            "reward": {"function": "lines"},
            "filter": {"drop_zero_spread": False},
            "staleness": staleness,
            "weights": {"publish_every": self.publish_every},
            "engines": {
                "count": self.engines,
                "progress_tokens": NO_LIMIT,
                "slots": min(self.slots, self.group_size * self.groups_per_batch * (2 + (self.max_staleness or 1))),
                "simulated": {
                    "response_tokens_median": self.median, "response_tokens_sigma": self.sigma,
                    "response_tokens_quantiles": list(self.quantiles),
                    "token_s": self.token_s, "token_load_s": self.token_load_s,
                    "context_token_s": self.context_token_s, "prefill_s": 0.0, "fetch_weights_s": 0.0,
                    "apply_weights_s": self.apply_s,
                },
            },
            "learner": {
                "groups_per_batch": self.groups_per_batch,
                "simulated": {"step_s": self.step_s, "publish_s": self.publish_s, "checkpoint_s": 0.0},
            },
        }  # fmt: skip
        source = Source(data, {(): Place("a published run", Path.cwd())})  # type: ignore[arg-type]
        return play(modelled_from(source)[0], seed)

    def step_time_s(self, seed: int) -> float:
        """Of the steady part; a publish counts as many steps as there are between two."""
        return self.played(seed).step_s * self.publish_every


def bisected(wanted: float, falling: Callable[[float], float], low: float, high: float, *, rounds: int = 9) -> float:
    """The argument at which a falling function comes closest to ``wanted``; an end, where it lies beyond."""
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return (low + high) / 2
