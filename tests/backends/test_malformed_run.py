"""What users' rows, episodes, rewards, filters and hooks do wrong, in one run with real actors, real backends and a
ledger in a file: each malformed thing ends as its table says, nothing else is touched, the auditor finds nothing wrong
with the ledger after any step, and nothing prints a stack trace."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest
import yaml
from one_process_run import OneProcessRun

from penstock.backends.ledger.audit import audit_ledger
from penstock.messages.ledger import StepRecorded
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.ledger.audit import AuditReport
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process

pytestmark = pytest.mark.long_run

FUNCTIONS: Final = Path(__file__).parent / "malformed_functions.py"
RUN_TIMEOUT_S: Final = 120.0

GOOD: Final = {"prompt": "ab=", "label": "1"}
GOOD_COLUMNS: Final = {
    "episode": "None",
    "first attempt": "None",
    "reward": "0.5",
    "sift": "True",
    "keep": "True",
    "look": "None",
}
"""What the functions do for the first sample of a row's group, or for the whole group; see malformed_functions.py."""

RAISED: Final = (
    "raises", "raises nothing to say", "asserts", "exits", "interrupts", "raises above all classes",
    "raises what cannot be shown", "recurses", "divides", "no literal",
)  # fmt: skip
RETURNED: Final = (
    "returns itself", "returns a function", "returns complex", "returns too much", "returns what cannot be shown",
    "prints", "'7'", "[1.0]", "(1, 2)", "{'a': 'b'}", "{1: 2}", "{'a': 1e999}", "1e999", "-1e999", "b'1'", "{1, 2}",
)  # fmt: skip
KILLS: Final = ("hangs", "takes the process down")
"""Episodes share a process, so every one in it is issued again."""
NO_VERDICT: Final = ("0.5", "'no'", "(False, 3)", "None", "(True, 'x', 1)")


class Ends(NamedTuple):
    """How the first sample of such a row ends, and how the second."""

    first: tuple[str, str]
    second: tuple[str, str] = ("trained", "")


COLUMNS: Final = {
    "episode": ((*RAISED, *RETURNED), Ends(("failed", "generation_failed"))),
    "first attempt": (KILLS, Ends(("trained", ""))),
    "reward": ((*RAISED, *RETURNED, "None", *KILLS), Ends(("failed", "scoring_failed"))),
    "sift": (("raises", "exits", "interrupts", *NO_VERDICT), Ends(("filtered", "sample_filter_error"))),
    "keep": (
        ("raises", "exits", "interrupts", *NO_VERDICT),
        Ends(("filtered", "filter_error"), ("filtered", "filter_error")),
    ),
    "look": (("raises", "exits", "interrupts"), Ends(("trained", ""))),
}
MALFORMED: Final = [(column, what) for column, (kinds, _) in COLUMNS.items() for what in kinds]
BAD_LINES: Final = (
    b"oops\n", b'{"prompt": "a", "label"\n', b"[1, 2]\n", b"null\n", b"{}\n", b'{"prompt": 3, "label": "2"}\n',
    b'{"prompt": "ab="}\n', b'{"prompt": " ", "label": "1"}\n', b'{"prompt": "\xe9"}\n',
)  # fmt: skip


def rows_with_bad_lines() -> bytes:
    """A good row, then one of each kind; bad lines in between."""
    rows = [GOOD_COLUMNS, *({**GOOD_COLUMNS, column: what} for column, what in MALFORMED)]
    lines = [json.dumps({**GOOD, **row}).encode() + b"\n" for row in rows]
    for place, bad in enumerate(BAD_LINES):
        lines.insert(4 * place, bad)
    return b"".join(lines)


def scenario_of(folder: Path) -> Path:
    (folder / "rows.jsonl").write_bytes(rows_with_bad_lines())
    scenario = {
        "run": {"name": "malformed", "num_steps": 1000},
        "model": {"make": "xs", "max_context": 64},
        "data": {
            "path": str(folder / "rows.jsonl"),
            "metadata_keys": list(GOOD_COLUMNS),
            "num_epochs": 1,
            "shuffle": False,
            "skip_bad_rows": True,
        },
        "sampling": {"samples_per_group": 2, "max_response_tokens": 4},
        "episode": {"kind": "function", "generate": f"{FUNCTIONS}:plays", "stall_timeout_s": 2.0},
        "reward": {"function": f"{FUNCTIONS}:judges", "num_workers": 2, "timeout_s": 4.0},
        "prompt_source": {"num_retries": len(KILLS) + 1},
        "filter": {
            "drop_zero_spread": False,
            "min_group_size": 1,
            "sample_function": f"{FUNCTIONS}:sifts",
            "function": f"{FUNCTIONS}:keeps",
            "all_samples_hook": f"{FUNCTIONS}:looks",
        },
        "staleness": {"policy": "fully_async", "max_staleness": 2},
        "engines": {"count": 1, "slots": 16},
        "learner": {"groups_per_batch": 16},
    }
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(scenario))
    return path


class Audits:
    """An audit of the ledger after each step."""

    def __init__(self, ledger: Path) -> None:
        self.reports: list[AuditReport] = []
        self._ledger = ledger

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None: ...

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        if any(isinstance(entry, StepRecorded) for entry in entries):
            self.reports.append(audit_ledger(self._ledger))

    def heard(self, process: Process, event: Event) -> None: ...

    def turned(self, process: Process) -> None: ...

    def lost(self, name: str, cause: str) -> None: ...


class Ended(NamedTuple):
    """A run that has ended."""

    run: OneProcessRun
    completed: bool
    story: str
    audits: list[AuditReport]
    printed: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("run")
    run = OneProcessRun(load_scenario(scenario_of(folder)), folder)
    audits = Audits(run.ledger)
    run.host.watch(audits, events=False)
    with (folder / "printed.txt").open("wb") as printed:
        before = os.dup(2)
        os.dup2(printed.fileno(), 2)
        try:
            ending = run.run(RUN_TIMEOUT_S)
        finally:
            os.dup2(before, 2)
            os.close(before)
    return Ended(run, ending.completed, ending.story, audits.reports, (folder / "printed.txt").read_text())


def test_the_run_comes_to_the_end_of_its_rows(ended: Ended) -> None:
    assert len(MALFORMED) + len(BAD_LINES) >= 60
    assert ended.completed, ended.story
    assert "the dataset ended" in ended.story
    assert ended.run.plan.num_rows == 1 + len(MALFORMED)
    counted = [int(notice.split()[0]) for notice in ended.run.plan.notices if " skipped" in notice]
    assert sum(counted) == len(BAD_LINES)


def test_the_ledger_balances_after_every_step_and_at_the_end(ended: Ended) -> None:
    reports = [*ended.audits, audit_ledger(ended.run.ledger)]
    for report in reports:
        assert report.findings == ()
        balance = report.balance
        assert balance.issued == sum(count.num_samples for count in balance.ended) + balance.in_system
    assert any(report.balance.in_system for report in reports)
    assert reports[-1].balance.in_system == 0
    assert reports[-1].balance.issued > 2 * (1 + len(MALFORMED)), "failed samples were drawn again"


def test_each_malformed_thing_ends_as_it_must_and_what_is_beside_it_is_trained(ended: Ended) -> None:
    expected: dict[tuple[int, int], tuple[str, str]] = {(0, 0): ("trained", ""), (0, 1): ("trained", "")}
    for group_id, (column, _) in enumerate(MALFORMED, 1):
        ends = COLUMNS[column][1]
        expected |= {(group_id, 0): ends.first, (group_id, 1): ends.second}
        if ends.first[0] == "failed":
            expected[group_id, 2] = ("trained", "")
    with sqlite3.connect(ended.run.ledger) as connection:
        found = {
            (group_id, index): (state, cause)
            for group_id, index, state, cause in connection.execute(
                "SELECT group_id, sample_index, state, cause FROM samples"
            )
        }
    connection.close()
    kinds = ["", *(f"{column}: {what}" for column, what in MALFORMED)]
    wrong = {
        f"{kinds[key[0]]} {key}": (found.get(key), expected.get(key))
        for key in found.keys() | expected.keys()
        if found.get(key) != expected.get(key)
    }
    assert not wrong


def test_nothing_prints_a_stack_trace(ended: Ended) -> None:
    assert "Traceback" not in ended.printed
    assert 'File "' not in ended.printed
