"""From recorded spans to the run's folder, and to a collector where there is one: the background thread.

Invariants:

* Nothing here runs on the thread of an actor. Exporting is late by at most the interval, never in the way.
* ``close`` returns within its deadline, whatever the file and the collector do.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.observability.span_collector import SpanCollector
    from penstock.runtime.observability.spans import SpanRecorder

SPANS_PER_EXPORT: Final = 512
EXPORT_INTERVAL_S: Final = 0.5
NEWS_INTERVAL_S: Final = 0.02
"""Between two exports where the recorder asks for them; what comes meanwhile goes together."""


class SpanSink(Protocol):
    """Where spans are written."""

    def write(self, spans: Sequence[bytes]) -> None:
        """Raises ``OSError`` where they cannot be written."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class SpanExporterThread:
    """Drains a recorder into the run's folder, and to a collector where there is one."""

    def __init__(
        self,
        recorder: SpanRecorder,
        file: SpanSink,
        *,
        collector: SpanCollector | None = None,
        interval_s: float = EXPORT_INTERVAL_S,
    ) -> None:
        self.num_exported = 0
        """Spans that are in the file."""
        self.error: OSError | None = None
        """Why the file could not be written; spans from then on are dropped and counted."""
        self._recorder = recorder
        self._file = file
        self._interval_s = interval_s
        self._num_lost = 0
        self._collector = collector
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="span-exporter", daemon=True)

    @property
    def num_dropped(self) -> int:
        """Spans that are not in the file."""
        return self._recorder.num_dropped + self._num_lost

    @property
    def num_collected(self) -> int:
        """Spans that the collector has taken."""
        return 0 if self._collector is None else self._collector.num_exported

    @property
    def num_not_collected(self) -> int:
        """Spans that did not reach the collector, because it was slow or refused them."""
        return 0 if self._collector is None else self._collector.num_dropped

    def start(self) -> None:
        """Begin to drain."""
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Write out what was recorded so far and end; returns whether everything was done in time."""
        deadline = time.monotonic() + timeout_s
        self._stop.set()
        self._recorder.has_news.set()
        self._thread.join(timeout_s)
        is_done = not self._thread.is_alive()
        if self._collector is not None:
            is_done = self._collector.close(deadline) and is_done
        if not self._thread.is_alive():
            self._file.close()
        return is_done

    def _run(self) -> None:
        has_news = self._recorder.has_news
        while not self._stop.is_set():
            is_asked = has_news.wait(self._interval_s)
            has_news.clear()
            self._drain()
            if is_asked:
                self._stop.wait(min(NEWS_INTERVAL_S, self._interval_s))
        self._drain()

    def _drain(self) -> None:
        while batch := self._recorder.take(SPANS_PER_EXPORT):
            self._write(batch)
            if self._collector is not None:
                self._collector.offer(batch)

    def _write(self, spans: list[bytes]) -> None:
        if self.error is None:
            try:
                self._file.write(spans)
            except OSError as error:
                # A full disk must not end the actor: what may be lost here is the trace, and it is counted.
                self.error = error
            else:
                self.num_exported += len(spans)
                return
        self._num_lost += len(spans)
