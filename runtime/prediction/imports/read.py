"""Reads the metrics that another system has logged, whatever it wrote them into: one row of numbers for each step.

Known are lines of JSON, one JSON document with ``log_history``, tables of comma-separated values with a column for each
metric or for tag and value, and what is printed on a console (:mod:`.console`). Which of them a file is, its content
says.

Invariants:

* A log is untrusted: sizes are bounded, those in memory too, nothing of it is evaluated, and no text of it but names of
  metrics is kept.
* Rows of one step are one row, from however many files they come. Numbers that no metric can be are left out.
* Rows before a step that do not name it (what a profiler logs in between) are added up and divided by the steps since.
* The last row of a file that ends within a line is left out if it cannot be read: its run was killed, or still writes.
"""

from __future__ import annotations

import csv
import json
import math
import os
import stat
from typing import TYPE_CHECKING, Final, cast

from penstock.messages.errors import UserFault
from penstock.runtime.prediction.imports.console import console_rows
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from pathlib import Path

MAX_LOG_BYTES: Final = 256 << 20
MAX_LINE_BYTES: Final = 16 << 20
MAX_DOCUMENT_BYTES: Final = 32 << 20
"""Of one JSON document, which is in memory as a whole, at up to twenty times its size."""
MAX_STEPS: Final = 100_000
MAX_METRICS: Final = 8_192
"""By name, in all rows together."""
MAX_FIGURES: Final = 5_000_000
"""In all rows together."""
TOO_LARGE: Final = 1e15
"""For a time or a count; not a number and the infinities are neither below it."""
STEP_KEYS: Final = (
    "rollout/step", "train/global_step", "training/global_step", "step", "Step", "global_step", "_step", "iteration",
)  # fmt: skip
"""Where a row says which step it is of; of those that a file has, the first counts."""

Values = dict[str, float]


class Log:
    """Rows by step."""

    def __init__(self) -> None:
        self.steps: dict[int, Values] = {}
        self._names: dict[str, str] = {}
        """Each once in memory, however many rows have it."""
        self._num_figures = 0

    def add(self, step: int, values: Mapping[str, float], where: str) -> None:
        """Merge one row."""
        if step not in self.steps and len(self.steps) >= MAX_STEPS:
            raise UserFault(f"{where}: more than {MAX_STEPS:,} steps; give a part of the log")
        row = self.steps.setdefault(step, {})
        self._num_figures -= len(row)
        row.update({self._names.setdefault(name, name): each for name, each in values.items() if abs(each) < TOO_LARGE})
        self._num_figures += len(row)
        check_names(self._names, where)
        if self._num_figures > MAX_FIGURES:
            raise UserFault(f"{where}: more than {MAX_FIGURES:,} figures; give a part of the log")


def check_names(names: Collection[str], where: str) -> None:
    """Refuse so many metrics with names of their own that these are none."""
    if len(names) > MAX_METRICS:
        raise UserFault(f"{where}: more than {MAX_METRICS:,} metrics have names of their own; is it a log of metrics?")


def read_logs(files: Iterable[Path]) -> Log:
    """All files together, as parts of the log of one run.

    Raises:
        UserFault: one cannot be read, is too large, or has no row with a step; the message says where.
    """
    log = Log()
    for file in files:
        before = sum(map(len, log.steps.values()))
        _read(file, log)
        if sum(map(len, log.steps.values())) == before:
            raise UserFault(
                f"{file}: no metrics with a step were found in it; known are lines of JSON, trainer_state.json, CSV "
                f"with a column of steps ({', '.join(STEP_KEYS)}), and what verl, slime, NeMo-RL and TRL print"
            )
    return log


def lines_of(file: Path, max_bytes: int = MAX_LOG_BYTES) -> Iterator[tuple[int, str]]:
    """Number and text of every line that is not empty.

    Raises:
        UserFault: the file cannot be read, or it or a line is too large.
    """
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UserFault(f"{file}: no file; a folder, pipe or device is not read as a log")
        if found.st_size > max_bytes:
            raise UserFault(f"{file}: {found.st_size:,} bytes, at most {max_bytes:,} are read; give a part of it")
        with file.open("rb") as lines:
            number = 0
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                if b"\0" in line:
                    raise UserFault(
                        f"{file}:{number}: no text in UTF-8; of TensorBoard's events and W&B's .wandb export the "
                        "metrics (CSV, lines of JSON), unpack what is compressed, and write UTF-16 anew"
                    )
                if len(line) > MAX_LINE_BYTES:
                    raise UserFault(f"{file}:{number}: a line of more than {MAX_LINE_BYTES:,} bytes")
                if text := line.decode("utf-8", errors="replace").strip("\r\n\ufeff"):
                    yield number, text
    except OSError as error:
        raise UserFault(f"{file}: cannot be read: {error.strerror}") from None


def is_cut_off(file: Path, rest: Iterator[object]) -> bool:
    """Whether what was read last is the end of a file that ends within a line; ``rest`` is what comes after it."""
    if next(rest, None) is not None:
        return False
    with file.open("rb") as lines:
        lines.seek(-1, os.SEEK_END)
        return lines.read(1) != b"\n"


def _read(file: Path, log: Log) -> None:
    first = next(lines_of(file), (0, ""))[1].lstrip()
    is_row = _is_object(first)
    if is_row and '"log_history"' not in first:
        _add_rows(file, lambda: _json_lines(file), log)
    elif is_row or (first.startswith("{") and not first.startswith("{'")):
        rows = list(_history(file))
        _add_rows(file, lambda: rows, log)
    elif (columns := [name.strip() for name in _fields(first)]) and _is_table(columns):
        _read_table(file, columns, log)
    else:
        for number, step, values in console_rows(lines_of(file)):
            log.add(step, values, f"{file}:{number}")


def _is_object(text: str) -> bool:
    try:
        return _object(_parsed(text, "")) is not None
    except UserFault:
        return False


# --- JSON ------------------------------------------------------------------------------------------------------------


def _json_lines(file: Path) -> Iterator[tuple[int, dict[str, object]]]:
    lines = lines_of(file)
    for number, text in lines:
        try:
            row = _object(_parsed(text, f"{file}:{number}"))
        except UserFault:
            if is_cut_off(file, lines):
                return
            raise
        if row is None:
            raise UserFault(f"{file}:{number}: expected an object with the metrics of a step")
        yield number, {**row, **(_object(row.get("data")) or {})}


def _history(file: Path) -> Iterator[tuple[int, dict[str, object]]]:
    document = _object(_parsed("\n".join(line for _, line in lines_of(file, MAX_DOCUMENT_BYTES)), str(file)))
    history = None if document is None else document.get("log_history")
    if not isinstance(history, list):
        raise UserFault(f"{file}: one JSON document is read if it has log_history, as trainer_state.json has")
    for number, each in enumerate(cast("list[object]", history)):
        if (row := _object(each)) is None:
            raise UserFault(f"{file}: log_history[{number}] is no object")
        yield number, row


def _parsed(text: str, where: str) -> object:
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserFault(f"{where}: no JSON: {terminal_text(str(error), max_chars=120)}") from None
    return parsed


def _object(value: object) -> dict[str, object] | None:
    return cast("dict[str, object]", value) if isinstance(value, dict) else None


def _add_rows(file: Path, rows: Callable[[], Iterable[tuple[int, dict[str, object]]]], log: Log) -> None:
    """``rows`` are read twice, and not kept: which of the keys is that of the step, only all of them tell."""
    found = {name for _, row in rows() for name in STEP_KEYS if _number(row.get(name)) is not None}
    key = next((name for name in STEP_KEYS if name in found), None)
    if key is None:
        return
    pending: Values = {}
    last: int | None = None
    for number, row in rows():
        values = _numbers(row)
        if key not in values:
            for name, value in values.items():
                pending[name] = pending.get(name, 0.0) + value
            check_names(pending, f"{file}:{number}")
            continue
        step = _step(values[key], f"{file}:{number}")
        gap = max(1, step - last) if last is not None else 1
        between = {name: value / gap for name, value in pending.items() if name not in STEP_KEYS}
        log.add(step, {**between, **values}, f"{file}:{number}")
        pending, last = {}, step


def _numbers(row: Mapping[str, object]) -> Values:
    found = {name: number for name, value in row.items() if (number := _number(value)) is not None}
    if len(found) > MAX_METRICS:
        return dict(list(found.items())[: MAX_METRICS + 1])  # refused where it is added
    return found


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _step(value: float, where: str) -> int:
    if not 0 <= value < 2**53:
        raise UserFault(f"{where}: {value:g} is no number of a step")
    return round(value)


# --- tables ----------------------------------------------------------------------------------------------------------


def _fields(line: str) -> list[str]:
    try:
        return next(iter(csv.reader([line])))
    except (StopIteration, csv.Error):
        return []


def _is_table(columns: list[str]) -> bool:
    lower = {name.lower() for name in columns}
    return len(columns) > 1 and bool(lower & {key.lower() for key in STEP_KEYS})


def _read_table(file: Path, columns: list[str], log: Log) -> None:
    lower = [name.lower() for name in columns]
    if set(lower) == {"wall time", "step", "value"}:
        raise UserFault(
            f"{file}: one metric of TensorBoard, without its name; export all of them with the columns step, tag, value"
        )
    at = next(lower.index(key.lower()) for key in STEP_KEYS if key.lower() in lower)
    is_long = {"tag", "value"} <= set(lower)
    names = [_plain_name(name) for name in columns]
    rows = csv.reader(text for _, text in lines_of(file))
    try:
        next(rows)
        for number, row in enumerate(rows, start=2):
            if len(row) != len(columns):
                if is_cut_off(file, rows):
                    break
                raise UserFault(f"{file}:{number}: {len(row)} fields, the first line has {len(columns)}")
            if (step := _number(row[at])) is None:
                continue
            where = f"{file}:{number}"
            if is_long:
                value = _number(row[lower.index("value")])
                values = {} if value is None else {row[lower.index("tag")]: value}
            else:
                values = {
                    name: value
                    for index, (name, field) in enumerate(zip(names, row, strict=True))
                    if index != at and name and (value := _number(field)) is not None
                }
            log.add(_step(step, where), values, where)
    except csv.Error as error:
        raise UserFault(f"{file}: {error}") from None


def _plain_name(column: str) -> str:
    """Of a metric: W&B puts the run's name before it, and has columns for the extremes of several runs."""
    return "" if column.endswith(("__MIN", "__MAX")) else column.rpartition(" - ")[2]
