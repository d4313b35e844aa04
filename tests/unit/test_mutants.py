"""What the unit tests of actors, delivery and shell are worth: single mistakes in the source, and whether they fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS, ROOT, Mutant
from plant_mutant import VARIABLE

HERE = Path(__file__).parent
TIMEOUT_S = 1800.0
TEST_TIMEOUT_S = 120
"""Of one test: a mistake that makes it go round for ever is found as well."""
PASSED, FAILED = 0, 1


def exit_code_of(tests: str, number: int | None) -> tuple[int, str]:
    """That of pytest, with a mutant or without, and what it said."""
    paths = sorted(map(str, HERE.glob(tests)))
    assert paths, f"there are no tests {tests}"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "plant_mutant", "-p", "no:cacheprovider"]
    command += ["--tb=no", f"--timeout={TEST_TIMEOUT_S}", "-m", "not slow", *paths]
    paths_of_modules = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    variables |= {"PYTHONPATH": paths_of_modules, VARIABLE: "" if number is None else str(number)}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.mistake)
def test_each_mutant_changes_a_line_that_is_there_and_is_a_program(mutant: Mutant) -> None:
    mutated = mutant.planted_in((ROOT / mutant.path).read_text())
    compile(mutated, mutant.path, "exec", dont_inherit=True)
    assert list(HERE.glob(mutant.tests))


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("tests", sorted({mutant.tests for mutant in MUTANTS}))
def test_without_a_mutant_the_tests_pass(tests: str) -> None:
    code, output = exit_code_of(tests, None)
    assert code == PASSED, output


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=[mutant.mistake for mutant in MUTANTS])
def test_a_mutant_is_found_by_the_tests_beside_it(number: int) -> None:
    """Found is what makes a test fail; what cannot even be imported is a mistake in the table."""
    code, output = exit_code_of(MUTANTS[number].tests, number)
    assert code == FAILED, f"{MUTANTS[number].mistake}: pytest ended with {code}\n{output}"
