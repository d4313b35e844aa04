"""What actors ask for: of their shell (sends, timers, records) and of the backends behind it.

A list of commands is carried out in order. What follows a ``Record`` happens only when the record is durable.
"""

from __future__ import annotations

from penstock.messages.base import Command, Event
from penstock.messages.flow import RowOutcome
from penstock.messages.ledger import LedgerEntry
from penstock.messages.samples import Group, Part, Prompt, Purpose, Sample, SampleKey
from penstock.messages.teaching import GivenTokens
from penstock.messages.training import UpdateMode
from penstock.messages.turn_sampling import TurnSampling
from penstock.messages.weights import WeightManifest

# --- of the shell ---------------------------------------------------------------------------------------------


class Send(Command, frozen=True):
    """Send an event to another actor; never blocks."""

    to: str
    event: Event


class Record(Command, frozen=True):
    """Make these entries durable before anything after it."""

    entries: tuple[LedgerEntry, ...]


class StartTimer(Command, frozen=True):
    """Start, or start anew, the timer of this key."""

    key: str
    delay_s: float


class StopTimer(Command, frozen=True):
    """Stop the timer of this key, if it runs."""

    key: str


class ReplaceActor(Command, frozen=True):
    """Ask the supervisor to kill this incarnation and start another in its place."""

    name: str
    epoch: int
    cause: str


class FailRun(Command, frozen=True):
    """Ask the supervisor to stop the run, with this story: it cannot or must not go on."""

    story: str
    has_diverged: bool = False
    """So has the training: with the same options it would again."""


# --- of the PromptSource's backend ----------------------------------------------------------------------------


class PromptRequest(Command, frozen=True, array_like=True, tag=False):
    """One prompt wanted: which group it is for and which row it is."""

    group_id: int
    row: int
    epoch: int
    dataset: int | None = None
    """Index in the scenario's ``evaluation.datasets``; None: a row to train on."""
    min_version: int = 0
    """Of its group; said where groups are pushed from outside."""


class FetchPrompts(Command, frozen=True):
    """Read these rows; answered by ``PromptsFetched``."""

    requests: tuple[PromptRequest, ...]
    ahead: tuple[int, ...] = ()
    """Rows that will probably be wanted after these, soonest first; a backend may read them before."""


class StreamPlace(Command, frozen=True, array_like=True, tag=False):
    """A place in the stream of prompts, with the row that stands there."""

    position: int
    row: int
    epoch: int


class ChooseRows(Command, frozen=True):
    """Choose a row for each of these groups; answered by ``RowsDrawn``."""

    group_ids: tuple[int, ...]
    stream: tuple[StreamPlace, ...]
    """As many as there are groups: those that are taken are taken from the front."""
    in_flight: tuple[int, ...]
    """Rows of groups that are on their way."""
    outcomes: tuple[RowOutcome, ...]
    """Those since the last time."""


class TellPushers(Command, frozen=True):
    """Say this to those who push groups from outside."""

    version: int
    """The newest that enough engines serve; −1: none yet."""
    gone: tuple[int, ...] = ()
    """Groups that want no row any more: they are settled."""


# --- of the engine --------------------------------------------------------------------------------------------


class OpenEngine(Command, frozen=True):
    """Start the engine; answered by ``EngineOpened``."""


class Generate(Command, frozen=True, kw_only=True):
    """Generate one sample; answered by ``GenerationAdvanced`` now and then and one ``GenerationEnded``."""

    key: SampleKey
    attempt: int
    purpose: Purpose
    prompt: Prompt
    seed: int
    deadline_version: int
    prefix: Part | None = None
    max_new_tokens: int | None = None
    """Length limit of the response, prefix included, where it is lower than the scenario's: of one turn of an
    episode."""
    sampling: TurnSampling | None = None
    """Of one turn of an episode, where it is drawn otherwise than the scenario says."""


class AbortGeneration(Command, frozen=True):
    """End this request now; answered by its ``GenerationEnded`` with what there is, unless it has ended already."""

    key: SampleKey
    attempt: int


class InterruptGenerations(Command, frozen=True):
    """End every running request, each answered by ``GenerationEnded(Cancelled("interrupted"))`` with its tokens."""


class FetchWeights(Command, frozen=True):
    """Bring these weights near in the background and check the digest; answered by ``WeightsStagedLocally``."""

    manifest: WeightManifest


class ApplyWeights(Command, frozen=True):
    """Swap to weights that were fetched; answered by ``WeightsSwapped``. The actor has seen to it that nothing runs,
    unless the mode is ``in_flight``."""

    manifest: WeightManifest
    update_mode: UpdateMode


class SleepEngine(Command, frozen=True):
    """Give device memory up, weights included, and keep the process; answered by ``EngineSlept``. The actor has seen to
    it that nothing runs. The next ``ApplyWeights`` takes the memory again."""


class ComputeLogprobs(Command, frozen=True, kw_only=True):
    """Compute how likely these tokens are, each after those before it; answered by one ``LogprobsComputed``, also when
    it cannot be done. Of a teacher, whose weights never change."""

    key: SampleKey
    attempt: int
    texts: tuple[GivenTokens, ...]


# --- of the Scorer and the Filter -----------------------------------------------------------------------------


class Score(Command, frozen=True, kw_only=True):
    """Run the reward function; answered by one ``SampleJudged``, also when it fails or takes too long."""

    sample: Sample
    prompt: Prompt
    timeout_s: float


class ScoreGroup(Command, frozen=True, kw_only=True):
    """Run a reward function on all samples of a group together; answered by one ``GroupScored``, also when it fails or
    takes too long."""

    samples: tuple[Sample, ...]
    """Samples in the order of their indices."""
    prompt: Prompt
    timeout_s: float


class JudgeGroup(Command, frozen=True):
    """Run the user's group filter; answered by ``GroupJudged``."""

    group: Group


class JudgeSamples(Command, frozen=True):
    """Run the user's sample filter on each sample of this group; answered by one ``SamplesJudged``."""

    group: Group


class ShowGroup(Command, frozen=True):
    """Show this group to the user's hook; not answered. ``cause``: why it is turned away; empty: it is admitted."""

    group: Group
    cause: str = ""


class KeepSamples(Command, frozen=True):
    """Write these samples where people can read them, if there is room; not answered. Of one that failed its end is
    there, and the response if one came. ``cause``: why the group is turned away; empty: it is admitted."""

    group: Group
    cause: str = ""


# --- of the learner -------------------------------------------------------------------------------------------


class OpenLearner(Command, frozen=True, kw_only=True):
    """Load model, optimizer and the state of random numbers from a checkpoint; without one load the model of the
    scenario, and warm-start if the scenario says so. Answered by ``LearnerOpened``."""

    version: int = 0
    path: str = ""
    """Path of the checkpoint; empty: none."""


class Train(Command, frozen=True, kw_only=True):
    """Train one batch; answered by ``BatchTrained``."""

    version: int
    """The version that this makes."""
    groups: tuple[Group, ...]
    min_token_version: int
    """Tokens of older versions get no loss; 0 trains all."""
    mask_old_tokens: bool = False
    """Tokens of a sample that are older than its newest ones get no loss."""


class PublishWeights(Command, frozen=True):
    """Export the current weights; answered by ``WeightsPublished``, and perhaps by ``WeightsCopied`` before. Exports
    end in the order in which they were asked for."""

    version: int
    publish: int


class ReleaseWeights(Command, frozen=True):
    """What was exported for versions below this one may go."""

    below_version: int


class SaveCheckpoint(Command, frozen=True):
    """Write the state to disk; answered by ``CheckpointWritten``."""

    version: int


class DeleteCheckpoints(Command, frozen=True):
    """Checkpoints of versions below this one may go; not answered."""

    below_version: int


class SleepLearner(Command, frozen=True):
    """Move everything from the device to the host's memory; answered by ``LearnerSlept``. What was asked for before is
    done first. Checkpoints can be saved in this state; it is neither trained nor published."""


class WakeLearner(Command, frozen=True):
    """Move everything back to the device; answered by ``LearnerWoken``."""


# --- of the Buffer --------------------------------------------------------------------------------------------


class FetchBatch(Command, frozen=True):
    """Read the payloads of these groups from the ledger, in this order; answered by ``BatchFetched``."""

    version: int
    group_ids: tuple[int, ...]


class ArchiveSamples(Command, frozen=True):
    """Write the samples of these batches to a file that outlives the ledger's payloads; answered by
    ``SamplesArchived``."""

    first_version: int
    last_version: int


class ArchiveGroups(Command, frozen=True):
    """Write the samples of these groups, which are ready and will not be trained here, to such a file; answered by
    ``SamplesArchived``."""

    group_ids: tuple[int, ...]


class KeepAnswers(Command, frozen=True, kw_only=True):
    """Write the answers of this group of an evaluation where people can read them; not answered. They are for reading
    alone: figures come from the ledger."""

    evaluation: int
    """Number of the evaluation that the answers are of."""
    version: int
    """Policy version that the evaluation asked for."""
    dataset: str
    """Name of it."""
    group: Group


PromptCommand = FetchPrompts | ChooseRows
PushCommand = PromptCommand | TellPushers
EngineCommand = (
    OpenEngine | Generate | AbortGeneration | InterruptGenerations | FetchWeights | ApplyWeights | SleepEngine
)
TeacherCommand = OpenEngine | ComputeLogprobs
ScorerCommand = Score | ScoreGroup
FilterCommand = JudgeGroup | JudgeSamples | ShowGroup | KeepSamples
LearnerCommand = (
    OpenLearner
    | Train
    | PublishWeights
    | ReleaseWeights
    | SaveCheckpoint
    | DeleteCheckpoints
    | SleepLearner
    | WakeLearner
)
BufferCommand = FetchBatch | ArchiveSamples | ArchiveGroups | KeepAnswers
BackendCommand = (
    PushCommand | EngineCommand | TeacherCommand | ScorerCommand | FilterCommand | LearnerCommand | BufferCommand
)
ShellCommand = Send | Record | StartTimer | StopTimer | ReplaceActor | FailRun
AnyCommand = ShellCommand | BackendCommand
