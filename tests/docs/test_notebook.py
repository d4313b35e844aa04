"""The notebook of the docs, executed in a kernel as a reader does it."""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
from blocks import HOUSE

if TYPE_CHECKING:
    from pathlib import Path

NOTEBOOK = HOUSE / "docs" / "train_in_a_notebook.ipynb"
TIMEOUT_S = 300


def outputs_of(notebook: Any) -> str:  # noqa: ANN401 - a notebook has no type
    """All that its cells show, as text."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output["output_type"] == "error"]
    return "\n".join("".join(each.get("text") or each["data"].get("text/html") or "") for each in outputs)


def check(shown: str) -> None:
    """The model has learnt, it can be seen, and what was given has travelled."""
    first, last = map(float, re.findall(r"^(0\.\d+) → (0\.\d+)$", shown, re.MULTILINE)[0])
    assert last > first + 0.3
    assert "completed · step 25 of 25" in shown
    assert "<polyline" in shown
    assert "VOWELS = 'aeiou'" in shown
    assert re.search(r"^True \d+ tokens trained$", shown, re.MULTILINE)


def test_the_notebook_is_kept_with_what_it_shows() -> None:
    check(outputs_of(json.loads(NOTEBOOK.read_text())))


@pytest.mark.long_run
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_the_notebook_learns_when_it_is_executed(tmp_path: Path) -> None:
    notebook = import_module("nbformat").read(NOTEBOOK, 4)
    for cell in notebook.cells:
        cell.outputs = []
    client = import_module("nbclient").NotebookClient(
        notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    check(outputs_of(notebook))
