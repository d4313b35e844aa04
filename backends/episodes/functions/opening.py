"""From a scenario's ``episode:`` block to what plays its functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.episodes.functions.driver import FunctionEpisodes
from penstock.backends.episodes.functions.wire import EVALUATION, FunctionSpecs, NamedFunction, Setup
from penstock.backends.episodes.playing import PlayRules

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from penstock.backends.episodes.options import EpisodeOptions
    from penstock.backends.episodes.playing import ImageRules


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


def open_functions(
    options: EpisodeOptions,
    model_folder: Path,
    *,
    max_context: int,
    max_response_tokens: int,
    uses_chat: bool,
    evaluated: Sequence[str | None] = (),
    can: Collection[str] = (),
    images: ImageRules | None = None,
) -> FunctionEpisodes:
    """The driver; its process starts with it."""
    rules = PlayRules(
        options=options,
        max_context=max_context,
        max_response_tokens=max_response_tokens,
        uses_chat=uses_chat,
        can=tuple(sorted(can)),
        images=images,
    )
    return FunctionEpisodes(Setup(specs_of(options, evaluated), str(model_folder), rules), options, model_folder)
