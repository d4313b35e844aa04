"""The ``evaluation:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.backends.data.options import MediaKeys, Scalar
from penstock.backends.rewards.options import RewardOptions
from penstock.messages.base import Options
from penstock.messages.option_keys import EpisodeKey, EvaluationHookKey, RowsKey

DatasetName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class EvaluationSampling(Options, frozen=True, kw_only=True):
    """How answers are drawn, where it differs from the run's ``sampling:``."""

    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    """0 takes the likeliest token; null: sampling.temperature."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """null: sampling.top_p."""
    top_k: Annotated[int, Meta(ge=0)] | None = None
    """0: all; null: sampling.top_k."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    """null: sampling.min_p."""
    max_response_tokens: Annotated[int, Meta(ge=1)] | None = None
    """null: sampling.max_response_tokens."""
    stop: tuple[str, ...] | None = None
    """null: sampling.stop."""
    stop_token_ids: tuple[int, ...] | None = None
    """null: sampling.stop_token_ids."""


class EvaluationSettings(Options, frozen=True, kw_only=True):
    """What holds for datasets of an evaluation that do not say otherwise."""

    samples_per_prompt: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Answers that are drawn to each prompt; null: 1."""
    max_prompts: Annotated[int, Meta(ge=1)] | None = None
    """Only so many rows, from the first on; null: all. Another part of a file: ``path@[a:b]``."""
    sampling: EvaluationSampling = EvaluationSampling()
    """How answers are drawn, where it differs from the run's."""
    reward: RewardOptions | None = None
    """How answers are scored; null: as the run's ``reward:`` says. Retries and alarms are those of the run."""
    generate: EpisodeKey | None = None
    """``file.py:function`` that plays the episode of an answer; null: as the run's ``episode:`` says."""
    k: tuple[Annotated[int, Meta(ge=1)], ...] | None = None
    """For which k pass@k is told: the chance that at least one of k answers passes; and, where the reward extracts
    answers, maj@k: the chance that the answer which most of k give passes. null: 1, and samples_per_prompt if that is
    more."""
    pass_reward: float | None = None
    """An answer passes with a reward of at least this; null: 1."""
    prompt_key: str | None = None
    """null: data.prompt_key."""
    label_key: str | None = None
    """null: data.label_key; an empty text: the rows have no label."""
    metadata_keys: tuple[str, ...] | None = None
    """null: data.metadata_keys."""
    chat_template: bool | None = None
    """null: data.chat_template."""
    template_arguments: dict[str, Scalar] | None = None
    """null: data.template_arguments."""
    system_prompt: str | None = None
    """null: data.system_prompt; an empty text: none."""
    tools_key: str | None = None
    """null: data.tools_key; an empty text: none."""
    multimodal_keys: MediaKeys | None = None
    """null: data.multimodal_keys."""
    metadata: dict[str, Scalar] | None = None
    """The same for each row; null: data.metadata."""
    skip_bad_rows: bool | None = None
    """null: data.skip_bad_rows."""
    max_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    """null: data.max_prompt_tokens."""


class EvaluationDataset(EvaluationSettings, frozen=True, kw_only=True):
    """One dataset to evaluate on. What is null here is as ``evaluation.defaults`` says."""

    name: DatasetName
    """Names its figures: ``eval/NAME/reward_mean``."""
    path: RowsKey
    """Written as data.path, with all its forms."""


class EvaluationOptions(Options, frozen=True, kw_only=True):
    """When the policy is evaluated, and on what. Evaluation never holds training up (with a staleness bound of 0, where
    engines and learner take turns, it shares the engines' turn), and no answer of it is trained on."""

    every: Annotated[int, Meta(ge=1)] | None = None
    """Batches from one evaluation to the next; null: none between first and last."""
    before_first: bool = False
    """Also before the first batch is trained."""
    at_end: bool = False
    """Also after the last one; the run ends when it is done."""
    pinned: bool = False
    """All answers are made by the one version that was asked for. Nothing newer is trained before they are there, so
    the learner stands still meanwhile. false: nothing waits, answers are made by the version that was asked for or by
    newer ones, also by several in the course of one answer, and the figures say which."""
    max_running: Annotated[int, Meta(ge=1)] | None = None
    """Answers that are generated at a time while there is training, so that it keeps the other slots; null: a quarter
    of all slots, at least one. Without any training, at the end for example, all slots are taken."""
    defaults: EvaluationSettings = EvaluationSettings()
    """What holds for each dataset that does not say otherwise."""
    datasets: tuple[EvaluationDataset, ...] = ()
    """Datasets that are evaluated; empty: none."""
    log_function: EvaluationHookKey | None = None
    """``file.py:function``: called with each dataset of each evaluation that is done: its name, version, figures, and
    the file with its answers. What it raises is told, and the run goes on."""
