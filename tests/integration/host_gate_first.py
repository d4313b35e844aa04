"""A module whose import lasts until somebody opens the pipe ``first`` for writing."""

import os
from pathlib import Path

Path(os.environ["PENSTOCK_TEST_GATES"], "first").read_bytes()
