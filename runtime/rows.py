"""The rows of a scenario, read the same by everybody who looks at them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.data.dataset import load_dataset
from penstock.backends.evaluation.rows import load_evaluation_rows
from penstock.runtime.scenario.evaluation_rules import sets_of
from penstock.runtime.scenario.recorded_rules import recorded_settings

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.data.dataset import Dataset
    from penstock.backends.evaluation.rows import EvaluationRows
    from penstock.runtime.scenario import Scenario


def read_dataset(scenario: Scenario, model_folder: Path, *, keeps_messages: bool = False) -> Dataset:
    """Every row, checked and tokenised.

    Args:
        scenario: of the run.
        model_folder: with the tokenizer.
        keeps_messages: prompts carry the chat messages that they were rendered from.

    Raises:
        DataError: the rows cannot be used.
    """
    return load_dataset(
        scenario.data,
        model_folder,
        seed=scenario.run.seed,
        max_context=scenario.model.max_context,
        keeps_messages=keeps_messages,
        recorded=recorded_settings(scenario),
    )


def read_evaluation(
    scenario: Scenario, model_folder: Path, *, keeps_messages: bool = False
) -> tuple[EvaluationRows, ...]:
    """Every row of the datasets of the evaluation, checked and tokenised; the arguments are those of
    :func:`read_dataset`.

    Raises:
        DataError: the rows of a dataset cannot be used.
    """
    return load_evaluation_rows(
        sets_of(scenario),
        model_folder,
        seed=scenario.run.seed,
        max_context=scenario.model.max_context,
        keeps_messages=keeps_messages,
    )
