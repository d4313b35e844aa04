"""Routing policies in whole simulated runs: those that are built in, the user's own, and what is wrong with one."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from penstock.messages.errors import UserFault
from penstock.runtime.hosts.virtual.simulate import simulate_scenario
from penstock.runtime.run.own_routing import OwnRouting
from penstock.runtime.scenario import load_scenario

SCENARIO = Path(__file__).parents[2] / "scenarios" / "simulated_1024_engines.yaml"
OWN = """
class First:
    def choose(self, sample, engines):
        {body}

class Needy:
    def __init__(self, size):
        pass

class Mute:
    pass
"""


def own(tmp_path: Path, body: str, name: str = "First") -> str:
    file = tmp_path / "own.py"
    file.write_text(OWN.format(body=body))
    return f"{file}:{name}"


def simulated(routing: str) -> tuple[int, str]:
    """Exit code, and the digest of all events."""
    settings = ["engines.count=8", "learner.groups_per_batch=8", "run.num_steps=3", f"prompt_source.routing={routing}"]
    out = io.StringIO()
    console = Console(file=out, width=120, no_color=True)
    code = simulate_scenario(load_scenario(SCENARIO, settings), seed=7, console=console, run_folder=None)
    return code, re.findall(r"digest\W+([0-9a-f]{32})", out.getvalue())[0]


def test_every_policy_runs_and_sends_samples_elsewhere_than_the_others(tmp_path: Path) -> None:
    body = "return sorted(engine.name for engine in engines)[0] if sample.group_id % 2 else None"
    routings = ["least_loaded", "round_robin", "consistent_hash", own(tmp_path, body)]
    found = [simulated(routing) for routing in routings]
    assert [code for code, _ in found] == [0] * 4
    assert len({digest for _, digest in found}) == 4
    assert simulated(routings[3]) == found[3]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "return 'engine/99'",
            r"prompt_source.routing: First.choose \(own.py:3\) returned 'engine/99'; expected one of",
        ),
        ("return 1", r"First.choose \(own.py:3\) returned 1; expected one of engine/"),
        ("return engines[99]", r"First.choose raised IndexError: .*\(own.py:4\)"),
    ],
)
def test_what_is_wrong_with_a_policy_is_the_users_fault_with_file_and_line(
    body: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UserFault, match=reason):
        simulated(own(tmp_path, body))


def test_one_that_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for name, reason in (("Needy", "raised TypeError"), ("Mute", "no method choose"), ("Absent", "has no 'Absent'")):
        with pytest.raises(UserFault, match=reason):
            OwnRouting(own(tmp_path, "return None", name))
    with pytest.raises(UserFault, match="did you mean 'round_robin'"):
        simulated("round_robbin")
