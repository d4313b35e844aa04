"""Functions that play episodes in their process, in front of an engine that says what the test says."""

from __future__ import annotations

import json
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from penstock.backends.data.options import DataOptions
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.engines.options import SamplingOptions
from penstock.backends.engines.torch.spec import TORCH
from penstock.backends.episodes.backend import EpisodeBackend
from penstock.backends.episodes.context import EpisodeContext
from penstock.backends.episodes.functions.opening import open_functions
from penstock.backends.vision.places import expanded
from penstock.messages.arrays import pack_floats, pack_tokens, tokens_view
from penstock.messages.commands import AbortGeneration, Generate, InterruptGenerations
from penstock.messages.local import GenerationAdvanced, GenerationEnded
from penstock.messages.samples import (
    Cancelled,
    Completed,
    Part,
    Prompt,
    Purpose,
    SampleKey,
    StopReason,
    Truncated,
    VersionSpan,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.backends.episodes.options import EpisodeOptions
    from penstock.backends.episodes.playing import ImageRules
    from penstock.backends.protocol import Capability, Emit, Fail
    from penstock.messages.base import Metric
    from penstock.messages.commands import EngineCommand
    from penstock.messages.local import LocalEvent
    from penstock.messages.samples import Media, Outcome

WAIT_S: Final = 60.0
MAX_CONTEXT: Final = 200
MAX_NEW: Final = 20
END: Final = "<eos>"


class ReplyingEngine:
    """Answers each generation with what ``reply`` says to its text; the end token ends it, and so does its limit."""

    def __init__(self, tokenizer: TextTokenizer, end: str) -> None:
        self.tokenizer = tokenizer
        self.end = end
        self.reply: Callable[[str], str] = lambda text: f"yes{END}"
        self.is_held = False
        self.held: list[Generate] = []
        self.asked: list[Generate] = []
        self.made: list[list[int]] = []
        self.version = 0

    def start(self, emit: Emit, fail: Fail) -> None:
        self.emit = emit

    def execute(self, command: EngineCommand, /) -> None:
        match command:
            case Generate():
                self.asked.append(command)
                self.held.append(command)
                if not self.is_held:
                    self.answer()
            case AbortGeneration() | InterruptGenerations():
                cause = "aborted" if isinstance(command, AbortGeneration) else "interrupted"
                for generate in self.held:
                    self._end(generate, generate.prefix or Part(), Cancelled(cause=cause))
                self.held.clear()
            case _:
                pass

    def answer(self) -> None:
        """Answer what is held."""
        held, self.held = self.held, []
        for generate in held:
            text = self.reply(self.text(generate.prompt.tokens))
            (ids,) = self.tokenizer.encode([text.removesuffix(self.end)], special=False)
            assert isinstance(ids, list)
            ids = ids + ([self.end_id] if text.endswith(self.end) else [])
            limit = generate.max_new_tokens or MAX_NEW
            outcome: Outcome = Completed(stop=StopReason.END_TOKEN) if len(ids) <= limit else Truncated()
            ids = ids[:limit]
            self.made.append(ids)
            part = Part(
                tokens=pack_tokens(ids),
                logprobs=pack_floats([-0.5] * len(ids)),
                spans=(VersionSpan(self.version, len(ids)),),
            )
            self.emit(GenerationAdvanced(key=generate.key, attempt=generate.attempt, from_token=0, chunk=part))
            self._end(generate, part, outcome)

    @property
    def end_id(self) -> int:
        found = self.tokenizer.token_id(self.end)
        assert found is not None
        return found

    def text(self, tokens: bytes) -> str:
        return self.tokenizer.decode(tokens_view(tokens).tolist())

    def _end(self, generate: Generate, part: Part, outcome: Outcome) -> None:
        self.emit(GenerationEnded(key=generate.key, attempt=generate.attempt, outcome=outcome, part=part))

    def gauges(self) -> tuple[Metric, ...]:
        return ()

    def close(self, timeout_s: float) -> None:
        pass


class FunctionBench:
    """One engine with the process that plays its episodes, the actor played by hand."""

    def __init__(
        self,
        model: Path,
        options: EpisodeOptions,
        *,
        uses_chat: bool = False,
        end: str = END,
        max_context: int = MAX_CONTEXT,
        max_new: int = MAX_NEW,
        can: frozenset[Capability] = TORCH.capabilities,
        images: ImageRules | None = None,
    ) -> None:
        self.tokenizer = TextTokenizer(model)
        self.engine = ReplyingEngine(self.tokenizer, end)
        sampling, data = SamplingOptions(max_response_tokens=max_new), DataOptions(chat_template=uses_chat)
        self.driver = open_functions(
            EpisodeContext(
                engine="engine/0", epoch=0, run_folder=model, model_folder=model, max_context=max_context,
                options=options, sampling=sampling, data=data, can=can, images=images,
            )
        )  # fmt: skip
        self.backend = EpisodeBackend(self.engine, self.driver)
        self.said: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()
        self.backend.start(self.said.put, self.said.put)
        self._index = -1

    def issue(self, prompt: str = "ab=", *, attempt: int = 0, label: str = "", **metadata: object) -> SampleKey:
        """A sample is asked for."""
        self._index += 1
        key = SampleKey(7, self._index)
        self.issue_again(key, prompt, attempt=attempt, label=label, prefix=None, media=(), messages=b"", **metadata)
        return key

    def issue_again(
        self,
        key: SampleKey,
        prompt: str = "ab=",
        *,
        attempt: int,
        label: str = "",
        prefix: Part | None = None,
        media: tuple[Media, ...] = (),
        messages: bytes = b"",
        **metadata: object,
    ) -> None:
        (ids,) = self.tokenizer.encode([prompt], special=False)
        assert isinstance(ids, list)
        if media:
            ids, media = expanded(ids, self.tokenizer.token_id("<|image_pad|>") or -1, media)
        self.backend.execute(
            Generate(
                key=key,
                attempt=attempt,
                purpose=Purpose.TRAIN,
                prompt=Prompt(
                    row=0, epoch=0, tokens=pack_tokens(ids), text=prompt, label=label,
                    metadata=json.dumps(metadata).encode() if metadata else b"", media=media, messages=messages,
                ),
                seed=5,
                deadline_version=9,
                prefix=prefix,
            )
        )  # fmt: skip

    def ended(self, key: SampleKey | None = None) -> GenerationEnded:
        """The next end, of this sample if one is named."""
        while True:
            event: GenerationEnded = self.hear(GenerationEnded)
            if key is None or event.key == key:
                return event

    def hear(self, kind: type[Any]) -> Any:  # noqa: ANN401 - an event of this kind
        while True:
            event = self.said.get(timeout=WAIT_S)
            assert not isinstance(event, BaseException), event
            if isinstance(event, kind):
                return event

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for what another thread does."""
        deadline_s = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < deadline_s
            time.sleep(0.005)

    def text(self, part: Part) -> str:
        return self.engine.text(part.tokens)

    def close(self) -> None:
        self.backend.close(WAIT_S)
