"""Drives the Scorer's backend by hand: samples from text, answers by key."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

import msgspec
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from penstock.backends.rewards import open_rewards
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.commands import Score, ScoreGroup
from penstock.messages.local import GroupScored, SampleJudged
from penstock.messages.samples import Completed, Part, Prompt, Sample, SampleKey, Truncated, VersionSpan

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.engines.surroundings import Surroundings
    from penstock.backends.protocol import Backend
    from penstock.backends.rewards.options import RewardOptions
    from penstock.messages.local import LocalEvent

WAIT_S = 60.0
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "é", "ß", "∫", "√", "−", "你", "🙂"]
PLACES = {symbol: place for place, symbol in enumerate(CHARACTERS)}
EMPTY_PROMPT = Prompt(row=4, epoch=0, tokens=b"")


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of single characters."""
    tokenizer = Tokenizer(models.WordLevel(vocab=PLACES))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")  # pyright: ignore
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))  # pyright: ignore[reportUnknownMemberType]
    return folder


def sample_of(text: str, index: int = 0, *, group_id: int = 0, truncated: bool = False) -> Sample:
    """A response of these characters, one token each."""
    ids = [PLACES[character] for character in text]
    n = len(ids)
    part = Part(tokens=pack_tokens(ids), logprobs=pack_floats([0.0] * n), spans=(VersionSpan(0, n),) if n else ())
    return Sample(key=SampleKey(group_id, index), parts=(part,), outcome=Truncated() if truncated else Completed())


def score_of(text: str, index: int = 0, *, label: str = "", metadata: object = None, timeout_s: float = 30.0) -> Score:
    """A command that has this response scored."""
    return Score(sample=sample_of(text, index), prompt=prompt_of(label, metadata), timeout_s=timeout_s)


def group_of(*texts: str, group_id: int = 0, label: str = "", timeout_s: float = 30.0) -> ScoreGroup:
    """A command that has these responses scored together."""
    samples = tuple(sample_of(text, index, group_id=group_id) for index, text in enumerate(texts))
    return ScoreGroup(samples=samples, prompt=prompt_of(label, None), timeout_s=timeout_s)


def prompt_of(label: str, metadata: object) -> Prompt:
    """A prompt with these columns."""
    encoded = b"" if metadata is None else msgspec.json.encode(metadata)
    return msgspec.structs.replace(EMPTY_PROMPT, text="the prompt", label=label, metadata=encoded)


class RewardDriver:
    """A backend at work, and what it has said."""

    def __init__(self, folder: Path, options: RewardOptions, surroundings: Surroundings | None = None) -> None:
        self.backend: Backend[Score | ScoreGroup] = open_rewards(options, folder, surroundings)
        self._events: queue.Queue[LocalEvent | BaseException] = queue.Queue()
        self.backend.start(self._events.put, self._events.put)

    def judged(self, *commands: Score, wait_s: float = WAIT_S) -> list[SampleJudged]:
        """Submit all, wait for all; in the order of the samples' keys."""
        found = [answer for answer in self._answers(commands, wait_s) if isinstance(answer, SampleJudged)]
        assert len(found) == len(commands)
        return sorted(found, key=lambda answer: answer.key)

    def values(self, *commands: Score) -> list[float | str]:
        """The rewards, or the reasons for having none."""
        return [judged.reason if judged.reward is None else judged.reward.value for judged in self.judged(*commands)]

    def scored(self, command: ScoreGroup) -> GroupScored:
        """Submit a group, wait for it."""
        (answer,) = self._answers((command,), WAIT_S)
        assert isinstance(answer, GroupScored)
        return answer

    def _answers(self, commands: tuple[Score | ScoreGroup, ...], wait_s: float) -> list[LocalEvent]:
        for command in commands:
            self.backend.execute(command)
        answers: list[LocalEvent] = []
        for _ in commands:
            event = self._events.get(timeout=wait_s)
            if isinstance(event, BaseException):
                raise event
            answers.append(event)
        assert self._events.empty()
        return answers

    def failure(self) -> BaseException:
        """What came to ``fail``."""
        event = self._events.get(timeout=WAIT_S)
        assert isinstance(event, BaseException), event
        return event

    def gauge(self, name: str) -> float:
        """A figure of the backend."""
        return {metric.name: metric.value for metric in self.backend.gauges()}[name]

    def close(self) -> None:
        """End it."""
        self.backend.close(WAIT_S)
