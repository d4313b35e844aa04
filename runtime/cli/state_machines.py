"""``docs/state_machines.md``: how the actors go from state to state, drawn from the tables that tests hold them to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.actors.buffer.phases import RUN
from penstock.actors.buffer.phases import Phase as RunPhase
from penstock.actors.buffer.table import GROUP, Status
from penstock.actors.engine_worker.phases import ENGINE, REQUEST, RequestState
from penstock.actors.engine_worker.phases import Phase as EnginePhase
from penstock.actors.learner.phases import LEARNER
from penstock.actors.learner.phases import Phase as LearnerPhase
from penstock.actors.weight_publisher.phases import ENGINE as PUBLISHED_ENGINE
from penstock.actors.weight_publisher.phases import Phase as PublisherPhase
from penstock.runtime.scenario.keys import field_docs

if TYPE_CHECKING:
    from enum import Enum

    from penstock.actors.transitions import State, Transitions

HEADER = """\
# State machines

<!-- Written by `make docs` from the tables in actors/. Change those, not this page. -->

How four of the actors go from state to state, and on what: an [event](events.md) that they hear, or for the Buffer's
groups an entry of the [ledger](ledger.md). In tests and random trials each actor checks after every event that the
steps which it took stand here, and a test takes each of them. One event may lead over several states. A dot is where
there is nothing yet, or nothing any more.
"""


class StateMachine(NamedTuple):
    """One table, and what people are told of it."""

    title: str
    story: str
    states: type[Enum]
    initial: tuple[State, ...]
    table: Transitions


MACHINES: Final = (
    StateMachine("The run, at the Buffer", "How far a run has come.", RunPhase, (RunPhase.FILLING,), RUN),
    StateMachine("A group, at the Buffer", "From its grant until it is trained or closed.", Status, (), GROUP),
    StateMachine(
        "An engine, at its EngineWorker",
        "How it comes to its weights. Where it shares devices with the learner it begins closed, and sleeps.",
        EnginePhase,
        (EnginePhase.STARTING, EnginePhase.CLOSED),
        ENGINE,
    ),
    StateMachine("A request, at its EngineWorker", "One attempt at a sample.", RequestState, (), REQUEST),
    StateMachine("The Learner", "What its backend does.", LearnerPhase, (LearnerPhase.STARTING,), LEARNER),
    StateMachine(
        "An engine, at the WeightPublisher",
        "What is waited for from one incarnation of it.",
        PublisherPhase,
        (),
        PUBLISHED_ENGINE,
    ),
)


def state_machines() -> str:
    """The page as Markdown."""
    return HEADER + "".join(map(_section, MACHINES))


def _section(machine: StateMachine) -> str:
    docs = field_docs(machine.states)
    states = "".join(f"* `{each.value}`: {docs[each.name]}\n" for each in machine.states if docs.get(each.name))
    rows = "".join(
        f"| {_cell(state)} | {cause.__name__} | {', '.join(map(_cell, following))} |\n"
        for (state, cause), following in machine.table.items()
    )
    return (
        f"\n## {machine.title}\n\n{machine.story}\n\n```mermaid\nstateDiagram-v2\n{_arrows(machine)}```\n\n{states}"
        f"\n| state | hears | goes to |\n|---|---|---|\n{rows}"
    )


def _arrows(machine: StateMachine) -> str:
    """One for each two states, with all that leads from the one to the other."""
    causes: dict[tuple[State, State], list[str]] = {(None, state): [] for state in machine.initial}
    for (state, cause), following in machine.table.items():
        for after in following:
            causes.setdefault((state, after), []).append(cause.__name__)
    return "".join(
        f"    {_node(before)} --> {_node(after)}{': ' if names else ''}{', '.join(names)}\n"
        for (before, after), names in causes.items()
    )


def _node(state: State) -> str:
    return "[*]" if state is None else str(state.value)


def _cell(state: State) -> str:
    return "●" if state is None else f"`{state.value}`"
