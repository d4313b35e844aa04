"""Which share of a GPU each actor asks Ray for. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from penstock.messages.names import LEARNER, engine_name

if TYPE_CHECKING:
    from penstock.runtime.scenario import Scenario

FROM_RAY: Final = ("auto", "cuda")
"""Devices that Ray assigns. ``cuda:1`` is the user's own choice, ``cpu`` needs none."""


def gpu_shares(scenario: Scenario, num_gpus: float) -> dict[str, float]:
    """GPUs of each actor that gets any, by name.

    With fewer GPUs than takers as many of them as needed share one, in equal parts: Ray never splits one taker over
    two GPUs, so parts that do not fill a GPU whole would leave somebody waiting for ever.
    """
    takers = [LEARNER] if scenario.learner.backend == "torch" and scenario.learner.device in FROM_RAY else []
    if scenario.engines.backend == "torch" and scenario.engines.device in FROM_RAY:
        takers += [engine_name(index) for index in range(scenario.engines.count)]
    if not takers or num_gpus < 1:
        return {}
    return dict.fromkeys(takers, 1.0 / math.ceil(len(takers) / math.floor(num_gpus)))
