"""Dumps and profiles of steps in a scenario: what is refused, with which words, and what ``--dry-run`` says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backends.learners.recording_options import DumpOptions
from penstock.messages.errors import UserFault
from penstock.runtime.cli.dry_run import dump_text
from penstock.runtime.scenario import load_scenario

QUICKSTART = Path(__file__).parents[2] / "scenarios" / "quickstart.yaml"
SIMULATED = ("engines.backend=simulated", "learner.backend=simulated", "model.make=null", "learner.warm_start=null")
REFUSED = {
    "a simulated learner": (
        (*SIMULATED, "learner.dump.every=2"),
        r"learner\.dump: a simulated learner cannot; .*torch",
    ),
    "its profile": ((*SIMULATED, "learner.profile.last_step=3"), r"learner\.profile: a simulated learner cannot"),
    "simulated engines": ((*SIMULATED, "engines.profile.last_step=3"), r"engines\.profile: simulated engines have no"),
    "beyond the end": (
        ("run.num_steps=5", "learner.dump.first_step=6"),
        r"learner\.dump\.first_step: the run ends with step 5",
    ),
    "a profile beyond it": (
        ("run.num_steps=1", "engines.profile.stacks=true"),
        r"engines\.profile\.first_step: .* step 1",
    ),
    "the wrong way round": (
        ("learner.profile={first_step: 5, last_step: 3}",),
        r"learner\.profile\.last_step: is before first_step",
    ),
    "no step": (("learner.dump.every=0",), r"learner\.dump\.every"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_recorded_is_refused_with_the_key(case: str) -> None:
    overrides, words = REFUSED[case]
    with pytest.raises(UserFault, match=words):
        load_scenario(QUICKSTART, overrides)


def test_the_size_of_a_dump_is_told_before_the_run() -> None:
    keys = ("run.num_steps=10", "learner.groups_per_batch=4", "sampling.samples_per_group=2", "model.max_context=100")
    scenario = load_scenario(QUICKSTART, (*keys, "sampling.max_response_tokens=50", "learner.dump.every=4"))
    of_step = 4 * 2 * (50 * (4 + 1 + 4 + 8 * 4) + 50 * 4)
    assert dump_text(scenario).startswith(f"# learner.dump: 3 steps of at most {of_step / 1024:.1f} KiB, ")
    assert dump_text(load_scenario(QUICKSTART)) == ""


def test_steps_are_counted_from_the_first() -> None:
    options = DumpOptions(first_step=3, last_step=9, every=3)
    assert [step for step in range(1, 14) if options.takes(step)] == [3, 6, 9]
