"""The torch learner on the device: its step, what it makes of the device, whether its memory is what was predicted,
and its numbers beside those of float32.

Batches of 16 prompts with 8 samples of 128 to 900 tokens, DAPO, each step a new batch. Memory is the most that
tensors take in a step, beside what ``--dry-run`` says of such a scenario. Numbers: the gradient of the whole batch
and the entropy of one step, in bfloat16 and in float32, of the same weights.
"""

from __future__ import annotations

import random
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch.sharded_load import load_divided
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.learners.worker_group.workers import alone_on
from penstock.benchmarks._harness import Measured, fact, plain_figure
from penstock.benchmarks._progress import in_turn
from penstock.benchmarks.gpu._stage import made_checkpoint, stage, stand_of
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.samples import Completed, Group, Part, Prompt, Reward, Sample, SampleKey, VersionSpan
from penstock.runtime.preflight.gpu_memory import needs_on_gpus
from penstock.runtime.scenario.architecture import find_architecture
from penstock.runtime.scenario.load import load_scenario

if TYPE_CHECKING:
    import argparse

    from penstock.backends.learners.training.batch_trainer import StepResult
    from penstock.benchmarks.gpu._stage import Stand

SAMPLES: Final = 8
PROMPT_TOKENS: Final = 64
LENGTHS: Final = (128, 256, 512, 900)
SCENARIO: Final = """\
run: {{name: memory, num_steps: 1}}
model: {{path: {folder}, dtype: {dtype}, max_context: 1024}}
data: {{path: "lines:100"}}
reward: {{function: random}}
engines: {{device: cpu}}
learner: {{device: cuda, max_tokens_per_micro_batch: {max_tokens}}}
"""


def measure(given: argparse.Namespace) -> Measured:
    stand = stand_of(given)
    num_groups, max_tokens = (16, 16384) if stand.is_real else (2, 1024)
    measured = Measured([], [], ("MFU counts what the model needs; recomputed activations come on top",))
    with tempfile.TemporaryDirectory() as name:
        folder = made_checkpoint(stand, Path(name))
        peak_bytes = _speed(stand, folder, num_groups, max_tokens, given.repetitions, measured)
        if stand.is_real:
            _memory(folder, stand.dtype_name, max_tokens, peak_bytes, measured)
        _numbers(stand, folder, num_groups // 2, max_tokens, measured)
    return measured


def _speed(stand: Stand, folder: Path, num_groups: int, max_tokens: int, repetitions: int, into: Measured) -> int:
    """The most bytes that tensors took in a step after the first."""
    trainer = _opened(stand, folder, stand.dtype_name, max_tokens)
    rates: list[float] = []
    results: list[StepResult] = []
    for version in in_turn(range(1, repetitions + 2), lambda number: f"step {number}, in {stand.dtype_name}"):
        batch = make_batch(stand, num_groups, seed=version)
        if version == 2:
            stand.peak_bytes()
        result, seconds = stand.timed(partial(trainer.train, batch, version=version, min_token_version=0))
        results.append(result)
        rates.append(result.num_trained_tokens / seconds)
    into.figures.append(plain_figure(f"trained in {stand.dtype_name}", "tokens/s", rates[1:]))
    for metric, unit in (("perf/actor_train_tflops", "TFLOP/s"), ("perf/mfu", "of the data sheet's peak")):
        if values := [value for each in results[1:] if (value := _metric(each, metric)) is not None]:
            into.figures.append(plain_figure(metric, unit, values))
    return stand.peak_bytes()


def _memory(folder: Path, dtype: str, max_tokens: int, peak_bytes: int, into: Measured) -> None:
    predicted = _predicted_bytes(folder, dtype, max_tokens)
    into.figures.append(plain_figure("memory of tensors, most of a step", "GB", [peak_bytes / 1e9]))
    into.figures.append(plain_figure("memory that --dry-run predicts", "GB", [predicted / 1e9]))
    ratio = predicted / peak_bytes
    text = f"memory is predicted to a tenth below and a fifth above: {ratio:.2f} of what it is"
    into.claims.append(fact(text, holds=0.9 <= ratio <= 1.2))


def _numbers(stand: Stand, folder: Path, num_groups: int, max_tokens: int, into: Measured) -> None:
    batch = make_batch(stand, num_groups, seed=1)
    exact, half = (
        _opened(stand, folder, dtype, tokens).train(batch, version=1, min_token_version=0)
        for dtype, tokens in (("float32", max_tokens // 4), (stand.dtype_name, max_tokens))
    )
    for metric, most in (("train/grad_norm", 0.02), ("train/entropy_loss", 0.01)):
        found, wanted = _metric(half, metric), _metric(exact, metric)
        assert found is not None, "every step has it"
        assert wanted is not None, "likewise"
        share = abs(found / wanted - 1)
        text = f"{metric} in {stand.dtype_name} is that in float32 to {most:.0%}: {share:.1e} off"
        into.claims.append(fact(text, holds=share <= most))


def _opened(stand: Stand, folder: Path, dtype: str, max_tokens: int) -> PolicyTrainer:
    workers = alone_on(stand.device)
    options = LearnerOptions(max_tokens_per_micro_batch=max_tokens)
    return PolicyTrainer(
        load_divided(folder, workers, options, dtype=dtype),
        options,
        temperature=1.0,
        num_steps=100,
        reference=None,
        check_stop=lambda: None,
        workers=workers,
    )


def make_batch(stand: Stand, num_groups: int, seed: int) -> tuple[Group, ...]:
    """Random tokens, with log-probs as an untrained model has them."""
    draw = random.Random(f"gpu {seed}")

    def tokens(count: int) -> bytes:
        return pack_tokens(draw.randrange(stand.vocabulary) for _ in range(count))

    def sample(key: SampleKey) -> Sample:
        length = draw.choice(LENGTHS)
        part = Part(tokens=tokens(length), logprobs=pack_floats([-12.0] * length), spans=(VersionSpan(0, length),))
        return Sample(key=key, parts=(part,), outcome=Completed(reward=Reward(value=draw.random())))

    return tuple(
        Group(
            group_id=number,
            prompt=Prompt(row=0, epoch=0, tokens=tokens(PROMPT_TOKENS)),
            samples=tuple(sample(SampleKey(number, index)) for index in range(SAMPLES)),
        )
        for number in range(num_groups)
    )


def _metric(result: StepResult, name: str) -> float | None:
    return next((metric.value for metric in result.metrics if metric.name == name), None)


def _predicted_bytes(folder: Path, dtype: str, max_tokens: int) -> float:
    """Of a rank of the learner, by the dry run."""
    file = folder / "memory.yaml"
    file.write_text(SCENARIO.format(folder=folder, dtype=dtype, max_tokens=max_tokens))
    scenario = load_scenario(file)
    found = find_architecture(scenario)
    assert found is not None, "its config.json was written above"
    return next(need.size_bytes for need in needs_on_gpus(scenario, found.architecture) if need.key == "learner")


def main(argv: list[str] | None = None) -> int:
    return stage(__file__, __doc__, repetitions=5).run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
