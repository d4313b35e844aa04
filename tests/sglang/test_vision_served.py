"""A stock server looks at the images of prompts and of later turns as the learner does: same tokens, same log-probs,
before and after new weights of both parts."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from running_server import run_server
from test_client import call_of, client_of

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("backends", "integration"))

from live_run import LiveRun
from vision_cases import model_folder, picture, prompt_of, sequence_of

from penstock.backends.checkpoint.make_vision import PUBLISHED_PATCH_SIZE
from penstock.backends.learners.batch.packing import pack
from penstock.backends.learners.torch.model import PackedModel
from penstock.messages.arrays import floats_view, tokens_view
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from running_server import RunningServer

    from penstock.backends.engines.served.base.calls import GenerateCall, Generated
    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
VARIABLES = {"TORCHDYNAMO_DISABLE": "1"}
"""The stand-in for triton knows nothing of compilation."""
NEW_TOKENS = 8
TOLERANCE = 2e-5
SCALED = 1e-4
"""Nats a token, where images are scaled: the server's library rounds pixels otherwise than ours."""
SERVED = (
    "runtime.host=local",
    "runtime.heartbeat_timeout_s=60",
    "run.num_steps=3",
    "staleness.policy=sync",
    "staleness.max_staleness=0",
    "engines.backend=sglang",
    "engines.device=cpu",
    "engines.slots=16",
    "engines.start_timeout_s=300",
    "engines.sglang.max_total_tokens=16384",
    "engines.sglang.mem_fraction_static=0.2",
    "learner.device=cpu",
    "learner.groups_per_batch=4",
    "evaluation.every=null",
    "evaluation.datasets=[]",
)


def calls_of(folder: Path) -> list[GenerateCall]:
    """A prompt of two turns with three images of sizes of their own, one with others, one of text alone."""
    text = "user: # and # differ?\nassistant: yes\nuser: and #?\nassistant: "
    sizes = [(56, 28), (28, 28), (84, 56)]  # whole squares, so that nobody scales them
    calls: list[GenerateCall] = []
    for shown, first in ((text, 0), (text, 5), ("user: hm\nassistant: ", None)):
        media = () if first is None else tuple(picture(folder, seed, size) for seed, size in enumerate(sizes, first))
        ids, at = prompt_of(folder, shown, media)
        calls.append(call_of(ids, NEW_TOKENS, media=at))
    return calls


def respell(folder: Path) -> None:
    """Let the tokenizer have a token of its own for what three letters spell, in the place of one that nobody needs."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["yes"] = vocabulary.pop("!")
    added = {**tokenizer["added_tokens"][-1], "id": vocabulary["yes"], "content": "yes"}
    tokenizer["added_tokens"].insert(2, added)
    file.write_text(json.dumps(tokenizer))


def later_turn(folder: Path, pictures: Path) -> GenerateCall:
    """An image, an answer whose tokens nobody would make of its text, and two more images behind it."""
    known, _ = prompt_of(folder, "yes", ())
    said = [token for letter in "yes" for token in prompt_of(folder, letter, ())[0]]
    assert len(known) < len(said) == 3
    before, first = prompt_of(folder, "user: #\nassistant: ", (picture(pictures, 7, (56, 28)),))
    shown = tuple(picture(pictures, seed, (28, 28)) for seed in (8, 9))
    after, later = prompt_of(folder, "user: # and #?\nassistant: ", shown)
    begin = len(before) + len(said)
    return call_of([*before, *said, *after], NEW_TOKENS, media=(*first, *(each.moved(begin) for each in later)))


async def answers(server: RunningServer, calls: list[GenerateCall]) -> list[Generated]:
    async with asyncio.timeout(120), client_of(server, 16) as client:
        return [await client.generator.generate(call, lambda _: None) for call in calls]


def test_its_log_probs_are_those_of_the_learner(environment: SglangEnvironment, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", patch_size=PUBLISHED_PATCH_SIZE)
    respell(folder)
    calls = [*calls_of(folder), later_turn(folder, tmp_path)]
    with run_server(environment, folder, tmp_path, variables=VARIABLES) as server:
        found = asyncio.run(answers(server, calls))
    model = PackedModel.load(folder, dtype="float32", device=torch.device("cpu"))
    for call, generated in zip(calls, found, strict=True):
        assert generated.failure is None, generated.detail
        response = tokens_view(generated.tokens).tolist()
        assert len(response) == NEW_TOKENS
        sequence = sequence_of(tokens_view(call.input_ids).tolist(), response, call.media, number=0, sample=0)
        expected = model.logprobs(pack([sequence]), temperature=1.0).detach().numpy()
        assert np.allclose(floats_view(generated.logprobs), expected, atol=TOLERANCE)


@pytest.mark.parametrize("example", ["examples/vlm.yaml", "examples/vlm_zoom.yaml"], ids=["prompts", "later turns"])
def test_a_learner_trains_on_what_a_server_saw(
    example: str, environment: SglangEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    folder = model_folder(tmp_path / "model", patch_size=PUBLISHED_PATCH_SIZE)
    model = ("model.make=null", f"model.path={folder}")
    with LiveRun(example, tmp_path, (*SERVED, *model), timeout_s=500.0) as run:
        summary = run.finish()
        steps = [step.metrics for step in read_steps(run.folder)]
    assert summary.completed
    assert summary.balance.in_system == 0
    assert len(steps) == 3
    for step in steps:
        assert (step["train/grad_norm"] or 0.0) > 0.0
        assert (step["train/train_rollout_logprob_abs_diff"] or 0.0) < SCALED
