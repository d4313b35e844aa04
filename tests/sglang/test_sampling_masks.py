"""What a real server draws from: named with every token, the same at every interval of its stream, and what the model's
own distribution has left."""

# transformers and torch.Tensor.tolist are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from test_client import call_of, with_client
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from live_run import LiveRun

from penstock.backends.engines.served.base.calls import EndReason
from penstock.backends.learners.objectives.logprobs import kept_logprobs
from penstock.messages.arrays import floats_view, tokens_view
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from running_server import RunningServer

    from penstock.backends.engines.served.base.calls import Chunk, Generated
    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

pytestmark = pytest.mark.sglang

PROMPT = [5, 6, 7, 8]
TEMPERATURE = 0.8
MAX_KEPT = 12


@pytest.mark.parametrize("stream_interval", [1, 16])
@pytest.mark.parametrize("changes", [{"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.05, "top_p": 0.9}], ids=str)
def test_log_probs_are_those_of_the_tokens_that_were_left(
    server: RunningServer, changes: dict[str, Any], stream_interval: int
) -> None:
    call = call_of(PROMPT, 40, temperature=TEMPERATURE, max_kept=MAX_KEPT, **changes)
    chunks: list[Chunk] = []

    async def work(client: Any) -> Generated:  # noqa: ANN401 - of test_client
        generated: Generated = await client.generator.generate(call, chunks.append)
        return generated

    made = with_client(server, work, stream_interval)
    assert (made.end, made.failure) == (EndReason.LENGTH, None)
    assert made.kept is not None
    counts = np.frombuffer(made.kept.counts, dtype="<u2").astype(np.int64)
    assert counts.max() <= MAX_KEPT
    assert counts.mean() > 1
    tokens = tokens_view(made.tokens).tolist()
    kept = torch.full((len(tokens), MAX_KEPT), -1)
    kept[torch.arange(MAX_KEPT) < torch.from_numpy(counts)[:, None]] = torch.tensor(
        np.frombuffer(made.kept.ids, dtype="<i4").astype(np.int64)
    )
    model: Any = AutoModelForCausalLM.from_pretrained(server.model_folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    own = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    expected = kept_logprobs(own, logits.gather(1, kept.clamp(min=0)), kept, temperature=TEMPERATURE)
    found = torch.tensor(list(floats_view(made.logprobs)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    for chunk in chunks:
        end = chunk.from_token + len(chunk.tokens) // 4
        assert chunk.kept == made.kept.between(chunk.from_token, end)


RUN = (
    "run.num_steps=2",
    "data.path=lines:200",
    "engines.backend=sglang",
    "engines.device=cpu",
    "engines.count=1",
    "engines.slots=16",
    "engines.start_timeout_s=240",
    "sampling.top_p=0.8",
    "sampling.replay_kept=16",
    "sampling.samples_per_group=4",
    "sampling.max_response_tokens=24",
    "staleness.max_staleness=0",
    "filter.drop_zero_spread=false",
    "learner.groups_per_batch=4",
    "learner.warm_start=null",
    "runtime.heartbeat_timeout_s=60",
)


# What a server names is held against its model above, and what a learner makes of it, over a whole run, in
# tests/integration/test_replayed_run.py.
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(400)
def test_in_a_run_the_learner_agrees_with_the_server_over_what_was_left(
    environment: SglangEnvironment, tmp_path: Path
) -> None:
    assert environment.is_cpu
    with LiveRun("quickstart.yaml", tmp_path, list(RUN), timeout_s=360) as run:
        run.finish()
        steps = [step.metrics for step in read_steps(run.folder)]
    assert len(steps) == 2
    for step in steps:
        assert (step["train/train_rollout_logprob_abs_diff"] or 1) < 1e-4
        assert 1 < (step["rollout/top_p_kept_vocab_per_token"] or 0) <= 16
