"""From a scenario's options to an engine on servers; what cannot be served is refused before any is started."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.engines.expert_choices import read_expert_shape
from penstock.backends.engines.served.base.backend import ServedEngineBackend
from penstock.backends.engines.served.base.health import HealthLimits
from penstock.backends.engines.served.base.opened import shape_of
from penstock.backends.engines.served.base.requests import RequestRules
from penstock.backends.engines.torch.sampling_parameters import sampling_parameters

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.backends.engines.served.base.dialect import EndpointT, Staging
    from penstock.backends.engines.served.base.opened import Opened
    from penstock.backends.engines.spec import EngineContext, EngineSetup


def served_engine(
    context: EngineContext,
    open_engine: Callable[[EngineSetup, Callable[[str], None]], Awaitable[Opened[EndpointT]]],
    staging: Staging[EndpointT],
) -> ServedEngineBackend[EndpointT]:
    """An engine on servers that ``open_engine`` starts or attaches to, not started yet.

    Raises:
        UserFault: the model folder lacks what is needed; the message says which.
    """
    model_folder, options = served_folder(context), context.options
    run, *others = sampling_parameters(model_folder, context.sampling, context.by_dataset)
    shape_of(model_folder)  # refuses a folder that does not say it, before any server is started
    rules = RequestRules(
        tag=secrets.token_hex(4),
        sampling=run,
        by_dataset=tuple(others),
        max_context=context.max_context,
        timeout_s=options.request_timeout_s,
        experts=read_expert_shape(model_folder) if options.record_experts else None,
    )
    setup = replace(context, model_folder=model_folder)
    limits = limits_of(options.hang_timeout_s)
    return ServedEngineBackend(partial(open_engine, setup), rules=rules, staging=staging, limits=limits)


def served_folder(context: EngineContext) -> Path:
    """What servers are started from: the model, or the copy of it in FP8."""
    copy = context.options.fp8_model
    return context.model_folder if copy is None else Path(copy)


def limits_of(hang_timeout_s: float) -> HealthLimits:
    """How long silence is borne where a server is given up after so long."""
    usual = HealthLimits()
    return HealthLimits(
        suspect_after_s=min(usual.suspect_after_s, hang_timeout_s / 2),
        dead_after_s=hang_timeout_s,
        cold_dead_after_s=max(usual.cold_dead_after_s, hang_timeout_s),
        stopped_dead_after_s=min(usual.stopped_dead_after_s, hang_timeout_s),
    )
