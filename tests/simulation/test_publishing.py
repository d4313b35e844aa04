"""Weights that go wrong on the virtual host: what a bad publish costs, and what it may never do."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from trials.draws import draw_trial
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun
from trials.trial import Trial

from penstock.actors.learner.machine import Learner
from penstock.messages.commands import Send, Train
from penstock.messages.flow import SampleGenerated
from penstock.messages.local import WeightsSwapped
from penstock.messages.names import LEARNER
from penstock.messages.training import NoticeGiven, UpdateMode
from penstock.messages.weights import PublishFailed, VersionAnnounced, WeightsExported
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from penstock.backends.simulated.engine import SimulatedEngine
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process


def trial(*faults: Fault, **fields: Any) -> Trial:  # noqa: ANN401 - fields of a trial
    values: dict[str, Any] = {
        "seed": 11,
        "policy": "fully_async",
        "max_staleness": 2,
        "update_mode": UpdateMode.IN_FLIGHT,
        "num_steps": 6,
        "num_engines": 3,
        "faults": faults,
    }
    return Trial(**(values | fields))


class Watch(IdleWatcher):
    """Publishes, what failed, and which engine incarnations made tokens of which versions."""

    def __init__(self, run: TrialRun) -> None:
        self.exported: list[WeightsExported] = []
        self.failed: list[PublishFailed] = []
        self.announced: list[int] = []
        self.num_wrong = 0
        """Swaps that left wrong weights in place."""
        self._never_right: set[tuple[str, int]] = set()
        """Engine and version: it was wrong there, and has not been right since."""
        self.notices: list[str] = []
        self.causes: list[str] = []
        run.host.watch(self)

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        if isinstance(event, PublishFailed):
            self.failed.append(event)
        if isinstance(event, WeightsSwapped):
            is_wrong = process.shell.machine.state == "spoilt"
            self.num_wrong += is_wrong
            (self._never_right.add if is_wrong else self._never_right.discard)((process.name, event.version))
        for command in commands:
            match command:
                case Send(event=WeightsExported() as exported):
                    self.exported.append(exported)
                case Send(to="buffer", event=VersionAnnounced() as announced):
                    self.announced.append(announced.version)
                case Send(event=SampleGenerated() as generated):
                    spans = generated.sample.parts[0].spans
                    assert not any((process.name, span.version) in self._never_right for span in spans), generated
                case _:
                    pass

    def heard(self, process: Process, event: Event) -> None:
        if isinstance(event, NoticeGiven):
            self.notices.append(event.text)

    def lost(self, name: str, cause: str) -> None:
        self.causes.append(f"{name}: {cause}")


def ran_with_bad_swaps(one: Trial, at_s: float, *engines: str) -> Watch:
    """The next swap of each of these leaves wrong weights in place."""
    run = TrialRun(one, with_digest=False)
    watch = Watch(run)
    run.host.run(at_s)
    for name in engines:
        cast("SimulatedEngine", run.host.supervisor.processes[name].backend).corrupt_swaps = 1
    run.run()
    return watch


@pytest.mark.parametrize("mode", [UpdateMode.IN_FLIGHT, UpdateMode.INTERRUPT])
def test_a_publish_that_fails_its_canary_is_published_again_and_the_run_completes(mode: UpdateMode) -> None:
    watch = ran_with_bad_swaps(trial(update_mode=mode), 3.0, "engine/0", "engine/1", "engine/2")
    failed = {event.publish for event in watch.failed}
    assert failed, "some engine was the canary"
    versions = {export.manifest.publish: export.manifest.version for export in watch.exported}
    for publish in failed:
        again = [number for number, version in versions.items() if number > publish and version >= versions[publish]]
        assert again, f"publish {publish} was not made again"
    assert watch.announced == sorted(set(watch.announced))
    assert any("the Learner publishes again" in notice for notice in watch.notices)
    assert not watch.causes, "no engine is replaced for what may be the weights' fault"


def test_an_engine_whose_swap_went_wrong_passes_on_nothing_of_it() -> None:
    run = TrialRun(trial(), with_digest=False)
    watch = Watch(run)
    run.host.run(3.0)
    for name in run.trial.engines:
        cast("SimulatedEngine", run.host.supervisor.processes[name].backend).corrupt_swaps = 1
    run.run()
    assert watch.num_wrong


@pytest.mark.parametrize("at_s", [3.0, 4.0, 5.0, 6.0])
def test_a_learner_that_dies_while_its_publish_has_failed_publishes_anew(at_s: float) -> None:
    one = trial(Fault(at_s=at_s, kind=FaultKind.KILL, target=LEARNER))
    watch = ran_with_bad_swaps(one, 2.5, "engine/0", "engine/1", "engine/2")
    assert watch.announced == sorted(set(watch.announced))
    assert max(export.manifest.learner_epoch for export in watch.exported) == 1


@pytest.mark.parametrize("at_s", [2.0, 4.4, 7.0, 9.0])
def test_an_engine_without_weights_does_not_wait_for_what_no_other_takes(at_s: float) -> None:
    # The one engine with weights is lost while it goes first, and its successor goes on with something newer.
    lost = Fault(at_s=at_s, kind=FaultKind.STOP, target="engine/0", duration_s=20.0)
    fields = {"policy": "one_step_off", "max_staleness": 1, "update_mode": UpdateMode.DRAIN}
    TrialRun(trial(lost, num_engines=1, num_recorded=1, **fields)).run()


@pytest.mark.parametrize("policy", ["sync", "one_step_off", "fully_async"])
def test_random_trials_hold_while_the_learner_trains_beside_its_digests(policy: str) -> None:
    """Its digests take longer than a step, or less; faults and all."""
    num_beside = 0
    for seed in range(12):
        drawn = draw_trial(policy, seed)
        digest_s = random.Random(f"digest {seed}").choice((0.01, 0.5, 6.0))
        learner = msgspec.structs.replace(drawn.learner, digest_s=digest_s)
        run = TrialRun(msgspec.structs.replace(drawn, learner=learner))
        beside = _Beside(run)
        run.run()
        num_beside += beside.num
    assert num_beside or policy == "sync", "a batch was trained while a digest was made"


class _Beside(Watch):
    """Counts batches that begin while an export is looked at."""

    num = 0

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        machine = process.shell.machine
        if isinstance(machine, Learner) and machine.publishing.copied is not None:
            self.num += any(isinstance(command, Train) for command in commands)
