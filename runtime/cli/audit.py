"""``penstock audit``: what became of every sample and token of a run, and whether its ledger agrees with itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich import box
from rich.markup import escape
from rich.table import Table

from penstock.messages.samples import TerminalState
from penstock.messages.texts import counted, does
from penstock.runtime.launch.certificate import VERIFIER_FILE, check_can_be_certified, write_certificate
from penstock.runtime.launch.runs import audit_run
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.texts import NOTHING, count_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.console import Console

    from penstock.backends.ledger.audit import AuditReport
    from penstock.messages.training import CauseCount

MAX_SHOWN: Final = 50
"""Findings on the terminal: the first ones tell the story, the rest follows from them."""
USEFUL: Final = (TerminalState.TRAINED, TerminalState.EVALUATED)


def show_audit(folder: Path, console: Console, *, certificate: Path | None = None) -> int:
    """Audit the ledger of a run and print what it comes to; 0 when everything agrees, 1 when something does not.

    Args:
        folder: of the run.
        console: where to print.
        certificate: the file for a certificate, which is written when everything agrees.

    Raises:
        UserFault: the folder has no ledger, or it cannot be read; or the run cannot be certified.
    """
    if certificate is not None:
        check_can_be_certified(folder, certificate)
    report = audit_run(folder)
    console.print(f"[bold]{escape(str(folder))}[/]  {counted(report.num_entries, 'entry')}\n")
    console.print(_balance_table(report))
    console.print(_waste_table(report, folder))
    for line in _facts(report):
        console.print(f"  {line}")
    console.print()
    if report.is_clean:
        console.print("[green]clean[/]: log, tables, payloads and checkpoints agree")
        return 0 if certificate is None else _certify(folder, certificate, report, console)
    for finding in report.findings[:MAX_SHOWN]:
        place = f"entry {finding.sequence}: " if finding.sequence else ""
        console.print(f"  [red]✗[/] {place}{escape(finding.text)}")
    if (hidden := len(report.findings) - MAX_SHOWN) > 0:
        console.print(f"  … and {hidden:,} more")
    console.print(f"[bold red]{counted(len(report.findings), 'disagreement')}[/]")
    if certificate is not None:
        console.print("no certificate was written: the ledger does not agree with itself")
    return 1


def _certify(folder: Path, target: Path, report: AuditReport, console: Console) -> int:
    found = write_certificate(folder, target, report)
    console.print(f"wrote {escape(str(target))}, and {VERIFIER_FILE} beside it", soft_wrap=True)
    for finding in found[:MAX_SHOWN]:
        console.print(f"  [red]✗[/] {escape(finding)}")
    if found:
        console.print(f"[bold red]the certificate does not verify[/]: {len(found):,} findings")
    return 1 if found else 0


def _balance_table(report: AuditReport) -> Table:
    balance = report.balance
    verdict = "[green]balanced[/]" if balance.is_balanced else "[bold red]not balanced[/]"
    tokens = sum(count.num_made_tokens for count in balance.ended) + report.in_system_tokens
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True, padding=(0, 2, 0, 0))
    table.add_column("state", footer="issued")
    table.add_column("cause", footer=verdict)
    table.add_column("samples", justify="right", footer=count_text(balance.issued))
    table.add_column("share", justify="right")
    table.add_column("tokens", justify="right", footer=count_text(tokens))
    rows = [(count.state, count.cause, count.num_samples, count.num_made_tokens) for count in balance.ended]
    rows.append(("in the system", "", balance.in_system, report.in_system_tokens))
    for state, cause, num_samples, num_tokens in rows:
        share = 100 * num_samples / max(1, balance.issued)
        shown = count_text(num_tokens) if num_tokens else NOTHING
        table.add_row(state, escape(cause), count_text(num_samples), f"{share:.1f} %", shown)
    return table


def _waste_table(report: AuditReport, folder: Path) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("waste by cause")
    table.add_column("tokens", justify="right")
    table.add_column("of all", justify="right")
    generated = sum(count.num_made_tokens for count in report.balance.ended) + report.in_system_tokens
    total = max(1, generated)
    wasted = sorted(_wasted(report), key=lambda count: -count.num_made_tokens)
    for count in wasted:
        share = f"{100 * count.num_made_tokens / total:.1f} %"
        table.add_row(escape(f"{count.state}: {count.cause}"), count_text(count.num_made_tokens), share)
    if not wasted:
        table.add_row("none in the ledger", NOTHING, NOTHING)
    for text, num_tokens in _estimates(folder, generated):
        table.add_row(f"[dim]{escape(text)}[/]", f"[dim]≈ {count_text(num_tokens)}[/]", NOTHING)
    return table


def _wasted(report: AuditReport) -> Iterator[CauseCount]:
    return (count for count in report.balance.ended if count.state not in USEFUL and count.num_made_tokens)


def _estimates(folder: Path, generated: int) -> Iterator[tuple[str, int]]:
    """What no ledger can know, from what the driver wrote when the run ended. ``generated``: tokens in the ledger,
    which has more than the driver was told where a run that ends for its failures has settled some since."""
    summary = read_summary(folder)
    if summary is None:
        return
    yield "lost with engines that were killed, not reported", summary.tokens_lost_estimate
    if beyond := max(0, summary.tokens_reported - max(summary.tokens_generated, generated)):
        yield "reported by engines, and in no response that came", beyond


def _facts(report: AuditReport) -> Iterator[str]:
    receipts = f"{counted(report.num_trained_tokens, 'token')} trained"
    if report.num_masked_tokens:
        receipts += f", {report.num_masked_tokens:,} too old for a loss"
    if report.num_given_tokens:
        receipts += f", {report.num_given_tokens:,} not made by the model"
    yield f"receipts     version {report.version}; {receipts}; oldest token of age {report.max_staleness}"
    announced = "none" if report.announced_version < 0 else str(report.announced_version)
    leased = "none" if report.leased_version is None else str(report.leased_version)
    yield f"versions     announced {announced}; batch that is out: {leased}"
    groups = ", ".join(f"{count:,} {state}" for state, count in sorted(report.num_groups.items())) or "none"
    pushed = f"; {report.num_pushed:,} pushed from outside" if report.num_pushed else ""
    yield f"groups       {groups}{pushed}; payloads of {report.num_payloads:,}"
    if report.evaluated_versions:
        yield f"evaluations  {_evaluations(report)}"
    yield f"checkpoints  {_checkpoints(report)}"
    newest = ", ".join(map(str, report.epochs[-5:])) or "none"
    yield f"claims       {len(report.epochs)} of the ledger; the newest epochs: {newest}"


def _evaluations(report: AuditReport) -> str:
    versions = ", ".join(map(str, report.evaluated_versions[-8:]))
    text = f"{len(report.evaluated_versions)}, of the versions {versions}"
    return f"{text}; the last one is open" if report.is_evaluating else text


def _checkpoints(report: AuditReport) -> str:
    count = report.version - (report.checkpoints[-1].version if report.checkpoints else 0)
    again = f"after a crash {counted(count, 'batch')} {does(count, 'are')} trained again"
    if not report.checkpoints:
        return f"none; {again}, from the model of the scenario"
    kept = ", ".join(f"{fact.version} ({fact.place})" for fact in report.checkpoints)
    return f"{kept}; {again}"
