"""Fixtures of the chaos tests."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE),
    str(HERE.parent / "integration"),
    str(HERE.parent / "simulation"),
]  # the harness beside the tests, and that of real runs
