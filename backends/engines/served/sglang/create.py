"""From a scenario's options to an engine of SGLang servers; what cannot be served is refused before any is started."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from penstock.backends.checkpoint.hf_config import CONFIG_FILE, HfConfig, need, read_config
from penstock.backends.engines.expert_choices import read_expert_shape
from penstock.backends.engines.served.expectation import expect_model
from penstock.backends.engines.served.sglang.backend import SglangEngineBackend
from penstock.backends.engines.served.sglang.health import HealthLimits
from penstock.backends.engines.served.sglang.loading import ServerStaging
from penstock.backends.engines.served.sglang.opening import EngineSetup
from penstock.backends.engines.served.sglang.parts import ModelShape
from penstock.backends.engines.served.sglang.requests import RequestRules
from penstock.backends.engines.torch.sampling_parameters import sampling_parameters

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.engines.served.sglang.opening import Opened
    from penstock.backends.engines.spec import EngineContext
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import EngineCommand


def open_sglang_engine(context: EngineContext) -> Backend[EngineCommand]:
    """An engine of SGLang servers, not started yet.

    Raises:
        UserFault: the model folder lacks what is needed; the message says which.
    """
    model_folder, options = context.model_folder, context.options
    expected = expect_model(model_folder)
    run, *others = sampling_parameters(model_folder, context.sampling, context.by_dataset)

    def make_rules(opened: Opened) -> RequestRules:
        info = opened.endpoints[0].info
        return RequestRules(
            tag=secrets.token_hex(4),
            sampling=run,
            by_dataset=tuple(others),
            max_context=context.max_context,
            timeout_s=options.request_timeout_s,
            is_seeded=info.deterministic,
            has_priorities=info.priority_scheduling,
            experts=read_expert_shape(model_folder) if options.record_experts else None,
        )

    setup = EngineSetup(
        name=context.name,
        place=context.place,
        model_folder=model_folder,
        run_folder=context.run_folder,
        options=options,
        max_context=context.max_context,
        dtype=context.dtype,
        sleeps=context.sleeps,
        remote_ranks=context.remote_ranks,
    )
    return SglangEngineBackend(
        setup,
        make_rules=make_rules,
        shape=shape_of(model_folder),
        staging=ServerStaging(
            engine=context.name,
            model_folder=model_folder,
            folder=context.run_folder / "weights" / f"staged-{context.name.replace('/', '-')}",
            expected=expected,
            bucket_size_bytes=context.bucket_size_bytes,
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
        UserFault: it does not say it.
    """
    config = read_config(model_folder, HfConfig)
    need(config, str(model_folder / CONFIG_FILE), "vocab_size", "num_attention_heads")
    return ModelShape(config.vocab_size, config.num_kv_heads)
