"""The blocks of code in README.md, CONTRIBUTING.md and docs/, and what a comment before one says about it.

A comment in the Markdown, which readers do not see, stands right before the fence it is about:

    <!-- not run: WHY -->                        nothing of the block is tried
    <!-- as: KIND=FUNCTION … -->                 of Python: these functions are held to the contracts of their kinds
    <!-- submit: SCHEDULER -->                   of YAML: it is a submit config
    <!-- over: SCENARIO KEY=VALUE … -->          of YAML: the scenario that the block is laid over, if not quickstart
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

HOUSE = Path(__file__).parents[2]
LANGUAGES = ("json", "mermaid", "python", "sh", "sql", "text", "yaml")
"""``text`` is what a program prints, a formula or a picture, ``mermaid`` a drawing: there is nothing in it to try."""
_NOTE = re.compile(r"<!-- (?P<kind>not run|as|over|submit): (?P<rest>.*?) -->\s*", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One block of code, and where it stands."""

    page: str
    line: int
    language: str
    """Empty for one that is indented, or whose fence names none."""
    text: str
    kind: str
    """Of the comment before it; empty without one."""
    note: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """What users and contributors read."""
    return [HOUSE / "README.md", HOUSE / "CONTRIBUTING.md", *sorted((HOUSE / "docs").rglob("*.md"))]


@cache
def all_blocks() -> tuple[Block, ...]:
    """The blocks of all pages."""
    return tuple(block for page in pages() for block in blocks_of(page.read_text(), str(page.relative_to(HOUSE))))


def blocks_of(text: str, page: str) -> list[Block]:
    """The blocks of one page.

    Raises:
        ValueError: a comment with a word that is not known, or with no block after it.
    """
    found: list[Block] = []
    kind = note = ""
    for token in MarkdownIt().parse(text):
        if token.type == "html_block" and (noted := _NOTE.fullmatch(token.content)):
            kind, note = noted["kind"], noted["rest"]
        elif token.type in ("fence", "code_block"):
            assert token.map is not None
            code = textwrap.dedent(token.content)
            found.append(Block(page, token.map[0] + 1, token.info.strip(), code, kind, note))
            kind = note = ""
        elif kind:
            raise ValueError(f"{page}: <!-- {kind}: {note} --> stands before no block")
    return found


def blocks(language: str) -> list[Block]:
    """Those of one language that are to be tried."""
    return [block for block in all_blocks() if block.language == language and block.kind != "not run"]


@cache
def inline_code() -> tuple[tuple[str, str], ...]:
    """Everything that stands between backticks in running text, with its page; generated pages are left out."""
    found: list[tuple[str, str]] = []
    for page in pages():
        for token in MarkdownIt().enable("table").parse(page.read_text()):
            children = token.children or ()
            name = str(page.relative_to(HOUSE))
            found += ((name, child.content) for child in children if child.type == "code_inline")
    return tuple(found)
