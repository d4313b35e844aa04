"""``penstock convert``: the model of a run, of a checkpoint or of any model folder as a folder of its own; or a look at
one.

Invariants:

* A checkpoint is checked against its record before it is read, as far as the model goes.
* What the user has to change is one sentence.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from penstock.backends.checkpoint.model_format import DTYPES, FP8, SHORT_DTYPES, ConversionPlan
from penstock.backends.learners.checkpoints.record import (
    RECORD_FILE,
    STATE_FOLDER,
    check_files,
    open_record,
)
from penstock.backends.learners.convert_model import FORMATS, convert_model, format_of, parse_size
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted
from penstock.runtime.launch.runs import model_folder
from penstock.runtime.observability.texts import count_text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from rich.console import Console


def convert(
    source: Path,
    target: Path,
    console: Console,
    *,
    version: int | None,
    dtype: str | None,
    max_shard_size: str,
    target_format: str,
) -> int:
    """Write a model into a folder of its own; the exit code.

    Raises:
        UserFault: there is no such model, it has a problem, or it cannot be written there.
    """
    if target_format not in FORMATS:
        raise UserFault(f"--format: expected one of {', '.join(sorted(FORMATS))}, got {target_format}")
    if dtype is not None and (dtype := SHORT_DTYPES.get(dtype, dtype)) not in (*DTYPES, FP8):
        raise UserFault(f"--dtype: expected one of {', '.join(DTYPES)}, {FP8}, got {dtype}")
    folder = model_folder(source, version)
    try:
        max_bytes = parse_size(max_shard_size)
    except UserFault as error:
        raise UserFault(f"--max-shard-size: {error}") from None
    plan = ConversionPlan(dtype, max_bytes)
    try:
        _check_record(folder)
        console.print(f"{escape(str(folder))} → {escape(str(target))}")
        with _progress(console) as begun:
            written = convert_model(folder, target.absolute(), plan, begun=begun, target_format=target_format)
    except OSError as error:
        raise UserFault(f"{target}: cannot be written: {error}") from error
    files = counted(written.num_files, "file")
    console.print(
        f"wrote {written.num_tensors:,} weights, {written.size_bytes:,} bytes, in {files}; read back and compared"
    )
    return 0


def show_problems(source: Path, console: Console, *, version: int | None) -> int:
    """Look at a model and say what is wrong with it; 0 if nothing is, otherwise 1.

    Raises:
        UserFault: there is no such model.
    """
    folder = model_folder(source, version)
    found = FORMATS[format_of(folder)].examine(folder)
    problems = list(found.problems)
    try:
        _check_record(folder)
    except UserFault as error:
        problems.append(str(error))
    if found.num_tensors:
        console.print(
            f"[bold]{escape(str(folder))}[/]  {escape(found.architecture) or 'unknown architecture'}, "
            f"{count_text(found.num_parameters)} parameters in {found.num_tensors:,} weights of "
            f"{' and '.join(found.dtypes)}, {found.size_bytes:,} bytes"
        )
    for remark in found.remarks:
        console.print(f"  [yellow]![/] {escape(remark)}")
    for problem in problems:
        console.print(f"  [red]✗[/] {escape(problem)}")
    if not problems:
        console.print("[green]sound[/]: names, shapes, tied weights and tokenizer are those of config.json")
    return 1 if problems else 0


def _check_record(folder: Path) -> None:
    """Of a checkpoint its model, byte for byte; of another folder nothing is known."""
    if (folder / RECORD_FILE).is_file():
        files = open_record(folder / RECORD_FILE).files
        check_files(folder, {name: file for name, file in files.items() if not name.startswith(STATE_FOLDER)})


@contextmanager
def _progress(console: Console) -> Generator[Callable[[int], Callable[[int], None]]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:

        def begun(size_bytes: int) -> Callable[[int], None]:
            task = progress.add_task("writing", total=size_bytes)
            return lambda num_bytes: progress.advance(task, num_bytes)

        yield begun
