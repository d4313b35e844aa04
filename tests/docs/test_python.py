"""Every block of Python runs as it stands, and functions that a page shows for a hook keep that hook's contract."""

from __future__ import annotations

import ast
import asyncio
import inspect
from typing import TYPE_CHECKING

import pytest
from blocks import Block, blocks
from reader import filled_in

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = blocks("python")
TIMEOUT_S = 60.0
"""Of one check."""
SHOWN_AS = [
    pytest.param(block, pair, id=f"{block.place}:{pair}")
    for block in PYTHON
    for pair in (block.note.split() if block.kind == "as" else ())
]


def reads_a_run(block: Block) -> bool:
    """Whether it wants a run that was made before: those are tried in ``test_made_runs.py``."""
    return filled_in(block.text) != block.text or "runs/" in block.text


def play(text: str, name: str) -> None:
    """Run the text, with ``await`` outside of functions, and then the tests that it defines."""
    code = compile(text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, object] = {"__name__": "shown"}
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)
    for test in [each for key, each in names.items() if key.startswith("test_") and inspect.isfunction(each)]:
        test()


@pytest.mark.usefixtures("in_readers_folder")
@pytest.mark.parametrize("block", [one for one in PYTHON if not reads_a_run(one)], ids=lambda block: block.place)
def test_a_block_of_python_runs(block: Block) -> None:
    play(block.text, block.place)


@pytest.mark.parametrize(("block", "pair"), SHOWN_AS)
def test_a_function_that_is_shown_for_a_hook_keeps_its_contract(block: Block, pair: str, tmp_path: Path) -> None:
    from penstock.runtime.contracts.kinds import check_function  # here, as it brings torch, which is slow to import

    kind, _, name = pair.partition("=")
    (tmp_path / "shown.py").write_text(block.text)
    found = check_function(f"{tmp_path / 'shown.py'}:{name}", kind, timeout_s=TIMEOUT_S)
    assert found
    assert [finding for finding in found if finding.state == "failed"] == []


def test_a_block_that_is_wrong_is_found() -> None:
    with pytest.raises(NameError):
        play("x = await nowhere()", "page")
    with pytest.raises(AssertionError):
        play("def test_it():\n    assert 1 == 2", "page")
