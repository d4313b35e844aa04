"""Makes the runs of unit and integration tests, made up and real, importable: pytest's importlib mode leaves their
folders off the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(Path(__file__).parents[1] / name) for name in ("unit", "integration")),
]
