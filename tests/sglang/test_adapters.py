"""Adapters on a stock SGLang server: log-probs of the learner, several versions at once, and what it lets go of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from conformance_bench import EngineBench

from penstock.backends.learners.options import LoraOptions
from penstock.backends.learners.torch.adapter_publishing import AdapterPublisher
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.reference import BasePolicy
from penstock.backends.learners.training.canary import canary_under, choose_canary
from penstock.backends.learners.worker_group.workers import SOLO
from penstock.messages.arrays import floats_view, tokens_view
from penstock.messages.canary import canary_difference
from penstock.messages.commands import ApplyWeights
from penstock.messages.local import WeightsSwapped
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.messages.local import GenerationEnded
    from penstock.messages.samples import Part
    from penstock.messages.weights import WeightManifest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

LORA = LoraOptions(rank=4, alpha=8, publish="adapter")
PROMPT = [20, 21, 22, 23, 24, 25]
TOLERANCE = 2e-5


class Learner:
    """A model whose adapters are set by a seed, and what publishes them to a bench."""

    def __init__(self, folder: Path, bench: EngineBench, *, base_seed: int | None = None) -> None:
        self.model = PackedModel.load(folder, dtype="float32", device=torch.device("cpu"))
        if base_seed is not None:
            generator = torch.Generator().manual_seed(base_seed)
            for parameter in self.model.model.parameters():
                parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        self.model.adapt(LORA)
        assert self.model.adapters is not None
        self._base = BasePolicy(self.model, self.model.adapters)
        self._canary = choose_canary(self.model)
        self._bench = bench
        self._publisher = AdapterPublisher(SOLO, bench.exporter)

    def move(self, seed: int) -> None:
        """To these adapters."""
        assert self.model.adapters is not None
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.model.adapters.state().values():
            tensor.data.normal_(std=0.05, generator=generator)

    def publish(self) -> WeightManifest:
        bench = self._bench
        bench.version, bench.publish = bench.version + 1, bench.publish + 1
        canary = canary_under(self.model, self._canary)
        manifest = self._publisher.publish(
            self.model, self._base, version=bench.version, publish=bench.publish, canary=canary
        )
        assert manifest is not None
        return manifest

    def logprobs(self, prompt: list[int], part: Part) -> torch.Tensor:
        """Of the tokens of a response, by the adapters as they are."""
        tokens = [*prompt, *tokens_view(part.tokens).tolist()]
        rows = self.model.next_token_logits(tokens)[:-1].log_softmax(-1)
        return rows.gather(1, torch.tensor(tokens[1:])[:, None])[len(prompt) - 1 :, 0]


def serve(bench: EngineBench, manifest: WeightManifest, mode: UpdateMode = UpdateMode.DRAIN) -> None:
    staged = bench.fetch(manifest)
    assert (staged.error, staged.digest) == ("", manifest.digest)
    bench.engine.execute(ApplyWeights(manifest, mode))
    swapped = bench.hear(WeightsSwapped)
    assert (swapped.version, swapped.digest) == (manifest.version, manifest.digest)
    assert manifest.canary is not None
    assert canary_difference(manifest.canary, swapped.canary_logprobs) < 1e-4


def difference(learner: Learner, ended: GenerationEnded) -> float:
    found = torch.tensor(floats_view(ended.part.logprobs).tolist())
    return float((learner.logprobs(PROMPT, ended.part) - found).abs().max())


def test_each_version_is_the_learners_and_what_runs_goes_on_with_its_own(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The base is not the model that the server was started with, as after a warm start."""
    bench = EngineBench("sglang", tiny_model(), tmp_path, lora=LORA)
    try:
        learner = Learner(tiny_model(), bench, base_seed=5)
        learner.move(1)
        serve(bench, learner.publish())
        older = [bench.generate(PROMPT) for _ in range(4)]
        for key in older:
            bench.advanced(key)
        learner.move(2)
        manifest = learner.publish()
        assert manifest.base is not None
        serve(bench, manifest, UpdateMode.IN_FLIGHT)
        newer = [bench.generate(PROMPT) for _ in range(4)]
        new, old = bench.ends(*newer), bench.ends(*older)
        # Each is of one version alone, and has the log-probs of that.
        assert [[span.version for span in end.part.spans] for end in (*old, *new)] == [[0]] * 4 + [[1]] * 4
        assert max(difference(learner, end) for end in new) < TOLERANCE
        assert max(difference(learner, end) for end in old) > 100 * TOLERANCE
        learner.move(1)
        assert max(difference(learner, end) for end in old) < TOLERANCE
        # Now nobody uses the first two any more.
        serve(bench, learner.publish())
    finally:
        bench.close()
    (log,) = (path.read_text() for path in tmp_path.glob("logs/*sglang.log"))
    assert log.count("POST /update_weights_from_disk") == 1, "the base came once"
    assert log.count("POST /load_lora_adapter") == 3
    assert log.count("POST /unload_lora_adapter") == 2


def test_an_interrupted_response_goes_on_with_the_newest(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    bench = EngineBench("sglang", tiny_model(), tmp_path, lora=LORA, transport="shared_memory")
    try:
        learner = Learner(tiny_model(), bench)
        learner.move(1)
        serve(bench, learner.publish())
        key = bench.generate(PROMPT)
        bench.advanced(key)
        bench.interrupt()
        (first,) = bench.ends(key)
        learner.move(2)
        serve(bench, learner.publish(), UpdateMode.INTERRUPT)
        whole = bench.ended(PROMPT, first.part)
        num_old = first.part.num_tokens
        assert [span.version for span in whole.part.spans] == [0, 1]
        assert whole.part.spans[0].num_tokens == num_old
        found = torch.tensor(floats_view(whole.part.logprobs).tolist())
        assert float((learner.logprobs(PROMPT, whole.part) - found)[num_old:].abs().max()) < TOLERANCE
    finally:
        bench.close()
