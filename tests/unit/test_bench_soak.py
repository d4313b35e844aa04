"""What a long run's looks at its processes come to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.benchmarks.soak import Look, course_of, soaked

if TYPE_CHECKING:
    from pathlib import Path


def looks(*own_mb: float, num_files: int = 80) -> list[Look]:
    return [Look(each, num_files) for each in own_mb]


@pytest.mark.parametrize(
    ("seen", "is_flat"),
    [
        (looks(20, 60, *[100] * 8), True),  # what is taken in the first fifth is no growth
        (looks(*[100] * 9, 104), True),
        (looks(*range(100, 110)), False),
        (looks(*[100] * 4, 102, 102, 104, 104, 106, 106), False),
        (looks(*[100] * 4, 101, 101, 103, 103, 104, 104), True),
        (looks(*[20] * 4, 21, 21, 22, 22, 24, 24), True),  # a few megabytes are none
        (looks(*[20] * 4, 22, 22, 24, 24, 26, 26), False),
        (looks(*[100] * 8, 120, 120), True),  # more at once than ever before
        (looks(*[100] * 4, *[110] * 4, 120, 120), False),
        (looks(*[100] * 8, 180, 180), False),  # that much is not freed memory
        (looks(*[100] * 8, 60, 60), True),
        ([*looks(*[100] * 8), *looks(100, 100, num_files=81)], False),
        (looks(100), True),
    ],
)
def test_what_rises_again_and_again_after_the_start_is_growth(seen: list[Look], is_flat: bool) -> None:
    assert course_of(seen).is_flat == is_flat


def test_every_actor_of_a_real_run_is_looked_at(tmp_path: Path) -> None:
    found = soaked(tmp_path, minutes=0.1, every_s=0.5)
    assert {"driver", "learner", "engine-0", "buffer", "scorer", "filter", "prompt_source"} <= found.looks.keys()
    assert all(seen[-1].own_mb > 5 and seen[-1].num_files > 10 for seen in found.looks.values()), found.looks
    assert found.samples_per_s > 0
    assert {"ledger", "events", "metrics"} <= found.disk_mb.keys()
