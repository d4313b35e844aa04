"""``penstock check hook``: a function of the user's, called as a run would call it, before any run."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from penstock.backends.processes.user_code import split_spec
from penstock.messages.errors import UserFault
from penstock.runtime.contracts.apart import check_apart
from penstock.runtime.contracts.kinds import KINDS, OTHER_NAMES

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.runtime.contracts.findings import Finding

SIGNS = {"passed": "[green]passed[/]", "failed": "[bold red]failed[/]", "note": "[yellow]note[/]"}


def check_hook(spec: str, kind: str, console: Console, *, timeout_s: float, reward_key: str | None = None) -> int:
    """Check it, and show what came of that; the exit code.

    Raises:
        UserFault: there is no such kind, or no such file; a key is given of what is no reward.
    """
    known = OTHER_NAMES.get(kind, kind)
    if known not in KINDS:
        near = difflib.get_close_matches(kind, [*KINDS, *OTHER_NAMES], n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(KINDS)}"
        raise UserFault(f"--as {kind}: no function is of this kind; {hint}")
    if ":" not in spec:
        raise UserFault(f"{spec!r}: expected file.py:function, as in rewards/mine.py:score")
    split_spec(spec)
    if reward_key is not None and known not in ("reward", "group_reward"):
        raise UserFault(f"--reward-key {reward_key}: a function of kind {known} returns no dictionary with a reward")
    findings = check_apart(spec, known, timeout_s=timeout_s, reward_key=reward_key)
    console.print(f"{escape(spec)} as [bold]{known}[/] ({KINDS[known].key}): {KINDS[known].is_of}", soft_wrap=True)
    console.print(_table(findings))
    num_failed = sum(finding.state == "failed" for finding in findings)
    console.print(
        f"{num_failed} of {len(findings)} checks failed" if num_failed else f"all {len(findings)} checks passed"
    )
    return 1 if num_failed else 0


def _table(findings: list[Finding]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("check")
    table.add_column("", no_wrap=True)
    table.add_column("what was found", overflow="fold")
    for finding in findings:
        table.add_row(escape(finding.check), SIGNS[finding.state], escape(finding.story))
    return table
