"""What the PromptSource is told when it is built."""

from __future__ import annotations

# msgspec reads the annotation:
from penstock.actors.prompt_source.options import PromptSourceOptions
from penstock.messages.base import Value
from penstock.messages.rows import RowSource


class PromptSourceSettings(Value, frozen=True, kw_only=True):
    """Sizes, budgets and deadlines of the run."""

    options: PromptSourceOptions
    epoch: int
    """Of this incarnation; above 0 it takes a census before it issues anything."""
    seed: int
    num_rows: int
    shuffle: bool
    sources: tuple[RowSource, ...] = ()
    """What these rows are of; empty: of one source."""
    chooses_rows: bool = False
    """The backend chooses the row of each group, and the Buffer records it before it is issued."""
    prefetch_rows: int = 0
    """Rows that are named to the backend before they are wanted."""
    samples_per_group: int
    salvages_responses: bool = True
    """What a lost attempt had reported is the prefix of the next one. Of an episode it is only what stands before its
    last save point, as nobody can put the other side of the conversation back to anywhere else."""
    max_evaluating: int = 1
    """Samples of an evaluation that are at engines while there is training."""
    awaits_pushes: bool = False
    """Groups are pushed from outside, and whoever pushes is told of versions and of what is settled."""
    recorded_engines: tuple[str, ...] = ()
    """Those that answer with the responses that rows hold, and generate nothing."""
    num_generating: int = 0
    """Engines that generate, when all are there; 0: nobody knows."""
