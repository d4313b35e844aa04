"""From a scenario's options to an engine that answers from rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.data.dataset import load_dataset
from penstock.backends.engines.recorded.backend import RecordedEngine

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.data.options import DataOptions
    from penstock.backends.data.recorded_rows import RecordedSettings
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import EngineCommand


def open_recorded_engine(
    data: DataOptions,
    settings: RecordedSettings,
    *,
    model_folder: Path,
    num_slots: int,
    seed: int,
    max_context: int,
) -> Backend[EngineCommand]:
    """An engine for the rows that hold their responses.

    Args:
        data: the ``data:`` block.
        settings: what the run makes of such rows.
        model_folder: with the tokenizer.
        num_slots: samples that it is given at once.
        seed: of the run; makes generated rows.
        max_context: in tokens.

    Raises:
        DataError: the rows cannot be used.
    """
    dataset = load_dataset(
        data, model_folder, seed=seed, max_context=max_context, recorded=settings, keeps_responses=True
    )
    return RecordedEngine(dataset, num_slots=num_slots)
