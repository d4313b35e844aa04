"""What holds for the pages themselves: how blocks are written, what is left untried, which files are named."""

from __future__ import annotations

import re

import pytest
from blocks import HOUSE, LANGUAGES, all_blocks, blocks_of, inline_code

MOST_LEFT_OUT = 7
"""Blocks that no test here tries; raise it only for one that cannot be tried at all."""
_FILE = re.compile(r"(?:actors|backends|benchmarks|docs|messages|runtime|scenarios|tests|typings)/[\w./-]+\.\w+")
DECISIONS = HOUSE / "docs" / "decisions"
LONGEST_DECISION = 40
"""Lines: who reads it wants to know why, not everything."""
NOT_HERE = {"scenarios/math.yaml", "scenarios/mine.yaml", "scenarios/qwen3_4b.yaml"}
"""Scenarios that pages suppose the reader to have."""


def test_every_block_is_fenced_and_says_its_language() -> None:
    """An indented block has no language, so nothing could try it, and the site could not colour it."""
    assert [block.place for block in all_blocks() if block.language not in LANGUAGES] == []


def test_few_blocks_are_left_out_and_each_says_what_tries_it_instead() -> None:
    left_out = [block for block in all_blocks() if block.kind == "not run"]
    assert len(left_out) <= MOST_LEFT_OUT, [block.place for block in left_out]
    for block in left_out:
        named = _FILE.findall(block.note)
        assert len(named) == 1, f"{block.place}: name the test that tries it"
        assert (HOUSE / named[0]).is_file(), f"{block.place}: there is no {named[0]}"


def test_comments_stand_before_blocks_of_their_language() -> None:
    about = {"as": "python", "over": "yaml", "submit": "yaml"}
    assert [block.place for block in all_blocks() if about.get(block.kind, block.language) != block.language] == []


def test_files_of_the_repository_that_are_named_exist() -> None:
    wrong = [
        f"{page}: {file}"
        for page, text in inline_code()
        for file in _FILE.findall(text)
        if text.startswith(file) and file not in NOT_HERE and not (HOUSE / file).exists()
    ]
    assert wrong == []


def test_pages_that_modules_name_exist() -> None:
    wrong = [
        f"{file.relative_to(HOUSE)}: {page}"
        for folder in ("actors", "backends", "benchmarks", "messages", "runtime", "scenarios")
        for file in sorted((HOUSE / folder).rglob("*"))
        if file.suffix in (".py", ".yaml")
        for page in re.findall(r"\bdocs/\w+\.md", file.read_text())
        if not (HOUSE / page).is_file()
    ]
    assert wrong == []


def test_the_site_and_the_first_page_lead_to_every_page() -> None:
    there = {page.name for page in (HOUSE / "docs").glob("*.md")}
    decisions = {f"decisions/{page.name}" for page in DECISIONS.glob("*.md")}
    in_nav = re.findall(r"[:-] ((?:\w+/)?\w+\.md)$", (HOUSE / "mkdocs.yml").read_text(), re.MULTILINE)
    studies = {f"studies/{page.name}" for page in (HOUSE / "docs" / "studies").glob("*.md")}
    assert sorted(in_nav) == sorted(there | decisions | studies)
    linked = re.findall(r"\]\((\w+\.md)\)", (HOUSE / "docs" / "index.md").read_text())
    assert there - set(linked) == {"index.md"}


def test_every_decision_is_short_and_says_what_lost_and_what_would_change_our_mind() -> None:
    index = (DECISIONS / "index.md").read_text()
    notes = sorted(page for page in DECISIONS.glob("*.md") if page.name != "index.md")
    assert {page.name for page in notes} == set(re.findall(r"\]\((\w+\.md)\)", index))
    wrong = [
        f"{page.name}: {what}"
        for page in notes
        for what in ("**Decided.**", "**Why.**", "**What lost**", "**What would change our mind.**")
        if page.read_text().count(what) != 1
    ]
    assert wrong == []
    assert [page.name for page in notes if page.read_text().count("\n") > LONGEST_DECISION] == []


def test_no_page_leads_out_of_the_folder_that_the_site_is_made_of() -> None:
    out = [page.name for page in (HOUSE / "docs").glob("*.md") if re.search(r"\]\(\.\./", page.read_text())]
    assert out == []


def test_what_a_page_may_not_do_is_found() -> None:
    indented, bare = blocks_of("Text:\n\n    penstock run\n\n```\nx\n```\n", "page")
    assert (indented.language, bare.language) == ("", "")
    (noted,) = blocks_of("1. Item\n\n   <!-- not run: why -->\n   ```sh\n   make\n   ```\n", "page")
    assert (noted.kind, noted.note, noted.text) == ("not run", "why", "make\n")
    with pytest.raises(ValueError, match="stands before no block"):
        blocks_of("<!-- over: sync -->\n\nText.\n", "page")
