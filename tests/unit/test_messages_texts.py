"""Numbers in sentences agree with what is counted and with what it does."""

from __future__ import annotations

import pytest

from penstock.messages.texts import counted, does


@pytest.mark.parametrize(
    ("number", "one", "many", "text"),
    [
        (1, "request", "run", "1 request runs"),
        (2, "request", "run", "2 requests run"),
        (0, "row", "have", "0 rows have"),
        (1, "batch", "are", "1 batch is"),
        (1200, "batch", "were", "1,200 batches were"),
        (1, "entry", "go", "1 entry goes"),
        (3, "entry", "go", "3 entries go"),
    ],
)
def test_one_does_and_many_do(number: int, one: str, many: str, text: str) -> None:
    assert f"{counted(number, one)} {does(number, many)}" == text
