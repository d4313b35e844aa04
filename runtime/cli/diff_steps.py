"""``penstock diff-steps``: where two runs part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.text import Text

from penstock.backends.learners.step_dumps import FIGURES
from penstock.messages.texts import counted
from penstock.runtime.dashboard.sample_tokens import tokenizer_of
from penstock.runtime.observability.step_difference import ORDER, SAMPLES, compare_steps
from penstock.runtime.safe_text import terminal_text
from penstock.runtime.terminal import print_json

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.observability.step_difference import StepDifference, StepsCompared

MEANING: Final = {
    "context": "what stands before the response",
    "tokens": "the tokens of the response",
    SAMPLES: "which samples the step trains",
    "mask": "which tokens are trained",
    "versions": "which weights made the tokens",
    **FIGURES,
}


def show_difference(
    first: Path, second: Path, console: Console, *, step: int | None, tolerance: float, as_json: bool
) -> int:
    """Print the first difference of two runs; 1 where there is one, 0 where there is none.

    Raises:
        UserFault: a run has written no steps down, or none that the other has.
    """
    compared = compare_steps(first, second, step=step, tolerance=tolerance)
    if as_json:
        print_json(compared, console)
    else:
        _show(compared, first, console)
    return 0 if compared.difference is None else 1


def _show(compared: StepsCompared, first: Path, console: Console) -> None:
    steps, found = compared.steps, compared.difference
    which = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    if found is None:
        within = f" within {compared.tolerance:g}" if compared.tolerance else ", bit for bit"
        console.print(Text(f"no difference in {which}: {', '.join(ORDER)} are the same{within}"), soft_wrap=True)
        return
    console.print(Text(f"first difference: step {found.step}, {_place(found, first)}", style="bold"), soft_wrap=True)
    console.print(Text(f"  {found.column}: {MEANING[found.column]}", style="dim"), soft_wrap=True)
    width = max(map(len, compared.runs))
    for run, value in zip(compared.runs, _told(found), strict=True):
        console.print(Text(f"  {terminal_text(run).ljust(width)}  {value}"), soft_wrap=True)
    before = ", ".join(ORDER[: ORDER.index(found.column)])
    same = f"; {before} are the same in this step" if before else ""
    where = counted(found.num_sequences, "sequence")
    if found.position is not None:
        where = f"{counted(found.num_different, 'token')} in {where}"
    console.print(Text(f"  it differs in {where}{same}"), soft_wrap=True)


def _place(found: StepDifference, run: Path) -> str:
    if found.position is None:
        return f"sample {found.sample}, which one of the runs has not trained"
    tokenizer = tokenizer_of(run)
    texts = [
        "the end" if token is None else f"{token}" if tokenizer is None else repr(tokenizer.decode([token]))
        for token in found.tokens
    ]
    text = texts[0] if found.tokens[0] == found.tokens[1] else " and ".join(texts)
    where = " of the context" if found.column == "context" else ""
    return f"sample {found.sample}, token {found.position}{where}: {terminal_text(text)}"


def _told(found: StepDifference) -> list[str]:
    if found.position is None:
        return ["trained" if value else "not trained" for value in found.values]
    return ["none" if value is None else f"{value:.9g}" for value in found.values]
