"""Makes the made-up runs of the unit tests importable: pytest's importlib mode leaves their folder off the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]
