"""No transport at all: for runs in which no engine holds weights.

Versions are announced as ever, since engines that answer from rows stamp what they give with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.weights.spec import NONE
from penstock.messages.weights import WeightManifest

if TYPE_CHECKING:
    from penstock.backends.weights.stream import AnyWeights
    from penstock.messages.weights import Canary


class NoWeightsExporter:
    """The learner's end: describes each publish, and carries none."""

    def __init__(self, learner_epoch: int) -> None:
        self._epoch = learner_epoch

    def export(self, tensors: AnyWeights, *, version: int, publish: int, canary: Canary | None) -> WeightManifest:
        """See :class:`~penstock.backends.weights.protocol.WeightExporter`. The digest is that of nothing."""
        return WeightManifest(
            version=version,
            publish=publish,
            learner_epoch=self._epoch,
            transport=NONE,
            location="",
            size_bytes=0,
            digest=NONE,
        )

    def release(self, below_version: int) -> None:
        """Nothing was kept."""

    def close(self) -> None:
        """Nothing is left."""
