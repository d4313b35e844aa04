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

from penstock.backends.learners.checkpoints.names import CHECKPOINT, CHECKPOINTS
from penstock.backends.learners.checkpoints.record import (
    RECORD_FILE,
    STATE_FOLDER,
    CheckpointError,
    check_files,
    open_record,
)
from penstock.backends.models.convert import FORMATS, convert_model, format_of, parse_size
from penstock.backends.models.model_format import DTYPES, ConversionError, ConversionPlan
from penstock.runtime.cli.runs import RECORD_NAME
from penstock.runtime.errors import UserError
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
        UserError: there is no such model, it has a problem, or it cannot be written there.
    """
    if target_format not in FORMATS:
        raise UserError(f"--format: expected one of {', '.join(sorted(FORMATS))}, got {target_format}")
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype}")
    folder = model_folder(source, version)
    try:
        max_bytes = parse_size(max_shard_size)
    except ConversionError as error:
        raise UserError(f"--max-shard-size: {error}") from None
    plan = ConversionPlan(dtype, max_bytes)
    try:
        _check_record(folder)
        console.print(f"{escape(str(folder))} → {escape(str(target))}")
        with _progress(console) as begun:
            written = convert_model(folder, target.absolute(), plan, begun=begun, target_format=target_format)
    except (ConversionError, CheckpointError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error}") from error
    files = "1 file" if written.num_files == 1 else f"{written.num_files} files"
    console.print(
        f"wrote {written.num_tensors:,} weights, {written.size_bytes:,} bytes, in {files}; read back and compared"
    )
    return 0


def show_problems(source: Path, console: Console, *, version: int | None) -> int:
    """Look at a model and say what is wrong with it; 0 if nothing is, otherwise 1.

    Raises:
        UserError: there is no such model.
    """
    folder = model_folder(source, version)
    found = FORMATS[format_of(folder)].examine(folder)
    problems = list(found.problems)
    try:
        _check_record(folder)
    except CheckpointError as error:
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


def model_folder(source: Path, version: int | None) -> Path:
    """The folder of the model that is meant: of a run its newest checkpoint, or that of a version.

    Raises:
        UserError: there is none.
    """
    checkpoints = source / CHECKPOINTS if (source / CHECKPOINTS).is_dir() else source
    found = _checkpoints_in(checkpoints)
    if not found:
        if version is not None:
            raise UserError(f"{source}: has no checkpoints, so --version {version} names nothing; leave it out")
        if not source.is_dir():
            raise UserError(f"{source}: there is no such folder; expected that of a run, a checkpoint or a model")
        if checkpoints != source or (source / RECORD_NAME).is_file():
            raise UserError(f"{source}: the run has written no checkpoint yet")
        return source
    wanted = [path for path in found if version is None or found[path][0] == version]
    if not wanted:
        there = ", ".join(str(number) for number in sorted({number for number, _ in found.values()}))
        raise UserError(f"{checkpoints}: has no checkpoint of version {version}; there are {there}")
    return max(wanted, key=lambda path: found[path])


def _checkpoints_in(folder: Path) -> dict[Path, tuple[int, int]]:
    """Path → version, and epoch of the incarnation that wrote it."""
    if not folder.is_dir():
        return {}
    matches = ((path, CHECKPOINT.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir())
    return {path: (int(match["version"]), int(match["epoch"] or 1)) for path, match in matches if match}


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
