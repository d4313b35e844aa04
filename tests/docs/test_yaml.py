"""Every block of YAML is a part of a scenario: laid over one that comes with Penstock, it loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml
from blocks import Block, blocks

from penstock.runtime.scenario.load import overridden_source, scenario_from
from penstock.runtime.scenario.shipped import shipped_scenarios
from penstock.runtime.scenario.source import read_source
from penstock.runtime.submit.options import read_options
from penstock.runtime.submit.scheduler_names import Scheduler

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.scenario.source import Plain


def merged(below: Plain, above: Plain) -> Plain:
    """What ``above`` says, and where it says nothing, what ``below`` does."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: merged(below.get(key), value) for key, value in above.items()}


OF_SCENARIOS = [block for block in blocks("yaml") if block.kind != "submit"]
OF_SCHEDULERS = [block for block in blocks("yaml") if block.kind == "submit"]


@pytest.mark.parametrize("block", OF_SCHEDULERS, ids=lambda block: block.place)
def test_a_submit_config_is_one_of_its_scheduler(block: Block, tmp_path: Path) -> None:
    (tmp_path / "submit.yaml").write_text(block.text)
    read_options(Scheduler(block.note), tmp_path / "submit.yaml")


@pytest.mark.parametrize("block", OF_SCENARIOS, ids=lambda block: block.place)
def test_a_block_of_yaml_is_part_of_a_scenario(block: Block, in_readers_folder: Path) -> None:
    name, *overrides = block.note.split() if block.kind == "over" else ["quickstart"]
    part = in_readers_folder / "scenarios" / "part.yaml"
    part.write_text(block.text)
    base = overridden_source(read_source(shipped_scenarios()[name]), overrides)
    whole = merged(base.data, read_source(part).data)
    assert isinstance(whole, dict)
    part.write_text(yaml.safe_dump(whole))
    scenario_from(read_source(part))


def test_what_a_block_says_goes_over_what_the_scenario_says() -> None:
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": [4]}) == {"a": {"b": 3, "c": 2}, "d": [4]}
    assert merged({"a": {"b": 1}}, {"a": None}) == {"a": None}
