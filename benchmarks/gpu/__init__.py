"""One GPU and all that Penstock claims of it: limits of the device, engine, learner, weights, whole runs; one page of
results.

Stages, each a process of its own with a deadline and a result of its own; what has a result of this machine and this
code is not measured again, so the pack goes on where it was cut off:

* ``limits``: what the device can do at best;
* ``engine``: the embedded engine against transformers' ``generate``, and its log-probs against the learner's;
* ``learner``: tokens a second, MFU, memory against what ``--dry-run`` predicts, bfloat16 against float32;
* ``weights``: publish, fetch and load by each transport of one machine, sleep and wake;
* ``runs``: whole runs under each policy and colocated, and one whose engine is killed;
* ``features``: whole runs with float16, FP8, adapters, replayed cut-offs, profiles, images, and with SGLang's servers.

``--folder`` gets ``gpu.html``, to attach to an issue, and what it is made of. ``--pretend`` goes through all of it on a
CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from rich.console import Console

from penstock.benchmarks._harness import MISSED, NOT_TOLD, edition_of
from penstock.benchmarks._processes import why_no_result
from penstock.benchmarks._progress import in_turn, say
from penstock.benchmarks._results import HISTORY, Result, html
from penstock.runtime.observability.page import write_whole
from penstock.runtime.observability.summary import machine_facts

if TYPE_CHECKING:
    from collections.abc import Sequence

STAGES: Final[dict[str, float]] = {
    "limits": 120,
    "engine": 600,
    "learner": 600,
    "weights": 600,
    "runs": 1200,
    "features": 2400,
}
"""With the seconds that each may take."""
RUNS: Final = ("runs", "features")
"""Those of whole runs."""
FOLDER: Final = f"{HISTORY}/gpu"
QUICK: Final = ("--pretend", "--repetitions", "1")
QUICK_S: Final = 135


class Outcome(NamedTuple):
    """Of a stage: a result, or why there is none."""

    name: str
    result: Result | None
    why: str


def main(argv: list[str] | None = None) -> int:
    """``penstock bench gpu``; 1 where a stage failed or a claim was missed, 3 where one cannot be told from noise.

    What is pretended shows no claim, so it cannot miss one.

    Raises:
        UserFault: there is no GPU, and nothing is pretended.
    """
    given = _parsed(argv)
    if not given.pretend:
        from penstock.benchmarks.gpu._stage import stand_of  # brings torch

        stand_of(given)  # without a GPU there is nothing to begin with
    given.folder.mkdir(parents=True, exist_ok=True)
    outcomes = [_outcome(name, given) for name in in_turn(given.only or list(STAGES))]
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    absent = [f"{outcome.name}: {outcome.why}" for outcome in outcomes if outcome.result is None]
    title = "Penstock on a GPU" if not given.pretend else "Penstock on a GPU, pretended: figures mean nothing"
    page = write_whole(given.folder / "gpu.html", html(title, results, absent))
    Console().print(f"{page}: all of it on one page", markup=False)
    verdicts = {verdict for result in results for verdict in result.verdicts if not given.pretend}
    if absent or "missed" in verdicts:
        return MISSED
    return NOT_TOLD if verdicts - {"met"} else 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="penstock bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(STAGES), metavar="STAGE", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--folder", type=Path, default=Path(FOLDER), help=f"of results and page (default: {FOLDER})")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--repetitions", type=int, default=None, help="of each measurement, as the stage has it")
    parser.add_argument("--steps", type=int, default=None, help="of each whole run, as the stage has it")
    parser.add_argument("--pretend", action="store_true", help="on the CPU, with tiny models: figures mean nothing")
    return parser.parse_args(argv)


def _outcome(name: str, given: argparse.Namespace) -> Outcome:
    output: Path = given.folder / f"{'pretended_' if given.pretend else ''}{name}.json"
    if not given.again and (kept := _kept(name, output)) is not None:
        say(f"{name}: its result of {kept.at} is kept; --again measures anew")
        return Outcome(name, kept, "")
    output.unlink(missing_ok=True)
    arguments = ["--output", str(output), "--history", str(given.folder)]
    arguments += ["--pretend"] * given.pretend
    if given.repetitions is not None and name not in RUNS:
        arguments += ["--repetitions", str(given.repetitions)]
    if given.steps is not None and name in RUNS:
        arguments += ["--steps", str(given.steps)]
    why = why_no_result(name, f"penstock.benchmarks.gpu.{name}", arguments, STAGES[name])
    if not output.exists():
        return Outcome(name, None, why)
    return Outcome(name, msgspec.json.decode(output.read_bytes(), type=Result), "")


def _kept(name: str, output: Path) -> Result | None:
    """A result of the same code on the same machine."""
    if not output.exists():
        return None
    result = msgspec.json.decode(output.read_bytes(), type=Result)
    is_same = result.edition == edition_of(Path(__file__).with_name(f"{name}.py")) and result.machine == machine_facts()
    return result if is_same else None
