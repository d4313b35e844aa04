"""The certificates of real runs verify without Penstock, also that of one whose actors were killed, which adds up."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from live_run import LiveRun
from test_accounting_runs import assert_whole

from penstock.backends.ledger import verify_certificate as verifier
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.chaos.verdict import CHAOS_FILE, Verdict
from penstock.runtime.launch.certificate import VERIFIER_FILE
from penstock.runtime.launch.runs import SCENARIO_NAME
from penstock.runtime.observability.summary import generated_tokens
from penstock.runtime.observability.weights_log import WEIGHTS_FILE

if TYPE_CHECKING:
    from penstock.backends.ledger.verify_certificate import Facts

pytestmark = pytest.mark.timeout(600)

MODELLED = Path(__file__).parents[1] / "chaos" / "modelled.yaml"
NUM_STEPS = 16
FAULTS = "kill:engine/0@0.3,kill:learner@0.4,kill:filter@0.5,kill:driver@0.6,kill:weight_publisher@0.7"


def penstock(*words: str) -> str:
    command = [sys.executable, "-m", "penstock.runtime.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def certified(run: Path, folder: Path) -> Facts:
    """The certificate of a run, written in this folder and verified there against the run's files."""
    penstock("audit", str(run), "--certificate", str(folder / "certificate.json"))
    code, text = verified(run, folder)
    assert code == 0, text
    certificate: Facts = json.loads((folder / "certificate.json").read_bytes())
    return certificate


def verified(run: Path, folder: Path) -> tuple[int, str]:
    files = {"--ledger": LEDGER_FILE, "--scenario": SCENARIO_NAME, "--weights": WEIGHTS_FILE}
    words = [word for option, name in files.items() for word in (option, str(run / name))]
    command = [sys.executable, "-I", "-S", VERIFIER_FILE, "certificate.json", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def assert_names(folder: Path, run: Path, certificate: Facts, place: str) -> None:
    """It does not verify, not even with a new digest, and the place is named."""
    certificate["digest"] = verifier.seal(certificate)
    (folder / "certificate.json").write_text(json.dumps(certificate))
    code, text = verified(run, folder)
    assert (code, place in text) == (1, True), text


def test_the_certificate_of_a_small_run_verifies_and_not_with_another_ledger(tmp_path: Path) -> None:
    with LiveRun(MODELLED, tmp_path, ("run.num_steps=4",)) as live:
        live.finish()
        run = live.folder
    facts = certified(run, tmp_path)["ledger"]
    assert sum(samples for _, _, samples, _ in facts["ages"]) == 4 * 8 * 4
    assert [row[:3] for row in facts["measured"]] == [[0, 100, 0], [1, 100, 0]]
    assert [version for _, version, _, _ in facts["evaluations"]] == [0, 4]
    with closing(sqlite3.connect(run / LEDGER_FILE)) as ledger, ledger:
        ledger.execute("UPDATE entries SET epoch = epoch + 1 WHERE sequence = 24")
    code, text = verified(run, tmp_path)
    assert code == 1
    assert "ledger.sha256" in text


@pytest.fixture(scope="module")
def with_kills(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run that lost everything once, and what was printed of it."""
    parent = tmp_path_factory.mktemp("kills")
    words = (f"run.folder={parent}", "runtime.host=local", f"run.num_steps={NUM_STEPS}", "--faults", FAULTS)
    said = penstock("chaos", str(MODELLED), *words, "--timeout", "300")
    (verdict,) = parent.glob(f"*/runs/*/{CHAOS_FILE}")
    return verdict.parent, said


@pytest.mark.long_run
def test_states_and_tokens_add_up_over_the_drives_of_a_run_that_lost_everything_once(
    with_kills: tuple[Path, str],
) -> None:
    run, said = with_kills
    verdict = msgspec.json.decode((run / CHAOS_FILE).read_bytes(), type=Verdict)
    accounts = assert_whole(run)
    assert generated_tokens(verdict.balance) == accounts.tokens.generated
    assert f"{accounts.tokens.generated:,} generated = " in said


@pytest.mark.long_run
def test_the_certificate_of_a_run_with_kills_verifies_and_not_with_one_thing_changed(
    with_kills: tuple[Path, str], tmp_path: Path
) -> None:
    run, _ = with_kills
    certificate = certified(run, tmp_path)
    facts = certificate["ledger"]
    assert sum(samples for _, _, samples, _ in facts["ages"]) == NUM_STEPS * 8 * 4
    assert (facts["infrastructure_failures_trained"], facts["timed_out_counted"]) == (0, 0)
    assert len({publish[0] for publish in certificate["weights"]["publishes"]}) > 1, "the Learner was killed"
    text = json.dumps(certificate)

    one_sample = json.loads(text)
    one_sample["ledger"]["groups"][-1][2][0][2] += 1
    assert_names(tmp_path, run, one_sample, "ledger.groups")
    one_age = json.loads(text)
    one_age["ledger"]["ages"][0][1] += 1
    assert_names(tmp_path, run, one_age, "ledger.ages[0][1]")
    one_digest = json.loads(text)
    one_digest["weights"]["publishes"][3][3] = "0" * 32
    assert_names(tmp_path, run, one_digest, "weights.chain[3]")
    one_count = json.loads(text)
    one_count["ledger"]["timed_out_counted"] = 1
    assert_names(tmp_path, run, one_count, "ledger.timed_out_counted")


@pytest.mark.long_run
def test_the_certificate_of_a_trained_model_names_its_checkpoints_by_their_records(tmp_path: Path) -> None:
    (tmp_path / "length.py").write_text("def reward(response):\n    return float(len(response) % 7)\n")
    overrides = (
        "model.make=xs", "learner.groups_per_batch=8", "run.num_steps=3", "learner.warm_start.num_steps=5",
        f"reward.function={tmp_path}/length.py:reward",
    )  # fmt: skip
    with LiveRun("quickstart.yaml", tmp_path, overrides) as live:
        live.finish()
        run = live.folder
    certificate = certified(run, tmp_path)
    assert [version for version, _, record in certificate["weights"]["checkpoints"] if len(record) == 64][-1] == 3
    digests = {publish[2]: publish[3] for publish in certificate["weights"]["publishes"]}
    assert len(set(digests.values())) == len(digests) >= 3
