"""Whether two checkpoints call the same tokens by the same ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.data.problems import DataError
from penstock.backends.data.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from pathlib import Path


def check_same_tokens(student: Path, teacher: Path) -> None:
    """Every token that the student's tokenizer knows has the same id in the teacher's. (The teacher may know more: the
    student never makes those.)

    Raises:
        DataError: it does not, or a folder has no tokenizer that can be read; the message says which token.
    """
    known = TextTokenizer(teacher).ids()
    wrong = [(token, index) for token, index in TextTokenizer(student).ids().items() if known.get(token) != index]
    if not wrong:
        return
    token, index = min(wrong, key=lambda pair: pair[1])
    found = known.get(token)
    there = "is not known there" if found is None else f"is {found} there"
    raise DataError(
        f"{teacher} has another tokenizer than {student}: {len(wrong)} tokens of the student have another id in the "
        f"teacher, {token!r} first, which is {index} here and {there}; take a teacher of the same family"
    )
