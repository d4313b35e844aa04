"""What servers call the weights of a publish, as version and as key of the prefix cache.

The number of the publish belongs to it: the same version may be published twice with other bytes, after a publish that
failed, and what was cached under the first must not be found under the second.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from penstock.messages.parts import joined_spans
from penstock.messages.samples import VersionSpan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.backends.engines.served.base.calls import VersionTokens
    from penstock.messages.weights import WeightManifest

_LABEL: Final = re.compile(r"v(?P<version>\d+)\.(?P<epoch>\d+)\.(?P<publish>\d+)")


def label_of(manifest: WeightManifest) -> str:
    """``v12.1.13``: version, incarnation of the learner, number of the publish."""
    return f"v{manifest.version}.{manifest.learner_epoch}.{manifest.publish}"


def version_of(label: str) -> int | None:
    """The version in a label; None when it is not one of ours."""
    match = _LABEL.fullmatch(label)
    return None if match is None else int(match["version"])


def spans_of(versions: Iterable[VersionTokens], fallback: int) -> tuple[VersionSpan, ...]:
    """Spans by version number, neighbours of one version joined; ``fallback`` stands for labels that are not ours."""
    found = ((version_of(label), num_tokens) for label, num_tokens in versions)
    return joined_spans(VersionSpan(fallback if version is None else version, count) for version, count in found)
