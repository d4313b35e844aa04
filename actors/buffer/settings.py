"""What the Buffer is told when it is built."""

from __future__ import annotations

from penstock.actors.buffer.evaluating import EvaluationSchedule
from penstock.actors.buffer.goals import Goal, Train
from penstock.actors.buffer.pacing import PacingSettings
from penstock.messages.base import Value
from penstock.messages.ledger import RunRecorded


class ElasticEngines(Value, frozen=True, kw_only=True):
    """How the engines of a run may join and leave; all of them are alike."""

    first: tuple[str, ...]
    """Those that it begins with."""
    fewest: int
    num_slots: int
    """Requests that one engine decodes side by side."""


class BufferSettings(Value, frozen=True, kw_only=True):
    """Sizes and limits of the run."""

    pacing: PacingSettings
    samples_per_group: int
    engines: tuple[str, ...]
    """Names of the EngineWorkers, which keep samples and hear of settlements; where they may join and leave, of all
    that there may be."""
    elastic: ElasticEngines | None = None
    """None: all are there from the start to the end."""
    num_prompts: int | None
    """Rows times epochs; None when the dataset may be gone through for ever."""
    policy_name: str = ""
    """Of the scenario's policy."""
    publish_every: int = 1
    max_requeues: int = 1
    max_rejected_batches: int = 20
    max_uses: int = 1
    """In how many batches a group may be trained."""
    stop_after_failures: int = 0
    """When so many samples have failed for one kind of reason, and none has had a reward, the run ends; 0: it never
    does."""
    keep_after_batches: int | None = None
    """Batches' worth of groups turned away since the last batch was formed, after which further ones are kept; None:
    none ever is."""
    mask_old_tokens: bool = False
    chooses_rows: bool = False
    """PromptSource chooses the rows of groups; they are recorded before they are issued."""
    tells_row_ends: bool = False
    """It is told what became of each row in the end, and not only what came in."""
    settle_delay_s: float = 0.1
    keep_checkpoints: int = 1
    keep_samples: bool = False
    """Archive trained samples before their payloads go."""
    goal: Goal = Train()
    """Of the scenario; that of a ledger which begins with the batches of another run takes its place."""
    evaluation: EvaluationSchedule | None = None
    """None: nothing is evaluated."""
    identity: RunRecorded | None = None
    """What a ledger must say of its run; None takes any."""

    @property
    def num_steps(self) -> int:
        return self.pacing.num_steps

    @property
    def groups_per_batch(self) -> int:
        return self.pacing.groups_per_batch
