"""What ``observability.max_disk_gb`` has to hold: eight short files of every writer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.options import most_engines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

NUM_SINGLE_ACTORS: Final = 6
SEGMENTS_PER_WRITER: Final = 8
"""So many segments of every writer fill the budget."""
MIN_SEGMENT_BYTES: Final = 64 << 10
MAX_SEGMENT_BYTES: Final = 16 << 20


def disk_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """The key to change, and what is wrong with it."""
    given, least = s.observability.max_disk_gb, least_disk_gb(s)
    if given is not None and given < least:
        yield (
            ("observability", "max_disk_gb"),
            f"{_num_writers(s)} files of events and spans are open at a time, for which at least {least:g} are needed; "
            f"found {given:g}; raise it, or set it to null for no bound",
        )


def least_disk_gb(s: Scenario) -> float:
    """The smallest budget that a run can keep to, in steps of a megabyte."""
    return math.ceil(_num_writers(s) * SEGMENTS_PER_WRITER * MIN_SEGMENT_BYTES / 1e6) / 1e3


def segment_bytes(s: Scenario) -> int:
    """From what size on a file of events or spans is closed and the next one begun; 0: never."""
    if s.observability.max_disk_gb is None:
        return 0
    share = s.observability.max_disk_gb * 1e9 / (_num_writers(s) * SEGMENTS_PER_WRITER)
    return min(MAX_SEGMENT_BYTES, int(share))


def _num_writers(s: Scenario) -> int:
    """Every actor writes its events, its spans where there are traces, and a recording where there is one."""
    others = sum(each.count for each in (s.teacher, s.reward_model) if each is not None)
    num_actors = NUM_SINGLE_ACTORS + most_engines(s.engines) + others
    return num_actors * (1 + s.observability.tracing + s.observability.record)
