"""Small actors for tests of the host: a stream of groups from ``engine/0`` over Scorer and Filter into the Buffer.

They use the real events, so that the real delivery has to carry them; the rest of the run (learning, weights) is left
out. The Buffer ends the run when every group has arrived, and fails when one arrives twice; it is rebuilt from the
ledger, with which it records each arrival before it settles it.

```
engine/0 ──SampleGenerated──► scorer ──SampleScored──► filter ──GroupAdmitted──► buffer ──SamplesSettled──► all three
```
"""

from __future__ import annotations

import os
import resource
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from penstock.backends.engines.served.base.hand_over import socket_name_of
from penstock.backends.engines.served.base.settings import OWNER_VARIABLE, SERVER_VARIABLE, owner_marks
from penstock.backends.processes.guardian import GuardianJob, start_guardian
from penstock.backends.processes.process_facts import marked_processes
from penstock.messages.arrays import ArrayLengthError
from penstock.messages.base import Event, Metric
from penstock.messages.commands import FailRun, Record, ReplaceActor, Send, StartTimer
from penstock.messages.errors import DivergedError, UserFault
from penstock.messages.flow import GroupAdmitted, SampleGenerated, SampleScored, SamplesSettled, SettledState
from penstock.messages.inboxes import (
    BufferWire,
    EngineWorkerWire,
    FilterWire,
    LearnerWire,
    PromptSourceWire,
    ScorerWire,
    WeightPublisherWire,
)
from penstock.messages.ledger import GroupRecorded
from penstock.messages.local import LearnerOpened, Started, TimerFired
from penstock.messages.membership import (
    ActorLost,
    ActorReturned,
    EngineGivenUp,
    EngineJoined,
    EngineLost,
    EnginesWanted,
)
from penstock.messages.names import BUFFER, FILTER, LEARNER, PROMPT_SOURCE, SCORER, SUPERVISOR, Role, role_of
from penstock.messages.samples import (
    Completed,
    Group,
    Part,
    Prompt,
    Reward,
    Sample,
    SampleKey,
    TerminalState,
    VersionSpan,
)
from penstock.messages.training import Activity, Balance, CauseCount, RunFinished, StepReported, StopAsked

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable

    from penstock.backends.ledger.protocol import LedgerStore
    from penstock.backends.protocol import Emit, Fail, Timers
    from penstock.messages.books import KeptBooks
    from penstock.messages.commands import AnyCommand
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.membership import HeldLease
    from penstock.messages.waits import Wait

ENGINE = "engine/0"
NAMES = (BUFFER, PROMPT_SOURCE, SCORER, FILTER, LEARNER, ENGINE)
KEEPERS = (ENGINE, SCORER, FILTER)


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the echo actors do."""

    num_groups: int = 50
    tick_s: float = 0.01
    """Pause between two groups."""
    num_tokens: int = 64
    crash: str = ""
    """This actor raises at its start."""
    crash_kind: Literal["RuntimeError", "ValueError", "ArrayLengthError", "DivergedError"] = "RuntimeError"
    """What it raises."""
    user_error: str = ""
    """This actor finds something that the user has to mend."""
    story: str = "data.path: rows.jsonl:3: not a JSON object, found '['"
    """What it says of that."""
    fail_after: int = -1
    """After so many groups the Buffer asks for the end of the run."""
    replace_after: int = -1
    """After so many groups the Buffer asks for another engine."""
    break_backend: bool = False
    """The learner's backend fails on its own thread."""
    stubborn: str = ""
    """The backend of this actor does not close in time."""
    leaves_server: str = ""
    """Each incarnation of this actor starts a program that is kept for a successor."""
    engines: tuple[str, ...] = ()
    """Those that the Buffer has recorded; empty: it says nothing of engines."""
    closes_books: bool = True
    """The Buffer answers ``StopAsked``."""
    ledger_bytes: int = 0
    """The Buffer's process can write no file beyond this size; 0: any."""


class EchoMachine:
    """What is common to all of them."""

    def __init__(self, name: str, plan: RunPlan) -> None:
        self.name = name
        self.plan = plan
        self.shows = (Activity.WAITING_FOR_DEMAND, 0.0, 0.0)

    @property
    def state(self) -> str:
        return "echoing"

    def leases(self) -> tuple[HeldLease, ...]:
        return ()

    def waits(self) -> tuple[Wait, ...]:
        return ()

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return ()

    def validate(self) -> None:
        pass

    def handle(self, event: Event, /) -> list[AnyCommand]:
        if isinstance(event, Started) and self.plan.crash == self.name:
            kinds = (RuntimeError, ValueError, ArrayLengthError, DivergedError)
            kind = next(each for each in kinds if each.__name__ == self.plan.crash_kind)
            raise kind(f"{self.name} was told to crash\nand this is a second line")
        return self.react(event)

    def react(self, event: Event) -> list[AnyCommand]:
        return []


def prompt_of(group_id: int) -> Prompt:
    return Prompt(row=group_id, epoch=0, tokens=np.arange(4, dtype=np.int32).tobytes())


def sample_of(group_id: int, num_tokens: int) -> Sample:
    part = Part(
        tokens=np.arange(num_tokens, dtype=np.int32).tobytes(),
        logprobs=np.zeros(num_tokens, dtype=np.float32).tobytes(),
        spans=(VersionSpan(0, num_tokens),),
    )
    return Sample(key=SampleKey(group_id, 0), engine=ENGINE, parts=(part,), outcome=Completed())


class EchoEngine(EchoMachine):
    """Generates one group a tick, from the first that is not settled."""

    next_group = 0

    def react(self, event: Event) -> list[AnyCommand]:
        if isinstance(event, Started):
            return [StartTimer("tick", self.plan.tick_s)]
        if not isinstance(event, TimerFired) or self.next_group >= self.plan.num_groups:
            return []
        self.shows = (Activity.WORKING, 0.5, 0.0)
        group_id = self.next_group
        self.next_group += 1
        generated = SampleGenerated(
            sample=sample_of(group_id, self.plan.num_tokens), group_size=1, prompt=prompt_of(group_id)
        )
        return [Send(SCORER, generated), StartTimer("tick", self.plan.tick_s)]


class EchoLearner(EchoMachine):
    """Looks, when it hears that an engine is lost, and when it begins, what is left of who is gone."""

    num_losses = num_left = 0

    def react(self, event: Event) -> list[AnyCommand]:
        if isinstance(event, EngineLost):
            self.num_losses += 1
            self.num_left += num_left(event.name)
        return []

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return Metric("echo/losses", self.num_losses), Metric("echo/left", self.num_left)


class EchoScorer(EchoMachine):
    def react(self, event: Event) -> list[AnyCommand]:
        if not isinstance(event, SampleGenerated):
            return []
        sample = msgspec.structs.replace(event.sample, outcome=Completed(reward=Reward(value=1.0)))
        return [Send(FILTER, SampleScored(sample=sample, group_size=1, prompt=event.prompt))]


class EchoFilter(EchoMachine):
    def react(self, event: Event) -> list[AnyCommand]:
        if not isinstance(event, SampleScored):
            return []
        group = Group(group_id=event.sample.key.group_id, prompt=event.prompt, samples=(event.sample,))
        return [Send(BUFFER, GroupAdmitted(group=group))]


class EchoBuffer(EchoMachine):
    """Settles each group as it comes, in whatever order."""

    def __init__(self, name: str, plan: RunPlan, records: Iterable[LedgerEntry] = ()) -> None:
        super().__init__(name, plan)
        self.recovered = {entry.group_id for entry in records if isinstance(entry, GroupRecorded)}
        self.arrived = set(self.recovered)
        self.sequence = len(self.arrived)
        self.has_ended = False

    def react(self, event: Event) -> list[AnyCommand]:
        if isinstance(event, Started) and self.plan.engines:
            return [Send(SUPERVISOR, EnginesWanted(engines=self.plan.engines))]
        if isinstance(event, EngineGivenUp):
            left = tuple(name for name in self.plan.engines if name != event.engine)
            return [Send(SUPERVISOR, EnginesWanted(engines=left))]
        if isinstance(event, Started) and self.arrived:
            return [*self.settle(), *self.end_if_complete()]
        if isinstance(event, StopAsked) and self.plan.closes_books and not self.has_ended:
            self.has_ended = True
            return [Send(SUPERVISOR, self.finished(completed=False, story=event.reason))]
        if not isinstance(event, GroupAdmitted):
            return []
        group_id = event.group.group_id
        if group_id in self.recovered:
            return []  # its sender had not heard of the settlement when the predecessor went
        assert group_id not in self.arrived, f"group {group_id} was handed in twice"
        self.arrived.add(group_id)
        recorded = GroupRecorded(group_id=group_id, deadline_version=0, samples=(), payload=event.group)
        commands: list[AnyCommand] = [Record((recorded,)), Send(SUPERVISOR, self.step(group_id)), *self.settle()]
        if len(self.arrived) == self.plan.fail_after:
            self.has_ended, story = True, "the Buffer has seen enough"
            commands += [Send(SUPERVISOR, self.finished(completed=False, story=story)), FailRun(story)]
        if len(self.arrived) == self.plan.replace_after:
            commands.append(ReplaceActor(ENGINE, 1, "it is late with its weights"))
        return [*commands, *self.end_if_complete()]

    def end_if_complete(self) -> list[AnyCommand]:
        if len(self.arrived) < self.plan.num_groups or self.has_ended:
            return []
        self.has_ended = True
        return [Send(SUPERVISOR, self.finished(completed=True, story="every group has arrived"))]

    def settle(self) -> list[AnyCommand]:
        self.sequence += 1
        floor = next(i for i in range(self.plan.num_groups + 1) if i not in self.arrived)
        above = tuple(sorted(i for i in self.arrived if i > floor))
        settled = SamplesSettled(settled=SettledState(self.sequence, floor, above))
        return [Send(keeper, settled) for keeper in KEEPERS]

    def balance(self) -> Balance:
        trained = CauseCount(state=TerminalState.TRAINED, cause="", num_samples=len(self.arrived), num_tokens=0)
        return Balance(issued=len(self.arrived), in_system=0, ended=(trained,))

    def step(self, group_id: int) -> StepReported:
        return StepReported(
            version=len(self.arrived),
            num_steps=self.plan.num_groups,
            group_ids=(group_id,),
            metrics=(Metric("reward/mean", 1.0),),
            staleness_counts=(1,),
            response_lengths=(self.plan.num_tokens,),
            balance=self.balance(),
        )

    def finished(self, *, completed: bool, story: str) -> RunFinished:
        return RunFinished(
            completed=completed, story=story, version=len(self.arrived), max_staleness=0, balance=self.balance()
        )


class EchoBackend:
    """Answers from a thread of its own, fails there, or refuses to close, as the plan says."""

    def __init__(self, name: str, plan: RunPlan) -> None:
        self.name = name
        self.plan = plan

    def start(self, emit: Emit, fail: Fail) -> None:
        def work() -> None:
            emit(LearnerOpened(version=0))
            if self.plan.break_backend:
                fail(MemoryError("the device is full"))

        threading.Thread(target=work, daemon=True).start()

    def execute(self, command: object, /) -> None:
        raise AssertionError("nobody gives this backend a command")

    def gauges(self) -> tuple[Metric, ...]:
        return (Metric("echo/pid", os.getpid()),)

    def close(self, timeout_s: float) -> None:
        if self.plan.stubborn == self.name:
            time.sleep(60)


MACHINES: dict[Role, type[EchoMachine]] = {
    Role.LEARNER: EchoLearner,
    Role.SCORER: EchoScorer,
    Role.FILTER: EchoFilter,
}

UNIONS: dict[Role, Any] = {
    Role.PROMPT_SOURCE: PromptSourceWire,
    Role.ENGINE_WORKER: EngineWorkerWire,
    Role.SCORER: ScorerWire,
    Role.FILTER: FilterWire,
    Role.BUFFER: BufferWire,
    Role.LEARNER: LearnerWire,
    Role.WEIGHT_PUBLISHER: WeightPublisherWire,
}


KEPT: list[subprocess.Popen[bytes]] = []
"""Guardians, whose lines end with this process."""


def leave_server(owner: str) -> None:
    """Start a program as an engine starts a server that a successor may take over."""
    server_id, log_path = secrets.token_hex(16), os.devnull
    job = GuardianJob(
        command=("sleep", "600"), launcher_pid=os.getpid(), log_path=log_path, max_log_bytes=1 << 20, linger_s=600.0,
        socket_name=socket_name_of(server_id),
    )  # fmt: skip
    guardian = start_guardian(job, {**os.environ, OWNER_VARIABLE: owner, SERVER_VARIABLE: server_id})
    KEPT.append(guardian)
    assert guardian.stdout is not None
    assert guardian.stdout.readline().startswith(b"P ")


def num_left(owner: str) -> int:
    """Living processes of programs that this actor of this run has started so."""
    return len(marked_processes(owner_marks(owner, os.environ)))


def build_machine(
    name: str, plan: RunPlan, *, epoch: int, records: Iterable[LedgerEntry] = (), kept: KeptBooks | None = None
) -> EchoMachine:
    left = num_left(name) if plan.leaves_server == name else 0
    if plan.leaves_server == name:
        leave_server(name)
    if plan.user_error == name:
        raise UserFault(plan.story)
    if name == ENGINE:
        return EchoEngine(name, plan)  # further engines are idle
    if name == BUFFER:
        if plan.ledger_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (plan.ledger_bytes, plan.ledger_bytes))
        return EchoBuffer(name, plan, records)
    machine = MACHINES.get(role_of(name), EchoMachine)(name, plan)
    if isinstance(machine, EchoLearner):
        machine.num_left = left
    return machine


def open_backend(
    name: str,
    plan: RunPlan,
    *,
    epoch: int,
    timers: Timers,
    store: LedgerStore | None,
    host: str,
    remote_ranks: object,
    takes_over: bool,
) -> EchoBackend | None:
    return EchoBackend(name, plan) if name == LEARNER or name == plan.stubborn else None


def hears(name: str) -> frozenset[type[Event]]:
    if name == LEARNER:
        return frozenset({EngineLost})
    return frozenset({ActorLost, ActorReturned, EngineJoined, EngineLost}) if name == PROMPT_SOURCE else frozenset()


def inbox_union(name: str) -> Any:  # noqa: ANN401 - a type form
    return UNIONS[role_of(name)]
