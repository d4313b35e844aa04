"""``penstock check hook``: good functions pass every check, and each wrong one fails the check that is about its fault,
with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from penstock.runtime.cli.app import app
from penstock.runtime.contracts.apart import check_apart
from penstock.runtime.contracts.kinds import KINDS, check_function

if TYPE_CHECKING:
    from penstock.runtime.contracts.findings import Finding

HERE = Path(__file__).parent
TIMEOUT_S = 20.0


def findings(name: str, kind: str, *, timeout_s: float = TIMEOUT_S) -> list[Finding]:
    """Of a function in one of the two files."""
    own = HERE / "contract_examples.py"
    file = own if f"def {name}(" in own.read_text() or f"class {name}" in own.read_text() else HERE / "hook_examples.py"
    return check_function(f"{file}:{name}", kind, timeout_s=timeout_s)


GOOD = [
    ("reward", "reward"),
    ("slow_reward", "reward"),
    ("ranked", "group_reward"),
    ("varied", "filter"),
    ("complete", "sample_filter"),
    ("shown", "all_samples"),
    ("uncertain", "priority"),
    ("Greedy", "policy"),
    ("Shortest", "routing"),
    ("two_turns", "generate"),
    ("feedback", "generate"),
    ("careful", "generate"),
    ("same_rewards", "postprocess"),
    ("doubled_rewards", "postprocess"),
    ("group_advantages", "advantage"),
    ("policy_gradient", "loss"),
    ("mean_over_samples", "reduction"),
    ("truncated", "importance"),
    ("same_sequence", "conversion"),
    ("without_last_token", "conversion"),
    ("num_groups", "rollout_log"),
    ("step_speed", "step_log"),
    ("prefixed", "weight_names"),
    ("Notes", "tracker"),
    ("Additions", "source"),
    ("best_answer", "evaluation_log"),
]


@pytest.mark.parametrize(("name", "kind"), GOOD)
def test_a_good_function_passes_every_check(name: str, kind: str) -> None:
    found = findings(name, kind)
    assert [finding for finding in found if finding.state == "failed"] == []
    assert len(found) > 2


def test_every_kind_has_a_good_function_here() -> None:
    assert {kind for _, kind in GOOD} == set(KINDS)


WRONG = [
    ("first_letter", "reward", "an empty response", "IndexError: string index out of range (contract_examples.py:"),
    ("needs_metadata", "reward", "a row without metadata", "KeyError: 'level' (contract_examples.py:"),
    ("wants_more", "reward", "loaded", "asks for 'reference_answer'; a reward function may ask for prompt, response"),
    ("best_of_two", "group_reward", "a group of one sample", "returned 2 rewards for a group of 1 sample"),
    ("second_best", "filter", "a group of one sample", "IndexError: list index out of range (contract_examples.py:"),
    ("says_maybe", "filter", "two groups of four", "the filter returned str 'maybe'; expected True, False"),
    ("only_seen", "priority", "a prompt that was never drawn", "TypeError: unsupported operand"),
    ("Never", "policy", "target", "nothing would ever be generated"),
    ("Never", "policy", "rank", "expected a tuple of whole numbers"),
    ("Stubborn", "routing", "choose names one", "returned 'engine/0 '; expected one of engine/0"),
    ("Counting", "routing", "the same answer", "returned different things"),
    ("trusting", "generate", "a model that says nothing", "IndexError: list index out of range (contract_examples.py:"),
    ("speechless", "generate", "a model that answers at once", "without a single turn of the model"),
    ("shifted_in_place", "advantage", "two groups of four", "changed what it was given"),
    ("drawn", "advantage", "two groups of four", "returned different things when it was called twice"),
    ("not_finite", "advantage", "two groups of four", "expected finite numbers"),
    ("pairs_of_rewards", "postprocess", "a group of one sample", "IndexError: tuple index out of range"),
    ("nan_rewards", "postprocess", "two groups of four", "returned nan at place 0"),
    ("without_gradient", "loss", "two groups of four", "without a gradient"),
    ("exploding", "loss", "30 nats apart", "returned a loss of"),
    ("negative", "reduction", "two groups of four", "expected at least 0"),
    ("drawn_weights", "importance", "two groups of four", "returned different things"),
    ("context_too", "conversion", "two groups of four", "none of those it was given"),
    ("known_figure", "rollout_log", "two groups of four", "which Penstock reports itself"),
    ("one_name", "weight_names", "ten weights", "every weight needs its own name"),
    ("NoSamples", "tracker", "made of the run", "has no samples"),
    ("InOrder", "tracker", "an evaluation that comes late", "AssertionError"),
    ("Dry", "source", "rows are dicts", "has ended before four rows"),
    ("always_answered", "evaluation_log", "without any answer", "KeyError: 'pass@1'"),
    ("numbered", "weight_names", "ten weights", "returned different things"),
]


@pytest.mark.parametrize(("name", "kind", "check", "story"), WRONG)
def test_a_wrong_function_fails_the_check_that_is_about_its_fault(name: str, kind: str, check: str, story: str) -> None:
    failed = [finding for finding in findings(name, kind) if finding.state == "failed" and check in finding.check]
    assert failed, "no such check has failed"
    assert any(story in finding.story for finding in failed), failed


@pytest.mark.parametrize(("name", "kind"), [("totals", "reward"), ("totals_of_group", "group_reward")])
def test_a_reward_in_a_dictionary_is_found_by_the_key_of_the_scenario(name: str, kind: str) -> None:
    spec = f"{HERE / 'contract_examples.py'}:{name}"
    right, wrong, without = (
        [each.story for each in check_function(spec, kind, timeout_s=20.0, reward_key=key) if each.state == "failed"]
        for key in ("total", "totl", None)
    )
    assert right == []
    assert any("a dict without 'totl'; its keys are list ['total'" in story for story in wrong)
    assert any("a dict without 'reward' or 'score'" in story for story in without)


def test_a_key_is_for_rewards_only() -> None:
    command = ["check", "hook", f"{HERE / 'contract_examples.py'}:varied", "--as", "filter", "--reward-key", "total"]
    failed = CliRunner().invoke(app, command)
    assert failed.exit_code != 0
    assert "--reward-key total: a function of kind filter returns no dictionary" in str(failed.exception)


@pytest.mark.parametrize(("name", "kind"), [("hangs", "reward"), ("endless", "generate")])
def test_a_function_that_hangs_fails_by_the_deadline(name: str, kind: str) -> None:
    failed = [finding for finding in findings(name, kind, timeout_s=0.1) if finding.state == "failed"]
    assert failed
    assert all("took longer than 0.1 s" in finding.story for finding in failed)


@pytest.mark.parametrize(
    ("name", "check", "story"),
    [
        ("exits_at_once", "an empty response", "its process ended with exit code 3; the checks after it were not made"),
        ("kills_itself", "an empty response", "its process was killed by SIGSEGV; the checks after it were not made"),
        ("interrupts", "an empty response", "KeyboardInterrupt (contract_examples.py:"),
    ],
)
def test_a_function_that_ends_its_process_fails_the_check_that_was_under_way(name: str, check: str, story: str) -> None:
    found = check_apart(f"{HERE / 'contract_examples.py'}:{name}", "reward", timeout_s=TIMEOUT_S)
    (failed,) = [finding for finding in found if finding.state == "failed"]
    assert (failed.check, failed.story[: len(story)]) == (check, story)
    assert (found[-1] == failed) == ("not made" in story)


def test_a_function_that_no_signal_ends_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.contracts.apart.GRACE_S", 0.5)
    found = check_apart(f"{HERE / 'contract_examples.py'}:never_ends", "reward", timeout_s=0.5)
    assert found[-1].story == (
        "took longer than 0.5 s, and did not end when it was told to; the checks after it were not made"
    )


def test_what_is_worth_a_look_is_a_note_and_no_failure() -> None:
    constant = {finding.check: finding for finding in findings("always_one", "reward")}
    assert constant["it tells responses apart"].state == "note"
    again = {finding.check: finding for finding in findings("counts", "reward")}
    assert again["the right answer"].state == "note"
    assert "returned something else" in again["the right answer"].story


def test_the_command_shows_a_table_and_fails_where_a_check_does() -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["check", "hook", f"{HERE}/contract_examples.py:reward", "--as", "reward"])
    assert good.exit_code == 0, good.output
    assert "checks passed" in good.output
    wrong = runner.invoke(app, ["check", "hook", f"{HERE}/contract_examples.py:first_letter", "--as", "reward"])
    assert wrong.exit_code == 1
    assert "checks failed" in wrong.output


@pytest.mark.parametrize(
    ("spec", "kind", "story"),
    [
        ("mine.py:f", "rewards", "did you mean 'reward'?"),
        ("nowhere.py:f", "reward", "there is no file"),
        ("reward", "reward", "expected file.py:function"),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(spec: str, kind: str, story: str) -> None:
    result = CliRunner().invoke(app, ["check", "hook", spec, "--as", kind])
    assert result.exit_code != 0
    assert story in str(result.exception)


PAGE = HERE.parents[1] / "docs" / "hooks.md"


def test_the_page_names_every_kind_with_its_key() -> None:
    text = PAGE.read_text()
    assert all(f"`{kind}` |" in text for kind in KINDS)
    assert all(f"`{known.key.split()[0]}`" in text for known in KINDS.values())
