"""What ``learner.true_on_policy`` needs of the rest of a scenario: without it some log-prob would have other bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.options import engine_groups
from penstock.backends.engines.spec import ENGINES, all_can
from penstock.backends.learners.spec import LEARNERS
from penstock.backends.protocol import Capability
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

Broken = tuple["KeyPath", str]
KEY: Final = "learner.true_on_policy"


def exact_rules(s: Scenario) -> Iterator[Broken]:
    """Rules that are broken: the key to change, and the reason."""
    if not s.learner.true_on_policy:
        return
    if s.staleness.max_staleness or s.staleness.update_mode is not UpdateMode.DRAIN:
        yield (
            ("staleness", "policy"),
            f"with {KEY} the weights that made a token are those that train it, and its whole context is theirs; found "
            f"max_staleness {s.staleness.max_staleness} and update_mode {s.staleness.update_mode}, set policy: sync",
        )
    yield from _learner(s)
    yield from _engines(s)


def _learner(s: Scenario) -> Iterator[Broken]:
    able = LEARNERS.having(lambda spec: spec.has_engine_bits)
    if s.learner.backend not in able:
        yield ("learner", "backend"), f"{KEY} is for {', '.join(able)}; found {s.learner.backend}"
    for name in ("num_updates", "num_passes"):
        if (found := getattr(s.learner, name)) != 1:
            yield ("learner", name), f"the policy has moved after one update; found {found}, with {KEY} set it to 1"
    if s.learner.compile:
        yield ("learner", "compile"), f"kernels that are compiled round otherwise than an engine's; remove it, or {KEY}"
    if s.learner.lora is not None:
        yield (
            ("learner", "lora"),
            "engines multiply with merged weights and the learner with adapters beside them, which rounds otherwise; "
            f"remove it, or {KEY}",
        )


def _engines(s: Scenario) -> Iterator[Broken]:
    groups = engine_groups(s.engines)
    if kinds := {group.backend for group in groups} - {groups[0].backend}:
        found = ", ".join(sorted({groups[0].backend, *kinds}))
        yield (
            ("engines", "more"),
            f"the learner has the products of one kind of engine; found {found}, with {KEY} take one",
        )
    for place, group in enumerate(groups):
        path: KeyPath = ("engines", "more", place - 1) if place else ("engines",)
        rules = ENGINES.spec(group.backend).true_on_policy
        if rules is None:
            able = ENGINES.having(lambda spec: spec.true_on_policy is not None)
            yield (*path, "backend"), f"{KEY} is for {', '.join(able)}; found {group.backend}"
        else:
            yield from rules(path, group)
    is_embedded = all_can(s.engines, Capability.EMBEDDED)
    if is_embedded and s.model.dtype != "float32":
        yield ("model", "dtype"), f"embedded engines have the learner's bits in float32; found {s.model.dtype}"
    if is_embedded and s.learner.num_threads != 1:
        yield (
            ("learner", "num_threads"),
            f"threads divide sums by their number; found {s.learner.num_threads}, set it to 1",
        )
    if (s.learner.device == "cpu") is not is_embedded:
        wanted = "cpu, as its engines" if is_embedded else "auto, for a GPU as its engines have"
        yield (
            ("learner", "device"),
            f"with {KEY} it computes where its engines do; found {s.learner.device}, set it to {wanted}",
        )
