"""The embedded engine against transformers' ``generate`` on the device, by tokens per second; and its decode step by
itself.

Prompts of 64 tokens, 128 new ones each, none ends earlier, log-probs on both sides, arms in turn. Beside it what
share of the time of a step its bytes would take at the bandwidth that :mod:`limits` measures: weights once, and the
keys and values that are in the cache half-way. Then how far the log-probs that the engine drew by are from those that
the learner's model computes of the same tokens.
"""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import random
import tempfile
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoModelForCausalLM

from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.engines.torch.requests import GenerationRequest
from penstock.benchmarks._harness import Measured, claim, figures, interleaved, pairs, plain_figure
from penstock.benchmarks.gpu._stage import made_checkpoint, stage, stand_of
from penstock.messages.arrays import floats_view, pack_tokens, tokens_view

if TYPE_CHECKING:
    import argparse

    from penstock.benchmarks.gpu._stage import Stand
    from penstock.messages.samples import Part

PROMPT_TOKENS: Final = 64
NEW_TOKENS: Final = 128
SLOTS: Final = (1, 64, 256)
CLAIMED: Final = 64
MAX_MISMATCH: Final = 0.05
"""Nats a token, bfloat16."""


def measure(given: argparse.Namespace) -> Measured:
    stand = stand_of(given)
    measured = Measured([], [])
    with tempfile.TemporaryDirectory() as name, quiet_transformers():
        folder = made_checkpoint(stand, Path(name))
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=stand.dtype)
        model.to(stand.device).eval()
        for num_slots in SLOTS if stand.is_real else (2,):
            _case(stand, folder, model, num_slots, given.repetitions, measured)
    return measured


def _case(stand: Stand, folder: Path, model: Any, num_slots: int, repetitions: int, into: Measured) -> None:  # noqa: ANN401 - of transformers
    settings = EngineSettings(num_slots=num_slots, max_context=512, dtype=stand.dtype, device=stand.device)
    engine = TorchEngine(read_model_config(folder), settings)
    with CheckpointTensors(folder) as tensors:
        engine.load(tensors, version=0)
    draw = random.Random(num_slots)
    prompts = [[draw.randrange(stand.vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(num_slots)]
    numbers = count()
    parts: list[tuple[list[int], Part]] = []

    def decode() -> None:
        parts[:] = _decoded(engine, prompts, next(numbers))

    num_tokens = num_slots * NEW_TOKENS
    arms = {
        "generate": lambda: num_tokens / stand.timed(partial(_generated, model, prompts, stand))[1],
        "engine": lambda: num_tokens / stand.timed(decode)[1],
    }
    # Two rounds to warm up: the first decode step of a shape runs by itself, the second is captured.
    other, ours = figures(interleaved(arms, repetitions, warm_up=2), "tokens/s", float, f"{num_slots} at once: {{}}")
    steps = [1000 * num_slots / rate for rate in ours.values]
    into.figures.extend([other, ours, plain_figure(f"{num_slots} at once: a decode step", "ms", steps)])
    config, width = engine.config, torch.finfo(stand.dtype).bits // 8
    kept = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (PROMPT_TOKENS + NEW_TOKENS // 2)
    weights = sum(tensor.numel() for tensor in model.parameters())
    read_gb = width * (weights + num_slots * kept) / 1e9
    into.figures.append(plain_figure(f"{num_slots} at once: read by a step", "GB", [read_gb]))
    text = f"engine ÷ generate, {num_slots} at once"
    if num_slots == CLAIMED:
        into.claims.append(claim(text, pairs(ours, other), at_least=1.5))
    else:
        into.figures.append(plain_figure(text, "×", pairs(ours, other)))
    differences = [_difference(model, prompt, part, stand) for prompt, part in parts[:8]]
    text = f"log-probs of the engine and of the learner's model, {num_slots} at once, nats"
    into.claims.append(claim(text, differences, at_most=MAX_MISMATCH))


def _decoded(engine: TorchEngine, prompts: list[list[int]], repetition: int) -> list[tuple[list[int], Part]]:
    for tag, prompt in enumerate(prompts):
        seed = repetition * len(prompts) + tag
        engine.submit(GenerationRequest(tag=tag, prompt=pack_tokens(prompt), seed=seed, max_new_tokens=NEW_TOKENS))
    found: dict[int, Part] = {}
    while engine.num_running or engine.num_queued:
        found |= {int(str(ended.tag)): ended.part for ended in engine.step().ended}
    return [(prompt, found[tag]) for tag, prompt in enumerate(prompts)]


def _generated(model: Any, prompts: list[list[int]], stand: Stand) -> None:  # noqa: ANN401 - of transformers
    ids = torch.tensor(prompts, device=stand.device)
    with torch.inference_mode():
        generated = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        drawn = generated.sequences[:, ids.shape[1] :]
        for step, logits in enumerate(generated.logits):  # one by one: all of them together do not fit
            torch.log_softmax(logits.float(), -1).gather(1, drawn[:, step : step + 1])


def _difference(model: Any, prompt: list[int], part: Part, stand: Stand) -> float:  # noqa: ANN401 - of transformers
    """Mean over the tokens, nats."""
    tokens = [*prompt, *tokens_view(part.tokens)]
    with torch.inference_mode():
        logits = model(torch.tensor([tokens], device=stand.device)).logits[0, len(prompt) - 1 : -1].float()
        ids = torch.tensor(tokens[len(prompt) :], device=stand.device)[:, None]
        ours = torch.log_softmax(logits, -1).gather(1, ids)[:, 0].cpu()
    return float((ours - torch.tensor(list(floats_view(part.logprobs)))).abs().mean())


def main(argv: list[str] | None = None) -> int:
    return stage(__file__, __doc__, repetitions=5).run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
