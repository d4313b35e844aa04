"""Every ``penstock …`` of the pages is understood, and what only looks at something is really done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from blocks import Block, blocks, inline_code
from calls import Call, calls_in, commands, parse
from reader import RUN_OF, filled_in
from typer.testing import CliRunner

from penstock.messages.errors import UserFault
from penstock.runtime.cli.app import app
from penstock.runtime.launch.resume import overridden
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.modelled import load_modelled

SHELL = [block for block in blocks("sh") if "penstock " in block.text]
REFUSED = {"penstock run quickstart lr=1e-5": "learner.learning_rate"}
"""Calls that a page shows for what is said against them."""
OF_THE_READER = {"GPUs", "SGLang's environment", "data", "devices", "model.path"}
"""Checks of a dry run that look at what a reader has, and the machine of a test lacks."""
TRIED = ("check hook", "convert scenario", "data check", "list", "schema")
"""Commands that are quick and need no run."""


def read(call: Call) -> None:
    """Read the scenario that a call names, with its overrides, as the command would.

    Raises:
        UserFault: something is wrong with them.
    """
    scenario, overrides = call.params.get("scenario"), call.params.get("overrides") or ()
    if call.command == "resume":
        given = [Path(each) for each in call.params["arguments"] if "=" not in each]
        folder = given[0] if given else Path(RUN_OF.format("quickstart"))
        overridden(folder, [each for each in call.params["arguments"] if "=" in each])
    elif scenario is not None:
        load = load_modelled if call.command == "simulate" else load_scenario
        load(scenario, overrides)


def _is_fine_elsewhere(output: str) -> bool:
    """Whether all that a dry run found wrong is what the machine of a test lacks."""
    failed = set(re.findall(r"^# (\S.*?) +failed$", output, re.MULTILINE))
    return bool(failed) and failed <= OF_THE_READER


@pytest.mark.usefixtures("in_readers_folder")
@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.place)
def test_the_calls_of_a_block_are_understood(block: Block) -> None:
    found = calls_in(filled_in(block.text))
    assert found
    for words in found:
        call = parse(words)
        read(call)
        if call.command in TRIED or call.params.get("dry_run"):
            result = CliRunner().invoke(app, list(words))
            is_fine = result.exit_code == 0 or _is_fine_elsewhere(result.output)
            assert is_fine, f"penstock {' '.join(words)}\n{result.output}\n{result.exception}"


@pytest.mark.usefixtures("in_readers_folder")
@pytest.mark.parametrize("page", sorted({page for page, text in inline_code() if text.startswith("penstock ")}))
def test_the_calls_in_running_text_are_understood(page: str) -> None:
    texts = {text for where, text in inline_code() if where == page and text.startswith("penstock ")}
    for text in texts - REFUSED.keys():
        for words in calls_in(filled_in(text).replace("…", "scenarios/mine.yaml")):
            read(parse(words, is_whole=False))


@pytest.mark.parametrize(("text", "said"), REFUSED.items())
def test_what_a_page_shows_as_refused_is_refused(text: str, said: str) -> None:
    assert text in {code for _, code in inline_code()}
    (words,) = calls_in(text)
    with pytest.raises(UserFault, match=re.escape(said)):
        read(parse(words))


@pytest.mark.usefixtures("in_readers_folder")
def test_the_examples_of_the_help_are_understood() -> None:
    shown = [line for command in commands() for line in (command.epilog or "").splitlines() if "penstock " in line]
    assert len(shown) > 20
    for line in shown:
        for words in calls_in(filled_in(line)):
            read(parse(words))
