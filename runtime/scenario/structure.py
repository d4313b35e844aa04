"""The whole of a scenario: one block of options for each part, each defined beside its part."""

from __future__ import annotations

from penstock.actors.buffer.options import StalenessOptions
from penstock.actors.filter.options import FilterOptions
from penstock.actors.prompt_source.options import PromptSourceOptions
from penstock.actors.weight_publisher.options import WeightsOptions
from penstock.backends.checkpoint.options import ModelOptions
from penstock.backends.data.options import DataOptions
from penstock.backends.engines.options import EnginesOptions, SamplingOptions
from penstock.backends.engines.reward_model_options import RewardModelOptions
from penstock.backends.engines.teacher_options import TeacherOptions
from penstock.backends.episodes.options import EpisodeOptions
from penstock.backends.evaluation.options import EvaluationOptions
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.rewards.options import RewardOptions
from penstock.messages.base import Options
from penstock.runtime.scenario.run_options import ObservabilityOptions, RunOptions, RuntimeOptions


class Scenario(Options, frozen=True, kw_only=True):
    """Everything that one run is made of. Only ``run.name`` and ``data.path`` have no default."""

    run: RunOptions
    """What is run and where it is written."""
    data: DataOptions
    """Where the prompts come from."""
    model: ModelOptions = ModelOptions()
    """Which model is trained."""
    sampling: SamplingOptions = SamplingOptions()
    """How responses are drawn."""
    episode: EpisodeOptions = EpisodeOptions()
    """What becomes of an issued sample: one response, or a conversation."""
    reward: RewardOptions = RewardOptions()
    """How responses are scored."""
    filter: FilterOptions = FilterOptions()
    """Which groups are worth training on."""
    staleness: StalenessOptions = StalenessOptions()
    """Synchronous, one step off or fully asynchronous: this block decides, and no other."""
    engines: EnginesOptions = EnginesOptions()
    """What generates, and how many of them."""
    learner: LearnerOptions = LearnerOptions()
    """What trains, and how."""
    teacher: TeacherOptions | None = None
    """A second model that is learnt from, by distillation on the student's own samples. null: there is none."""
    reward_model: RewardModelOptions | None = None
    """A model with weights of its own whose score is a reward. null: there is none."""
    evaluation: EvaluationOptions = EvaluationOptions()
    """When the policy is evaluated, and on what."""
    weights: WeightsOptions = WeightsOptions()
    """How new weights reach the engines."""
    prompt_source: PromptSourceOptions = PromptSourceOptions()
    """Retries and deadlines of issued samples."""
    runtime: RuntimeOptions = RuntimeOptions()
    """Processes, sockets, restarts."""
    observability: ObservabilityOptions = ObservabilityOptions()
    """Traces, metrics, report."""
