"""The ``learner.dump`` and ``learner.profile`` blocks: which steps are written down, token by token or call by call."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.messages.base import Options

Step = Annotated[int, Meta(ge=1)]


class DumpOptions(Options, frozen=True, kw_only=True):
    """Write down what single steps train: a file for each step in `steps/`, with every token, its mask, its log-probs,
    advantage and loss (docs/profiling.md). `penstock diff-steps` compares those of two runs."""

    first_step: Step = 1
    """The first that is written down."""
    last_step: Step | None = None
    """The last one; null: to the end of the run."""
    every: Step = 1
    """One step in so many, counted from the first. `--dry-run` says how much all of them take at most."""

    def takes(self, step: int) -> bool:
        """Whether this step is written down."""
        is_over = self.last_step is not None and step > self.last_step
        return step >= self.first_step and not is_over and (step - self.first_step) % self.every == 0


class ProfileOptions(Options, frozen=True, kw_only=True):
    """Profile whole steps with torch's profiler: a trace for each step and rank in `profiles/` (docs/profiling.md).
    The steps take longer meanwhile, and a trace of a large model is large, so take few."""

    first_step: Step = 2
    """The first that is profiled; 1 has what happens once."""
    last_step: Step = 2
    """The last one."""
    stacks: bool = False
    """Name the lines of Python that called each operator; dearer, and larger."""
    memory: bool = False
    """Every allocation in the trace; on CUDA also a snapshot of the allocator's history, for pytorch.org/memory_viz."""

    def takes(self, step: int) -> bool:
        """Whether this step is profiled."""
        return self.first_step <= step <= self.last_step
