"""What an operator asks while the run goes on: another policy, a pause of new grants, a checkpoint, other engines; and
which engines the run goes on without.

Invariants:

* A request is answered by what then holds. It is repeated until it is answered for good, so it is carried out once:
  what holds already is accepted without a further record, and a repeat gets the answer that it got. No Buffer takes
  back what it or its predecessor has promised: a checkpoint that is asked for is written before a stop is over.
* A policy, a pause and the engines of the run are in the ledger before anything follows from them, and hold for every
  grant after that entry.
* The supervisor is told which engines are recorded by every Buffer, so a run that is resumed has those that it had.
* An engine that is given up is none of the run's any more, where enough are left; where not, the supervisor ends the
  run. Word on an incarnation counts once, and the supervisor is told that it was heard: an operator may have the engine
  back before it has heard that it was gone.

| waits for | who ends it |
|---|---|
| a checkpoint that was asked for | the Learner; whoever asks has a deadline of their own |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never

from penstock.actors.buffer.batching import unfit
from penstock.actors.buffer.decisions import closing
from penstock.actors.buffer.phases import Phase
from penstock.actors.buffer.policies import refusal
from penstock.messages.ledger import EnginesRecorded, PauseRecorded, PolicyRecorded
from penstock.messages.membership import ActorEpoch, EnginesWanted
from penstock.messages.names import LEARNER, SUPERVISOR, engine_index
from penstock.messages.operator import EnginesAsked, GrantsPaused, OperatorAnswered, PolicyChanged, SaveAsked
from penstock.messages.samples import TerminalState
from penstock.messages.texts import counted
from penstock.messages.training import CheckpointDemanded, OnStale

if TYPE_CHECKING:
    from penstock.actors.buffer.bookkeeper import Bookkeeper
    from penstock.actors.buffer.pacing import AutoTarget
    from penstock.actors.buffer.run_state import RunState
    from penstock.actors.buffer.settings import ElasticEngines
    from penstock.messages.membership import EngineGivenUp
    from penstock.messages.operator import OperatorEvent

ANSWERS_KEPT: Final = 64
"""Of requests that may be repeated."""


class OperatorSide:
    """The requests of this Buffer's time."""

    def __init__(self, keeper: Bookkeeper, run: RunState, target: AutoTarget) -> None:
        """``target``: of outstanding groups, which the engines of the run limit."""
        self._keeper, self._run, self._books, self._target = keeper, run, keeper.books, target
        self._answers: dict[int, OperatorAnswered] = {}
        self._saves: dict[int, int] = {}
        """The version that is to be saved, by request."""
        self._given_up: dict[str, int] = {}
        """By engine: the last incarnation after which it was given up."""

    def remind(self) -> None:
        """This Buffer begins: tell people what an operator has left it with."""
        if self._books.policy_recorded is not None:
            self._keeper.notice(f"new grants follow {_named(self._books.policy_recorded)}, as an operator has said")
        if self._books.is_paused:
            self._keeper.notice("new grants are paused by an operator until: penstock pause --off")
        if (elastic := self._books.settings.elastic) is not None:
            self._remind_engines(elastic)

    def asked(self, event: OperatorEvent) -> None:
        """Carry it out, or say why not."""
        if event.request in self._answers:
            self._keeper.send(SUPERVISOR, self._answers[event.request])
            return
        match event:
            case PolicyChanged():
                reason, text = self._switch(event)
            case GrantsPaused():
                reason, text = self._pause(event)
            case SaveAsked():
                reason, text = self._save(event)
            case EnginesAsked():
                reason, text = self._scale(event)
            case _:
                assert_never(event)
        if reason:
            self._answer(event.request, reason, accepted=False)
        elif text:
            self._answer(event.request, text)

    def _answer(self, request: int, text: str, *, accepted: bool = True) -> None:
        if request:
            answer = OperatorAnswered(request=request, accepted=accepted, text=text)
            self._answers = dict([*self._answers.items(), (request, answer)][-ANSWERS_KEPT:])
            self._keeper.send(SUPERVISOR, answer)

    # --- the policy -------------------------------------------------------------------------------------------

    def _switch(self, event: PolicyChanged) -> tuple[str, str]:
        """Why not, and what holds now; one of them."""
        books = self._books
        recorded = PolicyRecorded(
            policy=event.policy,
            max_staleness=event.max_staleness,
            update_mode=event.update_mode,
            on_stale=event.on_stale,
        )
        publish_every, max_uses = books.settings.publish_every, books.settings.max_uses
        reason = self._why_no_grants("switch") or refusal(event, publish_every=publish_every, max_uses=max_uses)
        if reason:
            self._keeper.notice(f"the policy stays as it is: {reason}")
            return reason, ""
        if books.policy_recorded == recorded:
            return "", f"{_named(recorded)} holds already"
        if event.on_stale is OnStale.WAIT:
            # A policy that does not look ahead leaves over what could make the new one wait for ever.
            for tracked in unfit(books.table, books.settings.pacing, taken_at=books.taken_at):
                self._keeper.close(closing(books, tracked, TerminalState.STALE, "past_deadline"))
        self._keeper.note(recorded)
        text = f"new grants follow {_named(recorded)}, from group {books.grants.total} on, at version {books.version}"
        self._keeper.notice(text)
        return "", text

    def _why_no_grants(self, what: str) -> str:
        """Why a policy or a pause would change nothing any more, or never did; empty when it does."""
        if self._run.phase not in (Phase.FILLING, Phase.RUNNING):
            return f"the run is {self._run.phase}: nothing more is granted"
        if not self._books.goal.grants:
            return f"this run grants nothing for training, so there is nothing to {what}"
        return ""

    # --- the pause --------------------------------------------------------------------------------------------

    def _pause(self, event: GrantsPaused) -> tuple[str, str]:
        books = self._books
        if reason := self._why_no_grants("pause"):
            return reason, ""
        if event.is_paused == books.is_paused:
            return "", "new grants are paused already" if event.is_paused else "new grants are not paused"
        self._keeper.note(PauseRecorded(is_paused=event.is_paused))
        text = "new grants go on"
        if event.is_paused:
            num_left = books.table.num_outstanding
            text = f"new grants are paused; the {num_left} groups that are out come to their end, in batches"
        self._keeper.notice(text)
        return "", text

    # --- the engines ------------------------------------------------------------------------------------------

    def _scale(self, event: EnginesAsked) -> tuple[str, str]:
        books, elastic = self._books, self._books.settings.elastic
        if self._run.phase not in (Phase.FILLING, Phase.RUNNING):
            return f"the run is {self._run.phase}: no engine joins or leaves any more", ""
        if elastic is None:
            return "the engines of this run are fixed: its scenario sets no engines.max", ""
        engines = tuple(sorted(set(event.engines), key=engine_index))
        num_engines, listed = len(engines), ", ".join(engines)
        if num_engines < elastic.fewest:
            return f"{counted(num_engines, 'engine')} would be left, and engines.min is {elastic.fewest}", ""
        if not set(engines) <= set(books.settings.engines):
            return f"{listed} would be more than engines.max allows, which is {len(books.settings.engines)}", ""
        if engines == books.engines:
            return "", f"the run has these engines already: {listed}"
        self._keeper.note(EnginesRecorded(engines=engines, reason=event.reason))
        self._want_engines(elastic)
        because = f"; {event.reason}" if event.reason else ""
        text = f"the engines are {listed} from here on, at version {books.version}{because}"
        self._keeper.notice(text)
        return "", text

    def given_up(self, event: EngineGivenUp) -> None:
        """The run is to go on without this engine. Whatever becomes of that, the supervisor is told what holds."""
        books, elastic = self._books, self._books.settings.elastic
        if elastic is None or self._run.phase not in (Phase.FILLING, Phase.RUNNING):
            return
        name, left = event.engine, tuple(each for each in books.engines if each != event.engine)
        is_news = event.engine_epoch > self._given_up.get(name, -1)
        if is_news and elastic.fewest <= len(left) < len(books.engines):
            self._given_up[name] = event.engine_epoch
            self._keeper.note(EnginesRecorded(engines=left, reason=event.reason))
            self._keeper.notice(f"the engines are {', '.join(left)} from here on, at version {books.version}")
        self._want_engines(elastic)

    def _remind_engines(self, elastic: ElasticEngines) -> None:
        """Those that are recorded, as far as the scenario, which may be another one by now, still has them."""
        books = self._books
        engines = tuple(name for name in books.engines if name in books.settings.engines)
        if len(engines) < elastic.fewest:
            engines = elastic.first
        if engines != books.engines:
            self._keeper.note(EnginesRecorded(engines=engines))
        if engines != elastic.first:
            self._keeper.notice(f"the engines are {', '.join(engines)}, as is recorded")
        self._want_engines(elastic)

    def _want_engines(self, elastic: ElasticEngines) -> None:
        engines, num_samples = self._books.engines, self._books.settings.samples_per_group
        self._target.engines_hold(-(-len(engines) * elastic.num_slots // num_samples))
        given_up = tuple(ActorEpoch(name, epoch) for name, epoch in self._given_up.items())
        self._keeper.send(SUPERVISOR, EnginesWanted(engines=engines, given_up=given_up))

    # --- a checkpoint -----------------------------------------------------------------------------------------

    def _save(self, event: SaveAsked) -> tuple[str, str]:
        books = self._books
        if self._run.phase is Phase.FILLING and books.version:
            # Its predecessor may have promised this one. It is repeated, and the Learner is about to say where it is.
            self._promise(event.request, books.version)
            return "", ""
        is_promised = event.request in self._saves and self._run.phase in (Phase.ENDING, Phase.STOPPING)
        if self._run.phase is not Phase.RUNNING and not is_promised:
            return f"the run is {self._run.phase}", ""
        if not books.version:
            return "no batch is trained yet, so there is nothing to save", ""
        is_new = event.request not in self._saves
        version = self._saves.setdefault(event.request, books.version)
        if books.checkpoint_version >= version:
            del self._saves[event.request]
            return "", f"version {books.checkpoint_version} is saved: {books.checkpoints[-1].path}"
        if is_new:  # said once, the runtime repeats it; a second one could have the next version saved too
            self._keeper.send(LEARNER, CheckpointDemanded(version=version))
        self._promise(event.request, version)
        return "", ""

    def _promise(self, request: int, version: int) -> None:
        if request:
            text = f"a checkpoint of version {version} or a later one is asked for"
            self._keeper.send(SUPERVISOR, OperatorAnswered(request=request, accepted=True, text=text, is_final=False))

    def saved(self) -> None:
        """A checkpoint is recorded: answer those who have asked for it."""
        books = self._books
        for request, version in list(self._saves.items()):
            if books.checkpoint_version >= version:
                del self._saves[request]
                self._answer(request, f"version {books.checkpoint_version} is saved: {books.checkpoints[-1].path}")


def _named(policy: PolicyRecorded) -> str:
    return (
        f"{policy.policy} with max_staleness {policy.max_staleness}, update_mode {policy.update_mode}, "
        f"on_stale {policy.on_stale}"
    )
