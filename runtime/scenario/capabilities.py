"""What a scenario asks of its engines that not every kind can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.spec import engines_that
from penstock.backends.protocol import Capability
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

_NEEDED_BY: Final = {UpdateMode.IN_FLIGHT: Capability.IN_FLIGHT, UpdateMode.INTERRUPT: Capability.INTERRUPT}


def lacking(
    scenario: Scenario, path: KeyPath, backend: str, can: frozenset[Capability]
) -> Iterator[tuple[KeyPath, str]]:
    """What a resolved scenario demands and the engines of the block at ``path``, which ``can`` do so much, cannot."""
    mode = scenario.staleness.update_mode
    needed = None if mode is None else _NEEDED_BY.get(mode)
    if needed is not None and needed not in can:
        possible = [other.value for other in UpdateMode if other not in _NEEDED_BY or _NEEDED_BY[other] in can]
        yield ("staleness", "update_mode"), f"{backend} engines cannot do {mode}; they can do {', '.join(possible)}"
    if scenario.weights.canary and Capability.HOLDS_WEIGHTS in can and Capability.CANARY not in can:
        yield ("weights", "canary"), f"{backend} engines cannot return log-probs of a given text; set it to false"
    if scenario.engines.record_experts and Capability.RECORDS_EXPERTS not in can:
        yield ("engines", "record_experts"), f"{backend} engines cannot say it; set it to false"
    if scenario.sampling.replay_kept is not None and Capability.RECORDS_KEPT not in can:
        yield (
            ("sampling", "replay_kept"),
            f"{backend} engines cannot say which tokens they drew from, nor SGLang's with a draft model or behind a "
            "router; set it to null, or take torch or sglang engines without these",
        )
    is_quantized = scenario.engines.quantization is not None and Capability.HOLDS_WEIGHTS in can
    if is_quantized and Capability.TAKES_FP8 not in can:
        yield ("engines", "quantization"), f"{backend} engines take no weights in FP8; remove it"
    lora = scenario.learner.lora
    sends_adapters = lora is not None and lora.publish == "adapter" and Capability.HOLDS_WEIGHTS in can
    if sends_adapters and Capability.TAKES_ADAPTERS not in can:
        yield (
            ("learner", "lora", "publish"),
            f"{backend} engines take whole models and no adapters; set it to merged, or take "
            f"{' or '.join(engines_that(Capability.TAKES_ADAPTERS))} engines",
        )
    if scenario.engines.seeded_sampling and Capability.SEEDED_SAMPLING not in can:
        yield (
            (*path, "backend"),
            f"engines.seeded_sampling is true, and {backend} engines ignore the seed of a sample",
        )
