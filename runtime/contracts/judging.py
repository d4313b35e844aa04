"""Contracts of functions that run in workers: rewards, filters, the hook for all samples, curricula.

Arguments are made, and results read, by the code of the workers themselves.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec

from penstock.backends.rewards.functions import (
    FILTER,
    GROUP_REWARD,
    REWARD,
    arguments,
    group_judged,
    judged,
    kept,
    load_function,
    weighed,
)
from penstock.backends.rewards.sampling_calls import (
    HOOK,
    PRIORITY,
    SAMPLE_FILTER,
    PriorityCall,
    PromptHistory,
    RewardedCall,
    Verdict,
)
from penstock.backends.rewards.wire import (
    CallFailed,
    FilterCall,
    GroupCall,
    Judged,
    RewardCall,
    SampleCall,
    ShowCall,
)
from penstock.messages.arrays import pack_tokens
from penstock.messages.errors import UserFault
from penstock.runtime.contracts.cases import cases, texts
from penstock.runtime.contracts.checks import check_same, unchanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.rewards.functions import Loaded
    from penstock.backends.rewards.wire import Call
    from penstock.runtime.contracts.cases import Case
    from penstock.runtime.contracts.checks import Checks

SLOW_S = 1.0
"""From where on a call is worth a note: the scorer waits for it."""


def check_reward(checks: Checks) -> None:
    """Of a reward of single samples."""
    loaded = _loaded(checks, REWARD)
    if loaded is None:
        return
    values: list[float] = []

    def check(response: str, *, label: str, metadata: bytes, truncated: bool) -> str | None:
        call = _reward_call(response, label=label, metadata=metadata, truncated=truncated)
        found, note = _answered(loaded, call, lambda returned: judged(1, 0.0, returned, checks.reward_key))
        values.append(cast("Judged", found).value)
        return note

    usual = msgspec.json.encode({"level": 3})
    for name, response in texts():
        checks.run(name, partial(check, response, label="42", metadata=usual, truncated=False))
    checks.run("a truncated response", partial(check, "The answ", label="42", metadata=usual, truncated=True))
    checks.run("a row without metadata", partial(check, "42", label="42", metadata=b"", truncated=False))
    checks.run("a row without label", partial(check, "42", label="", metadata=usual, truncated=False))
    if values:
        checks.run("it tells responses apart", partial(_note_if_constant, values))


def check_group_reward(checks: Checks) -> None:
    """Of a reward of whole groups."""
    loaded = _loaded(checks, GROUP_REWARD)
    if loaded is None:
        return

    def check(case: Case) -> str | None:
        note = None
        for group, responses in zip(case.groups, case.responses, strict=True):
            samples = tuple(
                _reward_call(text, label=group.prompt.label, metadata=group.prompt.metadata, index=index)
                for index, text in enumerate(responses)
            )
            call = GroupCall(1, checks.timeout_s, samples)

            def read(returned: object, call: GroupCall = call) -> object:
                found = group_judged(call, 0.0, returned, checks.reward_key)
                for each in found.samples:
                    if isinstance(each, CallFailed):
                        raise UserFault(each.reason)
                return found

            note = _answered(loaded, call, read)[1] or note
        return note

    for case in cases():
        checks.run(case.name, partial(check, case))


def check_filter(checks: Checks) -> None:
    """Of a filter of groups."""
    _check_groups(checks, FILTER, lambda call: call, partial(kept, 1, 0.0))


def check_all_samples_hook(checks: Checks) -> None:
    """Of a hook that is shown every group: once admitted, once turned away."""
    for verdict in (Verdict(kept=True, cause=""), Verdict(kept=False, cause="zero_spread")):

        def shown(call: FilterCall, verdict: Verdict = verdict) -> ShowCall:
            return ShowCall(1, checks.timeout_s, call, verdict)

        _check_groups(checks, HOOK, shown, lambda _: None, suffix="" if verdict.kept else ", turned away")


def check_sample_filter(checks: Checks) -> None:
    """Of a filter of single samples."""
    loaded = _loaded(checks, SAMPLE_FILTER)
    if loaded is None:
        return

    def check(response: str, rewarded: RewardedCall) -> str | None:
        call = SampleCall(1, checks.timeout_s, _reward_call(response), rewarded)
        return _answered(loaded, call, partial(kept, 1, 0.0))[1]

    usual = RewardedCall(0.5, (("format", 1.0),), "completed")
    for name, response in texts():
        checks.run(name, partial(check, response, usual))
    checks.run("no reward", partial(check, "42", RewardedCall(None, (), "completed")))
    for outcome in ("truncated", "policy_error"):
        checks.run(f"outcome {outcome}", partial(check, "42", RewardedCall(0.0, (), outcome)))


def check_priority(checks: Checks) -> None:
    """Of a curriculum."""
    loaded = _loaded(checks, PRIORITY)
    if loaded is None:
        return
    histories = {
        "a prompt that was never drawn": PromptHistory(0, 0, None, None),
        "drawn once, always right": PromptHistory(1, 1, 1.0, 1.0),
        "drawn often, half right": PromptHistory(12, 2, 0.5, 0.25),
        "drawn often, never right": PromptHistory(12, 12, 0.0, 0.0),
        "turned away before it had a reward": PromptHistory(1, 1, None, None),
    }

    def check(history: PromptHistory, metadata: bytes) -> str | None:
        prompt_tokens = pack_tokens([1, 2, 3])
        call = PriorityCall(1, checks.timeout_s, "What is 6 · 7?", "42", metadata, prompt_tokens, 17, history)
        return _answered(loaded, call, partial(weighed, 1, 0.0))[1]

    for name, history in histories.items():
        checks.run(name, partial(check, history, b'{"level":3}'))
    checks.run("a row without metadata", partial(check, PromptHistory(0, 0, None, None), b""))


def _check_groups(
    checks: Checks,
    kind: str,
    wrapped: Callable[[FilterCall], Call],
    read: Callable[[object], object],
    *,
    suffix: str = "",
) -> None:
    loaded = _loaded(checks, kind, suffix)
    if loaded is None:
        return

    def check(case: Case) -> str | None:
        note = None
        for group, responses in zip(case.groups, case.responses, strict=True):
            call = wrapped(FilterCall(1, checks.timeout_s, msgspec.msgpack.encode(group), responses))
            note = _answered(loaded, call, read)[1] or note
        return note

    for case in cases():
        checks.run(f"{case.name}{suffix}", partial(check, case))


def _loaded(checks: Checks, kind: str, suffix: str = "") -> Loaded | None:
    found: list[Loaded] = []

    def load() -> None:
        found.append(load_function(kind, checks.spec))

    if suffix:
        load()
    else:
        checks.run("it can be loaded, and asks for what there is", load)
    return found[0] if found else None


def _answered(loaded: Loaded, call: Call, read: Callable[[object], object]) -> tuple[object, str | None]:
    """What the worker would make of the function's answer, and what is worth a note."""

    def ask(given: dict[str, object]) -> object:
        returned = loaded.function(**given)
        return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned

    began_s = time.perf_counter()
    first = read(unchanged(arguments(call, loaded.names), ask))
    elapsed_s = time.perf_counter() - began_s
    again = read(ask(arguments(call, loaded.names)))
    try:
        check_same(first, again)
    except UserFault:
        return first, "returned something else when it was called again; a run that is resumed is then another one"
    return first, f"took {elapsed_s:.1f} s" if elapsed_s > SLOW_S else None


async def _awaited(awaitable: object) -> object:
    return await cast("asyncio.Future[object]", awaitable)


def _reward_call(
    response: str, *, label: str = "42", metadata: bytes = b'{"level":3}', truncated: bool = False, index: int = 0
) -> RewardCall:
    return RewardCall(
        id=1,
        timeout_s=0.0,
        prompt="What is 6 · 7?",
        response=response,
        label=label,
        metadata=metadata,
        truncated=truncated,
        tokens=pack_tokens(ord(letter) % 1000 for letter in response[:512]),
        prompt_tokens=pack_tokens([1, 2, 3]),
        row=17,
        group_id=3,
        index=index,
        conversation=response,
    )


def _note_if_constant(values: list[float]) -> str | None:
    if len(set(values)) > 1:
        return None
    return f"gave {values[0]:g} for all of them: nothing can be learnt from a reward that never varies"
