"""A class of the user's that makes rows: what it is asked and told, what survives it, whose fault an error is."""

from __future__ import annotations

import queue
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock.backends.data.options import DataOptions
from penstock.backends.data.own_source.backend import open_own_source
from penstock.backends.data.own_source.journal import FOLDER, ROWS_FILE, Journal
from penstock.messages.commands import ChooseRows, FetchPrompts, PromptRequest, StreamPlace
from penstock.messages.errors import UserFault
from penstock.messages.flow import RowOutcome
from penstock.messages.local import PromptsFetched, RowsDrawn
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.backends.data.own_source.backend import OwnSourceBackend
    from penstock.messages.samples import Prompt

WAIT_S = 60.0
MINE = """
    import asyncio
    import os
    import time
    from pathlib import Path

    MADE = Path(__file__).with_name("made.txt")

    class Base:
        def __init__(self, base=0, seed=None):
            self.next, self.told_of, self.base, self.seed = base, [], base, seed

        def told(self, outcomes):
            self.told_of += [[o.row, o.fate, o.cause, o.rewards] for o in outcomes]

        def state(self):
            return {"next": self.next, "told": self.told_of}

        def restore(self, state):
            self.next, self.told_of = state["next"], state["told"]

        async def close(self):
            Path(__file__).with_name("closed.txt").write_text(f"{self.next} {self.told_of}")

    class Rows(Base):
        async def next_rows(self, n):
            await asyncio.sleep(0)
            rows = [{"prompt": f"row {self.next + i} {len(self.told_of)} {self.seed}", "label": ""} for i in range(n)]
            with MADE.open("a") as file:
                file.writelines(f"{self.next + i}\\n" for i in range(n))
            self.next += n
            return rows

    class Stream(Base):
        def __aiter__(self):
            return self.rows()
        async def rows(self):
            for number in range(self.next, 5):
                self.next += 1
                yield {"prompt": f"streamed {number}", "label": ""}

    class Raises(Rows):
        async def next_rows(self, n):
            if self.next:
                raise RuntimeError("no more \\x1b[31m today")
            return await super().next_rows(n)

    class Odd(Rows):
        def next_rows(self, n):
            return [{"prompt": "x", "label": ""}] * (n + 1)

    class Bad(Rows):
        def next_rows(self, n):
            return [{"question": "x"}]

    class Hangs(Rows):
        def next_rows(self, n):
            time.sleep(600)

    class Dies(Rows):
        def next_rows(self, n):
            os._exit(7)

    class Untold(Rows):
        def state(self):
            return object()

    class Empty:
        pass
    """


class Driver:
    """The backend, asked by hand."""

    def __init__(self, backend: OwnSourceBackend) -> None:
        self.backend = backend
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        backend.start(self._said.put, self._said.put)

    def answer(self) -> Any:  # noqa: ANN401 - an event or an error
        said = self._said.get(timeout=WAIT_S)
        if isinstance(said, BaseException):
            raise said
        return said

    def rows(self, *numbers: int) -> list[Prompt]:
        self.backend.execute(FetchPrompts(tuple(PromptRequest(number, number, 0) for number in numbers)))
        fetched = self.answer()
        assert isinstance(fetched, PromptsFetched)
        return [each.prompt for each in fetched.prompts]

    def tell(self, *outcomes: RowOutcome) -> None:
        self.backend.execute(ChooseRows((7,), (StreamPlace(3, 3, 0),), (), outcomes))
        drawn = self.answer()
        assert isinstance(drawn, RowsDrawn)
        assert [(row.group_id, row.row, row.position) for row in drawn.rows] == [(7, 3, 3)]


@pytest.fixture
def source(tmp_path: Path, tokenizer_folder: Path) -> Iterator[Callable[..., Driver]]:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(MINE))
    opened: list[Driver] = []

    def open_source(name: str = "Rows", **keys: object) -> Driver:
        options = msgspec.convert({"source": f"{path}:{name}", **keys}, DataOptions)
        backend = open_own_source(options, tokenizer_folder, tmp_path, seed=5, max_context=64)
        opened.append(Driver(backend))
        return opened[-1]

    yield open_source
    for each in opened:
        each.backend.close(10.0)


def made(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "made.txt").read_text().split()]


def test_rows_are_made_when_they_are_wanted_and_keep_their_numbers_over_any_process(
    source: Callable[..., Driver], tmp_path: Path
) -> None:
    first = source(source_options={"base": 100})
    assert [prompt.text for prompt in first.rows(1, 0)] == ["row 101 0 5", "row 100 0 5"]
    assert made(tmp_path) == [100, 101]
    first.backend.close(10.0)
    assert (tmp_path / "closed.txt").read_text() == "102 []"
    later = source(source_options={"base": 100})
    assert [prompt.text for prompt in later.rows(0, 3)] == ["row 100 0 5", "row 103 0 5"]
    assert made(tmp_path) == [100, 101, 102, 103], "none is made again, and none is left out"


def test_an_outcome_is_told_once_and_again_only_to_a_class_that_is_put_back(
    source: Callable[..., Driver], tmp_path: Path
) -> None:
    news = (
        RowOutcome(0, 0.5, False, "", "", (0.0, 1.0)),
        RowOutcome(1, 0.0, True, "", "zero_spread"),
        RowOutcome(0, None, False, "trained"),
    )
    first = source()
    first.rows(0, 1)
    first.tell(news[0])
    first.rows(2)  # the state after this one knows of the first outcome
    first.tell(*news[1:])
    first.backend.close(10.0)
    later = source()
    later.tell(*news)  # as every PromptSource is told, from the first
    assert [prompt.text for prompt in later.rows(3)] == ["row 3 3 5"], "the first was in its state, the others are told"
    later.backend.close(10.0)
    told = "[0, 'admitted', '', [0.0, 1.0]], [1, 'rejected', 'zero_spread', ()], [0, 'trained', '', ()]"
    assert (tmp_path / "closed.txt").read_text() == f"4 [{told}]"


def test_an_async_iterator_is_a_source_too_and_one_that_ends_says_so(source: Callable[..., Driver]) -> None:
    driver = source("Stream")
    assert [prompt.text for prompt in driver.rows(0, 1, 2)] == [f"streamed {i}" for i in range(3)]
    driver.backend.close(10.0)
    again = source("Stream")
    assert [prompt.text for prompt in again.rows(4)] == ["streamed 4"]
    with pytest.raises(UserFault, match=r"Stream has ended after 5 rows, .* set run\.num_steps lower"):
        again.rows(5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", r"mine.py:Raises: RuntimeError: no more .* today \(mine.py:\d+\)"),
        ("Odd", r"next_rows\(2\) returned 3 rows; expected at most as many as were asked for \(mine.py:\d+\)"),
        ("Bad", r"row 1: there is no column 'prompt'|row 0: .*'prompt'"),
        ("Hangs", r"0\.5 s went by before draw was done \(data\.source_timeout_s\)"),
        ("Dies", r"its process ended with exit code 7 before draw was done"),
        ("Untold", r"state\(\) returned what has no form in JSON: .* \(mine.py:\d+\)"),
        ("Empty", r"the class has no next_rows and no state and no restore; a source of rows has next_rows\(n\)"),
        ("Missing", r"has no 'Missing'"),
    ],
)
def test_what_the_class_does_wrong_is_the_users_fault_with_its_place(
    name: str, message: str, source: Callable[..., Driver], tmp_path: Path
) -> None:
    driver = source(name, source_timeout_s=0.5 if name == "Hangs" else 60.0)
    if name == "Raises":
        driver.rows(0)
    with pytest.raises(UserFault, match=message):
        driver.rows(0, 1)
    driver.backend.close(10.0)
    assert Journal(tmp_path).standing.num_rows == int(name == "Raises"), "a row that is refused has no number"


def test_a_journal_has_one_process_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.commit([b'{"a":1}', b"{}"], b"[1]", num_told=3)
    assert journal.row(0) == b'{"a":1}\n'
    journal.close()
    with (tmp_path / FOLDER / ROWS_FILE).open("ab") as file:
        file.write(b'{"a": "what a process that died had not commit')
    again = Journal(tmp_path)
    assert (again.standing.num_rows, again.standing.num_told, bytes(again.standing.state)) == (2, 3, b"[1]")
    again.commit([b'{"b":2}'], b"[2]", num_told=4)
    assert [again.row(number) for number in range(3)] == [b'{"a":1}\n', b"{}\n", b'{"b":2}\n']
    again.close()
    (tmp_path / FOLDER / ROWS_FILE).write_bytes(b"{}\n")
    with pytest.raises(UserFault, match="the file is damaged"):
        Journal(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.path=lines:8",), r"data\.path.*the rows are those of data\.source"),
        (("data.num_epochs=2",), r"data\.num_epochs.*has no end to count from"),
        (("data.stream=true",), r"data\.stream.*nothing is read from a file"),
        (("data.skip_bad_rows=true",), r"data\.skip_bad_rows.*leave bad ones out there"),
        (("prompt_source.replay={fraction: 0.5, below_reward: 0.1}",), r"prompt_source\.replay.*which row comes next"),
        (("data.source=null", "data.path=lines:8"), r"data\.source_options.*are for the class that data\.source names"),
    ],
)
def test_what_cannot_work_beside_it_is_refused(overrides: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(MINE))
    given = ("data.path=null", f"data.source={tmp_path}/mine.py:Rows", "data.source_options={base: 3}", *overrides)
    with pytest.raises(UserFault, match=f"(?s){message}"):
        load_scenario(Path(__file__).parents[2] / "scenarios" / "quickstart.yaml", given)
