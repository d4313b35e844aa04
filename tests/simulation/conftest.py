"""Makes the trials beside these tests importable: pytest's importlib mode leaves their folder off the path."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_other_files() -> None:
    """A simulation looks for garbage at its end, among all that came since the last freeze: modules and whatever else
    thousands of tests have left would be walked through each time, for as long as a short simulation takes."""
    gc.collect()
    gc.freeze()
