"""When an embedded engine tells what became of its requests: together, soon, in order, and at once where few wait."""

from __future__ import annotations

from penstock.backends.engines.torch.held_answers import HOLD_S, RUNNING_TO_HELD, HeldAnswers
from penstock.messages.local import EngineSlept, GenerationAdvanced, GenerationEnded, LocalEvent
from penstock.messages.samples import Completed, Part, SampleKey


class Told:
    """Answers on a clock that the test moves."""

    def __init__(self) -> None:
        self.events: list[LocalEvent] = []
        self.at_s = 100.0
        self.answers = HeldAnswers(self.events.append, lambda: self.at_s)


def ended(index: int) -> GenerationEnded:
    return GenerationEnded(key=SampleKey(7, index), attempt=1, outcome=Completed(), part=Part())


def advanced(index: int) -> GenerationAdvanced:
    return GenerationAdvanced(key=SampleKey(7, index), attempt=1, from_token=0, chunk=Part())


def test_one_of_many_is_held_until_the_time_is_over() -> None:
    told = Told()
    told.answers.tell()  # something was told just now
    for event in (advanced(0), ended(1)):
        told.answers.hold(event)
        told.answers.tell_due(60)
    assert not told.events
    told.at_s += 1.01 * HOLD_S
    told.answers.tell_due(60)
    assert told.events == [advanced(0), ended(1)]


def test_what_is_a_large_part_of_those_that_run_is_told_at_once() -> None:
    told = Told()
    told.answers.tell()
    told.answers.hold(advanced(0))
    told.answers.tell_due(RUNNING_TO_HELD + 1)
    assert not told.events
    told.answers.hold(ended(0))
    told.answers.tell_due(2 * RUNNING_TO_HELD + 1)
    assert not told.events
    told.answers.tell_due(2 * RUNNING_TO_HELD)
    assert told.events == [advanced(0), ended(0)]


def test_the_last_is_told_at_once_and_the_first_after_a_while_of_silence() -> None:
    told = Told()
    told.answers.hold(ended(0))
    told.answers.tell_due(1000)
    assert told.events == [ended(0)]
    told.answers.hold(ended(1))
    told.answers.tell_due(0)
    assert told.events == [ended(0), ended(1)]


def test_what_is_said_at_once_comes_after_what_was_held() -> None:
    told = Told()
    told.answers.tell()
    told.answers.hold(ended(0))
    told.answers.tell(EngineSlept())
    told.answers.tell()
    assert told.events == [ended(0), EngineSlept()]
