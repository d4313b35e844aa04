"""From a scenario's ``episode:`` block to a backend in front of the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.backends.episodes.context import EpisodeContext
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import EngineCommand


def open_episodes(inner: Backend[EngineCommand], context: EpisodeContext) -> Backend[EngineCommand]:
    """The engine itself where each sample is one generation, otherwise the engine behind its episodes."""
    if context.options.kind == "single":
        return inner
    from penstock.backends.episodes.backend import EpisodeBackend

    if context.options.kind == "function":
        from penstock.backends.episodes.functions.opening import open_functions

        return EpisodeBackend(inner, open_functions(context), sampling=context.sampling)
    from penstock.backends.episodes.gateway import GatewayEpisodes

    return EpisodeBackend(inner, GatewayEpisodes(context), sampling=context.sampling)
