"""Engines whose machines are taken, with word of it and without."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from trials.elastic_watch import ElasticWatch
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun, living_engines
from trials.trial import LONG_RESPONSES, Trial

from penstock.messages.commands import Generate, Send
from penstock.messages.flow import SampleIssued
from penstock.messages.local import GenerationEnded
from penstock.messages.names import PROMPT_SOURCE
from penstock.messages.training import UpdateMode
from penstock.runtime.hosts.virtual.host import IdleWatcher
from penstock.runtime.hosts.virtual.supervisor import Supervisor

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.samples import SampleKey
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.host import VirtualHost
    from penstock.runtime.hosts.virtual.process import Process


def lost_tokens(run: TrialRun) -> int:
    metrics = run.host.supervisor.processes[PROMPT_SOURCE].shell.metrics
    return int(next(each.value or 0 for each in metrics if each.name == "prompt_source/lost_tokens"))


def taken(notice_s: float) -> Trial:
    """Two engines, one of which loses its machine in the midst of its samples."""
    fault = Fault(at_s=40.0, kind=FaultKind.NOTICE, target="engine/1", duration_s=notice_s)
    return Trial(
        seed=5,
        policy="fully_async",
        max_staleness=2,
        update_mode=UpdateMode.IN_FLIGHT,
        num_steps=6,
        groups_per_batch=4,
        num_engines=2,
        num_slots=4,
        latency=LONG_RESPONSES,
        faults=(fault,),
    )


class LossWatch(IdleWatcher):
    """Of samples that engine/1 had when its machine was taken: how many of their tokens are made again."""

    def __init__(self, host: VirtualHost, at_s: float) -> None:
        self._clock, self._at_s = host.clock, at_s
        self._begun: dict[SampleKey, tuple[float, int]] = {}
        self.num_lost: list[int] = []

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        if (process.name, process.epoch) == ("engine/1", 0) and isinstance(event, GenerationEnded):
            self._begun.pop(event.key, None)
        for command in commands:
            match command:
                case Generate(key=key, prefix=prefix) if (process.name, process.epoch) == ("engine/1", 0):
                    self._begun[key] = (self._clock.now_s, 0 if prefix is None else prefix.num_tokens)
                case Send(event=SampleIssued(key=key, prefix=prefix)) if key in self._begun:
                    begun_s, num_tokens = self._begun.pop(key)
                    made = num_tokens + int((self._at_s - begun_s - LONG_RESPONSES.prefill_s) / LONG_RESPONSES.token_s)
                    self.num_lost.append(made - (0 if prefix is None else prefix.num_tokens))
                case _:
                    pass


def test_with_five_seconds_notice_no_token_is_lost() -> None:
    run = TrialRun(taken(5.0), with_digest=False)
    watch = ElasticWatch(run.host, salvages=True, loses_nothing=True)
    run.host.watch(watch)
    run.run()
    assert watch.num_left_early == 1
    assert watch.num_handed_back > 0
    assert lost_tokens(run) == 0
    assert run.oracle.num_generated_twice == 0
    assert living_engines(run) == {"engine/0", "engine/1"}


def test_without_notice_at_most_those_since_the_last_report_are_lost() -> None:
    trial = taken(0.001)
    run = TrialRun(trial, with_digest=False)
    watch = LossWatch(run.host, 40.0)
    run.host.watch(watch)
    run.run()
    assert len(watch.num_lost) == trial.num_slots
    assert 0 < max(watch.num_lost) <= trial.scenario.engines.progress_tokens
    assert min(watch.num_lost) >= 0
    assert living_engines(run) == {"engine/0", "engine/1"}


@pytest.mark.parametrize("notice_s", [5.0, 30.0])
def test_the_place_of_a_taken_machine_is_filled_when_its_notice_has_run_out(notice_s: float) -> None:
    run = TrialRun(taken(notice_s), with_digest=False)
    joined: list[float] = []
    start = Supervisor.start_now

    def noted(self: Supervisor, name: str, epoch: int) -> None:
        if (name, epoch) == ("engine/1", 1):
            joined.append(run.host.clock.now_s)
        start(self, name, epoch)

    with patch.object(Supervisor, "start_now", noted):
        run.run()
    [at_s] = joined
    assert 40.0 + notice_s <= at_s < 41.0 + notice_s
