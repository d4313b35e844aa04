"""Each dataset of an evaluation with every setting filled in: its own, else the block's defaults, else the run's.

Invariants:

* What a set says is complete: whoever reads, draws, scores or counts for it asks nobody else.
* A set stands at the place of its dataset in the scenario.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from penstock.backends.data.options import DataOptions, RecordedOptions
from penstock.backends.engines.options import SamplingOptions
from penstock.backends.rewards.options import RewardOptions
from penstock.messages.base import Options

if TYPE_CHECKING:
    from penstock.backends.evaluation.options import EvaluationDataset, EvaluationOptions, EvaluationSettings

PASS_REWARD: Final = 1.0

ValueT = TypeVar("ValueT")


class EvaluationSet(Options, frozen=True, kw_only=True):
    """One dataset with all that holds for it."""

    name: str
    data: DataOptions
    """Rows in their order, each once."""
    max_prompts: int | None
    sampling: SamplingOptions
    """``samples_per_group`` is the number of answers to each prompt."""
    reward: RewardOptions
    generate: str | None
    """None: as the run's ``episode:`` block says."""
    k: tuple[int, ...]
    """Rising."""
    pass_reward: float

    @property
    def samples_per_prompt(self) -> int:
        """Answers to each prompt."""
        return self.sampling.samples_per_group


class RunSettings(NamedTuple):
    """The blocks of the run that hold where an evaluation says nothing."""

    data: DataOptions
    sampling: SamplingOptions
    reward: RewardOptions


def evaluation_sets(options: EvaluationOptions, run: RunSettings) -> tuple[EvaluationSet, ...]:
    """The datasets in the order of the scenario."""
    return tuple(_set_of(dataset, options.defaults, run) for dataset in options.datasets)


def _set_of(dataset: EvaluationDataset, defaults: EvaluationSettings, run: RunSettings) -> EvaluationSet:
    samples = _first(dataset.samples_per_prompt, defaults.samples_per_prompt, 1)
    given_k = dataset.k if dataset.k is not None else defaults.k
    return EvaluationSet(
        name=dataset.name,
        data=_data_of(dataset, defaults, run.data),
        max_prompts=dataset.max_prompts if dataset.max_prompts is not None else defaults.max_prompts,
        sampling=_sampling_of(dataset, defaults, run.sampling, samples),
        reward=_first(dataset.reward, defaults.reward, run.reward),
        generate=dataset.generate if dataset.generate is not None else defaults.generate,
        k=tuple(sorted({1, samples} if given_k is None else set(given_k))),
        pass_reward=_first(dataset.pass_reward, defaults.pass_reward, PASS_REWARD),
    )


def _data_of(dataset: EvaluationDataset, defaults: EvaluationSettings, run: DataOptions) -> DataOptions:
    label_key = _first(dataset.label_key, defaults.label_key, run.label_key or "")
    max_prompt_tokens = dataset.max_prompt_tokens or defaults.max_prompt_tokens or run.max_prompt_tokens
    return msgspec.structs.replace(
        run,
        path=dataset.path,
        sources=(),
        source=None,
        source_options={},
        teacher_prompt_key=None,
        prompt_key=_first(dataset.prompt_key, defaults.prompt_key, run.prompt_key),
        label_key=label_key or None,
        metadata_keys=_first(dataset.metadata_keys, defaults.metadata_keys, run.metadata_keys),
        chat_template=_first(dataset.chat_template, defaults.chat_template, run.chat_template),
        template_arguments=_first(dataset.template_arguments, defaults.template_arguments, run.template_arguments),
        system_prompt=_first(dataset.system_prompt, defaults.system_prompt, run.system_prompt or "") or None,
        tools_key=_first(dataset.tools_key, defaults.tools_key, run.tools_key or "") or None,
        multimodal_keys=_first(dataset.multimodal_keys, defaults.multimodal_keys, run.multimodal_keys),
        metadata=_first(dataset.metadata, defaults.metadata, run.metadata),
        num_epochs=1,
        shuffle=False,
        stream=False,
        skip_bad_rows=_first(dataset.skip_bad_rows, defaults.skip_bad_rows, run.skip_bad_rows),
        max_prompt_tokens=max_prompt_tokens,
        recorded=RecordedOptions(),
    )


def _sampling_of(
    dataset: EvaluationDataset, defaults: EvaluationSettings, run: SamplingOptions, samples: int
) -> SamplingOptions:
    changes: dict[str, object] = {"samples_per_group": samples, "replay_kept": None}
    for settings in (defaults.sampling, dataset.sampling):
        for key in settings.__struct_fields__:
            if (value := getattr(settings, key)) is not None:
                changes[key] = value
    return msgspec.structs.replace(run, **changes)


def _first(own: ValueT | None, default: ValueT | None, run: ValueT) -> ValueT:
    if own is not None:
        return own
    return run if default is None else default
