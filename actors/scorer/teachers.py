"""Which teacher is asked about which sample, and what becomes of questions that are lost.

Invariants:

* Each question is either in the queue or at one teacher that lives. It ends with its answer, with the reason why there
  is none, or because the Scorer has no use for it any more.
* No teacher has more questions than it works on side by side: the others wait here, so that one that joins or returns
  has its share of them, and one that dies takes few with it.
* An answer counts whoever gives it: it follows from the tokens alone.
* A question that could not be answered spends a try. One that its teacher's death has ended does not; but so many
  deaths with it and no more are borne, so a sample that kills teachers comes to its end.
* A teacher that answers others is only behind: it is asked again what it may not have heard, which changes nothing if
  it has. One that answers nothing is replaced.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.actors.waits import several
from penstock.messages.arrays import LOGPROB_BYTES
from penstock.messages.commands import ReplaceActor, Send
from penstock.messages.samples import SampleKey
from penstock.messages.teaching import GivenTokens, TeacherAsked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.actors.scorer.settings import ScorerSettings
    from penstock.messages.commands import AnyCommand
    from penstock.messages.samples import Prompt, Sample
    from penstock.messages.teaching import TeacherAnswered
    from penstock.messages.top_logprobs import TopLogprobs
    from penstock.messages.waits import Wait


class Question(msgspec.Struct):
    """What is to be known about one sample."""

    key: SampleKey
    attempt: int
    texts: tuple[GivenTokens, ...]
    num_tries: int = 0
    """Tries that were answered with an error so far."""
    num_losses: int = 0
    """Teachers that were lost while they had it."""
    teacher: str = ""
    """Who was asked; empty: it is in the queue."""
    sweep: int = 0
    """The sweep of the timer in which it was asked last."""


def texts_for_teacher(prompt: Prompt, sample: Sample) -> tuple[GivenTokens, ...]:
    """The parts of a sample as a teacher reads them: behind the prompt that it was given, or behind what the row has
    for teachers in place of that. A context that does not begin with the prompt stays as it is."""
    own, given = prompt.tokens, prompt.teacher_tokens or prompt.tokens
    contexts = [part.context_tokens or own for part in sample.parts]
    return tuple(
        GivenTokens(given + context[len(own) :] if context.startswith(own) else context, part.tokens)
        for context, part in zip(contexts, sample.parts, strict=True)
    )


class TeacherView(msgspec.Struct):
    """One teacher that lives, as the Scorer sees it."""

    name: str
    epoch: int
    num_slots: int
    num_asked: int = 0
    has_answered: bool = False
    """Since the last sweep."""


class _Start(NamedTuple):
    epoch: int
    sweep: int
    """The sweep of the timer in which it was first seen."""


class Verdict(NamedTuple):
    """What became of a question: log-probs of each part, or the reason why there are none."""

    key: SampleKey
    logprobs: tuple[bytes, ...] | None
    reason: str = ""
    top: tuple[TopLogprobs, ...] = ()


class Teachers:
    """The teachers of a run and all open questions."""

    def __init__(self, settings: ScorerSettings) -> None:
        self.settings = settings
        self.views: dict[str, TeacherView] = {}
        self.questions: dict[SampleKey, Question] = {}
        self._queue: deque[SampleKey] = deque()
        """With keys that are not open any more, or were asked meanwhile."""
        self._starting: dict[str, _Start] = {}
        """Teachers that are there and not ready."""
        self._sweep = 0

    def waits(self) -> list[Wait]:
        """Answers of each teacher, and places at one."""
        waits: list[Wait] = []
        for name in self.views:
            asked = [(q.key, q.num_tries) for q in self.questions.values() if q.teacher == name]
            waits += several("log-probs of", name, asked)
        queued = [(q.key, q.num_losses) for q in self.questions.values() if not q.teacher]
        return waits + several("a place at a teacher for", self.settings.teachers[0], queued) if queued else waits

    # --- questions --------------------------------------------------------------------------------------------

    def ask(self, key: SampleKey, attempt: int, texts: tuple[GivenTokens, ...]) -> None:
        """Queue a question; :meth:`dispatch` sends it."""
        self.questions[key] = Question(key, attempt, texts)
        self._queue.append(key)

    def forget(self, key: SampleKey) -> None:
        """Nobody needs the answer any more."""
        question = self.questions.pop(key, None)
        if question is not None:
            self._leave(question)

    def answered(self, event: TeacherAnswered) -> Verdict | None:
        """Take an answer; what it means for the sample, if it is news."""
        view = self.views.get(event.teacher)
        if view is not None:
            view.has_answered = True
        question = self.questions.get(event.key)
        if question is None or question.attempt != event.attempt:
            return None
        if not event.error and (problem := _misfit(question.texts, event)):
            return self._failed(question, problem)
        if event.error:
            return self._failed(question, event.error)
        self.forget(event.key)
        return Verdict(event.key, event.logprobs, top=event.top)

    def _failed(self, question: Question, reason: str) -> Verdict | None:
        self._leave(question)
        if question.num_tries >= self.settings.num_retries:
            del self.questions[question.key]
            return Verdict(question.key, None, f"the teacher: {reason}")
        question.num_tries += 1
        self._queue.append(question.key)
        return None

    def _leave(self, question: Question) -> None:
        """Its teacher has it no longer."""
        view = self.views.get(question.teacher)
        if view is not None:
            view.num_asked -= 1
        question.teacher = ""

    # --- teachers ---------------------------------------------------------------------------------------------

    def joined(self, name: str, epoch: int) -> None:
        """This incarnation is there, and opens."""
        if name in self.settings.teachers and name not in self.views:
            self._starting[name] = _Start(epoch, self._sweep)

    def ready(self, name: str, epoch: int, num_slots: int) -> list[Verdict]:
        """This incarnation takes questions; what had to be given up with an earlier one."""
        self._starting.pop(name, None)
        known = self.views.get(name)
        if known is not None and known.epoch >= epoch:
            return []
        verdicts = [] if known is None else self.lost(name, known.epoch)
        self.views[name] = TeacherView(name, epoch, num_slots)
        return verdicts

    def lost(self, name: str, epoch: int) -> list[Verdict]:
        """This incarnation is gone; the questions that are given up with it."""
        if name in self._starting and self._starting[name].epoch <= epoch:
            del self._starting[name]
        view = self.views.get(name)
        if view is None or view.epoch > epoch:
            return []
        del self.views[name]
        verdicts: list[Verdict] = []
        again: list[SampleKey] = []
        for question in [q for q in self.questions.values() if q.teacher == name]:
            question.teacher = ""
            question.num_losses += 1
            if question.num_losses > self.settings.max_teacher_losses:
                del self.questions[question.key]
                verdicts.append(Verdict(question.key, None, f"{question.num_losses} teachers died with it"))
            else:
                again.append(question.key)
        self._queue.extendleft(reversed(again))
        return verdicts

    def restored(self, name: str) -> list[AnyCommand]:
        """What was on its way to this teacher may be lost: ask again."""
        return [self._question(q, name) for q in self.questions.values() if q.teacher == name]

    def sweep(self) -> list[AnyCommand]:
        """A period is over. What was asked before it began and has no answer is overdue."""
        self._sweep += 1
        commands: list[AnyCommand] = []
        for view in self.views.values():
            overdue = [q for q in self.questions.values() if q.teacher == view.name and q.sweep < self._sweep - 1]
            if overdue and not view.has_answered:
                cause = f"no answer for {self.settings.teacher_timeout_s:g} s about {len(overdue)} samples"
                commands.append(ReplaceActor(view.name, view.epoch, cause))
            else:
                commands += [self._question(q, view.name) for q in overdue]
            view.has_answered = False
        settings = self.settings
        for name, start in self._starting.items():
            if (self._sweep - start.sweep - 1) * settings.teacher_timeout_s >= settings.teacher_start_timeout_s:
                cause = f"not ready within {settings.teacher_start_timeout_s:g} s"
                commands.append(ReplaceActor(name, start.epoch, cause))
        return commands

    def dispatch(self) -> list[AnyCommand]:
        """Ask whoever has room, the least loaded first."""
        commands: list[AnyCommand] = []
        while self._queue:
            question = self.questions.get(self._queue[0])
            if question is not None and not question.teacher:
                view = _least_loaded(self.views.values())
                if view is None:
                    break
                view.num_asked += 1
                question.teacher = view.name
                commands.append(self._question(question, view.name))
            self._queue.popleft()
        return commands

    def _question(self, question: Question, teacher: str) -> AnyCommand:
        question.sweep = self._sweep
        return Send(teacher, TeacherAsked(key=question.key, attempt=question.attempt, texts=question.texts))

    def validate(self) -> None:
        """Assert the invariants."""
        queued = set(self._queue)
        counts = dict.fromkeys(self.views, 0)
        for key, question in self.questions.items():
            assert key == question.key
            assert question.num_tries <= self.settings.num_retries
            assert question.num_losses <= self.settings.max_teacher_losses
            if question.teacher:
                counts[question.teacher] += 1
            else:
                assert key in queued, f"{key} is nowhere"
        for view in self.views.values():
            assert counts[view.name] == view.num_asked <= view.num_slots, view


def _least_loaded(views: Iterable[TeacherView]) -> TeacherView | None:
    """The teacher with the smallest share of its places taken; None when none is free."""
    free = [view for view in views if view.num_asked < view.num_slots]
    return min(free, key=lambda view: (view.num_asked / view.num_slots, view.name), default=None)


def _misfit(texts: Sequence[GivenTokens], answer: TeacherAnswered) -> str:
    """What is wrong with an answer; empty when it speaks of each token."""
    found, wanted = [len(data) // LOGPROB_BYTES for data in answer.logprobs], [text.num_tokens for text in texts]
    if answer.top and wanted != (of_top := [top.num_tokens for top in answer.top]):
        return f"it named the likeliest tokens of {of_top} places, asked were {wanted}"
    if found == wanted and not any(len(data) % LOGPROB_BYTES for data in answer.logprobs):
        return ""
    return f"it answered with {found} log-probs, asked were {wanted}"
