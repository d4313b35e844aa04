"""Makes the trials beside these tests importable: pytest's importlib mode leaves their folder off the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
