"""The process that plays episodes, as its engine's backend sees it. What it says that is no message of ours ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.episodes.functions.wire import SAID, encoded
from penstock.backends.processes.function_process import FunctionProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.episodes.functions.wire import Order, Said

MODULE: Final = "penstock.backends.episodes.functions.worker"


class PlayerProcess(FunctionProcess):
    """See the module."""

    def __init__(self, now_s: float) -> None:
        super().__init__(MODULE)
        self.started_at_s = now_s
        self.is_loaded = False
        self.fault = ""
        """Why it is gone, where that is not how it ended."""

    def send(self, order: Order) -> None:
        """Send this; whatever the socket does not take now follows with :meth:`flush`."""
        self.write(encoded(order))

    def receive(self) -> Iterator[Said]:
        """What it has said since; afterwards ``is_gone`` says whether more can come."""
        for body in self.bodies():
            try:
                yield SAID.decode(body)
            except msgspec.MsgspecError as error:
                self.is_gone, self.fault = True, f"said what nobody understands ({error})"
                return
