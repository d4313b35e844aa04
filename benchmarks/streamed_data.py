"""Rows that are read when they are wanted: peak memory and time, against the same file in memory.

Each reading runs in a process of its own, on files of which one is larger by a known factor; memory is what the process
has at its peak above what it has once everything is imported. The claim: with a file several times as large, a stream
needs nearly the same, and rows in memory need several times as much. The prompts of both are compared first.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.actors.prompt_source.order import PromptOrder
from penstock.backends.checkpoint.make import make_model
from penstock.backends.data.backend import DatasetBackend
from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.options import DataOptions
from penstock.backends.data.streamed import StreamedRows
from penstock.benchmarks._progress import in_turn
from penstock.messages.base import Value
from penstock.messages.commands import FetchPrompts, PromptRequest
from penstock.messages.local import LocalEvent, PromptsFetched

QUICK: Final = ("--rows", "1000", "--prompts", "250")
QUICK_S: Final = 40
MAX_CONTEXT: Final = 8192
GROUPS_PER_REQUEST: Final = 32
GROWTH: Final = 4
"""How much larger the second file is."""
MAX_STREAM_GROWTH: Final = 1.5
PREFETCH_ROWS: Final = 256


class Reading(Value, frozen=True, kw_only=True):
    """What one process has measured."""

    peak_mib: float
    open_s: float
    prompts_per_s: float
    checksum: int


def read(path: str, folder: str, *, is_streamed: bool, num_prompts: int) -> Reading:
    """Open the rows and ask for prompts in the order of a run."""
    options = DataOptions(path=path, stream=is_streamed, prefetch_rows=PREFETCH_ROWS)
    # Imports, the tokenizer and the first use of each are paid before, and are the same for both.
    small = Path(path).with_name("small.jsonl")
    load_dataset(DataOptions(path=str(small)), Path(folder), seed=0, max_context=MAX_CONTEXT)
    StreamedRows(DataOptions(path=str(small)), Path(folder), max_context=MAX_CONTEXT).close()
    before = _peak_mib()
    began = time.perf_counter()
    rows: StreamedRows | None = None
    if is_streamed:
        rows = StreamedRows(options, Path(folder), max_context=MAX_CONTEXT)
        backend, sources = DatasetBackend(rows), rows.sources
    else:
        dataset = load_dataset(options, Path(folder), seed=0, max_context=MAX_CONTEXT)
        backend, sources = DatasetBackend(dataset), dataset.sources
    opened = time.perf_counter()
    order = PromptOrder(sources, seed=0, shuffle=False)
    checksum = 0

    def take(event: LocalEvent) -> None:
        nonlocal checksum
        assert isinstance(event, PromptsFetched)
        for fetched in event.prompts:
            checksum = (checksum * 31 + sum(fetched.prompt.tokens)) % (1 << 61)

    backend.start(take, lambda error: None)
    for start in range(0, num_prompts, GROUPS_PER_REQUEST):
        ordinals = range(start, min(num_prompts, start + GROUPS_PER_REQUEST))
        backend.execute(FetchPrompts(tuple(PromptRequest(place, *order.row_of(place)) for place in ordinals)))
    ended = time.perf_counter()
    if rows is not None:
        rows.close()
    return Reading(
        peak_mib=_peak_mib() - before,
        open_s=opened - began,
        prompts_per_s=num_prompts / (ended - opened),
        checksum=checksum,
    )


def write_rows(path: Path, num_rows: int) -> None:
    """Sums of many numbers, of about a kilobyte each."""
    draw = random.Random(path.name)
    with path.open("w") as file:
        for index in range(num_rows):
            terms = "+".join(str(draw.randrange(10)) for _ in range(draw.randrange(300, 700)))
            file.write(json.dumps({"prompt": f"{terms}=", "label": index}) + "\n")


def main(argv: list[str]) -> int:
    """Measure and print; 1 when the memory of a stream grows with the file."""
    parser = argparse.ArgumentParser(prog="penstock bench streamed_data", description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000, help="of the smaller file")
    parser.add_argument("--prompts", type=int, default=2_000)
    parser.add_argument("--one", nargs=3, metavar=("FILE", "FOLDER", "KIND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one:
        path, folder, kind = arguments.one
        reading = read(path, folder, is_streamed=kind == "stream", num_prompts=arguments.prompts)
        sys.stdout.buffer.write(msgspec.json.encode(reading))
        return 0
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        return _compare(Path(name), arguments.rows, arguments.prompts)


def _compare(folder: Path, num_rows: int, num_prompts: int) -> int:
    model = folder / "model"
    make_model("xs", model, 0)
    write_rows(folder / "small.jsonl", 64)
    table = Table("file", "rows are", "peak memory", "open", "prompts/s")
    readings: dict[tuple[str, int], Reading] = {}
    for factor in (1, GROWTH):
        path = folder / f"rows{factor}.jsonl"
        write_rows(path, factor * num_rows)
        for kind in in_turn(("memory", "stream"), f"{factor * num_rows:,} rows, in {{}}".format):
            command = [sys.executable, "-m", __name__, "--prompts", str(num_prompts)]
            command += ["--one", str(path), str(model), kind]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
            reading = readings[kind, factor] = msgspec.json.decode(out, type=Reading)
            size = f"{path.stat().st_size / 2**20:.0f} MiB"
            table.add_row(
                size,
                kind,
                f"{reading.peak_mib:.0f} MiB",
                f"{reading.open_s:.1f} s",
                f"{reading.prompts_per_s:,.0f}",
            )
    console = Console()
    console.print(table)
    growth = {kind: readings[kind, GROWTH].peak_mib / readings[kind, 1].peak_mib for kind in ("memory", "stream")}
    same = all(readings["memory", factor].checksum == readings["stream", factor].checksum for factor in (1, GROWTH))
    console.print(
        f"a file {GROWTH} times as large takes {growth['memory']:.2f} times the memory in memory and "
        f"{growth['stream']:.2f} times as a stream; the prompts are {'the same' if same else 'NOT the same'}"
    )
    return 0 if same and growth["stream"] <= MAX_STREAM_GROWTH else 1


def _peak_mib() -> float:
    """Of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status names no peak")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
