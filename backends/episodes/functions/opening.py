"""From a scenario's ``episode:`` block to what plays its functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.episodes.functions.driver import FunctionEpisodes
from penstock.backends.episodes.functions.wire import EVALUATION, FunctionSpecs, NamedFunction, Setup
from penstock.backends.episodes.playing import PlayRules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.episodes.context import EpisodeContext
    from penstock.backends.episodes.options import EpisodeOptions


def specs_of(options: EpisodeOptions, evaluated: Sequence[str | None] = ()) -> FunctionSpecs:
    """What the process has to load; ``evaluated``: what plays each dataset of the evaluation, None where it is as with
    the run's own rows."""
    assert options.generate is not None, "the scenario's rules see to it"
    return FunctionSpecs(
        functions=(
            NamedFunction("", options.generate),
            *(NamedFunction(named.name, named.generate) for named in options.functions),
            *(NamedFunction(f"{EVALUATION}{place}", spec) for place, spec in enumerate(evaluated) if spec is not None),
        ),
        function_key=options.function_key or "",
        tools=options.tools,
        environment=options.environment or "",
    )


def open_functions(context: EpisodeContext) -> FunctionEpisodes:
    """The driver; its process starts with it."""
    rules = PlayRules(
        options=context.options,
        max_context=context.max_context,
        max_response_tokens=context.sampling.max_response_tokens,
        uses_chat=context.data.chat_template,
        can=tuple(sorted(context.can)),
        images=context.images,
    )
    setup = Setup(specs_of(context.options, context.evaluated), str(context.model_folder), rules)
    return FunctionEpisodes(setup, context.options, context.model_folder)
