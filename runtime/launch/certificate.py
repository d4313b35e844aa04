"""The certificate of a run: what anybody can check again without Penstock, and the verifier beside it.

Invariants:

* Only a run that has ended and whose audit is clean has one.
* The figures are made by the verifier's own code, so both read the ledger alike; the audit, which shares no code with
  it, agrees on how many samples were issued.
* The certificate is replaced whole, so a reader never sees half of it.
"""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock import __version__
from penstock.backends.learners.checkpoints.record import RECORD_FILE
from penstock.backends.ledger import verify_certificate as verifier
from penstock.messages.errors import UserFault
from penstock.runtime.launch.runs import SCENARIO_NAME, ledger_file, read_record
from penstock.runtime.launch.status import state_of
from penstock.runtime.observability.weights_log import WEIGHTS_FILE
from penstock.runtime.output_file import check_output

if TYPE_CHECKING:
    from penstock.backends.ledger.audit import AuditReport, CheckpointFact

VERIFIER_FILE: Final = "verify_certificate.py"
"""Written beside the certificate."""


def check_can_be_certified(folder: Path, target: Path) -> None:
    """
    Raises:
        UserFault: the run goes on, a file of it is missing, or the certificate cannot lie there.
    """
    if state_of(folder, read_record(folder)) == "running":
        raise UserFault(f"{folder}: the run goes on, and a certificate is of one that has ended; stop it, or wait")
    if not (folder / WEIGHTS_FILE).is_file():
        raise UserFault(
            f"{folder / WEIGHTS_FILE} is missing, so nobody can say which weights made the tokens; an older penstock "
            "made this run, it published nothing, or the file was removed: put it back, or certify another run"
        )
    check_output(target, "--certificate")
    if target.name == VERIFIER_FILE:
        raise UserFault(f"{target}: the verifier is written under this name; give the certificate another one")


def write_certificate(folder: Path, target: Path, report: AuditReport) -> tuple[str, ...]:
    """Write the certificate of a run whose audit is clean, and the verifier beside it.

    Args:
        folder: of the run.
        target: the file.
        report: what the audit says of its ledger.

    Returns:
        What the verifier finds wrong with it; nothing, when all that it certifies holds.

    Raises:
        UserFault: a file of the run cannot be read, or the certificate cannot be written.
    """
    certificate = _certificate_of(folder, report)
    scratch = target.with_name(f".{target.name}.part")
    try:
        scratch.write_bytes(msgspec.json.encode(certificate, order="sorted") + b"\n")
        scratch.replace(target)
        shutil.copyfile(Path(verifier.__file__), target.with_name(VERIFIER_FILE))
    except OSError as error:
        raise UserFault(f"{target}: the certificate cannot be written: {error.strerror or error}") from None
    return tuple(verifier.findings_of(certificate))


def _certificate_of(folder: Path, report: AuditReport) -> verifier.Facts:
    path = ledger_file(folder)
    try:
        facts = verifier.read_ledger(path)
        scenario = (folder / SCENARIO_NAME).read_bytes()
        publishes = verifier.read_publishes((folder / WEIGHTS_FILE).read_bytes())
    except sqlite3.Error as error:
        raise UserFault(
            f"{path}: no certificate can be made of it: {error}; it needs the form of this penstock"
        ) from None
    except OSError as error:
        raise UserFault(f"{error.filename}: no certificate without it: {error.strerror}; put it back") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserFault(f"{folder / WEIGHTS_FILE}: is damaged: {error!r}; restore it from a copy") from None
    if (facts["num_entries"], facts["num_issued"]) != (report.num_entries, report.balance.issued):
        raise UserFault(f"{path}: changed while it was read; certify the run when nobody drives it any more")
    scenario_digest = hashlib.sha256(scenario).hexdigest()
    certificate = {
        "penstock_certificate": verifier.FORMAT,
        "made_by": f"penstock {__version__}",
        "run": read_record(folder).name,
        "scenario_sha256": scenario_digest,
        "ledger": facts,
        "weights": {
            "publishes": publishes,
            "chain": verifier.links(scenario_digest, publishes),
            "checkpoints": [_checkpoint(fact) for fact in report.checkpoints],
        },
    }
    return {**certificate, "digest": verifier.seal(certificate)}


def _checkpoint(fact: CheckpointFact) -> list[int | str | None]:
    """Version, name, and SHA-256 of the checkpoint's record, which has those of its files; None: it has no record."""
    record = Path(fact.path) / RECORD_FILE
    digest = hashlib.sha256(record.read_bytes()).hexdigest() if record.is_file() else None
    return [fact.version, Path(fact.path).name, digest]
