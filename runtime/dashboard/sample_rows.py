"""The table of samples: filters and orders over all of them, a page at a time, from the index beside the run.

Invariants:

* A page follows the last row of another one by the place of that row in the order (keyset), and may leave out so many
  rows from there; so a page deep down costs what lies between it and a page that is known.
* Every question goes through one covering index and reads no more than that once. An order has only samples that have
  what it goes by: an order by reward leaves out those without.
* Texts are cut short and have no control characters.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from penstock.backends.ledger.kept_samples import read_kept, read_kept_of
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault
from penstock.messages.samples import evaluation_group_id, group_name
from penstock.runtime.dashboard.routes import Query
from penstock.runtime.dashboard.sample_index import BY_KEY, ORDERS, IndexState, advance, open_index
from penstock.runtime.observability.samples import ShownSample, chosen_samples, fate_text
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence
    from pathlib import Path

MAX_ROWS: Final = 500
TEXT_CHARACTERS: Final = 200
SEARCHED: Final = 20_000
"""Of the samples that are kept as text, the newest so many."""
_COLUMNS: Final = "group_id, sample_index, fate, engine, step, reward, num_tokens, age, seconds, is_flat"
_RANGES: Final = (
    ("step", "first_step", "last_step"),
    ("reward", "min_reward", "max_reward"),
    ("num_tokens", "min_tokens", "max_tokens"),
    ("age", "min_age", "max_age"),
)

_FATES: Final = "SELECT fate FROM fates WHERE state = ? AND ? IN (cause, '')"

Value = int | float | str
Order = Literal["group", "step", "reward", "tokens", "age", "seconds"]
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class CountQuery(Query, frozen=True, kw_only=True):
    """Which samples are meant: those that pass every condition."""

    kind: Literal["", "training", "evaluation"] = ""
    state: Annotated[str, msgspec.Meta(max_length=100)] = ""
    cause: Annotated[str, msgspec.Meta(max_length=200)] = ""
    engine: Annotated[str, msgspec.Meta(max_length=100)] = ""
    group: Annotated[str, msgspec.Meta(pattern=r"^(e?[0-9]{1,18})?$")] = ""
    text: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    """Of those that are kept as text, such that have this in prompt, response, label or reason."""
    first_step: Whole | None = None
    last_step: Whole | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: Whole | None = None
    max_tokens: Whole | None = None
    min_age: Whole | None = None
    max_age: Whole | None = None
    is_flat: bool = False
    """Of groups without spread only."""
    sort: Order = "group"


class TableQuery(CountQuery, frozen=True, kw_only=True):
    """A page of the table."""

    is_ascending: bool = False
    after: Annotated[str, msgspec.Meta(max_length=100)] = ""
    """What another page said about its end; empty: from the beginning."""
    skip: Whole = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)] = 100


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    name: str
    state: str
    fate: str
    """In words."""
    engine: str
    step: int | None
    reward: float | None
    num_tokens: int
    age: int | None
    """In versions, of its oldest token when it was trained."""
    seconds: float | None
    """From the grant of its group to the group's end."""
    is_flat: bool
    text: str
    """The beginning of what it wrote, of one that is kept as text."""


class TablePage(msgspec.Struct, frozen=True, kw_only=True):
    """Some rows of the table of samples, in the order asked for, and where the next ones begin."""

    rows: list[SampleRow]
    after: str
    """Where the next page begins; empty when there is none."""


class Counted(msgspec.Struct, frozen=True):
    """How many samples pass."""

    num_samples: int


def progress(run_folder: Path, _query: Query) -> IndexState:
    """Work on the index for a moment, and tell how far it is."""
    return advance(run_folder)


def table(run_folder: Path, query: TableQuery) -> TablePage:
    """A page.

    Raises:
        UserFault: the index is not complete, or ``after`` is none of its places.
    """
    with closing(open_index(run_folder)) as index:
        sql, values = page_statement(run_folder, index, query)
        found = index.execute(sql, values).fetchall()
        fates = {row[0]: row[1:] for row in index.execute("SELECT * FROM fates")}
        engines = dict(index.execute("SELECT * FROM engines").fetchall())
    kept = read_kept_of(run_folder, [(row[0], row[1]) for row in found])
    rows: list[SampleRow] = []
    for group_id, number, fate, engine, step, reward, num_tokens, age, seconds, is_flat in found:
        state, cause = fates[fate]
        text = kept.get((group_id, number))
        rows.append(
            SampleRow(
                name=f"{group_name(group_id)}/{number}", state=state,
                fate=terminal_text(fate_text(state, cause, step), max_chars=TEXT_CHARACTERS),
                engine=terminal_text(engines.get(engine, "")), step=step, reward=reward, num_tokens=num_tokens,
                age=age, seconds=seconds, is_flat=bool(is_flat),
                text="" if text is None else terminal_text(
                    (text.response or text.reason or text.prompt)[:TEXT_CHARACTERS], max_chars=TEXT_CHARACTERS
                ),
            )
        )  # fmt: skip
    return TablePage(rows=rows, after=_place(query, found[-1]) if len(found) == query.limit else "")


def page_statement(run_folder: Path, index: sqlite3.Connection, query: TableQuery) -> tuple[str, list[Value]]:
    """What SQLite is asked for a page."""
    terms, values = conditions(run_folder, index, query)
    columns = list(dict.fromkeys((ORDERS[query.sort], "group_id", "sample_index")))
    if query.after:
        places = ", ".join("?" * len(columns))
        terms.append(f"({', '.join(columns)}) {'>' if query.is_ascending else '<'} ({places})")
        values += _decoded_place(query.after)[-len(columns) :]
    way = "ASC" if query.is_ascending else "DESC"
    return (
        f"SELECT {_COLUMNS} FROM samples {index_of(query, terms)} WHERE {' AND '.join(terms)} "
        f"ORDER BY {', '.join(f'{column} {way}' for column in columns)} LIMIT ? OFFSET ?",
        [*values, query.limit, query.skip],
    )


def count(run_folder: Path, query: CountQuery) -> Counted:
    """How many samples pass; as :func:`table`."""
    with closing(open_index(run_folder)) as index:
        terms, values = conditions(run_folder, index, query)
        sql = f"SELECT count(*) FROM samples {index_of(query, terms)} WHERE {' AND '.join(terms)}"
        return Counted(index.execute(sql, values).fetchone()[0])


def conditions(run_folder: Path, index: sqlite3.Connection, query: CountQuery) -> tuple[list[str], list[Value]]:
    terms = [f"{ORDERS[query.sort]} IS NOT NULL"]
    values: list[Value] = []
    for column, low, high in _RANGES:
        for name, sign in ((low, ">="), (high, "<=")):
            if (bound := getattr(query, name)) is not None:
                terms.append(f"{column} {sign} ?")
                values.append(bound)
    if query.kind:
        terms.append("group_id < 0" if query.kind == "evaluation" else "group_id >= 0")
    if query.group:
        name = query.group
        terms.append("group_id = ?")
        values.append(evaluation_group_id(int(name[1:])) if name.startswith("e") else int(name))
    if query.is_flat:
        terms.append("is_flat")
    if query.state:
        fates = _numbers(index, _FATES, query.state, query.cause)
        terms.append(f"fate = {fates[0]}" if len(fates) == 1 else f"fate IN ({', '.join(map(str, fates))})")
    if query.engine:
        engines = _numbers(index, "SELECT engine FROM engines WHERE name = ?", query.engine)
        terms.append(f"engine IN ({', '.join(map(str, engines))})")
    if query.text:
        found = chosen_samples(
            [ShownSample(one, "", "", None) for one in read_kept(run_folder, SEARCHED)], grep=query.text
        )
        keys = [(sample.kept.group_id, sample.kept.index) for sample in found]
        terms.append("(group_id, sample_index) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?))")
        values.append(msgspec.json.encode(keys).decode())
    return terms, values


def index_of(query: CountQuery, terms: Sequence[str]) -> str:
    """The index that has the rows in the order that is asked for."""
    if query.text or query.group:
        return ""  # few, which are looked up by their key
    if query.sort != "group":
        return f"INDEXED BY by_{query.sort}"
    if any(term.startswith("fate = ") for term in terms):
        return "INDEXED BY by_fate"
    return f"INDEXED BY {'flat' if query.is_flat else BY_KEY}"


def _numbers(index: sqlite3.Connection, sql: str, *values: str) -> list[int]:
    return [number for (number,) in index.execute(sql, values)]


def _place(query: TableQuery, row: Sequence[int | float]) -> str:
    names: list[str] = [*_COLUMNS.split(", ")]
    value = row[names.index(ORDERS[query.sort])]
    return msgspec.json.encode((value, row[0], row[1])).decode()


def _decoded_place(after: str) -> tuple[int | float, int, int]:
    try:
        return msgspec.json.decode(after, type=tuple[int | float, int, int])
    except UNREADABLE:
        raise UserFault(f"after: {after!r} is no place in the table; it is what another page has said") from None
