"""The comparison of routings is the same for every seed, however many processes it is spread over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.benchmarks import routing
from penstock.benchmarks._results import Result

if TYPE_CHECKING:
    from pathlib import Path


def values(folder: Path, processes: int) -> dict[str, list[float]]:
    output = folder / f"{processes}.json"
    asked = ["--engines", "1", "3", "--sigma", "0.3", "--rounds", "1", "2", "--repetitions", "2"]
    where = ["--processes", str(processes), "--output", str(output), "--history", str(folder)]
    routing.main([*asked, *where])
    return {each.name: each.values for each in msgspec.json.decode(output.read_bytes(), type=Result).figures}


def test_processes_change_no_figure(tmp_path: Path) -> None:
    found = values(tmp_path, 1)
    assert list(found) == [f"{count} engines, sigma 0.3, {rounds} rounds" for count in (1, 3) for rounds in (1, 2)]
    assert all(len(each) == 2 for each in found.values())
    assert len({value for each in found.values() for value in each}) > 4, "seeds and loads differ"
    assert values(tmp_path, 2) == found
