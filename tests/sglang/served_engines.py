"""Engines of both kinds that serve a tiny model, each opened once for all tests that ask what it computes."""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, cast

import torch
from conformance_bench import MAX_RESPONSE, EngineBench, num_decided, perturbed, response_logprobs, tokens_of
from tiny_models import VOCAB_SIZE
from transformers import AutoModelForCausalLM

from penstock.backends.engines.options import SamplingOptions
from penstock.messages.arrays import floats_view
from penstock.messages.samples import Completed, Truncated

if TYPE_CHECKING:
    from pathlib import Path

    from tiny_models import Architecture
    from transformers import PreTrainedModel

    from penstock.messages.local import GenerationEnded
    from penstock.messages.samples import Part
    from penstock.messages.training import UpdateMode

TOLERANCE: Final = 2e-5
SAMPLING: Final = SamplingOptions(
    temperature=0.7, top_p=0.95, top_k=100, min_p=0.001, max_response_tokens=MAX_RESPONSE
)  # fmt: skip
GREEDY: Final = SamplingOptions(temperature=0.0, max_response_tokens=64)
GREEDILY: Final = 0
"""The dataset whose prompts are answered with the likeliest tokens."""
ENGINES: Final[list[tuple[str, Architecture]]] = [
    ("torch", "qwen3"), ("sglang", "qwen3"), ("torch", "qwen3_moe"), ("sglang", "qwen3_moe"),
]  # fmt: skip


def prompt_of(seed: int, num_tokens: int = 24) -> list[int]:
    """Ordinary tokens, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(10, VOCAB_SIZE) for _ in range(num_tokens)]


def load(folder: Path) -> PreTrainedModel:
    """In float32; ``from_pretrained`` leaves it in evaluation mode."""
    return cast("PreTrainedModel", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


class Served:
    """An engine, and the model that it serves."""

    def __init__(self, kind: str, model_folder: Path, run_folder: Path) -> None:
        self.run_folder = run_folder
        self.bench = EngineBench(kind, model_folder, run_folder, sampling=SAMPLING, by_dataset=(GREEDY,))
        self.model = load(model_folder)
        self._first = self.model
        self._num_updates = 0
        self.bench.serve(self.model)

    def next_model(self) -> PreTrainedModel:
        """Other weights than any before."""
        self._num_updates += 1
        return perturbed(self._first, self._num_updates)  # not of the last: logits would grow, and rounding with them

    def update(self, mode: UpdateMode) -> None:
        """Other weights, while nothing runs."""
        self.model = self.next_model()
        self.bench.serve(self.model, mode)


def check_computed(
    model: PreTrainedModel, prompt: list[int], part: Part, begin: int = 0, end: int | None = None
) -> None:
    """These tokens have this model's log-probs; where they have not, the message says which and how they came about."""
    difference = largest_difference(model, prompt, part, begin, end)
    if difference < TOLERANCE:
        return
    expected = response_logprobs(model, prompt, tokens_of(part), SAMPLING.temperature)
    each = [abs(a - b) for a, b in zip(floats_view(part.logprobs).tolist(), expected, strict=True)]
    wrong = [place for place in range(begin, len(each) if end is None else end) if each[place] >= TOLERANCE]
    raise AssertionError(
        f"tokens {begin} to {end} differ by up to {difference}: {len(wrong)} of them, from {wrong[0]} to {wrong[-1]}; "
        f"the response has {len(each)} tokens of the versions {part.spans}, the prompt {len(prompt)}"
    )


def largest_difference(
    model: PreTrainedModel, prompt: list[int], part: Part, begin: int = 0, end: int | None = None
) -> float:
    """To transformers' log-probs of these tokens at the temperature that they were drawn with, where no router's choice
    hangs on rounding.
    """
    expected = response_logprobs(model, prompt, tokens_of(part), SAMPLING.temperature)
    found = floats_view(part.logprobs).tolist()
    assert len(found) == len(expected)
    end = min(len(found) if end is None else end, num_decided(model, prompt + tokens_of(part)) - len(prompt))
    differences = [abs(a - b) for a, b in zip(found[begin:end], expected[begin:end], strict=True)]
    return max(differences, default=0.0)


def check(model: PreTrainedModel, prompt: list[int], ended: GenerationEnded, version: int) -> None:
    """A whole response of one version."""
    assert isinstance(ended.outcome, Completed | Truncated), ended.outcome
    assert [span.version for span in ended.part.spans] == [version]
    check_computed(model, prompt, ended.part)
