"""Which of the arguments of its kind a reward function, filter or the like asks for; others by their names here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.processes.signatures import declared_names

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
    return declared_names(function, spec, names[kind], f"a {kind} function", lambda asked: _hint(asked, kind, names))


def _hint(asked: str, kind: str, names: Mapping[str, tuple[str, ...]]) -> str:
    if kind == "reward" and asked in names["group reward"] and asked not in names[kind]:
        return ". For a function that scores whole groups set reward.per_group: true"
    if kind == "group reward" and asked in names["reward"] and asked not in names[kind]:
        return ". For a function that scores one sample set reward.per_group: false"
    ours = ELSEWHERE.get(asked)
    return f". What others call {asked} is {ours} here" if ours is not None else ""
