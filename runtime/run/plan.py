"""What every process of a run knows about it."""

from __future__ import annotations

from typing import Final

from penstock.backends.weights.spec import SHARED_MEMORY
from penstock.messages.base import Value
from penstock.messages.rows import RowSource
from penstock.runtime.scenario import Scenario


class RunPlan(Value, frozen=True, kw_only=True):
    """What every process of a run knows about it."""

    scenario: Scenario
    """Resolved."""
    run_id: str
    run_folder: str
    """Absolute."""
    model_folder: str
    """Absolute; with the tokenizer. Empty when both backends are simulated."""
    teacher_folder: str = ""
    """Absolute; with its tokenizer. Empty when there is no teacher, or a simulated one."""
    num_rows: int
    """Of the dataset, without those that were skipped."""
    sources: tuple[RowSource, ...] = ()
    """What they are of; empty where nobody has read them."""
    data_digest: str = ""
    """Of rows that are read when they are wanted, and of what is made of them; empty where all are in memory."""
    notices: tuple[str, ...] = ()
    """What people should know of the rows before the run starts."""
    engine_notices: tuple[str, ...] = ()
    """Likewise, of how engines serve the model."""
    num_evaluation_prompts: tuple[int, ...] = ()
    """Of each dataset of the evaluation, in the order of the scenario."""
    has_recorded_rows: bool = False
    """Rows of this run were chosen before this drive, and stand in its ledger."""
    transport: str = SHARED_MEMORY

    @property
    def chooses_rows(self) -> bool:
        """Whether the row of a group does not follow from its place in the stream of prompts. Once it did not, it never
        does again: what was chosen has shifted the places of all that came later."""
        if self.scenario.run.only == "learner":
            return False  # its groups are those of another run, and none is drawn
        return (
            self.has_recorded_rows or self.scenario.prompt_source.chooses_rows or self.scenario.data.source is not None
        )


LOGS_FOLDER: Final = "logs"


def log_name(name: str, epoch: int) -> str:
    """Where an incarnation's output goes, relative to the run's folder."""
    return f"{LOGS_FOLDER}/{name.replace('/', '-')}-{epoch}.log"
