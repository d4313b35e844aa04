"""Puts a judge's questions beside an embedded engine's samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.episodes.judge_endpoint.backend import JudgingEngine
from penstock.backends.episodes.judge_endpoint.server import JudgeServer

if TYPE_CHECKING:
    from penstock.backends.episodes.judge_endpoint.settings import JudgingSettings
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import EngineCommand


def open_judging_engine(inner: Backend[EngineCommand], settings: JudgingSettings) -> Backend[EngineCommand]:
    """The engine, which answers questions as well."""
    return JudgingEngine(
        inner, JudgeServer(settings), num_slots=settings.num_slots, canary_tolerance=settings.canary_tolerance
    )
