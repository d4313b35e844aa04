"""What a process of a worker group does first, a rank and a launcher alike."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys


def settle_in() -> None:
    """Leave Ctrl-C to whoever started the process, log to its standard error, and show all stacks on SIGUSR1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
