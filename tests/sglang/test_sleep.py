"""An engine gives its memory up and takes it again: the order of the calls, and what it computes afterwards.

On a CPU the server answers these calls and frees nothing, so what is shown here is the order and the numbers; the
embedded engine does free its memory, which :mod:`tests.backends.test_device_memory` looks at.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from conformance_bench import NUM_SLOTS, PROGRESS_TOKENS, START_S, EngineBench, perturbed
from test_conformance import SAMPLING, check, load, prompt_of

from penstock.backends.engines.options import EnginesOptions
from penstock.messages.commands import SleepEngine
from penstock.messages.local import EngineSlept, WeightsSwapped
from penstock.messages.samples import Cancelled
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from transformers import PreTrainedModel

    from penstock.backends.engines.options import OptionValue

pytestmark = pytest.mark.sglang

CALLS = re.compile(
    r'"POST /(flush_cache|release_memory_occupation|resume_memory_occupation|pause_generation|continue_generation'
    r"|update_weights_from_disk|weights_checker)"
)


class Sleeper:
    """An engine that has served one model."""

    def __init__(self, kind: str, folder: Path, run_folder: Path) -> None:
        self.kind = kind
        self.run_folder = run_folder
        server: dict[str, OptionValue] = {
            "log_level_http": "info",
            "uvicorn_access_log_exclude_prefixes": ["/ready"],
            "max_total_tokens": 16384,
            "mem_fraction_static": 0.2,
        }
        options = EnginesOptions(
            backend="sglang" if kind == "sglang" else "torch",
            slots=NUM_SLOTS,
            device="cpu",
            progress_tokens=PROGRESS_TOKENS,
            start_timeout_s=START_S,
            sglang=server if kind == "sglang" else {},
        )
        self.bench = EngineBench(kind, folder, run_folder, sampling=SAMPLING, options=options)
        self.first: PreTrainedModel = load(folder)
        self.bench.serve(self.first)

    def sleep(self) -> None:
        self.bench.engine.execute(SleepEngine())
        self.bench.hear(EngineSlept)

    def calls(self) -> list[str]:
        """The control calls that the server has answered so far, in order."""
        text = "".join(path.read_text() for path in sorted((self.run_folder / "logs").glob("*sglang.log")))
        return CALLS.findall(text)


@pytest.fixture(scope="module", params=["torch", "sglang"])
def sleeper(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Generator[Sleeper]:
    sleeper = Sleeper(request.param, tiny_model(), tmp_path_factory.mktemp(f"sleep-{request.param}"))
    try:
        yield sleeper
    finally:
        sleeper.bench.close()


def test_an_engine_that_slept_computes_with_the_weights_that_it_woke_with(sleeper: Sleeper) -> None:
    """The prompt is in the prefix cache when it falls asleep; nothing of that cache is left when it wakes."""
    bench, prompt = sleeper.bench, prompt_of(1)
    bench.ended(prompt)
    for seed in (1, 2):
        sleeper.sleep()
        model = perturbed(sleeper.first, seed)
        bench.serve(model)
        check(model, prompt, bench.ended(prompt), bench.version)


def test_weights_are_fetched_while_it_sleeps_and_their_canary_is_right_when_it_wakes(sleeper: Sleeper) -> None:
    bench, model, canary = sleeper.bench, perturbed(sleeper.first, 3), prompt_of(2, 40)
    sleeper.sleep()
    manifest = bench.stage(model, canary)
    assert bench.is_silent()
    bench.apply(manifest, UpdateMode.IN_FLIGHT)
    swapped = bench.hear(WeightsSwapped)
    assert swapped.digest == manifest.digest
    assert manifest.canary is not None
    assert swapped.canary_logprobs != b""
    check(model, prompt_of(3), bench.ended(prompt_of(3)), bench.version)


def test_memory_is_taken_again_in_two_stages_around_the_load(sleeper: Sleeper) -> None:
    if sleeper.kind == "torch":
        pytest.skip("the embedded engine makes no calls")
    num_before = len(sleeper.calls())
    sleeper.sleep()
    sleeper.bench.serve(perturbed(sleeper.first, 4))
    assert sleeper.calls()[num_before:] == [
        "flush_cache",
        "release_memory_occupation",
        "pause_generation",
        "resume_memory_occupation",
        "update_weights_from_disk",
        "weights_checker",
        "resume_memory_occupation",
        "continue_generation",
    ]


def test_a_server_that_still_works_is_not_put_to_sleep(sleeper: Sleeper) -> None:
    """Stock SGLang dies of it. What was revoked, and what runs to its end, is waited for."""
    if sleeper.kind == "torch":
        pytest.skip("the embedded engine ends a request at once")
    bench = sleeper.bench
    model = perturbed(sleeper.first, 5)
    bench.serve(model)
    revoked, running = bench.generate(prompt_of(4)), bench.generate(prompt_of(5))
    bench.advanced(running)
    bench.abort(revoked)
    sleeper.sleep()
    ended = bench.ends(revoked, running)  # both were told before it slept: hearing of the sleep has passed them
    assert ended[0].outcome == Cancelled(cause="aborted")
    check(model, prompt_of(5), ended[1], bench.version)
    last = perturbed(sleeper.first, 6)
    bench.serve(last)
    check(last, prompt_of(4), bench.ended(prompt_of(4)), bench.version)
