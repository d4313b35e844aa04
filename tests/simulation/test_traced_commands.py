"""What untraced samples spare: the observer looks at no command of a Scorer or a Filter that has heard of one. It may,
as what these do for a sample is about its group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.messages.commands import Send
from penstock.messages.flow import GroupAdmitted, GroupRejected
from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.observability.spans import SpanRecorder
from penstock.runtime.observability.stages import StageRecorder
from penstock.runtime.observability.subjects import KEY_OF, OF_ONE_GROUP, SUBJECTS
from penstock.runtime.observability.trace_ids import TraceIds
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process

SCENARIO = Path(__file__).parents[2] / "scenarios" / "simulated_1024_engines.yaml"
SMALL = ("engines.count=8", "learner.groups_per_batch=8", "run.num_steps=5")
COMMANDS = frozenset(StageRecorder(SpanRecorder(), TraceIds(bytes(16), 1.0)).on_command)


class Groups:
    """Notes whose group each command is about that follows from one of these events."""

    def __init__(self) -> None:
        self.num_followed: dict[type[Event], int] = dict.fromkeys(OF_ONE_GROUP, 0)

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        if type(event) not in OF_ONE_GROUP:
            return
        group_id = KEY_OF[type(event)](event).group_id
        for command in commands:
            assert type(command) not in COMMANDS, f"{command} begins a stage"
            if isinstance(command, Send) and type(command.event) in SUBJECTS:
                assert group_of(command.event) == group_id
                self.num_followed[type(event)] += 1

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None: ...

    def heard(self, process: Process, event: Event) -> None: ...

    def turned(self, process: Process) -> None: ...

    def lost(self, name: str, cause: str) -> None: ...


def group_of(event: Event) -> int:
    if isinstance(event, GroupAdmitted):
        return event.group.group_id
    if isinstance(event, GroupRejected):
        return event.group_id
    return KEY_OF[type(event)](event).group_id


@pytest.mark.parametrize("on_failed", ["refill", "reject", "shrink"])
def test_what_scorer_and_filter_do_for_a_sample_is_about_its_group(on_failed: str) -> None:
    overrides = (*SMALL, "engines.simulated.failure_rate=0.2", f"filter.on_failed_sample={on_failed}")
    simulation, groups = Simulation(load_scenario(SCENARIO, overrides)), Groups()
    simulation.host.watch(groups)
    assert simulation.run(None).completed
    judged = [number for kind, number in groups.num_followed.items() if kind.__name__ != "SampleGenerated"]
    assert all(judged), groups.num_followed
