"""One run under chaos, and what has to hold at the end of each."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from host_harness import HOST
from rich.console import Console

from penstock.runtime.chaos.verdict import CHAOS_FILE, Verdict
from penstock.runtime.chaos.watch import OUTPUT_FILE
from penstock.runtime.cli.chaos import planned_faults, play
from penstock.runtime.run.replay import Choice, replay_run
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent
TIMEOUT_S = 420.0


class ChaosRun:
    """Plays a scenario of this folder with these faults below ``folder``."""

    def __init__(
        self, folder: Path, name: str, faults: Sequence[str], *, seed: int, overrides: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        path = HERE / name
        keys = (f"runtime.host={HOST}", "observability.record=true", *overrides, f"run.folder={folder}")
        scenario = load_scenario(path, keys)
        planned = planned_faults(scenario, faults, num_faults=None, seed=seed)
        self.told = Console(file=io.StringIO(), width=200, record=True)
        self.verdict: Verdict = play(scenario, path, keys, planned, seed=seed, timeout_s=TIMEOUT_S, console=self.told)

    @property
    def run_folder(self) -> Path:
        (verdict,) = self.folder.glob(f"*/runs/*/{CHAOS_FILE}")
        return verdict.parent

    def logs(self) -> str:
        """What every process of the run has logged."""
        return "".join(file.read_text(errors="replace") for file in sorted((self.run_folder / "logs").glob("*.log")))

    def assert_clean(self) -> None:
        """It was completed, every fault came and was told, the audit is clean, nothing was trained twice or generated
        again, and every command comes out again in a replay."""
        verdict = self.verdict
        (output,) = self.folder.glob(f"*/{OUTPUT_FILE}")
        assert verdict.is_clean, f"{verdict}\n{output.read_text(errors='replace')[-3000:]}\n{self.logs()[-3000:]}"
        assert verdict.version == verdict.num_steps, verdict
        assert all(fault.at_s is not None for fault in verdict.faults), verdict
        told = self.told.export_text()
        assert [f for f in verdict.faults if f"{f.fault} at step {f.version} of {verdict.num_steps}" not in told] == []
        assert verdict.issued == verdict.trained + verdict.evaluated > verdict.evaluated, (
            f"{verdict}\n{self.logs()[-5000:]}"
        )
        assert_replays(self.run_folder)


def assert_replays(run_folder: Path) -> None:
    """Every incarnation of every actor asks for the same again, from all that it heard."""
    replayed = replay_run(run_folder, Choice())
    assert (replayed.moment, replayed.notes) == (None, ())
    assert replayed.num_events > 1000
