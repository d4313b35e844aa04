"""People's own questions to the ledger from the page: SQL that can read this one file and do nothing else.

A question is answered by a process of its own, which is ended at the time limit whatever it is doing; one at a time.
Several fences stand one behind the other:

* The file is opened with ``mode=ro`` and ``PRAGMA query_only``, and the process may write no file at all.
* An authorizer allows SELECT, the reading of columns, and the functions that SQLite calls harmless. So there is no
  ATTACH, no PRAGMA, no transaction, no ``load_extension``, and no other statement; a second statement is refused.
* Texts and blobs have a largest size, so have the statement and the process's memory; so have the rows and bytes that
  are sent back. What was left out is said.
"""

from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from penstock.backends.ledger.sqlite import open_read_only
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault
from penstock.runtime.dashboard.routes import Query
from penstock.runtime.safe_text import terminal_lines

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S: Final = 6.0
START_S: Final = 3.0
"""For the process to come and go, beyond the question's own time."""
MAX_ROWS: Final = 1000
MAX_BYTES: Final = 2 * 2**20
"""Of all cells that are sent back."""
MAX_CELL: Final = 4000
MAX_VALUE_BYTES: Final = 8 * 2**20
"""Of a text or a blob anywhere in a question."""
MEMORY_BYTES: Final = 512 * 2**20
INSTRUCTIONS_A_CHECK: Final = 10_000
SQLITE_INNOCUOUS: Final = 0x200000
"""Of ``PRAGMA function_list``: SQLite's own word for a function that can neither do nor tell anything."""

_one_at_a_time = threading.Lock()


class SqlQuery(Query, frozen=True, kw_only=True):
    """A question."""

    sql: Annotated[str, msgspec.Meta(max_length=4000)]


class SqlAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back."""

    names: list[str] = []
    rows: list[list[str | None]] = []
    """Cells as text, so that no figure loses a digit on its way; None for NULL."""
    is_number: list[bool] = []
    """By column: whether it has nothing but numbers."""
    took_s: float = 0.0
    cut: str = ""
    """What was left out, in words."""
    error: str = ""
    """Why there is no answer, in words."""


class _Job(msgspec.Struct, frozen=True):
    file: str
    sql: str
    limit_s: float


def ask(run_folder: Path, query: SqlQuery, limit_s: float = LIMIT_S) -> SqlAnswer:
    """Have a question answered.

    Raises:
        UserFault: there is no ledger, the question is refused, goes wrong or takes too long, or another one is under
            way.
    """
    from penstock.runtime.launch.runs import ledger_file

    job = _Job(str(ledger_file(run_folder)), query.sql, limit_s)
    if not _one_at_a_time.acquire(blocking=False):
        raise UserFault("another question is being answered; ask again when it is")
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __spec__.name],  # -P: no module of the folder where it is started
            input=msgspec.json.encode(job), capture_output=True, timeout=limit_s + START_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserFault(_too_long(limit_s)) from None
    finally:
        _one_at_a_time.release()
    try:
        answer = msgspec.json.decode(done.stdout, type=SqlAnswer)
    except UNREADABLE:
        raise UserFault(
            f"the question has ended its process (status {done.returncode}): it has taken more than "
            f"{MEMORY_BYTES // 2**20} MiB of memory or {limit_s:g} s of a core; ask for less"
        ) from None
    if answer.error:
        raise UserFault(answer.error)
    return answer


def main() -> int:
    """The process: a job on standard input, the answer on standard output."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=_Job)
    sys.stdout.buffer.write(msgspec.json.encode(answer_in_here(job.file, job.sql, job.limit_s, is_alone=True)))
    return 0


def answer_in_here(file: str, sql: str, limit_s: float, *, is_alone: bool = False) -> SqlAnswer:
    """Answer in this process, which is fenced in for good when it is there for this alone."""
    from pathlib import Path

    began_s = time.monotonic()
    try:
        with closing(open_read_only(Path(file))) as database:
            _fence(database, began_s + limit_s)
            if is_alone:
                _fence_process(limit_s)
            cursor = database.execute(sql)
            if cursor.description is None:
                return SqlAnswer(error="there is no question in this; ask with SELECT")
            return _collected(cursor, began_s)
    except (sqlite3.Error, sqlite3.Warning) as error:
        return SqlAnswer(error=_story(error, limit_s))
    except MemoryError:
        return SqlAnswer(error=_story(sqlite3.OperationalError("out of memory"), limit_s))


def _fence(database: sqlite3.Connection, ends_s: float) -> None:
    rows = database.execute("SELECT name, flags FROM pragma_function_list").fetchall()
    harmless = {name for name, flags in rows if flags & SQLITE_INNOCUOUS or name.startswith(("json", "->"))}
    harmless = (harmless | {"entry_json"}) - {"sqlite_log"}
    database.execute("PRAGMA temp_store = MEMORY")  # what is sorted goes to no file
    for kind, most in (
        (sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES),
        (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 20_000),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
        (sqlite3.SQLITE_LIMIT_COLUMN, 200),
        (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
        (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 50),
        (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 200),
    ):
        database.setlimit(kind, most)
    database.text_factory = _text
    database.set_progress_handler(lambda: time.monotonic() > ends_s, INSTRUCTIONS_A_CHECK)

    def allows(action: int, first: str | None, second: str | None, _database: str | None, _trigger: str | None) -> int:
        match action:
            case sqlite3.SQLITE_SELECT | sqlite3.SQLITE_RECURSIVE | sqlite3.SQLITE_READ:
                return sqlite3.SQLITE_OK
            case sqlite3.SQLITE_FUNCTION if second in harmless:
                return sqlite3.SQLITE_OK
            case _:
                return sqlite3.SQLITE_DENY

    database.set_authorizer(allows)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _fence_process(limit_s: float) -> None:
    """Memory, time on a core, and files; the ledger's own files are open by now or need no more than reading."""
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, int(limit_s) + 2),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _collected(cursor: sqlite3.Cursor, began_s: float) -> SqlAnswer:
    names = [terminal_lines(str(column[0])) for column in cursor.description]
    is_number = [True] * len(names)
    rows: list[list[str | None]] = []
    num_bytes = 0
    cut = ""
    for row in cursor:
        if len(rows) == MAX_ROWS:
            cut = f"only the first {MAX_ROWS:,} rows are here; LIMIT and OFFSET ask for others"
            break
        cells = [_cell(value) for value in row]
        num_bytes += sum(len(cell) + 8 for cell in cells if cell is not None)
        if num_bytes > MAX_BYTES:
            cut = f"only the first {len(rows):,} rows are here: the next ones are beyond {MAX_BYTES // 2**20} MiB"
            break
        is_number = [was and (v is None or isinstance(v, int | float)) for was, v in zip(is_number, row, strict=True)]
        rows.append(cells)
    return SqlAnswer(names=names, rows=rows, is_number=is_number, took_s=time.monotonic() - began_s, cut=cut)


def _cell(value: object) -> str | None:
    match value:
        case None:
            return None
        case bytes():
            return f"{len(value):,} bytes: {value[:16].hex(' ')}{' …' if len(value) > 16 else ''}"
        case float():
            return f"{value:.10g}"
        case _:
            return terminal_lines(str(value), max_chars=MAX_CELL)


def _too_long(limit_s: float) -> str:
    return f"the question has not ended within {limit_s:g} s; ask for less, or in a terminal with penstock ledger --sql"


def _story(error: sqlite3.Error | sqlite3.Warning, limit_s: float) -> str:
    text = terminal_lines(str(error), max_chars=500)
    if text == "interrupted":
        return _too_long(limit_s)
    if any(word in text for word in ("not authorized", "authorization denied", "prohibited", "may not be modified")):
        return f"only SELECT with SQLite's harmless functions is allowed here: {text}"
    if "readonly" in text:
        return "the ledger is opened to be read, and the statement would write; ask with SELECT"
    if "too big" in text:
        return f"a text or blob in the question is larger than {MAX_VALUE_BYTES // 2**20} MiB; ask for less"
    if "out of memory" in text:
        return f"the question needs more than {MEMORY_BYTES // 2**20} MiB of memory; ask for less"
    if "one statement" in text:
        return "ask one question at a time: there is a second statement after the first"
    return f"the question cannot be answered: {text}. The tables and their columns stand below"


if __name__ == "__main__":
    sys.exit(main())
