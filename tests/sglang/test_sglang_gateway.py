"""The gateway with a stock SGLang server behind it and the official OpenAI client in front of it."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))

import gateway_cases as cases
from gateway_bench import GatewayBench, hold_conversation

from penstock.backends.data.options import DataOptions
from penstock.backends.engines.options import EnginesOptions, SamplingOptions
from penstock.backends.engines.served.sglang.create import open_sglang_engine
from penstock.backends.engines.served.sglang.spec import SGLANG
from penstock.backends.engines.spec import EngineContext
from penstock.backends.episodes.options import EpisodeOptions
from penstock.messages.arrays import floats_view, tokens_view
from penstock.messages.commands import ApplyWeights
from penstock.messages.local import WeightsSwapped
from penstock.messages.samples import Completed, Reward, StopReason
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.backends.engines.served.sglang.environment import SglangEnvironment
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import EngineCommand, Generate

pytestmark = pytest.mark.sglang
START_S = 240.0


def engine_of(model: Path, folder: Path, sampling: SamplingOptions) -> Backend[EngineCommand]:
    """A server of its own for this model."""
    options = EnginesOptions(
        backend="sglang",
        slots=4,
        device="cpu",
        progress_tokens=4,
        start_timeout_s=START_S,
        sglang={"max_total_tokens": 8192, "mem_fraction_static": 0.2},
    )
    return open_sglang_engine(
        EngineContext(
            name="engine/0",
            place=0,
            epoch=0,
            model_folder=model,
            run_folder=folder,
            options=options,
            sampling=sampling,
            data=DataOptions(),
            max_context=512,
            dtype="float32",
            seed=0,
            bucket_size_bytes=1 << 20,
        )
    )


@pytest.fixture(scope="module")
def bench(environment: SglangEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayBench]:
    assert environment.is_cpu
    model, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("run")
    cases.make_model(model)
    data = DataOptions(path="rows.jsonl", metadata_keys=("level", "label"))
    # The likeliest token, always: a server on the CPU draws without a seed, and the model may stray from what it knows.
    sampling = SamplingOptions(max_response_tokens=64, top_k=1)
    opened = GatewayBench(
        model, folder, EpisodeOptions(kind="gateway", follow_sampling=True), data, open_engine=engine_of,
        start_s=START_S, sampling=sampling, can=SGLANG.capabilities,
    )  # fmt: skip
    try:
        opened.serve(0)
        yield opened
    finally:
        opened.close()


def test_a_conversation_with_a_tool_becomes_a_sample_of_the_very_tokens_that_the_server_made(
    bench: GatewayBench,
) -> None:
    bench.engine.ends.clear()
    taken, client = bench.begin()
    hold_conversation(client)
    bench.finish(taken, reward=1.0)
    end = bench.ended()
    assert end.event.outcome == Completed(stop=StopReason.EPISODE, reward=Reward(value=1.0))
    made = [tokens_view(turn.part.tokens).tolist() for turn in bench.engine.ends]
    assert len(made) == 2
    assert [token for token, is_own in zip(end.ids, end.mask, strict=True) if is_own] == made[0] + made[1]
    logprobs = floats_view(end.event.part.logprobs).tolist()
    of_server = [value for turn in bench.engine.ends for value in floats_view(turn.part.logprobs).tolist()]
    assert [value for value, is_own in zip(logprobs, end.mask, strict=True) if is_own] == of_server


def test_an_answer_is_held_to_a_schema_and_not_trained(bench: GatewayBench) -> None:
    bench.engine.ends.clear()
    taken, client = bench.begin(index=2)
    asked: Any = {"role": "user", "content": "Is number object?"}
    word = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    wish: Any = {"type": "json_schema", "json_schema": {"name": "word", "schema": word}}
    held = client.chat.completions.create(
        model="t", messages=[asked], response_format=wish, temperature=0.5, extra_body={"top_k": -1}
    )
    assert json.loads(held.choices[0].message.content or "")["a"] in ("yes", "no")
    said: Any = held.to_dict()["penstock"]
    assert (said["masked"], said.get("ignored")) == ("constrained", None)
    message: Any = held.choices[0].message
    client.chat.completions.create(model="t", messages=[asked, message, asked], max_tokens=4)
    bench.finish(taken, reward=1.0)
    end = bench.ended()
    assert sum(end.mask) == bench.engine.ends[1].part.num_tokens
    assert set(end.mask[: bench.engine.ends[0].part.num_tokens]) == {0}


def test_new_weights_come_in_flight_in_the_middle_of_a_turn_and_the_agent_does_not_notice(
    bench: GatewayBench,
) -> None:
    taken, client = bench.begin(index=1)
    swap = ApplyWeights(bench.stage(1).manifest, UpdateMode.IN_FLIGHT)

    def swap_too(command: Generate) -> None:
        """The first turn is given to the engine, and right after it the swap."""
        bench.engine.hold = None
        bench.engine.inner.execute(command)
        bench.backend.execute(swap)

    bench.engine.hold = swap_too
    answers: list[list[Any]] = []
    agent = threading.Thread(target=lambda: answers.append(hold_conversation(client)))
    agent.start()
    bench.hear(WeightsSwapped)
    agent.join(START_S)
    assert len(answers) == 1
    bench.finish(taken)
    end = bench.ended()
    assert end.event.outcome == Completed(stop=StopReason.EPISODE)
    assert [span.version for span in end.event.part.spans][-1] == 1
