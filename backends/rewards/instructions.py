"""The reward ``ifbench``: 1 when a response follows all instructions of its row, else 0.

The row's metadata are those of IFEval and IFBench: ``instruction_id_list``, names of instructions, and ``kwargs``, a
list with the arguments of each (``null`` values count as absent). Both may be JSON in a text, as tables have them.

Invariants:

* An instruction without a checker, or whose arguments the row lacks, gives no reward: it is never taken as followed,
  nor as not followed.
* Strict: the response is checked as it stands; no line is taken away first.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, cast

import msgspec

from penstock.backends.rewards import ifbench_answers, ifbench_checkers, ifeval_checkers
from penstock.backends.rewards.functions import NoRewardError
from penstock.backends.rewards.instruction_text import Given, as_list
from penstock.messages.base import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NAMES: Final = "instruction_id_list"
CHECKERS: Final[Mapping[str, Callable[[str, Given], bool]]] = MappingProxyType(
    {**ifeval_checkers.CHECKERS, **ifbench_checkers.CHECKERS, **ifbench_answers.CHECKERS}
)
"""Of every instruction that has one, by its name."""


def ifbench_reward(response: str, metadata: Mapping[str, object]) -> dict[str, float]:
    """1 or 0, and beside it the share of instructions that are followed."""
    metadata = _of_row(metadata)
    names = _names(metadata)
    arguments = _arguments(metadata, len(names))
    followed = [_follows(name, response, given) for name, given in zip(names, arguments, strict=True)]
    return {"reward": float(all(followed)), "followed": sum(followed) / len(followed)}


def _follows(name: str, response: str, arguments: Mapping[str, object]) -> bool:
    check = CHECKERS.get(name)
    if check is None:
        raise ifeval_checkers.unknown_instruction(name)
    given = Given(name, arguments)
    if not response.strip():
        check("x", given)  # a row that lacks an argument is to be told whatever the response is
        return False
    return check(response, given)


def _of_row(metadata: Mapping[str, object]) -> Mapping[str, object]:
    """Where the names stand: in columns of their own, or in one column with an object."""
    if NAMES not in metadata:
        for value in map(_decoded, metadata.values()):
            if isinstance(value, dict) and NAMES in value:
                return cast("dict[str, object]", value)
    return metadata


def _names(metadata: Mapping[str, object]) -> Sequence[str]:
    value = _decoded(metadata.get(NAMES))
    items = as_list(value)
    names = [item.strip() for item in items if isinstance(item, str) and item.strip()]
    if not names or len(names) != len(items):
        raise NoRewardError(
            "the reward 'ifbench' needs the column 'instruction_id_list', a list of names (name it in "
            f"data.metadata_keys); found {str(value)[:60]!r}"
        )
    return names


def _arguments(metadata: Mapping[str, object], num_names: int) -> Sequence[Mapping[str, object]]:
    value = _decoded(metadata.get("kwargs"))
    if value is None:
        return [dict[str, object]() for _ in range(num_names)]
    items: list[object] = cast("list[object]", value) if isinstance(value, list) else [value]
    found = [_decoded(item) for item in items]
    if len(found) != num_names or not all(item is None or isinstance(item, dict) for item in found):
        raise NoRewardError(
            f"the column 'kwargs' has {len(found)} entries for {num_names} instructions; expected a list with an "
            "object for each"
        )
    return [cast("dict[str, object]", item) if isinstance(item, dict) else {} for item in found]


def _decoded(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except UNREADABLE:
        return value
