"""Penstock: asynchronous reinforcement-learning post-training of language models.

``from penstock import train, load_scenario, run, …``: all names of :mod:`penstock.api`, which is imported with the
first of them. ``import penstock`` alone imports nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.api import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]  # its __all__

__version__ = "0.1.0"
_NAMES = frozenset((
    "Accounts", "ActivityRow", "AuditReport", "EvaluationRow", "Forecast", "Job", "Models", "Planned", "Rehearsal",
    "Replayed", "Run", "RunFailedError", "RunStatus", "RunSummary", "Sample", "Scenario", "SimulationResult", "SpanRow",
    "StepRow", "UserFault", "audit", "calibrate", "calibrate_from", "check", "evaluate", "forecast", "list_runs",
    "load_scenario", "open_run", "plan", "rehearse", "replay", "resume", "run", "simulate", "submit", "train",
))  # fmt: skip
"""As ``penstock.api.__all__``; a test compares."""


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *_NAMES]
