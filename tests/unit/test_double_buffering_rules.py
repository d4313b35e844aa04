"""The second set of weights of embedded engines in a scenario: where it is refused, and what a dry run says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.messages.errors import UserFault
from penstock.runtime.cli.engine_memory import embedded_text
from penstock.runtime.scenario import load_scenario

SCENARIO = Path(__file__).parents[2] / "scenarios" / "quickstart.yaml"
WANTED = "engines.double_buffering=true"
COLOCATED = ("engines.placement=colocate", "staleness.policy=sync", "staleness.max_staleness=null")
ADAPTERS = ("learner.lora.rank=4", "learner.lora.publish=adapter")
SGLANG = ("engines.backend=sglang",)
AGAIN = "and as much again for the set that is prepared (double_buffering)"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (COLOCATED, "engines.double_buffering: a colocated engine swaps while nothing runs"),
        (ADAPTERS, "engines.double_buffering: adapters that are published alone are small"),
        (SGLANG, "engines.double_buffering: has no effect with sglang engines; set backend: torch or remove it"),
    ],
)
def test_where_it_does_nothing_it_is_refused_and_left_to_itself_it_is_not(
    overrides: tuple[str, ...], text: str
) -> None:
    with pytest.raises(UserFault) as refused:
        load_scenario(SCENARIO, [*overrides, WANTED])
    assert text in str(refused.value)
    load_scenario(SCENARIO, list(overrides))


@pytest.mark.parametrize(
    ("overrides", "rest"),
    [
        ((WANTED,), f", {AGAIN}"),
        ((WANTED, "engines.device=cuda"), f", {AGAIN}"),
        ((), f", {AGAIN} on a CPU with two cores or more, where ten sets would go into what memory is free"),
        (("engines.double_buffering=false",), ""),
        (("engines.device=cuda",), ""),
        (COLOCATED, ""),
        (ADAPTERS, ""),
    ],
)
def test_a_dry_run_counts_the_sets(overrides: tuple[str, ...], rest: str) -> None:
    text = embedded_text(load_scenario(SCENARIO, list(overrides)))
    assert text == f"# engines: 1.21 MB of weights in each of 2{rest}\n#\n"


def test_of_other_engines_it_says_nothing() -> None:
    assert embedded_text(load_scenario(SCENARIO, list(SGLANG))) == ""
    mixed = [*SGLANG, "engines.more=[{backend: torch, double_buffering: true}]"]
    assert embedded_text(load_scenario(SCENARIO, mixed)) == (
        f"# engines.more[0]: 1.21 MB of weights in each of 1, {AGAIN}\n#\n"
    )
