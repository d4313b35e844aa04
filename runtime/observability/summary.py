"""The outcome of a run in one struct: what ``summary.json`` holds, the terminal shows and the report begins with."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.learners.checkpoints.names import CHECKPOINTS, checkpoint_in
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault
from penstock.messages.reasons import ReasonCount
from penstock.messages.samples import TerminalState
from penstock.messages.training import Balance
from penstock.runtime.observability.evaluations import DatasetOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

SUMMARY_FILE: Final = "summary.json"
USEFUL: Final = (TerminalState.TRAINED, TerminalState.EVALUATED)
"""What ends so is no waste."""


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run ran."""

    system: str
    python: str
    num_cpus: int
    """CPUs that the run may use."""
    memory_bytes: int
    gpus: tuple[str, ...] = ()


class TokenWaste(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were generated and not trained, by what became of them."""

    state: str
    cause: str
    num_tokens: int


class ActorRestarts(msgspec.Struct, frozen=True, kw_only=True):
    """How often an actor was replaced."""

    name: str
    count: int


class ActorCost(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time that an actor's processes took, their start included."""

    name: str
    cpu_s: float


class HeldPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A staleness policy, and the step from which it held for new grants."""

    from_step: int
    """The first that came after it was in force; 1 of the first policy."""
    policy: str
    max_staleness: int
    """η."""


def policies_text(policies: Sequence[HeldPolicy]) -> str:
    """In words, in a line."""
    return ", then ".join(f"{each.policy}, η = {each.max_staleness}, from step {each.from_step:,}" for each in policies)


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to. Figures that a run without a step does not have are None."""

    scenario: str
    penstock_version: str
    seed: int
    policy: str
    """Name of the staleness policy that held at the end."""
    policies: tuple[HeldPolicy, ...] = ()
    """All that held, in order: more than one where an operator switched."""
    staleness_bound: int
    """The largest η that a policy had."""
    started_at: str
    """ISO 8601 with the offset to UTC."""
    machine: MachineFacts

    completed: bool
    story: str
    """Why the run ended, in a sentence for people."""
    version: int
    """Batches trained."""
    num_steps: int
    """Batches that were to be trained; 0 of a run that trains nothing."""

    wall_s: float
    """From the start of the driver to the end."""
    training_s: float
    """From when the actors were up and the warm start was done."""
    first10_reward: float | None
    """Mean reward of the first ten steps, or of all when there are fewer."""
    last10_reward: float | None
    mean_staleness: float | None
    """Over trained samples, in versions."""
    max_staleness: int
    mean_logprob_abs_diff: float | None
    """Mean over the steps of |learner − engine| log-prob a token, in nats."""
    max_logprob_abs_diff: float | None
    """Largest of the steps' means."""

    balance: Balance
    tokens_generated: int
    """Tokens that the model made, of every response that has come to the Buffer; so ``generated = trained + evaluated +
    wasted + in the system``, of ``balance``."""
    tokens_trained: int
    tokens_wasted: tuple[TokenWaste, ...]
    tokens_lost_estimate: int
    """Tokens that killed engines had made since their last report: an estimate, beside the balance."""
    tokens_reported: int = 0
    """As the engines counted what they made, each incarnation up to its last report: what never arrived is among it,
    and what was made after a last report is not."""
    restarts: tuple[ActorRestarts, ...]
    costs: tuple[ActorCost, ...] = ()
    """CPU time and memory by actor; none on a virtual clock."""

    failures: tuple[ReasonCount, ...] = ()
    """Why samples failed or were dropped by an error: the most frequent reasons, most frequent first."""
    num_failures: int = 0
    """Samples that failed so, for any reason."""
    evaluations: tuple[DatasetOutcome, ...] = ()
    """By dataset; none where nothing was evaluated."""
    warnings: tuple[str, ...] = ()
    """What was found to be wrong with the run while it went on (engine and learner that compute different models), and
    that its warm start was taken from the cache."""
    checkpoint: str = ""
    """Folder of the last checkpoint; empty when there is none."""
    report: str = ""
    """Path of the HTML report; empty when it was switched off."""
    metrics: str = ""
    """Path of the steps as JSON lines."""

    @property
    def goodput(self) -> float | None:
        """Trained ÷ generated tokens; None when nothing was generated."""
        return self.tokens_trained / self.tokens_generated if self.tokens_generated else None

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens a second of training."""
        return self.tokens_generated / self.training_s if self.training_s > 0 else None


def generated_tokens(balance: Balance) -> int:
    """Tokens that the model made, of every response that came; of a balance from before they were counted, of those
    that ended."""
    if balance.generated_tokens is None:
        return sum(count.num_made_tokens for count in balance.ended)
    return balance.generated_tokens


def trained_tokens(balance: Balance) -> int:
    """Tokens that the model made, of the samples that were trained."""
    return sum(count.num_made_tokens for count in balance.ended if count.state == TerminalState.TRAINED)


def wasted_tokens(balance: Balance) -> tuple[TokenWaste, ...]:
    """Tokens that the model made, of the samples that ended otherwise, the largest waste first."""
    waste = [
        TokenWaste(state=count.state, cause=count.cause, num_tokens=count.num_made_tokens)
        for count in balance.ended
        if count.state not in USEFUL and count.num_made_tokens
    ]
    return tuple(sorted(waste, key=lambda item: (-item.num_tokens, item.state, item.cause)))


def machine_facts() -> MachineFacts:
    """The machine of this process, with its GPUs if it has any."""
    # Imported here so that reading a summary needs neither.
    import psutil

    from penstock.runtime.observability.nvml import gpu_names

    return MachineFacts(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpu_names(),
    )


def write_summary(run_folder: Path, summary: RunSummary) -> Path:
    """Write ``summary.json`` whole or not at all; returns its path."""
    path = run_folder / SUMMARY_FILE
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    os.replace(partial, path)
    return path


def set_summary_aside(run_folder: Path) -> RunSummary | None:
    """The summary of the last drive that wrote one, from here on under ``summary-<k>.json``; None when there is none.

    Raises:
        UserFault: the file is no summary.
    """
    path, number = run_folder / SUMMARY_FILE, 0
    while _aside(run_folder, number).exists():
        number += 1
    if path.exists():
        os.replace(path, _aside(run_folder, number))
        number += 1
    return _decode(_aside(run_folder, number - 1)) if number else None


def read_summary(run_folder: Path) -> RunSummary | None:
    """The summary of a run, with its files where they are now; None when the run was cut off before it could write one.

    Raises:
        UserFault: the file is no summary.
    """
    path = run_folder / SUMMARY_FILE
    if not path.exists():
        return None
    found, folder = _decode(path), run_folder.absolute()  # which may be a copy, or have been moved
    return msgspec.structs.replace(
        found,
        checkpoint=found.checkpoint and str(checkpoint_in(folder / CHECKPOINTS, found.checkpoint)),
        report=found.report and str(folder / Path(found.report).name),
        metrics=found.metrics and str(folder / Path(found.metrics).name),
    )


def _aside(run_folder: Path, number: int) -> Path:
    return run_folder / f"summary-{number}.json"


def _decode(path: Path) -> RunSummary:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunSummary)
    except UNREADABLE as error:
        raise UserFault(f"{path} is no summary of a run: {error}") from error
