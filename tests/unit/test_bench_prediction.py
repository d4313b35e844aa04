"""What the benchmark of predictions says of the machine between two runs, by the CPU time of the same work."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from penstock.backends.engines.decode_passes import DecodeBand
from penstock.benchmarks.prediction import Arm, slower

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.prediction.recorded import Recording
    from penstock.runtime.scenario import Scenario


class Told:
    """Of a recording, what is asked."""

    def __init__(self, bands: Sequence[DecodeBand]) -> None:
        self.bands = bands


def arm(bands: Sequence[DecodeBand], train_cpu_s: float) -> Arm:
    return Arm(cast("Recording", Told(bands)), cast("Scenario", None), 0.0, train_cpu_s)


def band(least: int, passes: int, pass_s: float, *, wall: float = 1.0) -> DecodeBand:
    return DecodeBand(least, passes, passes * pass_s, passes * least, 0.0, wall * passes * pass_s)


def test_passes_are_compared_with_those_of_as_many_requests_whatever_loads_a_run_has_had() -> None:
    fitted = arm([band(1, 1000, 0.001), band(16, 10, 0.003)], 0.2)
    predicted = arm([band(1, 10, 0.0012), band(16, 1000, 0.0036), band(64, 500, 0.1)], 0.22)
    found = slower(predicted, fitted)
    assert found is not None
    assert found == pytest.approx((1.2, 1.1))


@pytest.mark.parametrize(
    ("bands", "train_cpu_s"), [([band(1, 10, 0.001)], 0.0), ([], 0.2), ([band(1, 10, 0.001, wall=0.0)], 0.2)]
)
def test_nothing_is_said_where_a_run_has_not_told_of_its_cpu_time(
    bands: Sequence[DecodeBand], train_cpu_s: float
) -> None:
    told = arm([band(1, 10, 0.001)], 0.2)
    assert slower(arm(bands, train_cpu_s), told) is None
    assert slower(told, arm(bands, train_cpu_s)) is None
