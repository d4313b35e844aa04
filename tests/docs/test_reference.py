"""The reference of scenarios: every key has its meaning, and every kind of block is shown in one place."""

from __future__ import annotations

import re

from penstock.runtime.scenario.keys import block_paths, field_docs, shape_of
from penstock.runtime.scenario.reference import scenario_reference


def test_every_key_has_a_meaning() -> None:
    silent = {
        f"{struct.__name__}.{field.name}"
        for _, struct in block_paths()
        for field in shape_of(struct).fields
        if not field_docs(struct).get(field.name)
    }
    assert silent == set(), "say beneath the field what it means, with its unit and when to change it"
    assert "|  |" not in scenario_reference()


def test_a_block_that_stands_in_several_places_is_shown_once_and_led_to() -> None:
    page = scenario_reference()
    titles = re.findall(r"^##+ `(.+)`$", page, re.MULTILINE)
    assert len(titles) == len({struct for path, struct in block_paths() if path})
    assert "evaluation.datasets[].reward" not in titles
    (row,) = re.findall(r"^\| `reward` \|.*$", page.partition("`evaluation.datasets[]`\n")[2], re.MULTILINE)
    assert "[`reward`](#reward)" in row


def test_what_is_led_to_is_there() -> None:
    page = scenario_reference()
    anchors = {re.sub(r"[^a-z0-9_]", "", title) for title in re.findall(r"^##+ `(.+)`$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(\w+)\)", page)) <= anchors
