"""The Scorer's and the Filter's backends: which function, and where it runs.

Invariants:

* Each ``Score`` is answered by one ``SampleJudged``, each ``JudgeGroup`` by one ``GroupJudged``.
* A failure of any kind (exception, nonsense, overrun, a process that dies) is a reason and never a zero.
* Nothing of the function's runs on the actor's thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.surroundings import Surroundings
from penstock.backends.processes.user_code import UserCodeError, split_spec
from penstock.backends.rewards.combine import Rewards
from penstock.backends.rewards.functions import FILTER
from penstock.backends.rewards.functions_asked import asked_functions
from penstock.backends.rewards.pool import WorkerPool
from penstock.backends.rewards.sample_calls import ResponseText, filter_call
from penstock.backends.rewards.spec import REWARDS
from penstock.backends.rewards.wire import CallFailed, Kept
from penstock.messages.base import Metric
from penstock.messages.commands import JudgeGroup
from penstock.messages.local import GroupJudged
from penstock.messages.option_keys import is_user_code

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.ledger.kept_samples import SampleKeeper
    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.backends.rewards.options import RewardOptions
    from penstock.backends.rewards.wire import Answer, FilterCall
    from penstock.messages.commands import FilterCommand, Score, ScoreGroup

FILTER_TIMEOUT_S: Final = 30.0
FILTER_ERROR: Final = "filter_error"
"""The cause of a group that was turned away because the user's filter failed on it."""

_LOG: Final = logging.getLogger(__name__)


def open_rewards(
    options: RewardOptions, tokenizer_folder: Path, surroundings: Surroundings | None = None
) -> Backend[Score | ScoreGroup]:
    """The backend that scores samples as the scenario says.

    Raises:
        UserFault: there is no such reward function, or no such file.
    """
    surroundings = surroundings or Surroundings()
    asked = asked_functions(options, max_response_tokens=surroundings.max_response_tokens)
    for function in asked.every():
        if is_user_code(function.function):
            split_spec(function.function)
        elif problem := REWARDS.problem(function.function):
            raise UserCodeError(f"reward.function: {problem}")
    return Rewards(asked, ResponseText(tokenizer_folder), surroundings)


def open_filter(
    function: str | None, tokenizer_folder: Path, *, timeout_s: float = FILTER_TIMEOUT_S
) -> Backend[JudgeGroup]:
    """The backend that asks the user's filter; without one it keeps every group.

    Raises:
        UserFault: there is no such file.
    """
    if function is None:
        return KeepEveryGroup()
    split_spec(function)
    return GroupFilter(function, ResponseText(tokenizer_folder), timeout_s)


def open_filters(
    function: str | None,
    sample_function: str | None,
    hook: str | None,
    tokenizer_folder: Path,
    keeper: SampleKeeper | None = None,
) -> Backend[FilterCommand]:
    """The backend that asks every function of a user's that the Filter has.

    Raises:
        UserFault: there is no such file.
    """
    from penstock.backends.rewards.sampling import FilterFunctions, GroupShower, SampleSifter

    judge, text = open_filter(function, tokenizer_folder), ResponseText(tokenizer_folder)
    for spec in (sample_function, hook):
        if spec is not None:
            split_spec(spec)
    return FilterFunctions(
        judge,
        None if sample_function is None else SampleSifter(sample_function, text),
        None if hook is None else GroupShower(hook, ResponseText(tokenizer_folder)),
        keeper,
    )


class GroupFilter(WorkerPool[JudgeGroup]):
    """Asks the user's filter in a process. One that fails on a group turns it away, with a cause of its own."""

    def __init__(self, spec: str, text: ResponseText, timeout_s: float) -> None:
        super().__init__(FILTER, spec)
        self._text = text
        self._timeout_s = timeout_s

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`. A filter that cannot be loaded comes to ``fail``."""
        self._emit = emit
        self._begin(fail)

    def execute(self, command: JudgeGroup, /) -> None:
        """Have a group judged."""
        self.submit(command)

    def gauges(self) -> tuple[Metric, ...]:
        """As for rewards."""
        return (
            Metric("filter/waiting", float(self.num_waiting)),
            Metric("filter/running", float(self.num_running)),
            Metric("filter/answered", float(self.num_answered)),
            Metric("filter/failed", float(self.num_failed)),
            Metric("filter/replaced_processes", float(self.num_restarts)),
        )

    def _call(self, command: JudgeGroup, call_id: int, names: tuple[str, ...]) -> FilterCall:
        return filter_call(command.group, self._timeout_s, call_id, self._text, names)

    def _on_answer(self, command: JudgeGroup, answer: Answer) -> None:
        group_id = command.group.group_id
        if isinstance(answer, Kept):
            self._emit(GroupJudged(group_id=group_id, keep=answer.keep, cause=answer.cause))
            return
        assert isinstance(answer, CallFailed)
        # Causes are few and counted in the balance, so the text of the error cannot be one.
        _LOG.warning("group %d is turned away because the filter failed on it: %s", group_id, answer.reason)
        judged = GroupJudged(group_id=group_id, keep=False, cause=FILTER_ERROR, is_failure=True, reason=answer.reason)
        self._emit(judged)


class KeepEveryGroup:
    """The backend of a Filter whose scenario names no function."""

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`."""
        self._emit = emit

    def execute(self, command: JudgeGroup, /) -> None:
        """Keep it."""
        self._emit(GroupJudged(group_id=command.group.group_id, keep=True))

    def gauges(self) -> tuple[Metric, ...]:
        """Nothing to tell."""
        return ()

    def close(self, timeout_s: float) -> None:
        """Nothing runs."""
