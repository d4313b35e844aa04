"""What a learner exports while it trains on: engines are told when the digest is there.

Invariants:

* One export is under way at a time: ``begin`` after ``wait`` only. So they end in the order in which they began.
* Each is said to be copied first, and then ends in exactly one call of ``done`` or ``fail``.

| wait | who ends it |
|---|---|
| ``wait`` | the threads that hash the copy, which is there |
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.backends.weights.protocol import BackgroundExporter
from penstock.messages.local import WeightsCopied, WeightsPublished

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.protocol import Fail
    from penstock.backends.weights.protocol import BegunExport, WeightExporter
    from penstock.backends.weights.stream import AnyWeights
    from penstock.messages.weights import Canary, WeightManifest


def begin_export(
    exporter: WeightExporter, weights: AnyWeights, *, version: int, publish: int, canary: Canary | None
) -> BegunExport | WeightManifest:
    """Export these as far as they are needed for it: all of it where the transport cannot do the rest by itself.

    Raises:
        WeightExportError: they cannot be written.
    """
    if isinstance(exporter, BackgroundExporter):
        return exporter.begin(weights, version=version, publish=publish, canary=canary)
    return exporter.export(weights, version=version, publish=publish, canary=canary)


class ExportsUnderWay:
    """The thread that waits for a digest while training goes on."""

    def __init__(self, *, done: Callable[[WeightsCopied | WeightsPublished], None], fail: Fail) -> None:
        self._done = done
        self._fail = fail
        self._thread: threading.Thread | None = None

    def begin(self, export: BegunExport, version: int) -> None:
        """The weights of this version are copied; say when engines can fetch them."""
        self._done(WeightsCopied(version=version, size_bytes=export.size_bytes))
        self._thread = threading.Thread(target=self._finish, args=(export,), name="export", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until none is under way."""
        if self._thread is not None:
            self._thread.join()

    def _finish(self, export: BegunExport) -> None:
        try:
            manifest = export.manifest()
        except BaseException as error:
            # The thread's only way to tell; and the learner must not go on as if engines could be told.
            self._fail(error)
            return
        self._done(WeightsPublished(manifest=manifest))
