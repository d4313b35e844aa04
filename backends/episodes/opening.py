"""From a scenario's ``episode:`` block to a backend in front of the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.backends.data.options import DataOptions
    from penstock.backends.engines.options import SamplingOptions
    from penstock.backends.episodes.options import EpisodeOptions
    from penstock.backends.episodes.playing import ImageRules
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import EngineCommand


def open_episodes(
    inner: Backend[EngineCommand],
    options: EpisodeOptions,
    *,
    engine: str,
    epoch: int,
    run_folder: str,
    model_folder: str,
    max_context: int,
    sampling: SamplingOptions,
    data: DataOptions,
    evaluated: Sequence[str | None] = (),
    can: Collection[str] = (),
    images: ImageRules | None = None,
) -> Backend[EngineCommand]:
    """The engine itself where each sample is one generation, otherwise the engine behind its episodes. ``evaluated``:
    what plays each dataset of the evaluation. ``can``: what the engine can do. ``images``: what may be shown to the
    model, None where nothing may."""
    if options.kind == "single":
        return inner
    from penstock.backends.episodes.backend import EpisodeBackend

    if options.kind == "function":
        from penstock.backends.episodes.functions.opening import open_functions

        driver = open_functions(
            options,
            Path(model_folder),
            max_context=max_context,
            max_response_tokens=sampling.max_response_tokens,
            uses_chat=data.chat_template,
            evaluated=evaluated,
            can=can,
            images=images,
        )
        return EpisodeBackend(inner, driver, sampling=sampling)
    from penstock.backends.episodes.gateway import GatewayEpisodes, GatewaySettings

    settings = GatewaySettings(
        engine=engine,
        epoch=epoch,
        run_folder=run_folder,
        model_folder=model_folder,
        model=Path(model_folder).name,
        max_context=max_context,
        options=options,
        sampling=sampling,
        data=data,
        can=frozenset(can),
        images=images,
    )
    return EpisodeBackend(inner, GatewayEpisodes(settings), sampling=sampling)
