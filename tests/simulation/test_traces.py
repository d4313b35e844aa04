"""What an actor's recorder does not look at has no stage of a group that is traced: random runs with every fault, each
observed twice. The observers that trace every group look at everything, so what the others record must be all that is
about steps, versions and the groups that they trace."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from trials.draws import draw_trial
from trials.fuzz import POLICIES, TrialRun

from penstock.runtime.observability.event_observer import EventObserver
from penstock.runtime.observability.group_spans import unpacked
from penstock.runtime.observability.lives import STAGES
from penstock.runtime.observability.spans import SpanRecorder, decoded_span
from penstock.runtime.observability.stages import StageRecorder
from penstock.runtime.observability.trace_ids import TraceIds
from penstock.runtime.observability.trackers import EventLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process
    from penstock.runtime.observability.spans import SpanTuple

SALT = bytes(range(16))
FRACTION = 0.2
OF_STEPS_AND_VERSIONS = frozenset(
    ("step", "checkpoint", "policy", "pause", "version", "publish", "digest", "fetch_weights", "apply_weights")
)


class TraceWatch:
    """Observers of every incarnation of every actor, which trace this share of the groups."""

    def __init__(self, run: TrialRun, fraction: float) -> None:
        self._host = run.host
        self._fraction = fraction
        self._recorder = SpanRecorder(max_pending=10_000_000)
        self._observers: dict[tuple[str, int], EventObserver] = {}
        run.host.watch(self)

    @property
    def spans(self) -> list[SpanTuple]:
        return [each for span in self._recorder.take(10_000_000) for each in unpacked(decoded_span(span))]

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        key = (process.name, process.epoch)
        if key not in self._observers:
            now_ns = lambda: round(1e9 * self._host.clock.now_s)  # noqa: E731
            stages = StageRecorder(self._recorder, TraceIds(SALT, self._fraction), now_ns)
            self._observers[key] = EventObserver(
                EventLog(), name=process.name, epoch=process.epoch, now_s=lambda: 0.0, stages=stages
            )
        self._observers[key].handled(event, header, commands)

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        """Not watched."""

    def heard(self, process: Process, event: Event) -> None:
        """Not watched."""

    def turned(self, process: Process) -> None:
        """Not watched."""

    def lost(self, name: str, cause: str) -> None:
        """Not watched."""


def counted(spans: Sequence[SpanTuple]) -> Counter[tuple[object, ...]]:
    """Without the ids of spans, which each recorder counts for itself; and without the links of a step, which are to
    the samples that are traced."""
    return Counter(
        (trace_id, name, start_ns, end_ns, attributes, () if name == "step" else links)
        for trace_id, _, _, name, start_ns, end_ns, attributes, links in spans
    )


def is_kept(span: SpanTuple) -> bool:
    """Whether a recorder that traces ``FRACTION`` of the groups has this one too."""
    return span[3] in OF_STEPS_AND_VERSIONS or int.from_bytes(span[0][8:], "big") < FRACTION * 2**64


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_not_looked_at_has_no_stage_of_a_traced_group(policy: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(9000, 9008):
        run = TrialRun(draw_trial(policy, seed), with_digest=False)
        all_of_them, some = TraceWatch(run, 1.0), TraceWatch(run, FRACTION)
        run.run()
        every = all_of_them.spans
        found = counted(some.spans)
        assert found == counted([span for span in every if is_kept(span)]), seed
        assert found.total() < len(every)
        seen.update(str(name) for _, name, *_ in found.elements())
    assert min(seen[name] for name in (*STAGES, "step", "version", "publish", "apply_weights")) > 0
