"""Counts tokens with books of its own, from the ledger's entries and the responses that engines send.

Invariants, asserted after every commit and of every report:

* Tokens that came = tokens of samples that ended, by state and cause, + tokens of groups that have come and not ended.
* A step's report, and the last word, say exactly that, as it was when the step was recorded.
* A sample that came with a response has as many tokens as some engine sent for it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.messages.commands import Send
from penstock.messages.evaluation import GroupEvaluated
from penstock.messages.flow import SampleGenerated
from penstock.messages.ledger import GroupClosed, GroupRecorded, StepRecorded
from penstock.messages.samples import TerminalState
from penstock.messages.training import RunFinished, StepReported
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.samples import Sample, SampleEnd, SampleKey
    from penstock.messages.training import Balance
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process


class TokenWatch(IdleWatcher):
    """Asserts after every commit."""

    def __init__(self) -> None:
        self.num_came = 0
        """Tokens that the model made, of all that came to the Buffer."""
        self.ended: Counter[tuple[str, str]] = Counter()
        """Those of samples that ended, by state and cause."""
        self.num_steps_compared = 0
        self._open: dict[int, GroupRecorded] = {}
        self._at_step: dict[int, tuple[int, int, Counter[tuple[str, str]]]] = {}
        self._sent: dict[SampleKey, set[int]] = {}

    @property
    def num_open(self) -> int:
        """Tokens in the system."""
        return sum(_of_group(record) for record in self._open.values())

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""
        for command in commands:
            if isinstance(command, Send) and isinstance(command.event, SampleGenerated):
                sample = command.event.sample
                self._sent.setdefault(sample.key, set()).add(_made(sample))

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""
        for entry in entries:
            match entry:
                case GroupRecorded():
                    self._open[entry.group_id] = entry
                    self.num_came += _of_group(entry)
                    self._assert_sent(entry)
                case GroupClosed():
                    if self._open.pop(entry.group_id, None) is None:
                        self.num_came += sum(end.num_tokens - end.num_given_tokens for end in entry.ended)
                    self._end(entry.ended)
                case GroupEvaluated():
                    for sample in entry.row.samples:
                        self._count(TerminalState.EVALUATED, "", sample.num_tokens - sample.num_given_tokens)
                        self.num_came += sample.num_tokens - sample.num_given_tokens
                    self.num_came += sum(end.num_tokens - end.num_given_tokens for end in entry.row.missing)
                    self._end(entry.row.missing)
                case StepRecorded():
                    for group_id in entry.group_ids:
                        if group_id in entry.again:
                            continue  # its samples came to their end when it was trained for the first time
                        record = self._open.pop(group_id)
                        assert record.payload is not None
                        self._count(TerminalState.TRAINED, "", sum(map(_made, record.payload.samples)))
                        self._end(record.ended)
                    self._at_step[entry.version] = (self.num_came, self.num_open, +self.ended)
                case _:
                    continue
            assert self.num_came == self.num_open + self.ended.total(), (
                f"{self.num_came} tokens came; {self.num_open} are in the system, ended are {self.ended}"
            )

    def heard(self, process: Process, event: Event) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""
        if isinstance(event, StepReported) and event.version in self._at_step:
            assert tokens_of(event.balance) == self._at_step[event.version], f"step {event.version}"
            self.num_steps_compared += 1
        elif isinstance(event, RunFinished):
            assert tokens_of(event.balance) == (self.num_came, self.num_open, +self.ended)

    def _end(self, ends: Iterable[SampleEnd]) -> None:
        for end in ends:
            self._count(end.state, end.cause, end.num_tokens - end.num_given_tokens)

    def _count(self, state: TerminalState, cause: str, num_tokens: int) -> None:
        self.ended[state.value, cause] += num_tokens

    def _assert_sent(self, record: GroupRecorded) -> None:
        assert record.payload is not None
        for sample in record.payload.samples:
            sent = self._sent.get(sample.key, set())
            assert _made(sample) in sent, f"{sample.key} came with {_made(sample)} tokens; engines sent {sent}"


def tokens_of(balance: Balance) -> tuple[int | None, int, Counter[tuple[str, str]]]:
    """What came, what is in the system, and what ended, by state and cause."""
    assert balance.is_balanced, balance
    ended = Counter({(count.state, count.cause): count.num_made_tokens for count in balance.ended})
    return balance.generated_tokens, balance.in_system_tokens, +ended


def _made(sample: Sample) -> int:
    return sum(part.num_tokens - part.loss_mask.count(0) for part in sample.parts)


def _of_group(record: GroupRecorded) -> int:
    assert record.payload is not None
    ended = sum(end.num_tokens - end.num_given_tokens for end in record.ended)
    return sum(map(_made, record.payload.samples)) + ended
