"""Rows with a retry budget of their own, on the virtual host: each sample that is given up has had its row's budget.

The rows' numbers are read from the prompts that travel, not from the PromptSource's own accounts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import pytest
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun
from trials.trial import EvaluationTrial, Trial

from penstock.backends.engines.options import LatencyOptions
from penstock.messages.commands import Send
from penstock.messages.flow import SampleFailed, SampleIssued
from penstock.messages.names import BUFFER, PROMPT_SOURCE
from penstock.messages.training import UpdateMode
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.samples import Prompt
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process

USUAL = 1
POLICIES = {
    "sync": (0, UpdateMode.DRAIN),
    "one_step_off": (1, UpdateMode.DRAIN),
    "fully_async": (2, UpdateMode.IN_FLIGHT),
}


class Attempts(IdleWatcher):
    """What the PromptSource sends."""

    def __init__(self) -> None:
        self.given_up: list[tuple[int, SampleFailed]] = []
        """With the incarnation that gave it up."""
        self.prompts: dict[tuple[int | None, int], set[int | None]] = {}
        """By dataset and row: the numbers that were ever sent with it."""

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        if process.name != PROMPT_SOURCE:
            return
        for command in commands:
            match command:
                case Send(event=SampleFailed() as failed):
                    self.given_up.append((process.epoch, failed))
                    self._note(failed.prompt)
                case Send(event=SampleIssued() as issued):
                    self._note(issued.prompt)
                case _:
                    pass

    def _note(self, prompt: Prompt) -> None:
        self.prompts.setdefault((prompt.dataset, prompt.row), set()).add(prompt.num_retries)


def run(policy: str, **changes: object) -> Attempts:
    eta, mode = POLICIES[policy]
    trial = Trial(
        seed=5,
        policy=policy,
        max_staleness=eta,
        update_mode=mode,
        num_steps=8,
        groups_per_batch=4,
        samples_per_group=4,
        num_rows=24,
        num_retries=USUAL,
        own_retries=(0, 1, 4),
        latency=LatencyOptions(response_tokens_median=12.0, prefill_s=0.05, token_s=0.05, failure_rate=0.5),
    )
    trial_run, attempts = TrialRun(msgspec.structs.replace(trial, **changes)), Attempts()
    trial_run.host.watch(attempts)
    trial_run.run()
    return attempts


def budget(failed: SampleFailed) -> int:
    return USUAL if failed.prompt.num_retries is None else failed.prompt.num_retries


@pytest.mark.parametrize("policy", POLICIES)
def test_each_sample_that_is_given_up_has_had_the_attempts_of_its_row(policy: str) -> None:
    attempts = run(policy)
    failed = [failed for _, failed in attempts.given_up]
    assert [each.attempt for each in failed] == [budget(each) for each in failed]
    assert {each.prompt.num_retries for each in failed} >= {None, 0, 1}


@pytest.mark.parametrize("target", [PROMPT_SOURCE, BUFFER, ""])
def test_a_row_keeps_its_budget_whoever_dies(target: str) -> None:
    """Also when the whole machine does, which a resumed run looks like: nobody has kept anything but the ledger."""
    kind = FaultKind.KILL if target else FaultKind.MACHINE
    faults = tuple(Fault(at_s=at_s, kind=kind, target=target) for at_s in (2.0, 6.0))
    attempts = run("fully_async", faults=faults)
    assert all(len(numbers) == 1 for numbers in attempts.prompts.values()), "a row says the same, whoever reads it"
    last = max(epoch for epoch, _ in attempts.given_up)
    assert (last == 0) is (target == BUFFER)
    late = [failed for epoch, failed in attempts.given_up if epoch == last]
    assert {failed.prompt.num_retries for failed in late} >= {None, 0, 1}
    assert all(failed.attempt >= budget(failed) for _, failed in attempts.given_up)


def test_rows_of_an_evaluation_have_budgets_too() -> None:
    evaluation = EvaluationTrial(before_first=True, every=2, num_rows=(9, 9), samples_per_prompt=(2, 1))
    attempts = run("one_step_off", evaluation=evaluation)
    failed = [failed for _, failed in attempts.given_up if failed.prompt.dataset is not None]
    assert [each.attempt for each in failed] == [budget(each) for each in failed]
    counts = Counter(each.prompt.num_retries for each in failed)
    assert counts[0]
    assert counts[None]
