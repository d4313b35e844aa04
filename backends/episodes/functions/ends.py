"""What a function returned or raised, as the end of its episode.

Invariants:

* Only a finite number becomes a reward. Anything else that was returned is a fault of ours or the function's
  (``infra_error``), never a reward of 0.
* An error is the model's only where the function says so: ``ToolError`` that nobody told the model, and
  ``EpisodePolicyError``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

from penstock.backends.episodes.functions.wire import Ended
from penstock.backends.episodes.interfaces import EpisodeInfraError, EpisodePolicyError, ToolError
from penstock.backends.episodes.play import End, EpisodeLimitError
from penstock.backends.processes.user_code import described, named, text_of
from penstock.backends.rewards.functions import NoRewardError, judged
from penstock.messages.texts import valid_text

if TYPE_CHECKING:
    from pathlib import Path

OutcomeName = Literal["completed", "truncated", "policy_error"]
OUTCOMES: Final = frozenset(get_args(OutcomeName))
MAX_DETAIL_CHARACTERS: Final = 500
EPISODE_FUNCTION: Final = "the episode function"


def end_of(episode: int, returned: object, *, is_cut_off: bool) -> Ended:
    """The end that a function has returned.

    Raises:
        NoRewardError: it is none.
    """
    natural: OutcomeName = "truncated" if is_cut_off else "completed"
    if returned is None:
        return Ended(episode, natural)
    if not isinstance(returned, End):
        found = judged(0, 0.0, returned, who=EPISODE_FUNCTION)
        return Ended(episode, natural, reward=found.value, components=found.components)
    outcome: OutcomeName = returned.outcome or natural
    if outcome not in OUTCOMES:
        raise NoRewardError(f"End.outcome is {outcome!r}; expected completed, truncated or policy_error")
    if returned.reward is None:
        if returned.components:
            raise NoRewardError("End has components and no reward; components are reported beside one")
        return Ended(episode, outcome, _short(returned.detail))
    found = judged(0, 0.0, {**returned.components, "reward": returned.reward})
    return Ended(episode, outcome, _short(returned.detail), found.value, found.components)


def failure_of(episode: int, error: BaseException, path: Path | None) -> Ended:
    """The end of an episode whose function raised this."""
    match error:
        case EpisodeLimitError():
            return Ended(episode, "truncated", _short(text_of(error)))
        case EpisodePolicyError():
            return _policy_error(episode, error)
        case ToolError():
            return Ended(episode, "policy_error", _short(text_of(error)))
        case NoRewardError() if path is not None:
            return Ended(episode, "infra_error", f"{_short(text_of(error))} (what an episode in {path.name} returned)")
        case EpisodeInfraError() | NoRewardError():
            return Ended(episode, "infra_error", _short(text_of(error)))
        case asyncio.CancelledError():
            return Ended(episode, "infra_error", "the episode was stopped")
        case _:
            text = named(error) if path is None else described(error, path)
            return Ended(episode, "infra_error", _short(text))


def _policy_error(episode: int, error: EpisodePolicyError) -> Ended:
    detail = _short(text_of(error))
    if error.reward is None:
        return Ended(episode, "policy_error", detail)
    try:
        value = judged(0, 0.0, cast("object", error.reward)).value
    except NoRewardError as wrong:
        return Ended(episode, "infra_error", str(wrong))
    return Ended(episode, "policy_error", detail, value)


def _short(text: str) -> str:
    return valid_text(text[:MAX_DETAIL_CHARACTERS])
