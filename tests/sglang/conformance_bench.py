"""An engine of either kind behind its protocol, with weights from a real transport, and what transformers computes."""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import torch

from penstock.backends.checkpoint.checkpoint_names import CheckpointNames
from penstock.backends.data.options import DataOptions
from penstock.backends.engines.options import EnginesOptions, SamplingOptions
from penstock.backends.engines.spec import ENGINES, EngineContext
from penstock.backends.weights.transports import open_exporter
from penstock.messages.arrays import pack_floats, pack_tokens, tokens_view
from penstock.messages.commands import (
    AbortGeneration,
    ApplyWeights,
    FetchWeights,
    Generate,
    InterruptGenerations,
    OpenEngine,
)
from penstock.messages.local import (
    EngineOpened,
    GenerationAdvanced,
    GenerationEnded,
    LocalEvent,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import Part, Prompt, Purpose, SampleKey
from penstock.messages.training import UpdateMode
from penstock.messages.weights import Canary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from penstock.backends.learners.options import LoraOptions
    from penstock.backends.weights.protocol import WeightExporter
    from penstock.messages.base import OptionValue
    from penstock.messages.weights import WeightManifest

START_S = 240.0
WAIT_S = 60.0
NUM_SLOTS = 8
MAX_CONTEXT = 512
MAX_RESPONSE = 256
PROGRESS_TOKENS = 8
ROUTER_ROUNDING = 2e-6
"""Of a probability, with the rounding of the layers before it; log-probs of engines are within 7e-6 of the truth."""
EventT = TypeVar("EventT", bound=LocalEvent)


class EngineBench:
    """One engine, and the learner's end of its weights. Versions and publishes count up through its whole life."""

    def __init__(
        self,
        kind: str,
        model_folder: Path,
        folder: Path,
        *,
        sampling: SamplingOptions | None = None,
        by_dataset: Sequence[SamplingOptions] = (),
        transport: Literal["shared_memory", "disk", "distributed", "tensor"] = "disk",
        options: EnginesOptions | None = None,
        dtype: str = "float32",
        lora: LoraOptions | None = None,
    ) -> None:
        self.kind = kind
        self.model_folder = model_folder
        sampling = sampling or SamplingOptions(max_response_tokens=MAX_RESPONSE)
        self.engine = ENGINES.spec(kind).open(
            replace(
                context_of(kind, model_folder, folder, sampling, by_dataset=by_dataset, options=options, dtype=dtype),
                lora=lora,
            )
        )
        self.exporter: WeightExporter = open_exporter(
            transport, run_id="conformance", learner_epoch=1, folder=folder / "weights"
        )
        self.said: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()
        self.publish = -1
        self.version = -1
        self._index = 0
        self._unclaimed: dict[SampleKey, GenerationEnded] = {}
        self.engine.start(self.said.put, self.said.put)
        self.engine.execute(OpenEngine())
        opened = self.next_said(START_S)
        assert isinstance(opened, EngineOpened)
        assert opened.num_slots == NUM_SLOTS

    def close(self) -> None:
        self.engine.close(WAIT_S)
        self.exporter.close()

    # --- hearing ----------------------------------------------------------------------------------------------

    def next_said(self, timeout_s: float = WAIT_S) -> LocalEvent:
        """The next event; a failure of the engine is raised."""
        event = self.said.get(timeout=timeout_s)
        if isinstance(event, BaseException):
            raise event
        return event

    def hear(self, kind: type[EventT]) -> EventT:
        """The next event of this kind; reports are passed over, ends are kept for ``ends``."""
        while not isinstance(event := self.next_said(), kind):
            if isinstance(event, GenerationEnded):
                self._unclaimed[event.key] = event
            else:
                assert isinstance(event, GenerationAdvanced), event
        return event

    def is_silent(self) -> bool:
        """Whether nothing was said that was not heard."""
        try:
            event = self.said.get_nowait()
        except Empty:
            return True
        raise AssertionError(event)

    # --- weights ----------------------------------------------------------------------------------------------

    def export(self, tensors: dict[str, torch.Tensor], canary: Canary | None = None) -> WeightManifest:
        self.publish += 1
        self.version += 1
        return self.exporter.export(tensors, version=self.version, publish=self.publish, canary=canary)

    def fetch(self, manifest: WeightManifest) -> WeightsStagedLocally:
        self.engine.execute(FetchWeights(manifest))
        return self.hear(WeightsStagedLocally)

    def stage(self, model: PreTrainedModel, canary: list[int] | None = None) -> WeightManifest:
        """Export this model and fetch it."""
        scored = None if canary is None else reference_canary(model, canary)
        manifest = self.export(weights_of(model), scored)
        staged = self.fetch(manifest)
        assert (staged.version, staged.digest, staged.error) == (manifest.version, manifest.digest, "")
        return manifest

    def apply(self, manifest: WeightManifest, mode: UpdateMode) -> None:
        self.engine.execute(ApplyWeights(manifest, mode))

    def serve(self, model: PreTrainedModel, mode: UpdateMode = UpdateMode.DRAIN) -> WeightsSwapped:
        """Serve this model; nothing runs."""
        self.apply(self.stage(model), mode)
        swapped = self.hear(WeightsSwapped)
        assert swapped.version == self.version
        return swapped

    # --- requests ---------------------------------------------------------------------------------------------

    def generate(self, prompt: list[int], prefix: Part | None = None, dataset: int | None = None) -> SampleKey:
        """Ask for one response; to a prompt of a dataset of an evaluation, if one is given."""
        self._index += 1
        key = SampleKey(self._index, 0)
        self.engine.execute(
            Generate(
                key=key,
                attempt=0,
                purpose=Purpose.TRAIN if dataset is None else Purpose.EVALUATE,
                prompt=Prompt(row=0, epoch=0, tokens=pack_tokens(prompt), dataset=dataset),
                seed=self._index,
                deadline_version=9,
                prefix=prefix,
            )
        )
        return key

    def abort(self, key: SampleKey) -> None:
        self.engine.execute(AbortGeneration(key, 0))

    def interrupt(self) -> None:
        self.engine.execute(InterruptGenerations())

    def ends(self, *keys: SampleKey) -> list[GenerationEnded]:
        """How these ended, in this order."""
        while not set(keys) <= self._unclaimed.keys():
            event = self.hear(GenerationEnded)
            self._unclaimed[event.key] = event
        return [self._unclaimed.pop(key) for key in keys]

    def ended(self, prompt: list[int], prefix: Part | None = None) -> GenerationEnded:
        """One response from its beginning to its end."""
        return self.ends(self.generate(prompt, prefix))[0]

    def advanced(self, key: SampleKey) -> GenerationAdvanced:
        """The next report of this request."""
        while (event := self.hear(GenerationAdvanced)).key != key:
            pass
        return event


def context_of(
    kind: str,
    model_folder: Path,
    folder: Path,
    sampling: SamplingOptions,
    *,
    by_dataset: Sequence[SamplingOptions] = (),
    options: EnginesOptions | None = None,
    dtype: str = "float32",
) -> EngineContext:
    """What such an engine is opened with."""
    sglang: dict[str, OptionValue] = {
        "max_total_tokens": 16384,
        "mem_fraction_static": 0.2,
        "log_level_http": "info",  # each call is in its log, in order
        "uvicorn_access_log_exclude_prefixes": ["/ready"],
    }
    usual = EnginesOptions(
        backend=kind,
        slots=NUM_SLOTS,
        device="cpu",
        progress_tokens=PROGRESS_TOKENS,
        start_timeout_s=START_S,
        sglang=sglang if kind == "sglang" else {},
    )
    return EngineContext(
        name="engine/0",
        place=0,
        epoch=0,
        model_folder=model_folder,
        run_folder=folder,
        options=options or usual,
        sampling=sampling,
        by_dataset=by_dataset,
        data=DataOptions(),
        max_context=MAX_CONTEXT,
        dtype=dtype,
        seed=0,
        bucket_size_bytes=1 << 20,
    )


# --- transformers ---------------------------------------------------------------------------------------------------


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's parameters by their names in a checkpoint, copied."""
    named = CheckpointNames(model).rename(model.state_dict())
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def perturbed(model: PreTrainedModel, seed: int, scale: float = 0.05) -> PreTrainedModel:
    """A model of the same shape with other weights."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return other


def reference_logprobs(model: PreTrainedModel, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """``[T − 1]``: what transformers' forward pass gives each token but the first."""
    rows = _reference_rows(model, tokens, temperature)
    return cast("list[float]", rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist())


def reference_canary(model: PreTrainedModel, tokens: list[int]) -> Canary:
    """As a learner would publish it."""
    logprobs = cast("list[float]", _reference_rows(model, tokens, 1.0)[:, tokens].flatten().tolist())
    return Canary(tokens=pack_tokens(tokens), logprobs=pack_floats(logprobs))


def num_decided(model: PreTrainedModel, tokens: list[int]) -> int:
    """How many of these tokens, from the first, have log-probs that rounding cannot move by much.

    Of a mixture of experts whose router has two experts within a float32's rounding, an engine may rightly take the
    other one, and what follows sees that. One in 50,000 tokens of the tiny mixture is so at ``ROUTER_ROUNDING``.
    """
    if not hasattr(model.config, "num_experts_per_tok"):
        return len(tokens)
    num_chosen = cast("int", model.config.num_experts_per_tok)
    with torch.no_grad():
        layers = _exact(model)(torch.tensor([tokens]), output_router_logits=True).router_logits
    undecided = torch.zeros(len(tokens), dtype=torch.bool)
    for logits in cast("tuple[torch.Tensor, ...]", layers):
        leading = logits.softmax(-1).topk(num_chosen + 1).values
        undecided |= leading[:, -2] - leading[:, -1] < ROUTER_ROUNDING
    first = undecided.nonzero()
    return int(first[0]) + 1 if len(first) else len(tokens)  # its own log-prob was made a position earlier


def _exact(model: PreTrainedModel) -> PreTrainedModel:
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the grouped products have no float64
    return exact


def _reference_rows(model: PreTrainedModel, tokens: list[int], temperature: float) -> torch.Tensor:
    """``[T − 1, V]`` in float64: what differs from it is the engine's own rounding alone."""
    with torch.no_grad():
        logits = cast("torch.Tensor", _exact(model)(torch.tensor([tokens])).logits)[0, :-1].double() / temperature
    return torch.log_softmax(logits, -1)


def response_logprobs(
    model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float = 1.0
) -> list[float]:
    """What transformers gives each token of a response."""
    return reference_logprobs(model, prompt + response, temperature)[len(prompt) - 1 :]


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The likeliest continuation, not stopped by any token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def tokens_of(part: Part) -> list[int]:
    """Token ids of a part."""
    return tokens_view(part.tokens).tolist()
