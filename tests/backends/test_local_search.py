"""Search in documents of a file."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import TYPE_CHECKING

import pytest

from penstock.backends.data.problems import DataError
from penstock.backends.episodes.interfaces import ToolError
from penstock.backends.episodes.tools import LocalSearch
from penstock.backends.episodes.tools.local_search import Document, SearchIndex

if TYPE_CHECKING:
    from pathlib import Path

DOCUMENTS: list[dict[str, object]] = [
    {"title": "Cats", "text": "A cat is a feline and likes to purr."},
    {"title": "Dogs", "text": "A dog is a friend and loves to play."},
    {"title": "Birds", "text": "A bird is an animal that can fly. A bird sings."},
    {"title": "", "text": "Zürich lies on a lake; room 7 is free."},
]


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_best_document_comes_first_and_those_without_a_word_do_not_come(tmp_path: Path) -> None:
    search = LocalSearch(written(tmp_path / "docs.jsonl", DOCUMENTS))
    assert asyncio.run(search.call({"query": "bird"})) == "[1] Birds: A bird is an animal that can fly. A bird sings."
    assert asyncio.run(search.call({"query": "which feline, or which friend?"})).splitlines()[0].startswith("[1] ")
    assert asyncio.run(search.call({"query": "volcano"})) == "(no document matches)"
    assert asyncio.run(search.call({"query": "Zürich 7"})) == "[1] Zürich lies on a lake; room 7 is free."


def test_the_ranking_is_that_of_the_closed_form() -> None:
    index = SearchIndex([Document("", "x x y"), Document("", "x z z z z z"), Document("", "q"), Document("", "r")])
    found = index.search("x", 4)
    assert [one.document.text for one in found] == ["x x y", "x z z z z z"]
    # Robertson's idf as Lucene has it, k1 = 1.5, b = 0.75, mean length 11 / 4.
    idf = 0.6931471805599453  # log(1 + (4 - 2 + 0.5) / (2 + 0.5))
    lengths = (3, 6)
    for one, count, length in zip(found, (2, 1), lengths, strict=True):
        expected = idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * length / 2.75))
        assert one.score == pytest.approx(expected, rel=1e-5)


def test_equal_documents_keep_their_order() -> None:
    index = SearchIndex([Document(str(i), "same words") for i in range(9)])
    assert [one.document.title for one in index.search("words", 9)] == [str(i) for i in range(9)]


def test_no_more_is_shown_than_was_asked_for(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"text": f"word {'long ' * 100}{i}"} for i in range(10)]
    search = LocalSearch(written(tmp_path / "docs.jsonl", rows), num_results=2, max_result_chars=20)
    shown = asyncio.run(search.call({"query": "word"})).splitlines()
    assert len(shown) == 2
    assert all(len(line) <= len("[1] ") + 20 + len("...") for line in shown)


def test_compressed_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "needle"}\n'))
    assert asyncio.run(LocalSearch(path).call({"query": "needle"})) == "[1] needle"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no document"),
        ('{"text": "a"}\n{"body": "b"}\n', "docs.jsonl:2"),
        ('{"text": "a"}\n{"text": ""}\n', "docs.jsonl:2"),
        ('{"text": "a"}\n{"text": 7}\n', "docs.jsonl:2"),
        ('{"text": "a", "title": 3}\n', "docs.jsonl:1"),
        ('{"text": "a"\n', "docs.jsonl:1"),
        ("[]\n", "docs.jsonl:1"),
    ],
)
def test_a_bad_line_is_an_error_with_file_and_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=says):
        LocalSearch(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        LocalSearch(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("arguments", [{}, {"query": None}, {"query": "  "}, {"q": "cat"}, {"query": "cat " * 2000}])
def test_malformed_arguments_are_told(tmp_path: Path, arguments: dict[str, object]) -> None:
    search = LocalSearch(written(tmp_path / "docs.jsonl", DOCUMENTS))
    with pytest.raises(ToolError):
        asyncio.run(search.call(arguments))
