"""The rows of the datasets of an evaluation, read and checked as those of the run are.

Invariants:

* A bad row is an error that names file and line, or a counted skip where the dataset allows it, whichever dataset it is
  in; the error names the dataset too.
* Prompts are numbered from 0 in the order of the file; those past ``max_prompts`` are not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.problems import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.backends.data.dataset import Dataset
    from penstock.backends.data.images import ImageIntake
    from penstock.backends.evaluation.sets import EvaluationSet
    from penstock.messages.samples import Prompt


class EvaluationRows(NamedTuple):
    """The prompts of one dataset."""

    place: int
    """Place of the dataset in the scenario, from 0."""
    each: EvaluationSet
    dataset: Dataset

    @property
    def num_prompts(self) -> int:
        """That are evaluated."""
        num_rows = self.dataset.num_rows
        return num_rows if self.each.max_prompts is None else min(num_rows, self.each.max_prompts)

    def prompt(self, row: int) -> Prompt:
        """A prompt by its number.

        Raises:
            IndexError: there is no such prompt.
        """
        if not 0 <= row < self.num_prompts:
            raise IndexError(f"prompt {row} of {self.num_prompts} of the dataset {self.each.name}")
        return replace(self.dataset.prompt(row, 0), dataset=self.place)


def load_evaluation_rows(
    sets: Sequence[EvaluationSet],
    tokenizer_folder: Path,
    *,
    seed: int,
    max_context: int,
    keeps_messages: bool = False,
    images: ImageIntake | None = None,
) -> tuple[EvaluationRows, ...]:
    """Read the datasets, in their order.

    Args:
        sets: the datasets with all that holds for them.
        tokenizer_folder: with the tokenizer, and the chat template if one is asked for.
        seed: the run's; makes generated rows.
        max_context: in tokens.
        keeps_messages: prompts carry the chat messages that they were rendered from.
        images: looks at those that engine and learner compute; None: a server does.

    Raises:
        DataError: a dataset, or (unless it skips them) a row of it, cannot be used.
    """
    return tuple(
        EvaluationRows(
            place,
            each,
            _load(
                each, tokenizer_folder, seed=seed, max_context=max_context, keeps_messages=keeps_messages, images=images
            ),
        )
        for place, each in enumerate(sets)
    )


def _load(
    each: EvaluationSet,
    folder: Path,
    *,
    seed: int,
    max_context: int,
    keeps_messages: bool,
    images: ImageIntake | None,
) -> Dataset:
    try:
        return load_dataset(
            each.data,
            folder,
            # Generated rows of a run's own task are not to be those that it is trained on.
            seed=evaluation_seed(seed),
            max_context=max_context,
            keeps_messages=keeps_messages or each.generate is not None,
            images=images,
        )
    except DataError as error:
        text = str(error).replace("data.skip_bad_rows: true", "skip_bad_rows: true there")
        raise DataError(f"evaluation dataset '{each.name}': {text}") from error


def evaluation_seed(seed: int) -> int:
    """The seed from which datasets of an evaluation make rows: ``lines:100`` is another hundred rows there than in
    ``data.path``, the same in every run of this seed."""
    return seed ^ 0x5EED_E7A1
