"""Random walks of one actor: whatever those around it may do next, at random, so that it comes into every state.

What a backend or a peer can say depends on what it was asked for; nothing else is said. The walks are always the same.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import actor_driver as drive
from engine_bench import EngineBench, issued, manifest
from test_actor_learner import LearnerBench
from test_actor_turns import ENGINES, Learning
from test_actor_weight_publisher import PublisherBench

from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.engine_worker.phases import Phase as EnginePhase
from penstock.actors.engine_worker.settings import EngineWorkerSettings
from penstock.actors.learner.machine import LEND_TIMER
from penstock.actors.learner.phases import Phase as LearnerPhase
from penstock.actors.weight_publisher.phases import Phase as PublisherPhase
from penstock.messages.evaluation import PublishDemanded
from penstock.messages.flow import SampleRevoked, SamplesSettled, SettledState
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    EngineOpened,
    EngineSlept,
    GenerationEnded,
    LearnerOpened,
    LearnerSlept,
    LearnerWoken,
    Started,
    TimerFired,
    WeightsCopied,
    WeightsPublished,
)
from penstock.messages.membership import EngineJoined, EngineLeaving, EngineLost
from penstock.messages.names import engine_name
from penstock.messages.samples import Cancelled, Completed, InfraError, SampleKey, evaluation_group_id
from penstock.messages.training import (
    BatchReady,
    CheckpointDemanded,
    CheckpointNamed,
    DeviceTurned,
    DeviceYielded,
    Holder,
    UpdateMode,
)
from penstock.messages.weights import EngineReady, PublishFailed, WeightsApplied, WeightsFetched

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.actors.weight_publisher.engines import EngineState
    from penstock.messages.samples import Outcome
    from penstock.messages.weights import WeightManifest

MAX_REQUESTS = 4
PART = drive.part((0, 4))


class Walk:
    """Takes steps at random among those that can be taken. For a while each walk prefers some kinds of steps to others,
    so that it comes where one without preferences hardly ever does."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._weights: dict[str, float] = {}

    def options(self) -> list[tuple[str, Callable[[], object]]]:
        """What can be done now, by kind."""
        raise NotImplementedError

    def go(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.rng.random() < 0.03:
                self._weights.clear()
            found = self.options()
            weights = [self._weights.setdefault(kind, self.rng.choice((0.1, 1.0, 5.0))) for kind, _ in found]
            self.rng.choices([step for _, step in found], weights)[0]()


class EngineWalk(Walk):
    """An EngineWorker between PromptSource, WeightPublisher, its engine and perhaps a Learner on the same device."""

    def __init__(self, seed: int, *, takes_turns: bool, retracts: bool, is_lent: bool = False) -> None:
        super().__init__(seed)
        self.bench = EngineBench()
        self.bench.driver.machine = EngineWorker(
            EngineWorkerSettings(name="engine/0", epoch=0, takes_turns=takes_turns, is_lent=is_lent, retracts=retracts)
        )
        self.takes_turns = takes_turns
        self.holder, self.turn = Holder.LEARNER, 0
        self.publish = 0
        self.evaluated = self.rng.random()
        """Share of what is issued."""
        self.issued: dict[SampleKey, int] = {}
        self.num_issued = 0
        self.settled: set[int] = set()
        self.bench.hear(Started(epoch=0))

    def options(self) -> list[tuple[str, Callable[[], object]]]:
        worker, hear = self.bench.worker, self.bench.hear
        found: list[tuple[str, Callable[[], object]]] = []
        match worker.phase:
            case EnginePhase.STARTING:
                found.append(("open", lambda: hear(EngineOpened(num_slots=2))))
            case EnginePhase.SLEEPING:
                found.append(("sleep", lambda: hear(EngineSlept())))
            case EnginePhase.APPLYING:
                found += [("swap", self.bench.swap), ("spoil", lambda: self.bench.swap(digest="another"))]
            case _:
                pass
        if self.takes_turns and (
            self.holder is Holder.ENGINES or worker.phase in (EnginePhase.CLOSED, EnginePhase.ASLEEP)
        ):
            found.append(("turn", self._give_turn))
        if worker.weights.fetching is not None:
            publish = worker.weights.fetching.publish
            found.append(("fetch", lambda: self.bench.fetched(publish)))
        elif worker.phase not in (EnginePhase.CLOSED, EnginePhase.STARTING):
            found.append(("stage", self._stage))
            found.append(("commit", lambda: self.bench.commit(self.publish, self.rng.choice(list(UpdateMode)))))
        if len(self.issued) < MAX_REQUESTS:
            found.append(("issue", self._issue))
        for request in worker.requests.running():
            found.append(("end", lambda key=request.key: self._end(key)))  # type: ignore[misc]
        if self.issued:
            found += [("again", self._issue_again), ("revoke", self._revoke), ("settle", self._settle)]
        return found

    def leave(self) -> None:
        """It is to leave the run."""
        self.bench.hear(EngineLeaving(name="engine/0", epoch=0))

    def _give_turn(self) -> None:
        self.turn += 1
        self.holder = Holder.LEARNER if self.holder is Holder.ENGINES else Holder.ENGINES
        self.bench.hear(DeviceTurned(turn=self.turn, holder=self.holder))

    def _stage(self) -> None:
        self.publish += 1
        self.bench.stage(self.publish)

    def _issue(self) -> None:
        self.num_issued += 1
        group_id = evaluation_group_id(self.num_issued) if self.rng.random() < self.evaluated else self.num_issued
        self.issued[SampleKey(group_id, 0)] = 0
        self.bench.issue(group_id)

    def _any(self) -> SampleKey:
        return self.rng.choice(list(self.issued))

    def _issue_again(self) -> None:
        key = self._any()
        self.issued[key] += 1
        self.bench.hear(issued(key.group_id, attempt=self.issued[key]))

    def _revoke(self) -> None:
        key = self._any()
        self.bench.hear(SampleRevoked(key=key, attempt=self.issued[key]))

    def _settle(self) -> None:
        key = self._any()
        del self.issued[key]
        self.settled.add(key.group_id)
        state = SettledState(len(self.settled), 0, tuple(sorted(self.settled)), 0)
        self.bench.hear(SamplesSettled(settled=state))

    def _end(self, key: SampleKey) -> None:
        request = self.bench.worker.requests.current(key, self.issued[key])
        assert request is not None
        is_broken_off = self.bench.worker.phase in (EnginePhase.INTERRUPTING, EnginePhase.SPOILT)
        outcome: Outcome = Cancelled(cause="interrupted") if is_broken_off else Completed()
        if self.rng.random() < 0.3:
            outcome = InfraError(detail="out of memory")
        part = request.response() or PART
        self.bench.hear(GenerationEnded(key=key, attempt=self.issued[key], outcome=outcome, part=part))


class LearnerWalk(Walk):
    """A Learner between the Buffer, the WeightPublisher, its backend and perhaps engines on the same devices."""

    def __init__(self, seed: int, *, shares: bool, lends: bool = False) -> None:
        """``lends``: the devices that it shares are its own, and engines get them only while it waits."""
        super().__init__(seed)
        self.bench = Learning(lend_after_s=1.0 if lends else None) if shares else LearnerBench()
        self.epochs: dict[str, int] = {}
        self.num_joined = 0
        self.shares = shares
        self.bench.hear(Started(epoch=0))

    def options(self) -> list[tuple[str, Callable[[], object]]]:
        learner, hear = self.bench.learner, self.bench.hear
        version, published = learner.version, learner.publishing.version
        found: list[tuple[str, Callable[[], object]]] = []
        match learner.phase:
            case LearnerPhase.STARTING:
                named = CheckpointNamed(learner_epoch=0, version=0, path="", announced_version=-1)
                found.append(("name", lambda: hear(named)))
            case LearnerPhase.OPENING:
                found.append(("open", lambda: hear(LearnerOpened(version=0))))
            case LearnerPhase.TRAINING:
                trained = BatchTrained(version=version + 1, num_trained_tokens=1, num_masked_tokens=0, metrics=())
                found.append(("train", lambda: hear(trained)))
            case LearnerPhase.PUBLISHING if learner.publishing.copied is None:
                found.append(("publish", lambda: hear(WeightsPublished(manifest=manifest(version)))))
                found.append(("copy", lambda: hear(WeightsCopied(version=version, size_bytes=1))))
            case LearnerPhase.SLEEPING:
                found.append(("sleep", lambda: hear(LearnerSlept())))
            case LearnerPhase.WAKING:
                found.append(("wake", lambda: hear(LearnerWoken())))
            case _:
                pass
        if version >= 0:
            found.append(("batch", lambda: hear(self._batch(version + 1))))
            found.append(("demand", lambda: hear(PublishDemanded(version=version + self.rng.randrange(2)))))
            found.append(("save", lambda: hear(CheckpointDemanded(version=version))))
        if published >= 0:
            found.append(
                ("fail", lambda: hear(PublishFailed(version=published, publish=self._last_publish(), cause="wrong")))
            )
        if (writing := learner.saving.writing) is not None:
            found.append(("write", lambda: hear(CheckpointWritten(version=writing, path="c"))))
        if (copied := learner.publishing.copied) is not None:
            found.append(("digest", lambda: hear(WeightsPublished(manifest=manifest(copied)))))
        if self.shares:
            found.append(("wait", lambda: hear(TimerFired(key=LEND_TIMER))))
            found += [("join", self._join), *(("lose", lambda name=name: self._lose(name)) for name in self.epochs)]
            found += [("yield", lambda name=name: self._yield(name)) for name in self.epochs]  # type: ignore[misc]
        return found

    def _last_publish(self) -> int:
        return self.bench.learner.publishing.next_publish - 1

    def _batch(self, version: int) -> BatchReady:
        return BatchReady(
            version=version,
            groups=(),
            announced_version=max(0, self.bench.learner.publishing.version),
            max_staleness=2,
            update_mode=UpdateMode.DRAIN,
            is_last=self.rng.random() < 0.3,  # more come all the same, so that one goes on
        )

    def _join(self) -> None:
        name = self.rng.choice(ENGINES)
        if name in self.epochs:
            self._lose(name)
        self.num_joined += 1
        self.epochs[name] = self.num_joined
        self.bench.hear(EngineJoined(name=name, epoch=self.num_joined))

    def _lose(self, name: str) -> None:
        self.bench.hear(EngineLost(name=name, epoch=self.epochs.pop(name)))

    def _yield(self, name: str) -> None:
        turn = self.bench.learner.turns.turn
        self.bench.hear(DeviceYielded(engine=name, engine_epoch=self.epochs[name], turn=turn))


class PublisherWalk(Walk):
    """A WeightPublisher, perhaps one that follows another, between the Learner and three engines."""

    def __init__(self, seed: int, *, leaves: bool, lends: bool = False) -> None:
        """``leaves``: engines may be told to leave the run; ``lends``: devices that they are lent are taken back."""
        super().__init__(seed)
        self.leaves, self.lends = leaves, lends
        self.turn = 0
        """Of devices that engines are lent."""
        self.bench = PublisherBench(max_failed_publishes=1000)
        self.publish = self.version = 0

    def options(self) -> list[tuple[str, Callable[[], object]]]:
        found: list[tuple[str, Callable[[], object]]] = [("export", self._export)]
        for index in range(3):
            engine = self.bench.publisher.engines.by_name.get(engine_name(index))
            found.append(("join", lambda index=index: self._join(index)))  # type: ignore[misc]
            if engine is None:
                continue
            found.append(("lose", lambda index=index: self.bench.lose(index)))  # type: ignore[misc]
            if self.leaves and self.rng.random() < 0.1:  # else hardly any gets far
                leaving = EngineLeaving(name=engine.name, epoch=engine.epoch)
                found.append(("leave", lambda leaving=leaving: self.bench.hear(leaving)))  # type: ignore[misc]
            if self.lends and self.rng.random() < 0.05:
                found.append(("takes back", lambda engine=engine: self._take_back(engine)))  # type: ignore[misc]
            if engine.phase is not PublisherPhase.QUARANTINED:
                found.append(("older", lambda index=index: self._says_older(index)))  # type: ignore[misc]
            match engine.phase:
                case PublisherPhase.STARTING:
                    ready = EngineReady(engine=engine.name, engine_epoch=engine.epoch, num_slots=2)
                    found.append(("ready", lambda ready=ready: self.bench.hear(ready)))  # type: ignore[misc]
                case PublisherPhase.STAGING if engine.target is not None:
                    found.append(("fetch", lambda e=engine.name, m=engine.target.manifest: self._fetched(e, m)))  # type: ignore[misc]
                case PublisherPhase.COMMITTING if engine.target is not None:
                    found.append(("apply", lambda i=index, m=engine.target.manifest: self._applied(i, m)))  # type: ignore[misc]
                case _:
                    continue
            found.append(("late", lambda name=engine.name: self.bench.hear(TimerFired(key=name))))  # type: ignore[misc]
        return found

    def _export(self) -> None:
        self.publish += 1
        self.version = max(0, self.version + self.rng.choice((1, 1, -1)))  # a Learner goes over old batches again
        self.bench.export(self.publish, version=self.version)

    def _join(self, index: int) -> None:
        name = engine_name(index)
        epoch = self.bench.epochs[name] = self.bench.epochs.get(name, -1) + 1
        self.bench.hear(EngineJoined(name=name, epoch=epoch))

    def _take_back(self, engine: EngineState) -> None:
        self.turn += 1
        taken = EngineReady(engine=engine.name, engine_epoch=engine.epoch, num_slots=0, turn=self.turn)
        self.bench.hear(taken)

    def _fetched(self, name: str, target: WeightManifest) -> None:
        fetched = WeightsFetched(
            engine=name,
            engine_epoch=self.bench.epochs[name],
            version=target.version,
            publish=target.publish,
            digest=target.digest,
            error="gone" if self.rng.random() < 0.5 else "",
        )
        self.bench.hear(fetched)

    def _applied(self, index: int, target: WeightManifest) -> None:
        wrong = "another" if self.rng.random() < 0.4 else None
        self.bench.applied(index, target.publish, version=target.version, digest=wrong)

    def _says_older(self, index: int) -> None:
        """What it serves since before this publisher was there."""
        said = WeightsApplied(
            engine=engine_name(index),
            engine_epoch=self.bench.epochs[engine_name(index)],
            version=self.version + 1,
            publish=10_000 + self.publish,
            digest="digest",
        )
        self.bench.hear(said)
