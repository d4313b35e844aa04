"""From a scenario's options to an engine of SGLang servers; what cannot be served is refused before any is started."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.engines.expert_choices import read_expert_shape
from penstock.backends.engines.sglang.backend import ModelShape, SglangEngineBackend
from penstock.backends.engines.sglang.health import HealthLimits
from penstock.backends.engines.sglang.loading import ServerStaging
from penstock.backends.engines.sglang.opening import EngineSetup
from penstock.backends.engines.sglang.requests import RequestRules
from penstock.backends.engines.torch.drawings import drawings
from penstock.backends.protocol import Capability
from penstock.backends.weights.expectation import expect_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.backends.engines.options import EnginesOptions, SamplingOptions
    from penstock.backends.engines.sglang.opening import Opened
    from penstock.backends.protocol import Backend
    from penstock.backends.remote_ranks import RemoteRanks
    from penstock.messages.commands import EngineCommand

CAPABILITIES: Final = frozenset({Capability.IN_FLIGHT, Capability.INTERRUPT, Capability.CANARY, Capability.RETRACT})
"""Of every server; whether seeds are heeded depends on its options."""


class ModelConfigError(ValueError):
    """A ``config.json`` that does not say what is needed here."""


class _Config(msgspec.Struct):
    vocab_size: int | None = None
    num_key_value_heads: int | None = None
    num_attention_heads: int | None = None
    text_config: _Config | None = None


def open_sglang_engine(
    *,
    name: str,
    place: int,
    model_folder: Path,
    run_folder: Path,
    options: EnginesOptions,
    sampling: SamplingOptions,
    max_context: int,
    dtype: str,
    bucket_size_bytes: int,
    sleeps: bool = False,
    remote_ranks: RemoteRanks | None = None,
    by_dataset: Sequence[SamplingOptions] = (),
) -> Backend[EngineCommand]:
    """An engine of SGLang servers for the model in this folder, not started yet.

    Args:
        name: of the actor; its server's log is named after it.
        place: which engine of its kind it is, counted from 0.
        model_folder: a Hugging Face checkpoint.
        run_folder: for logs and staged weights; on the disk on which the learner writes.
        options: as of a run with this kind of engine only.
        sampling: how responses are drawn.
        max_context: tokens of prompt and response together.
        dtype: ``float32`` or ``bfloat16``.
        bucket_size_bytes: weights that are pushed travel in pieces of about this size.
        sleeps: it takes turns on its GPUs with the learner.
        remote_ranks: the other nodes of an engine over several.
        by_dataset: how responses to prompts of the datasets of an evaluation are drawn.

    Raises:
        ValueError: the model folder lacks what is needed; the message says which.
    """
    expected = expect_model(model_folder)
    run, *others = drawings(model_folder, sampling, by_dataset)

    def make_rules(opened: Opened) -> RequestRules:
        info = opened.endpoints[0].info
        return RequestRules(
            tag=secrets.token_hex(4),
            drawing=run,
            by_dataset=tuple(others),
            max_context=max_context,
            timeout_s=options.request_timeout_s,
            is_seeded=info.deterministic,
            has_priorities=info.priority_scheduling,
            experts=read_expert_shape(model_folder) if options.record_experts else None,
        )

    staged = run_folder / "weights" / f"staged-{name.replace('/', '-')}"
    setup = EngineSetup(
        name=name,
        place=place,
        model_folder=model_folder,
        run_folder=run_folder,
        options=options,
        max_context=max_context,
        dtype=dtype,
        sleeps=sleeps,
        remote_ranks=remote_ranks,
    )
    return SglangEngineBackend(
        setup,
        make_rules=make_rules,
        shape=shape_of(model_folder),
        staging=ServerStaging(
            engine=name,
            model_folder=model_folder,
            folder=staged,
            expected=expected,
            bucket_size_bytes=bucket_size_bytes,
        ),
        limits=_limits(options.hang_timeout_s),
    )


def _limits(hang_timeout_s: float) -> HealthLimits:
    usual = HealthLimits()
    return HealthLimits(
        suspect_after_s=min(usual.suspect_after_s, hang_timeout_s / 2),
        dead_after_s=hang_timeout_s,
        cold_dead_after_s=max(usual.cold_dead_after_s, hang_timeout_s),
        stopped_dead_after_s=min(usual.stopped_dead_after_s, hang_timeout_s),
    )


def shape_of(model_folder: Path) -> ModelShape:
    """What the checkpoint's configuration says.

    Raises:
        ModelConfigError: it does not say it.
    """
    path = model_folder / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from None
    inner = config if config.vocab_size is not None else (config.text_config or config)
    heads = inner.num_key_value_heads or inner.num_attention_heads
    if inner.vocab_size is None or heads is None:
        raise ModelConfigError(
            f"{path}: vocab_size and num_attention_heads are needed; this is no causal language model"
        )
    return ModelShape(inner.vocab_size, heads)
