"""The rows of a scenario, read the same by everybody who looks at them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.checkpoint.vision_config import read_vision_part
from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.duplicates import duplicates_in, duplicates_text, rows_in_both
from penstock.backends.data.media import KEPT_FOLDER
from penstock.backends.data.problems import DataError
from penstock.backends.data.streamed import StreamedRows
from penstock.backends.episodes.functions.choice import chosen
from penstock.backends.episodes.functions.opening import specs_of
from penstock.backends.evaluation.rows import load_evaluation_rows
from penstock.backends.extras import missing_extra
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted, does
from penstock.runtime.scenario.evaluation_rules import sets_of
from penstock.runtime.scenario.media_rules import are_placed_here, has_images
from penstock.runtime.scenario.recorded_rules import recorded_settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.backends.data.dataset import Dataset
    from penstock.backends.data.images import ImageIntake
    from penstock.backends.data.rows import Rows
    from penstock.backends.evaluation.rows import EvaluationRows
    from penstock.runtime.scenario import Scenario

INDEX_FOLDER: Final = "data_index"
"""Of a run's folder: where the rows are that are read when they are wanted."""


def read_dataset(
    scenario: Scenario,
    model_folder: Path,
    *,
    keeps_messages: bool = False,
    run_folder: Path | None = None,
    tell: Callable[[str], None] | None = None,
) -> Dataset | StreamedRows:
    """Every row, checked and tokenised; or, where they are to be read when they are wanted, their index.

    Args:
        scenario: of the run.
        model_folder: with the tokenizer.
        keeps_messages: prompts carry the chat messages that they were rendered from.
        run_folder: where an index is kept; None: in memory, for this once.
        tell: is told how far an index is.

    Raises:
        DataError: the rows cannot be used.
    """
    if scenario.data.stream:
        return StreamedRows(
            scenario.data,
            model_folder,
            max_context=scenario.model.max_context,
            keeps_messages=keeps_messages,
            folder=None if run_folder is None else run_folder / INDEX_FOLDER,
            tell=tell,
            images=image_intake(scenario, model_folder, run_folder),
        )
    dataset = load_dataset(
        scenario.data,
        model_folder,
        seed=scenario.run.seed,
        max_context=scenario.model.max_context,
        keeps_messages=keeps_messages,
        recorded=recorded_settings(scenario),
        images=image_intake(scenario, model_folder, run_folder),
    )
    _check_choices(scenario, dataset)
    return dataset


def image_intake(scenario: Scenario, model_folder: Path, run_folder: Path | None) -> ImageIntake | None:
    """What looks at the images of rows, where prompts hold all their tokens; None: nobody here does.

    Args:
        scenario: of the run.
        model_folder: with the image processor.
        run_folder: where images that stand in rows are kept; None: nowhere.

    Raises:
        UserFault: the model takes text only, or sees in another way than we compute, or Pillow is not installed.
    """
    if not has_images(scenario) or not are_placed_here(scenario):
        return None
    if missing := missing_extra("PIL"):
        raise UserFault(f"data.multimodal_keys: {missing}")
    from penstock.backends.data.images import ImageIntake

    part = read_vision_part(model_folder)
    if part is None:
        raise UserFault(
            f"model.path: {model_folder} takes text only, and the run has images (data.multimodal_keys, "
            "episode.images); name a model that sees, such as Qwen2.5-VL"
        )
    return ImageIntake(part, None if run_folder is None else run_folder.absolute() / KEPT_FOLDER)


def _check_choices(scenario: Scenario, dataset: Dataset) -> None:
    """Each row that names the function of its episode names one that there is. (Of streamed rows each is checked when
    it is played.)"""
    if scenario.episode.kind != "function" or scenario.episode.function_key is None:
        return
    specs = specs_of(scenario.episode)
    for row in range(dataset.num_rows):
        try:
            chosen(specs, dataset.prompt(row, 0))
        except UserFault as error:
            raise DataError(f"{dataset.place_of(row)}: {error}") from None


def row_notices(scenario: Scenario, model_folder: Path, rows: Rows) -> tuple[str, ...]:
    """What people should know of the rows before a run: what was skipped, prompts that come twice, and those of the
    evaluation that are trained on."""
    notices = [
        f"{counted(count, 'row')} {does(count, 'are')} skipped: {reason}" for reason, count in rows.skipped.items()
    ]
    if repeated := duplicates_text(duplicates_in(rows.hashes), rows.place_of):
        notices.append(repeated)
    trains = scenario.run.only != "evaluate"  # where nothing does, the data are those of the evaluation
    for evaluated in read_evaluation(scenario, model_folder) if trains and scenario.evaluation.datasets else ():
        both = rows_in_both(rows.hashes, evaluated.dataset.hashes[: evaluated.num_prompts])
        if both.num_rows:
            row, other = both.examples[0]
            notices.append(
                f"{both.num_rows} of the {evaluated.num_prompts} prompts of the evaluation {evaluated.each.name!r} "
                f"{does(both.num_rows, 'are')} trained on ({evaluated.dataset.place_of(row)} is "
                f"{rows.place_of(other)}, the first)"
            )
    return tuple(notices)


def read_evaluation(
    scenario: Scenario, model_folder: Path, *, keeps_messages: bool = False, run_folder: Path | None = None
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
        images=image_intake(scenario, model_folder, run_folder),
    )
