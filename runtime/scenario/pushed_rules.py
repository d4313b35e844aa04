"""Groups that are pushed from outside: what they leave no room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.engines.spec import are_modelled, some_can
from penstock.backends.protocol import Capability
from penstock.messages.training import OnStale

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


def pushed_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """The key to change, and what is wrong with it."""
    if not some_can(s.engines, Capability.FROM_ROWS) and not are_modelled(s.engines):
        yield (
            ("data", "source"),
            "pushed groups are answered by an engine of the backend recorded, and the run has none; set "
            "engines.backend: recorded, or a block of that backend under engines.more",
        )
    if s.staleness.on_stale is not OnStale.WAIT:
        yield (
            ("staleness", "on_stale"),
            f"is {s.staleness.on_stale}; a pushed group that was taken is never too old, and none is drawn again; set "
            "it to wait",
        )
    if s.staleness.over_sampling != 1.0:
        yield (
            ("staleness", "over_sampling"),
            f"is {s.staleness.over_sampling:g}; what is too much would be given up, and was taken from somebody; set "
            "it to 1",
        )
    for name in ("teacher_prompt_key", "num_retries_key"):
        if getattr(s.data, name) is not None:
            yield ("data", name), "names a column, and pushed groups have none; set it to null"
    if s.data.metadata_keys:
        yield ("data", "metadata_keys"), "a pushed group brings its metadata with it; remove it"
    if s.data.source_options:
        yield ("data", "source_options"), "are for a class, and pushed groups come from outside; remove them"
