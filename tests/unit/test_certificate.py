"""A certificate verifies without Penstock, and with one thing changed it does not: the verifier names what differs."""

from __future__ import annotations

import copy
import json
import shutil
import sqlite3
import subprocess
import sys
from io import StringIO
from typing import TYPE_CHECKING, Any

import ledger_entries as make
import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.backends.ledger import verify_certificate as verifier
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.messages.ledger import PolicyRecorded
from penstock.messages.local import WeightsPublished
from penstock.messages.training import OnStale, UpdateMode
from penstock.messages.weights import WeightManifest
from penstock.runtime.cli.app import app
from penstock.runtime.cli.audit import show_audit
from penstock.runtime.launch.certificate import VERIFIER_FILE
from penstock.runtime.launch.runs import SCENARIO_NAME, close_record, open_record
from penstock.runtime.observability.weights_log import WEIGHTS_FILE, WeightsLog

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.backends.ledger.verify_certificate import Facts

TIMEOUT_S = 60
CERTIFICATE = "certificate.json"


def published(version: int, publish: int, *, epoch: int = 1, digest: str = "") -> WeightsPublished:
    manifest = WeightManifest(
        version=version, publish=publish, learner_epoch=epoch, transport="disk", location="weights", size_bytes=8,
        digest=digest or f"{version:064x}",
    )  # fmt: skip
    return WeightsPublished(manifest=manifest)


def made_run(folder: Path) -> Path:
    """A run that has ended: its second Learner has published version 1 again."""
    store = SqliteStore(folder / LEDGER_FILE)
    store.claim(1)
    for entry in make.whole_run():
        store.commit([entry])
    store.close()
    (folder / SCENARIO_NAME).write_text("run: {name: made}\n")
    for epoch, versions in ((1, (0, 1)), (2, (1, 2))):
        log = WeightsLog(folder)
        for publish, version in enumerate(versions, epoch * 1000):
            log.saw(published(version, publish, epoch=epoch))
        log.close()
    close_record(folder, open_record(folder, "made"), 0)
    return folder


def certify(folder: Path, target: Path) -> tuple[int, str]:
    text = StringIO()
    return show_audit(folder, Console(file=text, width=200), certificate=target), text.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made_run(tmp_path_factory.mktemp("made"))
    code, text = certify(folder, folder / CERTIFICATE)
    assert code == 0, text
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def certificate(made: Path) -> Facts:
    read: Facts = json.loads((made / CERTIFICATE).read_bytes())
    return read


def verify(folder: Path, *words: str) -> tuple[int, str]:
    """As somebody does who has Python and no Penstock."""
    command = [sys.executable, "-I", "-S", VERIFIER_FILE, CERTIFICATE, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def spoil(folder: Path, certificate: Facts) -> None:
    (folder / CERTIFICATE).write_text(json.dumps(certificate))


def sealed(certificate: Facts) -> Facts:
    """By a forger who knows how the digest is made."""
    return {**certificate, "digest": verifier.seal(certificate)}


def tamper(path: Path, *statements: str) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        database.execute(statement)
    database.close()


FILES = ("--ledger", LEDGER_FILE, "--scenario", SCENARIO_NAME, "--weights", WEIGHTS_FILE)


# --- it verifies ----------------------------------------------------------------------------------------------------


def test_it_verifies_where_there_is_no_penstock(made: Path) -> None:
    bare = [sys.executable, "-I", "-S", "-c", "import penstock"]
    assert subprocess.run(bare, cwd=made, capture_output=True, timeout=TIMEOUT_S).returncode == 1
    assert verify(made)[0] == 0
    code, text = verify(made, *FILES)
    assert (code, text) == (0, "verified: the certificate agrees with itself, ledger, scenario, weights\n")


def test_it_says_what_the_ledger_says(certificate: Facts) -> None:
    facts = certificate["ledger"]
    assert facts["num_issued"] == 20  # nine groups of two, and two replacements
    assert [row[:3] for row in facts["ends"]] == [
        ["failed", "reward_timeout", 2],
        ["filtered", "zero_spread", 2],
        ["in the system", "", 2],
        ["stale", "past_deadline", 4],
        ["trained", "", 8],
    ]
    assert facts["num_waiting"] == 2
    assert facts["ages"] == [[0, 0, 6, 18], [1, 1, 2, 6]]
    assert (facts["infrastructure_failures_trained"], facts["timed_out_counted"]) == (0, 0)
    assert [row[0] for row in certificate["weights"]["checkpoints"]] == [1, 2]
    assert [row[:3] for row in certificate["weights"]["publishes"]] == [
        [1, 1000, 0], [1, 1001, 1], [2, 2000, 1], [2, 2001, 2],
    ]  # fmt: skip


def test_the_same_run_has_the_same_certificate(made: Path, run: Path) -> None:
    certify(run, run / "again.json")
    assert (run / "again.json").read_bytes() == (made / CERTIFICATE).read_bytes()


# --- one thing changed ----------------------------------------------------------------------------------------------


def one_sample(certificate: Facts) -> None:
    certificate["ledger"]["groups"][0][2][0][1] += 1


def one_age(certificate: Facts) -> None:
    certificate["ledger"]["ages"][0][0] += 1


def one_version(certificate: Facts) -> None:
    group = next(group for group in certificate["ledger"]["groups"] if group[1] == 2)
    group[2][0][4] -= 1


def one_digest(certificate: Facts) -> None:
    certificate["weights"]["publishes"][1][3] = "f" * 64


def one_count(certificate: Facts) -> None:
    certificate["ledger"]["infrastructure_failures_trained"] = 1


def one_flaw(certificate: Facts) -> None:
    kind = next(kind for kind in certificate["ledger"]["kinds"] if kind[0] == "trained")
    kind[3] = verifier.NO_RESPONSE


def one_end(certificate: Facts) -> None:
    certificate["ledger"]["ends"][0][2] -= 1


def one_receipt(certificate: Facts) -> None:
    certificate["ledger"]["steps"][1][4] = 0


def one_bound(certificate: Facts) -> None:
    certificate["ledger"]["steps"][1][5] = 0


def one_step_less(certificate: Facts) -> None:
    certificate["ledger"]["steps"].pop(0)


def one_publish_less(certificate: Facts) -> None:
    certificate["weights"]["publishes"].pop(0)


CHANGES: dict[Callable[[Facts], None], str] = {
    one_sample: "ledger.ends",
    one_age: "ledger.ages[0][0]",
    one_version: "ledger.ages",
    one_digest: "weights.chain[1]",
    one_count: "ledger.infrastructure_failures_trained",
    one_flaw: "ledger.infrastructure_failures_trained",
    one_end: "ledger.ends[0][2]",
    one_receipt: "step 2: the receipt says age 0",
    one_bound: "step 2: trains a token of age 1",
    one_step_less: "samples are trained by step 1, which has no receipt",
    one_publish_less: "no digest of version 0",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_with_one_thing_changed_it_does_not_verify(
    change: Callable[[Facts], None], certificate: Facts, run: Path
) -> None:
    before = copy.deepcopy(certificate)
    change(certificate)
    assert certificate != before
    spoil(run, certificate)
    code, text = verify(run)
    assert code == 1
    assert "digest: the certificate says" in text
    assert CHANGES[change] in text
    spoil(run, sealed(certificate))
    code, text = verify(run)
    assert code == 1
    assert "digest: the certificate says" not in text
    assert CHANGES[change] in text


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("run", "another", "digest: the certificate says"),
        ("digest", "0" * 64, "digest: the certificate says"),
        ("scenario_sha256", "0" * 64, "weights.chain[0]"),
    ],
)
def test_with_another_key_changed_it_does_not_verify(
    key: str, value: str, said: str, certificate: Facts, run: Path
) -> None:
    spoil(run, {**certificate, key: value})
    code, text = verify(run)
    assert code == 1
    assert said in text


def test_a_forgery_that_agrees_with_itself_does_not_agree_with_the_files(certificate: Facts, run: Path) -> None:
    facts, weights = certificate["ledger"], certificate["weights"]
    kind = next(kind for kind in facts["kinds"] if kind[1] == "reward_timeout")
    kind[:2] = ["filtered", "zero_spread\x1b[2J"]
    facts.update(verifier.derived(facts))
    weights["publishes"][3][3] = "f" * 64
    weights["chain"] = verifier.links(certificate["scenario_sha256"], weights["publishes"])
    spoil(run, sealed(certificate))
    assert verify(run)[0] == 0
    code, text = verify(run, "--ledger", LEDGER_FILE)
    assert code == 1
    assert "ledger.kinds" in text
    assert "\x1b" not in text
    code, text = verify(run, "--weights", WEIGHTS_FILE)
    assert (code, "weights.publishes[3][3]" in text) == (1, True)
    (run / SCENARIO_NAME).write_text("run: {name: other}\n")
    code, text = verify(run, "--scenario", SCENARIO_NAME)
    assert (code, "scenario_sha256" in text) == (1, True)


# --- another ledger -------------------------------------------------------------------------------------------------


def test_with_another_ledger_it_does_not_verify(run: Path) -> None:
    store = SqliteStore(run / LEDGER_FILE)
    store.claim(2)
    policy = PolicyRecorded(policy="y", max_staleness=1, update_mode=UpdateMode.DRAIN, on_stale=OnStale.WAIT)
    store.commit([policy])
    store.close()
    code, text = verify(run, "--ledger", LEDGER_FILE)
    assert code == 1
    assert "ledger.sha256" in text
    assert "ledger.num_entries: the certificate says 24, the ledger file 25" in text


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE samples SET cause = 'unwell' WHERE cause = 'past_deadline'", "ledger.kinds"),
        ("UPDATE samples SET oldest_version = 0 WHERE group_id = 4", "ledger.groups"),
        ("UPDATE steps SET num_trained_tokens = 1 WHERE version = 2", "ledger.steps[1][2]"),
        ("UPDATE entries SET epoch = 2 WHERE sequence = 24", "ledger.sha256"),
        ("UPDATE entries SET body = CAST(body || x'00' AS BLOB) WHERE sequence = 3", "ledger.sha256"),
    ],
)
def test_with_a_ledger_that_was_tampered_with_it_does_not_verify(statement: str, said: str, run: Path) -> None:
    tamper(run / LEDGER_FILE, statement)
    code, text = verify(run, "--ledger", LEDGER_FILE)
    assert code == 1
    assert said in text


# --- what must not be counted ---------------------------------------------------------------------------------------

NOTED = "INSERT INTO reasons VALUES (0, 0, 'failed', 'scoring_failed', 'kind', 'took longer than 2 s', 10)"


@pytest.mark.parametrize(
    ("statements", "trained", "timed_out"),
    [
        ((NOTED, "UPDATE samples SET attempt = 0"), 1, 1),
        ((NOTED,), 0, 0),  # issued again after that
        ((NOTED, "UPDATE samples SET attempt = 0", "INSERT INTO claims VALUES (1000, 20)"), 0, 0),  # resumed after that
        ((NOTED, "UPDATE samples SET attempt = 0", "INSERT INTO claims VALUES (1000, 5)"), 1, 1),
        (("UPDATE samples SET engine = NULL WHERE group_id = 0 AND sample_index = 1",), 1, 0),
        (("UPDATE samples SET outcome = 'infra_error' WHERE group_id = 0",), 2, 0),
        (("UPDATE samples SET engine = NULL WHERE state = 'stale'",), 0, 0),  # not counted
    ],
)
def test_failures_that_were_counted_are_found(
    statements: tuple[str, ...], trained: int, timed_out: int, run: Path
) -> None:
    tamper(run / LEDGER_FILE, *statements)
    facts = verifier.read_ledger(run / LEDGER_FILE)
    assert (facts["infrastructure_failures_trained"], facts["timed_out_counted"]) == (trained, timed_out)
    made: dict[str, Any] = {**json.loads((run / CERTIFICATE).read_bytes()), "ledger": facts}
    spoil(run, sealed(made))
    code, text = verify(run, "--ledger", LEDGER_FILE)
    assert code == (1 if trained else 0)
    assert ("ledger.infrastructure_failures_trained: " in text) == bool(trained)
    assert ("ledger.timed_out_counted: 1, it must be 0" in text) == bool(timed_out)


# --- where there is none --------------------------------------------------------------------------------------------


def test_a_version_without_a_digest_is_said_when_it_is_made(run: Path) -> None:
    (run / WEIGHTS_FILE).unlink()
    log = WeightsLog(run)
    log.saw(published(0, 1))
    log.saw(published(1, 2, digest="none"))
    log.close()
    code, text = certify(run, run / CERTIFICATE)
    assert code == 1
    assert "no digest of version 1" in text
    assert "no digest of version 0" not in text
    assert verify(run)[0] == 1


def test_adapters_are_certified_with_the_model_that_they_belong_to(run: Path) -> None:
    (run / WEIGHTS_FILE).unlink()
    log, base = WeightsLog(run), published(0, 1, digest="b" * 64).manifest
    for version in range(3):
        manifest = published(version, version + 1, digest=f"{version}" * 64).manifest
        log.saw(WeightsPublished(manifest=msgspec.structs.replace(manifest, base=base)))
    log.close()
    code, text = certify(run, run / CERTIFICATE)
    assert code == 0, text
    assert verify(run, *FILES)[0] == 0
    publishes = json.loads((run / CERTIFICATE).read_bytes())["weights"]["publishes"]
    assert [publish[3] for publish in publishes] == [f"{str(version) * 64}+{'b' * 64}" for version in range(3)]


def test_a_ledger_that_does_not_agree_with_itself_has_no_certificate(run: Path) -> None:
    tamper(run / LEDGER_FILE, "UPDATE samples SET num_tokens = 9 WHERE group_id = 0")
    code, text = certify(run, run / "new.json")
    assert code == 1
    assert "no certificate was written" in text
    assert not (run / "new.json").exists()


def test_what_cannot_be_certified_is_refused_with_the_reason(run: Path) -> None:
    with pytest.raises(UserFault, match="is a folder; name a file"):
        certify(run, run)
    with pytest.raises(UserFault, match="its folder is not there"):
        certify(run, run / "missing" / CERTIFICATE)
    with pytest.raises(UserFault, match="give the certificate another"):
        certify(run, run / VERIFIER_FILE)
    (run / WEIGHTS_FILE).write_text('{"version": 0}\n')
    with pytest.raises(UserFault, match=r"weights\.jsonl: is damaged"):
        certify(run, run / "new.json")
    (run / WEIGHTS_FILE).unlink()
    with pytest.raises(UserFault, match=r"weights\.jsonl is missing"):
        certify(run, run / "new.json")
    open_record(run, "made")
    with pytest.raises(UserFault, match="the run goes on"):
        certify(run, run / "new.json")
    result = CliRunner().invoke(app, ["audit", str(run), "--certificate", str(run / "new.json")])
    assert isinstance(result.exception, UserFault)
    assert not (run / "new.json").exists()


def test_what_cannot_be_read_is_said_with_exit_code_2(run: Path) -> None:
    assert verify(run, "--ledger", SCENARIO_NAME)[0] == 2
    assert verify(run, "--ledger", "missing.sqlite") == (
        2,
        "cannot be read: 'missing.sqlite: unable to open database file'\n",
    )
    assert verify(run, "--weights", "no.jsonl") == (2, "cannot be read: 'no.jsonl: No such file or directory'\n")
    for text in ("no JSON", "[]", "{}", '{"penstock_certificate": 1}', '{"penstock_certificate": 2}'):
        (run / CERTIFICATE).write_text(text)
        code, told = verify(run)
        assert code == 2, told


def test_a_line_that_a_kill_has_torn_is_passed_over(run: Path) -> None:
    with (run / WEIGHTS_FILE).open("a") as file:
        file.write('{"at": 1, "ver')
    assert verify(run, *FILES)[0] == 0
    log = WeightsLog(run)
    log.saw(published(2, 3000, epoch=3))
    log.close()
    assert len(verifier.read_publishes((run / WEIGHTS_FILE).read_bytes())) == 5
