"""An engine gives its memory up and takes it again: the order of the calls, and what it computes afterwards.

On a CPU the server answers these calls and frees nothing, so what is shown here is the order and the numbers; the
embedded engine does free its memory, which :mod:`tests.backends.test_device_memory` looks at.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from served_engines import ENGINES, check, prompt_of

from penstock.messages.commands import SleepEngine
from penstock.messages.local import EngineSlept, WeightsSwapped
from penstock.messages.samples import Cancelled
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from served_engines import Served

# The dense ones; their architecture has no part in it.
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.parametrize("served", ENGINES[:2], ids="-".join, indirect=True, scope="session"),
]

CALLS = re.compile(
    r'"POST /(flush_cache|release_memory_occupation|resume_memory_occupation|pause_generation|continue_generation'
    r"|update_weights_from_disk|weights_checker)"
)


def sleep(served: Served) -> None:
    served.bench.engine.execute(SleepEngine())
    served.bench.hear(EngineSlept)


def calls(served: Served) -> list[str]:
    """The control calls that the server has answered so far, in order."""
    text = "".join(path.read_text() for path in sorted((served.run_folder / "logs").glob("*sglang.log")))
    return CALLS.findall(text)


def test_an_engine_that_slept_computes_with_the_weights_that_it_woke_with(served: Served) -> None:
    """The prompt is in the prefix cache when it falls asleep; nothing of that cache is left when it wakes."""
    bench, prompt = served.bench, prompt_of(1)
    bench.ended(prompt)
    for _ in range(2):
        sleep(served)
        served.update(UpdateMode.DRAIN)
        check(served.model, prompt, bench.ended(prompt), bench.version)


def test_weights_are_fetched_while_it_sleeps_and_their_canary_is_right_when_it_wakes(served: Served) -> None:
    bench, canary = served.bench, prompt_of(2, 40)
    sleep(served)
    served.model = served.next_model()
    manifest = bench.stage(served.model, canary)
    assert bench.is_silent()
    bench.apply(manifest, UpdateMode.IN_FLIGHT)
    swapped = bench.hear(WeightsSwapped)
    assert swapped.digest == manifest.digest
    assert manifest.canary is not None
    assert swapped.canary_logprobs != b""
    check(served.model, prompt_of(3), bench.ended(prompt_of(3)), bench.version)


def test_memory_is_taken_again_in_two_stages_around_the_load(served: Served) -> None:
    if served.bench.kind == "torch":
        pytest.skip("the embedded engine makes no calls")
    num_before = len(calls(served))
    sleep(served)
    served.update(UpdateMode.DRAIN)
    assert calls(served)[num_before:] == [
        "flush_cache",
        "release_memory_occupation",
        "pause_generation",
        "resume_memory_occupation",
        "update_weights_from_disk",
        "weights_checker",
        "resume_memory_occupation",
        "continue_generation",
    ]


def test_a_server_that_still_works_is_not_put_to_sleep(served: Served) -> None:
    """Stock SGLang dies of it. What was revoked, and what runs to its end, is waited for."""
    if served.bench.kind == "torch":
        pytest.skip("the embedded engine ends a request at once")
    bench = served.bench
    served.update(UpdateMode.DRAIN)
    revoked, running = bench.generate(prompt_of(4)), bench.generate(prompt_of(5))
    bench.advanced(running)
    bench.abort(revoked)
    sleep(served)
    ended = bench.ends(revoked, running)  # both were told before it slept: hearing of the sleep has passed them
    assert ended[0].outcome == Cancelled(cause="aborted")
    check(served.model, prompt_of(5), ended[1], bench.version)
    served.update(UpdateMode.DRAIN)
    check(served.model, prompt_of(4), bench.ended(prompt_of(4)), bench.version)
