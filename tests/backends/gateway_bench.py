"""One engine with its gateway, the actor played by hand, and an agent that holds the conversation the model knows."""

from __future__ import annotations

import json
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import gateway_cases as cases
import httpx2 as httpx
import msgspec
import openai

from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.data.options import DataOptions
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.engines.options import EnginesOptions, SamplingOptions
from penstock.backends.engines.torch.factory import open_torch_engine
from penstock.backends.engines.torch.spec import TORCH
from penstock.backends.episodes.api import SessionEnded, SessionTaken
from penstock.backends.episodes.backend import EpisodeBackend
from penstock.backends.episodes.context import EpisodeContext
from penstock.backends.episodes.gateway import GatewayEpisodes
from penstock.backends.episodes.options import EpisodeOptions
from penstock.backends.episodes.registry import run_token
from penstock.backends.vision.places import expanded
from penstock.backends.weights.transports import open_exporter, open_fetcher
from penstock.messages.arrays import pack_tokens, tokens_view
from penstock.messages.commands import (
    ApplyWeights,
    FetchWeights,
    Generate,
    OpenEngine,
)
from penstock.messages.local import EngineOpened, GenerationEnded, LocalEvent, WeightsStagedLocally, WeightsSwapped
from penstock.messages.samples import (
    Part,
    Prompt,
    Purpose,
    SampleKey,
)
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.backends.episodes.playing import ImageRules
    from penstock.backends.protocol import Backend, Capability, Emit, Fail
    from penstock.messages.base import Metric
    from penstock.messages.commands import EngineCommand
    from penstock.messages.samples import Media

    OpenEngineFor = Callable[[Path, Path, SamplingOptions], Backend[EngineCommand]]
    """From the model's folder and the run's to an engine with four slots and 512 tokens of context."""

WAIT_S = 60.0
ASKED: list[Any] = [{"role": "user", "content": cases.QUESTION}]
TOOLS: list[Any] = [cases.MULTIPLY]


class Listening:
    """An engine that is listened to: what it answers is noted, generation by generation."""

    def __init__(self, inner: Backend[EngineCommand]) -> None:
        self.inner = inner
        self.ends: list[GenerationEnded] = []
        self.hold: Callable[[Generate], None] | None = None
        """Called with each generation before the engine gets it."""

    def start(self, emit: Emit, fail: Fail) -> None:
        def note(event: LocalEvent) -> None:
            if isinstance(event, GenerationEnded):
                self.ends.append(event)
            emit(event)

        self.inner.start(note, fail)

    def execute(self, command: EngineCommand, /) -> None:
        if isinstance(command, Generate) and self.hold is not None:
            self.hold(command)
            return
        self.inner.execute(command)

    def gauges(self) -> tuple[Metric, ...]:
        return self.inner.gauges()

    def close(self, timeout_s: float) -> None:
        self.inner.close(timeout_s)


class Ended(NamedTuple):
    """What the actor heard of a sample."""

    event: GenerationEnded
    ids: list[int]
    mask: list[int]


def _embedded(model: Path, _: Path, sampling: SamplingOptions) -> Backend[EngineCommand]:
    return open_torch_engine(
        model_folder=model,
        options=EnginesOptions(slots=4, device="cpu", progress_tokens=4),
        sampling=sampling,
        max_context=512,
        dtype="float32",
        fetcher=open_fetcher(),
    )


class GatewayBench:
    """One engine with its gateway, the actor played by hand."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        options: EpisodeOptions,
        data: DataOptions,
        engine_name: str = "engine/0",
        open_engine: OpenEngineFor | None = None,
        start_s: float = WAIT_S,
        sampling: SamplingOptions | None = None,
        can: frozenset[Capability] = TORCH.capabilities,
        images: ImageRules | None = None,
    ) -> None:
        self.model = model
        self.folder = folder
        self.tokenizer = TextTokenizer(model)
        sampling = sampling or SamplingOptions(max_response_tokens=64)
        self.engine = Listening((open_engine or _embedded)(model, folder, sampling))
        self.gateway = GatewayEpisodes(
            EpisodeContext(
                engine=engine_name, epoch=0, run_folder=folder, model_folder=model,
                max_context=512, options=options, sampling=sampling, data=data, can=can,
                images=images,
            )
        )  # fmt: skip
        self.backend = EpisodeBackend(self.engine, self.gateway, sampling=sampling)
        self.said: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()
        self.backend.start(self.said.put, self.said.put)
        self.exporter = open_exporter(
            "disk", run_id="gateway", learner_epoch=0, folder=folder / f"weights-{engine_name[-1]}"
        )
        self.backend.execute(OpenEngine())
        self.hear(EngineOpened, start_s)
        self.url = self.gateway.address.result(WAIT_S).url
        self.key = run_token(folder)
        self.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=WAIT_S)

    def hear(self, kind: type[Any], timeout_s: float = WAIT_S) -> Any:  # noqa: ANN401 - an event of this kind
        """The next thing of this kind that is said."""
        while True:
            event = self.said.get(timeout=timeout_s)
            assert not isinstance(event, BaseException), event
            if isinstance(event, kind):
                return event

    def stage(self, version: int) -> ApplyWeights:
        with CheckpointTensors(self.model) as tensors:
            manifest = self.exporter.export(
                {name: tensors[name] for name in tensors}, version=version, publish=version, canary=None
            )
        self.backend.execute(FetchWeights(manifest))
        assert not self.hear(WeightsStagedLocally).error
        return ApplyWeights(manifest, UpdateMode.INTERRUPT)

    def serve(self, version: int) -> None:
        self.backend.execute(self.stage(version))
        self.hear(WeightsSwapped)

    def issue(self, index: int = 0, *, prefix: Part | None = None, attempt: int = 0, prompt: str = "",
              media: tuple[Media, ...] = (), messages: bytes = b"") -> None:  # fmt: skip
        text = prompt or cases.QUESTION
        (ids,) = self.tokenizer.encode([text], special=False)
        assert isinstance(ids, list)
        if media:
            ids, media = expanded(ids, self.tokenizer.token_id("<|image_pad|>") or -1, media)
        self.backend.execute(
            Generate(
                key=SampleKey(7, index),
                attempt=attempt,
                purpose=Purpose.TRAIN,
                prompt=Prompt(
                    row=0, epoch=0, tokens=pack_tokens(ids), text=text, label="42",
                    metadata=json.dumps({"level": 3, "answer": 42, "label": "42"}).encode(),
                    media=media, messages=messages,
                ),
                seed=11 + index,
                deadline_version=9,
                prefix=prefix,
            )
        )  # fmt: skip

    def take(self, wait_s: float = WAIT_S) -> SessionTaken:
        reply = self.http.post("/sessions", json={"wait_s": wait_s})
        assert reply.status_code == 200, reply.text
        return msgspec.json.decode(reply.content, type=SessionTaken)

    def begin(self, index: int = 0) -> tuple[SessionTaken, openai.OpenAI]:
        """A sample is issued and taken; the session and a client for it."""
        self.issue(index)
        taken = self.take()
        return taken, self.client(taken)

    def client(self, taken: SessionTaken) -> openai.OpenAI:
        return openai.OpenAI(base_url=taken.base_url, api_key=self.key, max_retries=0, timeout=WAIT_S)

    def finish(self, taken: SessionTaken, **said: object) -> SessionEnded:
        reply = self.http.post(f"/sessions/{taken.id}/finish", json=said)
        assert reply.status_code == 200, reply.text
        return msgspec.json.decode(reply.content, type=SessionEnded)

    def take_status(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.http.get("/status").json())

    def ended(self) -> Ended:
        event = cast("GenerationEnded", self.hear(GenerationEnded))
        ids = tokens_view(event.part.tokens).tolist()
        return Ended(event, ids, list(event.part.loss_mask or b"\1" * len(ids)))

    def close(self) -> None:
        self.http.close()
        self.backend.close(WAIT_S)
        self.exporter.close()


class BenchFactory:
    """Opens benches and closes them."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.benches: list[GatewayBench] = []

    def __call__(
        self, engine: str = "engine/0", folder: Path | None = None, options: dict[str, Any] | None = None
    ) -> GatewayBench:
        """``options``: of the scenario's ``episode:`` block."""
        data = DataOptions(path="rows.jsonl", metadata_keys=("level", "label"))
        if folder is None:
            folder = self.folder / str(len(self.benches))
            folder.mkdir()
        bench = GatewayBench(self.model, folder, EpisodeOptions(kind="gateway", **(options or {})), data, engine)
        self.benches.append(bench)
        bench.serve(0)
        return bench


def hold_conversation(client: openai.OpenAI) -> list[Any]:
    """Ask, run the tool, ask again; the messages at the end."""
    messages: list[Any] = [*ASKED]
    first = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "multiply"
    assert json.loads(call.function.arguments) == {"a": 6, "b": 7}
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": cases.TOOL_RESULT}]
    second = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content == cases.ANSWER
    return [*messages, second.choices[0].message]
