"""Which of the arguments that there are a user's function asks for, by its signature."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Final

from penstock.backends.user_code import UserCodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ELSEWHERE: Final = {
    **dict.fromkeys(("completion", "solution_str", "output", "generation", "answer_text"), "response"),
    **dict.fromkeys(("completions", "outputs", "generations", "solution_strs"), "responses"),
    **dict.fromkeys(("answer", "ground_truth", "solution", "target", "reference", "gold"), "label"),
    **dict.fromkeys(("prompts", "query", "question", "inputs"), "prompt"),
    **dict.fromkeys(("extra_info", "data_source", "sample", "row_data", "example"), "metadata"),
    **dict.fromkeys(("completion_ids", "response_ids"), "tokens"),
}
"""What reward functions of TRL, verl, OpenRLHF and slime call their arguments → what is closest to it here."""


def asked_names(
    function: Callable[..., object], kind: str, spec: str, names: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """The arguments that it declares, of those that there are.

    Args:
        function: to be called with them by name.
        kind: one of ``names``.
        spec: as the scenario names it.
        names: kind → the arguments that there are.

    Raises:
        UserCodeError: it needs another.
    """
    known = names[kind]
    asked: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return known
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        by_name = parameter.kind is not parameter.POSITIONAL_ONLY
        if parameter.name in known and by_name:
            asked.append(parameter.name)
        elif parameter.default is parameter.empty:
            how = "" if by_name else " by position, and arguments are given by name"
            raise UserCodeError(
                f"{spec} asks for {parameter.name!r}{how}; a {kind} function may ask for {', '.join(known)}"
                f"{_hint(parameter.name, kind, names)}"
            )
    return tuple(asked)


def _hint(asked: str, kind: str, names: Mapping[str, tuple[str, ...]]) -> str:
    if kind == "reward" and asked in names["group reward"] and asked not in names[kind]:
        return ". For a function that scores whole groups set reward.per_group: true"
    if kind == "group reward" and asked in names["reward"] and asked not in names[kind]:
        return ". For a function that scores one sample set reward.per_group: false"
    ours = ELSEWHERE.get(asked)
    return f". What others call {asked} is {ours} here" if ours is not None else ""
