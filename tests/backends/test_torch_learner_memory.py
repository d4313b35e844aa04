"""What ranks take to load a model of 1 GiB and to publish it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from learner_memory_cases import ENVIRONMENT, MIB, make_large_model, measure

if TYPE_CHECKING:
    from pathlib import Path

NUM_RANKS = 4
BUCKET_BYTES = 64 * MIB


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_take_their_shares_and_two_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    size_bytes = make_large_model(tmp_path / "model", 1024 * MIB)
    found = measure(tmp_path, NUM_RANKS, BUCKET_BYTES)
    with capsys.disabled():
        print(f"\nmodel of {size_bytes / MIB:,.0f} MiB; above what each rank had before, MiB:")
        for rank, used in enumerate(found):
            print(f"rank {rank}: loading {used.load_bytes / MIB:,.0f}, publishing {used.publish_bytes / MIB:,.0f}")
    for used in found:
        assert used.load_bytes <= size_bytes / NUM_RANKS + 0.25 * size_bytes
        assert used.publish_bytes <= 2 * BUCKET_BYTES
