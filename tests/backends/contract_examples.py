"""Functions that `penstock check hook` is tried on beside :mod:`hook_examples`: good ones, and ones that are wrong in
the ways that users' are."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import torch

from penstock.backends.episodes.interfaces import EpisodePolicyError
from penstock.backends.learners.objectives.protocol import ObjectiveTerms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.actors.buffer.policies import BufferState, RankedGroup
    from penstock.actors.prompt_source.policies import RoutedEngine, RoutedSample
    from penstock.backends.episodes.play import Play
    from penstock.backends.learners.hooks.protocols import AdvantageInput, GroupRewards
    from penstock.backends.learners.objectives.protocol import PolicyTokens
    from penstock.backends.learners.options import ObjectiveOptions
    from penstock.backends.rewards.sampling_calls import PromptHistory
    from penstock.backends.trackers.protocol import TrackedRun, TrackedSample
    from penstock.messages.training import OnStale, UpdateMode
    from penstock.runtime.observability.evaluation_log import FinishedEvaluation

# --- good -------------------------------------------------------------------------------------------------------------


def reward(response: str, label: str) -> float:
    return float(bool(label) and label in response)


async def slow_reward(response: str) -> dict[str, float]:
    return {"reward": min(1.0, len(response) / 100), "length": len(response)}


def totals(response: str) -> dict[str, float]:
    return {"total": min(1.0, len(response) / 100), "length": len(response)}


def totals_of_group(responses: list[str]) -> list[dict[str, float]]:
    return [totals(response) for response in responses]


def ranked(responses: list[str]) -> list[float]:
    return [sum(len(other) < len(own) for other in responses) / len(responses) for own in responses]


def varied(rewards: list[float]) -> tuple[bool, str]:
    return len(set(rewards)) > 1, "all_equal"


def complete(response: str, outcome: str) -> bool:
    return bool(response.strip()) and outcome != "truncated"


def shown(rewards: list[float], kept: bool, cause: str) -> None:
    assert kept or cause


def uncertain(history: PromptHistory) -> float:
    return 1.0 if history.mean_reward is None else history.mean_reward * (1.0 - history.mean_reward)


class Greedy:
    def __init__(self, *, max_staleness: int, update_mode: UpdateMode, on_stale: OnStale) -> None:
        self.max_staleness, self.update_mode, self.on_stale = max_staleness, update_mode, on_stale

    def target(self, state: BufferState) -> int:
        return state.target_outstanding

    def rank(self, group: RankedGroup) -> tuple[int, ...]:
        return (-group.num_tokens, group.group_id)


async def two_turns(play: Play) -> float:
    turn = await play.say(play.messages)
    if play.task.label and play.task.label not in turn.text:
        turn = await play.say([*play.messages, {"role": "user", "content": "Are you sure?"}])
    return float(play.task.label in turn.text)


def feedback(response: str, label: str, turn: int) -> str | float:
    return 1.0 if label in response else 0.0 if turn > 2 else "Try again."


# --- wrong ------------------------------------------------------------------------------------------------------------


def first_letter(response: str) -> float:
    return float(response[0].isdigit())


def needs_metadata(metadata: dict[str, Any]) -> float:
    return float(metadata["level"])


def wants_more(response: str, reference_answer: str) -> float:
    return 0.0


def exits_at_once(response: str) -> float:
    if not response:
        os._exit(3)
    return len(response) / 100


def kills_itself(response: str) -> float:
    if not response:
        os.kill(os.getpid(), signal.SIGSEGV)
    return len(response) / 100


def interrupts(response: str) -> float:
    if not response:
        raise KeyboardInterrupt
    return len(response) / 100


def never_ends(response: str) -> float:
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


def hangs(response: str) -> float:
    while True:
        time.sleep(0.05)


def always_one(response: str) -> float:
    return 1.0


_count = itertools.count()


def counts(response: str) -> float:
    return float(next(_count))


def best_of_two(responses: list[str]) -> list[float]:
    return [1.0, 0.0]


def second_best(rewards: list[float]) -> bool:
    return rewards[1] > 0


def says_maybe(rewards: list[float]) -> str:
    return "maybe"


def only_seen(history: PromptHistory) -> float:
    return history.mean_reward - 0.5  # type: ignore[operator]


class Shortest:
    def choose(self, sample: RoutedSample, engines: Sequence[RoutedEngine]) -> str | None:
        return sample.group_engine or min(engines, key=lambda engine: engine.load).name


class Stubborn:
    def choose(self, sample: RoutedSample, engines: Sequence[RoutedEngine]) -> str:
        return "engine/0 "


class Counting:
    num_built = 0

    def __init__(self) -> None:
        Counting.num_built += 1

    def choose(self, sample: RoutedSample, engines: Sequence[RoutedEngine]) -> str:
        return engines[Counting.num_built % len(engines)].name


class Never:
    def __init__(self, *, max_staleness: int, update_mode: UpdateMode, on_stale: OnStale) -> None:
        self.max_staleness, self.update_mode, self.on_stale = max_staleness, update_mode, on_stale

    def target(self, state: BufferState) -> int:
        return 0

    def rank(self, group: RankedGroup) -> int:
        return group.group_id


async def trusting(play: Play) -> float:
    turn = await play.say(play.messages)
    return float(turn.text.split("boxed{")[1][:2] == play.task.label)


async def careful(play: Play) -> float:
    turn = await play.say(play.messages)
    if "boxed{" not in turn.text:
        raise EpisodePolicyError("no box", reward=0.0)
    return float(turn.text.split("boxed{")[1][:2] == play.task.label)


async def endless(play: Play) -> float:
    while True:
        time.sleep(0.05)  # noqa: ASYNC251  # that is what is wrong with it


async def speechless(play: Play) -> float:
    return 1.0


def shifted_in_place(given: AdvantageInput, options: ObjectiveOptions) -> torch.Tensor:
    given.rewards.sub_(given.rewards.mean())
    return given.samples.spread(given.rewards).float()


def pairs_of_rewards(given: GroupRewards) -> list[float]:
    return [given.rewards[0] - given.rewards[1], *given.rewards[1:]]


def without_gradient(tokens: PolicyTokens, options: ObjectiveOptions) -> ObjectiveTerms:
    return ObjectiveTerms((tokens.weights * tokens.logprobs.detach()).sum(), {})


def exploding(tokens: PolicyTokens, options: ObjectiveOptions) -> ObjectiveTerms:
    ratio = torch.exp(40 * (tokens.logprobs - tokens.rollout_logprobs).double()).float()
    return ObjectiveTerms((tokens.weights * -ratio * tokens.advantages).sum(), {})


def numbered(name: str) -> str:
    return f"weight_{next(_count)}"


class Notes:
    """A tracker that keeps everything."""

    def __init__(self, run: TrackedRun) -> None:
        self._file = run.folder / "notes.txt"

    def metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        self._add(f"{version} {sorted(metrics.items())}")

    def samples(self, version: int, samples: Sequence[TrackedSample]) -> None:
        self._add(f"{version} {[each.response for each in samples]}")

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self._add(f"{summary} {len(files)}")

    def _add(self, text: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


class InOrder(Notes):
    """It takes versions for something that only goes up."""

    last = 0

    def metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        assert version >= self.last
        self.last = version


class NoSamples:
    def __init__(self, run: TrackedRun) -> None: ...
    def metrics(self, version: int, metrics: Mapping[str, float]) -> None: ...
    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None: ...


class Additions:
    """A source of rows that counts."""

    def __init__(self) -> None:
        self._made = 0

    def next_rows(self, n: int) -> list[dict[str, str]]:
        first, self._made = self._made, self._made + n
        return [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(first, self._made)]

    def state(self) -> int:
        return self._made

    def restore(self, state: int) -> None:
        self._made = state


class Dry(Additions):
    """One row, and then none."""

    def next_rows(self, n: int) -> list[dict[str, str]]:
        return super().next_rows(min(n, 1 - self._made))


def best_answer(finished: FinishedEvaluation) -> None:
    """Looks at figures and answers of an evaluation, which may have neither."""
    if finished.samples_file.exists():
        print(finished.dataset, max(json.loads(line)["reward"] for line in finished.samples_file.open()))


def always_answered(finished: FinishedEvaluation) -> None:
    """Believes that every evaluation has some answer."""
    print(finished.figures["pass@1"])
