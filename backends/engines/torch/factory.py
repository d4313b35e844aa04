"""From a scenario's options to an engine; what cannot be served is refused here, before any process waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.checkpoint.fp8_publish import PlainFetcher
from penstock.backends.devices import choose_device
from penstock.backends.engines.torch.backend import TorchEngineBackend
from penstock.backends.engines.torch.engine_settings import EngineSettings, OtherSampling
from penstock.backends.engines.torch.generic_config import read_engine_config
from penstock.backends.engines.torch.profile import EngineProfile
from penstock.backends.engines.torch.sampling import Sampler
from penstock.backends.engines.torch.sampling_parameters import sampling_parameters
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.backends.engines.options import EnginesOptions, SamplingOptions
    from penstock.backends.protocol import Backend
    from penstock.backends.weights.protocol import WeightFetcher
    from penstock.messages.commands import EngineCommand

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_torch_engine(
    *,
    model_folder: Path,
    options: EnginesOptions,
    sampling: SamplingOptions,
    max_context: int,
    dtype: str,
    fetcher: WeightFetcher,
    by_dataset: Sequence[SamplingOptions] = (),
    true_on_policy: bool = False,
    run_folder: Path | None = None,
    name: str = "engine",
    sleeps: bool = False,
) -> Backend[EngineCommand]:
    """An embedded engine for the model in this folder. Of the folder only the configuration and the tokenizer are
    read: the weights come with the first ``ApplyWeights``. It draws as ``sampling`` says, and for prompts of a dataset
    of an evaluation as ``by_dataset`` does. With ``true_on_policy`` it computes with the learner's own
    products. Its profiles are written to ``run_folder`` under its name. One that ``sleeps`` has no second set of
    weights, since it swaps while nothing runs.

    Raises:
        UserFault: a model, a device, a dtype or a limit that this engine cannot serve; the message says which.
    """
    config = read_engine_config(model_folder)
    if dtype not in DTYPES:
        raise UserFault(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    run, *others = sampling_parameters(model_folder, sampling, by_dataset)
    settings = EngineSettings(
        num_slots=options.slots,
        max_context=max_context,
        dtype=DTYPES[dtype],
        device=choose_device(options.device, "engines.device"),
        sampler=_sampler(run.sampling),
        stop_token_ids=run.stop_token_ids,
        stop_strings=run.stop_strings,
        others=tuple(
            OtherSampling(
                sampler=_sampler(other.sampling), stop_token_ids=other.stop_token_ids, stop_strings=other.stop_strings
            )
            for other in others
        ),
        progress_tokens=options.progress_tokens,
        records_experts=options.record_experts,
        learner_model=model_folder if true_on_policy else None,
    )
    settings.check(config)
    profile = None
    if options.profile is not None and run_folder is not None:
        profile = EngineProfile(options.profile, run_folder, name, is_cuda=settings.device.type == "cuda")
    return TorchEngineBackend(
        config,
        settings,
        max_response_tokens=[each.sampling.max_response_tokens for each in (run, *others)],
        num_threads=options.num_threads,
        fetcher=fetcher if options.quantization is None else PlainFetcher(fetcher, settings.dtype),
        profile=profile,
        double_buffering=False if sleeps else options.double_buffering,
    )


def _sampler(sampling: SamplingOptions) -> Sampler:
    return Sampler(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        num_recorded=sampling.replay_kept or 0,
    )
