"""Search in documents of a file, by BM25.

Invariants:

* The same query gives the same documents in the same order.
* A document without any of the query's words is never a result.
* The index is made once for a file in a process, and used from any thread.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from penstock.backends.data.jsonl import jsonl_rows
from penstock.backends.data.problems import DataError, RowProblem
from penstock.backends.data.row import shown
from penstock.backends.episodes.tools.arguments import text_argument, text_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.data.row import RawRow
    from penstock.backends.episodes.interfaces import JsonObject

MAX_CHARS: Final = 2048
TOKEN_PATTERN: Final = r"(?u)\w+"
"""Words and numbers of one character count too."""


class Document(NamedTuple):
    """One line of the file."""

    title: str
    text: str


class Found(NamedTuple):
    """One result."""

    document: Document
    score: float


class SearchIndex:
    """Documents and their words."""

    def __init__(self, documents: Sequence[Document], *, stopwords: str | Sequence[str] = "en") -> None:
        """
        Args:
            documents: at least one.
            stopwords: words that do not count: a language of the bm25s package, or a list.
        """
        import bm25s

        assert documents, "an index of nothing"
        self.documents = tuple(documents)
        self._stopwords = stopwords if isinstance(stopwords, str) else list(stopwords)
        self._index: Any = bm25s.BM25()
        self._index.index(self._tokens([f"{d.title}\n{d.text}" for d in self.documents]), show_progress=False)

    def search(self, query: str, num_results: int) -> list[Found]:
        """The best documents first."""
        tokens = self._tokens([query])
        places, scores = self._index.retrieve(tokens, k=min(num_results, len(self.documents)), show_progress=False)
        ranked = sorted(zip(places[0].tolist(), scores[0].tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
        return [Found(self.documents[place], score) for place, score in ranked if score > 0]

    def _tokens(self, texts: list[str]) -> list[list[str]]:
        import bm25s

        tokenize = cast("Callable[..., list[list[str]]]", getattr(bm25s, "tokenize"))  # noqa: B009 - its types are partial
        return tokenize(
            texts, token_pattern=TOKEN_PATTERN, stopwords=self._stopwords, return_ids=False, show_progress=False
        )


class LocalSearch:
    """Finds documents of a JSONL file (also ``.gz`` and ``.zst``), one object a line with its text in ``text_key``."""

    name: Final = "search"
    description: Final = "Searches a collection of documents and returns the best matches."
    parameters: Final[JsonObject] = text_schema("query", "words to look for")

    def __init__(
        self,
        path: str | Path,
        *,
        text_key: str = "text",
        title_key: str | None = "title",
        num_results: int = 3,
        max_result_chars: int = 1000,
        stopwords: str | Sequence[str] = "en",
    ) -> None:
        """
        Args:
            path: the file, once for each process.
            text_key: of a line, the document.
            title_key: of a line, its title; a document may have none.
            num_results: at most so many are shown.
            max_result_chars: of each document that are shown.
            stopwords: see :class:`SearchIndex`.

        Raises:
            DataError: the file or a line of it cannot be used.
        """
        words = stopwords if isinstance(stopwords, str) else tuple(stopwords)
        self._index = _index_of(Path(path).expanduser().absolute(), text_key, title_key, words)
        self._num_results = num_results
        self._max_result_chars = max_result_chars

    async def call(self, arguments: JsonObject) -> str:
        """See :class:`~penstock.backends.episodes.interfaces.Tool`."""
        query = text_argument(arguments, "query", max_chars=MAX_CHARS)
        found = await self.find(query)
        return "\n".join(self._told(place, one) for place, one in enumerate(found, 1)) or "(no document matches)"

    async def find(self, query: str) -> list[Found]:
        """The best documents first, at most ``num_results``."""
        return await asyncio.to_thread(self._index.search, query, self._num_results)

    def _told(self, place: int, found: Found) -> str:
        text = found.document.text
        if len(text) > self._max_result_chars:
            text = text[: self._max_result_chars] + "..."
        return f"[{place}] {found.document.title}: {text}" if found.document.title else f"[{place}] {text}"


@functools.lru_cache(maxsize=8)
def _index_of(path: Path, text_key: str, title_key: str | None, stopwords: str | tuple[str, ...]) -> SearchIndex:
    documents = [_document(row, text_key, title_key) for row in jsonl_rows(path)]
    if not documents:
        raise DataError(f"{path}: there is no document in it; expected one JSON object a line")
    return SearchIndex(documents, stopwords=stopwords)


def _document(row: RawRow | RowProblem, text_key: str, title_key: str | None) -> Document:
    if isinstance(row, RowProblem):
        raise DataError(f"{row.place}: {row.message}")
    text = row.columns.get(text_key)
    if not isinstance(text, str) or not text.strip():
        has = ", ".join(sorted(row.columns)) or "nothing"
        raise DataError(f"{row.place}: expected a document under {text_key!r}, found {shown(text)}; the line has {has}")
    title = "" if title_key is None else row.columns.get(title_key, "")
    if not isinstance(title, str):
        raise DataError(f"{row.place}: expected a title under {title_key!r}, found {shown(title)}")
    return Document(title, text)
