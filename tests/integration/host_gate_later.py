"""A module whose import lasts until somebody opens the pipe ``later`` for writing."""

import os
from pathlib import Path

Path(os.environ["PENSTOCK_TEST_GATES"], "later").read_bytes()
