"""How many rows a run has whose prompts are modelled: told by the scenario, without reading any."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from penstock.backends.data.mixture import named_sources, shares_of
from penstock.messages.errors import UserFault
from penstock.messages.rows import RowSource
from penstock.runtime.scenario.evaluation_rules import sets_of

if TYPE_CHECKING:
    from penstock.backends.data.mixture import NamedSource
    from penstock.runtime.scenario import Scenario

_MADE_ROWS: Final = re.compile(r"(?:lines|reasoning_gym:\w+):(\d+)")
_MANY_ROWS: Final = 1 << 40


def num_rows(scenario: Scenario) -> int:
    """How many rows the dataset has. Simulated prompts have no text, so no file is read for it.

    Raises:
        UserFault: the run ends with the dataset, and its size is not known without reading it.
    """
    return sum(source.num_rows for source in row_sources(scenario))


def row_sources(scenario: Scenario) -> tuple[RowSource, ...]:
    """The sources of these rows.

    Raises:
        UserFault: as :func:`num_rows`.
    """
    named = named_sources(scenario.data)
    shares = shares_of([source.weight for source in named])
    return tuple(
        RowSource(name=source.name, num_rows=_num_rows(scenario, source), share=share)
        for source, share in zip(named, shares, strict=True)
    )


def _num_rows(scenario: Scenario, source: NamedSource) -> int:
    made = _MADE_ROWS.fullmatch(source.path)
    if made is not None:
        return int(made.group(1))
    if scenario.data.num_epochs is not None:
        raise UserFault(
            f"data.num_epochs: {scenario.data.num_epochs} ends the run with the dataset, and a simulation reads none; "
            f"add the override {source.key}=lines:N for {source.path} with N rows, or data.num_epochs=null"
        )
    return _MANY_ROWS


def num_evaluation_prompts(scenario: Scenario) -> tuple[int, ...]:
    """The prompts of each dataset of the evaluation, told without reading any.

    Raises:
        UserFault: it cannot be told.
    """
    counts: list[int] = []
    for index, each in enumerate(sets_of(scenario)):
        made = _MADE_ROWS.fullmatch(scenario.evaluation.datasets[index].path)
        limits = [int(made.group(1))] if made is not None else []
        limits += [] if each.max_prompts is None else [each.max_prompts]
        if not limits:
            raise UserFault(
                f"evaluation.datasets[{index}].max_prompts: a simulation reads no data, so it has to be said how many "
                f"prompts {each.name} has; set it, or path to lines:N"
            )
        counts.append(min(limits))
    return tuple(counts)
