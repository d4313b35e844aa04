"""Calls of the functions that decide about sampling: a filter of single samples, a hook that is shown every group, and
a curriculum that weighs prompts; with the arguments that each may ask for.

``sample filter``: what a reward function may ask for, and ``reward``, ``components`` (the other numbers of a reward, by
name) and ``outcome`` (``completed``, ``truncated``, ``policy_error``). Returns ``True``, ``False`` or
``(False, "cause")``.

``hook``: what a filter of groups may ask for, and ``kept`` and ``cause``. What it returns does not matter.

``priority``: ``prompt``, ``label``, ``metadata``, ``row``, ``prompt_tokens``, and ``history``, a
:class:`PromptHistory`. Returns a number, the higher the sooner, or ``None``: not now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.arrays import tokens_view
from penstock.messages.option_keys import Names

if TYPE_CHECKING:
    from collections.abc import Mapping

SAMPLE_TIMEOUT_S: Final = 5.0
"""How long one call of a sample filter may take."""
SAMPLE_FILTER: Final = Names.SAMPLE_FILTER.value
HOOK: Final = Names.SAMPLES_HOOK.value
PRIORITY: Final = Names.PRIORITY.value
OF_A_SAMPLE: Final = ("reward", "components", "outcome")
OF_A_GROUP: Final = ("kept", "cause")
OF_A_PROMPT: Final = ("prompt", "label", "metadata", "row", "prompt_tokens", "history")


class PromptHistory(msgspec.Struct, frozen=True, array_like=True):
    """What has come of a prompt in this run, as far as it is recorded."""

    seen: int
    """Groups that were drawn from it and came in, those that were turned away among them."""
    rejected: int
    """How many of these the filter turned away."""
    mean_reward: float | None
    """Over its groups; None: none had a reward yet."""
    last_reward: float | None
    """Mean reward of the last group."""


class RewardedCall(msgspec.Struct, frozen=True, array_like=True):
    """What a sample filter sees beside the response."""

    reward: float | None
    components: tuple[tuple[str, float], ...]
    outcome: str


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What the filter has decided, for the hook."""

    kept: bool
    cause: str


class PriorityCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Weigh one prompt."""

    id: int
    timeout_s: float
    prompt: str
    label: str
    metadata: bytes
    prompt_tokens: bytes
    row: int
    history: PromptHistory


def sample_argument(given: RewardedCall, name: str) -> object:
    """One of :data:`OF_A_SAMPLE`."""
    match name:
        case "reward":
            return given.reward
        case "components":
            return dict(given.components)
        case _:
            return given.outcome


def verdict_argument(given: Verdict, name: str) -> object:
    """One of :data:`OF_A_GROUP`."""
    return given.kept if name == "kept" else given.cause


def priority_arguments(call: PriorityCall, names: tuple[str, ...]) -> Mapping[str, object]:
    """Those of a curriculum."""
    return {name: _priority_argument(call, name) for name in names}


def _priority_argument(call: PriorityCall, name: str) -> object:
    match name:
        case "prompt":
            return call.prompt
        case "label":
            return call.label
        case "metadata":
            return msgspec.json.decode(call.metadata) if call.metadata else {}
        case "prompt_tokens":
            return tokens_view(call.prompt_tokens).tolist()
        case "row":
            return call.row
        case _:
            return call.history
