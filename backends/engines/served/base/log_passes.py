"""Times a server's decode passes by what its log says of them, where nobody else does.

A line comes every so many passes, with the requests of the last one and the tokens a second since the line before.
Where no prompt was read between two in a row, nobody came; where the second names hardly fewer requests, the passes had
the mean of both, and took that ÷ tokens a second each. With drafts, which make several tokens in a pass, this is the
time of a token of each request, which is what is asked for.

Invariants:

* Lines are foreign text. One that tells of passes in unknown words is counted, and nothing else comes of it.
* Stretches in which a call may have held the server up do not count, and neither do those that began before it.
* What requests hold is the server's figure or the sum of what they have told here, whichever is more: the server
  counts a prefix once that several share. Where more have told here than run, the line is late, and its figure counts.
* Seconds are of the wall clock. Nothing is asked of the server.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.engines.decode_passes import DecodePasses
from penstock.backends.engines.served.base.settings import Decoded, Told
from penstock.messages.base import Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from penstock.backends.engines.served.base.launched import LaunchedServer
    from penstock.backends.engines.served.base.settings import LogWords

ALIKE: Final = 0.8
"""Of the requests at its beginning, so many have to be left at the end of a stretch that counts."""
UNREADABLE: Final = "engine/unreadable_pass_lines"


class _Point(NamedTuple):
    """Where a stretch may begin."""

    num_running: int
    context_tokens: int


class LogPasses:
    """Of one engine. For one thread; another may read the metrics."""

    def __init__(self, held: Callable[[], Sequence[int]]) -> None:
        """``held``: tokens that each request holds now of which the server has told some."""
        self._held = held
        self._passes = DecodePasses()
        self._per_line = self._num_unreadable = self._num_calls = 0
        self._before: _Point | None = None
        self._words: LogWords

    def follow(self, server: LaunchedServer, passes_per_line: int) -> None:
        """Read the log of this server, which has a line every so many passes, from here on."""
        self._words, self._per_line = server.settings.log_words, passes_per_line
        server.on_line = self.take

    def take(self, line: str) -> None:
        """One line of the log."""
        told = self._words.passes_in(line)
        if told is None:
            return
        before, self._before = self._before, None
        if told is Told.UNREADABLE:
            self._num_unreadable += 1
        if not isinstance(told, Decoded) or self._num_calls:
            return
        held = self._held()
        known = sum(held) if len(held) <= told.num_running else 0
        now = self._before = _Point(told.num_running, max(told.num_tokens, known))
        if before is None or not before.num_running >= now.num_running >= max(1, ALIKE * before.num_running):
            return
        if told.tokens_per_s > 0:
            running = (before.num_running + now.num_running) / 2
            # Not by what is held in the end: those that have ended with the last pass hold nothing any more.
            context = before.context_tokens * running / before.num_running + running * self._per_line / 2
            self._passes.add_alike(self._per_line, running, context, running / told.tokens_per_s)

    @contextlib.contextmanager
    def held_up(self) -> Generator[None]:
        """Around calls that may stop the server from making passes; may be nested."""
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._before = None

    def metrics(self) -> tuple[Metric, ...]:
        """Those of :class:`.DecodePasses`, and how many lines could not be read; nothing where no log is followed."""
        if not self._per_line:
            return ()
        return (*self._passes.metrics(), Metric(UNREADABLE, self._num_unreadable))
