"""The user's own routing policy, ``prompt_source.routing: file.py:Class``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from penstock.backends.processes.hook_calling import Hook
from penstock.backends.processes.user_code import UserCodeError, load_object, split_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.actors.prompt_source.policies import RoutedEngine, RoutedSample, RoutingPolicy

KEY: Final = "prompt_source.routing"


class OwnRouting:
    """Calls it, and holds what it answers against what there is."""

    def __init__(self, spec: str) -> None:
        """
        Raises:
            UserCodeError: it cannot be loaded or built, or has no ``choose``.
        """
        found = load_object(spec)
        if not isinstance(found, type):
            raise UserCodeError(f"{KEY}: {spec} is {type(found).__name__}; expected a class with a method choose")
        path, name = split_spec(spec)
        built = Hook[object].around(cast("Callable[[], object]", found), path, name, KEY)()
        choose = getattr(built, "choose", None)
        if not callable(choose):
            raise UserCodeError(
                f"{KEY}: {spec} has no method choose(sample, engines); docs/hooks.md says what it is given"
            )
        self._choose = Hook[object].around(choose, path, f"{name}.choose", KEY)

    def choose(self, sample: RoutedSample, engines: Sequence[RoutedEngine], /) -> str | None:
        """See :class:`.RoutingPolicy`.

        Raises:
            UserCodeError: it raised something, or returned what is no name of these engines.
        """
        answer = self._choose(sample, engines)
        if answer is None:
            return None
        names = [engine.name for engine in engines]
        if not isinstance(answer, str) or answer not in names:
            raise self._choose.fault(f"returned {answer!r:.80}; expected one of {', '.join(names[:8])}, or None")
        return answer


def routing_of(spec: str) -> RoutingPolicy | None:
    """The user's own; None for those that are built in."""
    return OwnRouting(spec) if ".py:" in spec else None
