"""The suites see what they are for: parts that are right but for one thing fail the test of that thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import test_contracts as parts
import torch
from msgspec.structs import replace as changed

from penstock.backends.contracts.hearing import Driven
from penstock.backends.weights.protocol import WeightFetchError
from penstock.messages.arrays import pack_floats
from penstock.messages.commands import OpenLearner
from penstock.messages.local import (
    BatchTrained,
    GenerationAdvanced,
    GenerationEnded,
    LearnerOpened,
    LocalEvent,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import Part, VersionSpan

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.contracts.engine import EngineSubject
    from penstock.backends.contracts.learner import LearnerSubject
    from penstock.backends.contracts.transport import TransportSubject
    from penstock.backends.engines.spec import EngineContext
    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.backends.weights.protocol import FetchedWeights, WeightExporter
    from penstock.backends.weights.spec import ExportContext
    from penstock.backends.weights.stream import AnyWeights
    from penstock.messages.base import Metric
    from penstock.messages.weights import Canary, WeightManifest

Change = Callable[[Any], list[LocalEvent]]


class Wrong:
    """A backend whose events of one class are said otherwise."""

    def __init__(self, right: Backend[Any], kind: type[LocalEvent], change: Change) -> None:
        self._right, self._kind, self._change = right, kind, change

    def start(self, emit: Emit, fail: Fail) -> None:
        def say(event: LocalEvent) -> None:
            for each in self._change(event) if isinstance(event, self._kind) else [event]:
                emit(each)

        self._right.start(say, fail)

    def execute(self, command: Any, /) -> None:  # noqa: ANN401 - of any backend
        self._right.execute(command)

    def gauges(self) -> tuple[Metric, ...]:
        return self._right.gauges()

    def close(self, timeout_s: float) -> None:
        self._right.close(timeout_s)


def with_part(change: Callable[[Part], Part]) -> Change:
    return lambda event: [changed(event, part=change(event.part))]


ENGINES: dict[str, tuple[type[LocalEvent], Change, str]] = {
    "ends twice": (GenerationEnded, lambda e: [e, e], "test_every_request_ends_once_and_says_what_it_is"),
    "another attempt": (
        GenerationEnded,
        lambda e: [changed(e, attempt=e.attempt + 1)],
        "test_every_request_ends_once_and_says_what_it_is",
    ),
    "probabilities": (
        GenerationEnded,
        with_part(lambda part: changed(part, logprobs=pack_floats([0.5] * part.num_tokens))),
        "test_every_request_ends_once_and_says_what_it_is",
    ),
    "old stamps": (
        GenerationEnded,
        with_part(lambda part: changed(part, spans=(VersionSpan(3, part.num_tokens),))),
        "test_weights_are_staged_and_served_as_they_were_published",
    ),
    "reports again": (GenerationAdvanced, lambda e: [e, e], "test_reports_of_progress_are_the_response_in_order"),
    "another digest": (
        WeightsStagedLocally,
        lambda e: [changed(e, digest="x")],
        "test_weights_are_staged_and_served_as_they_were_published",
    ),
    "half a canary": (
        WeightsSwapped,
        lambda e: [changed(e, canary_logprobs=e.canary_logprobs[4:])],
        "test_the_canary_is_answered_in_full",
    ),
    "forgets who made the prefix": (
        GenerationEnded,
        with_part(lambda part: changed(part, spans=(VersionSpan(4, part.num_tokens),))),
        "test_a_response_goes_on_from_a_prefix",
    ),
}


def fixture(suite: object, name: str) -> Callable[..., Any]:
    """What pytest would call for a fixture of a suite."""
    function: Callable[..., Any] = getattr(type(suite), name).__wrapped__
    return partial(function, suite)


@pytest.mark.parametrize("what", ENGINES)
def test_an_engine_that_is_wrong_fails(what: str, tmp_path: Path) -> None:
    kind, change, name = ENGINES[what]
    suite = parts.TestSimulatedEngine()
    right: EngineSubject = fixture(suite, "subject")(tmp_path)

    def open_wrong(context: EngineContext) -> Backend[Any]:
        return Wrong(right.spec.open(context), kind, change)

    wrong = replace(right, spec=replace(right.spec, open=open_wrong))
    with pytest.raises(AssertionError):
        getattr(suite, name)(wrong, next(fixture(suite, "engine")(wrong)))


def test_a_learner_that_miscounts_fails(tmp_path: Path) -> None:
    suite = parts.TestSimulatedLearner()
    subject: LearnerSubject = fixture(suite, "subject")(tmp_path)
    right = subject.spec.open(subject.context)
    learner = Driven(Wrong(right, BatchTrained, lambda e: [changed(e, version=e.version + 1)]), 10.0)
    learner.ask(OpenLearner(), LearnerOpened)
    with pytest.raises(AssertionError):
        suite.test_each_batch_makes_the_next_version(subject, learner)


class Hoards:
    """An exporter that frees nothing, and takes no weights for weights."""

    def __init__(self, right: WeightExporter) -> None:
        self._right = right

    def export(self, tensors: AnyWeights, *, version: int, publish: int, canary: Canary | None) -> WeightManifest:
        if isinstance(tensors, Mapping) and not tensors:
            tensors = {"a": torch.zeros(1)}
        return self._right.export(tensors, version=version, publish=publish, canary=None)

    def release(self, below_version: int) -> None: ...

    def close(self) -> None:
        self._right.close()


@pytest.mark.parametrize(
    "name",
    [
        "test_what_is_fetched_is_what_was_exported",
        "test_a_release_frees_older_versions_and_never_the_newest",
        "test_no_weights_are_no_export",
        "test_one_flipped_bit_is_caught",
    ],
)
def test_a_transport_that_is_wrong_fails(tmp_path: Path, name: str) -> None:
    suite = parts.TestDisk()
    right: TransportSubject = next(fixture(suite, "subject")(tmp_path))
    first: list[FetchedWeights] = []

    def fetch(manifest: WeightManifest) -> FetchedWeights:
        try:
            first.append(right.spec.fetch(manifest))
        except WeightFetchError:
            if "flipped" not in name:
                raise
            return right.spec.fetch(right.open(1).export({"a": torch.ones(1)}, version=9, publish=9, canary=None))
        return first[-1]

    def open_exporter(context: ExportContext) -> WeightExporter:
        return Hoards(right.spec.open_exporter(context))

    wrong = replace(right, spec=replace(right.spec, open_exporter=open_exporter, fetch=fetch))
    test = getattr(suite, name)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(wrong.open(1)) if name == "test_no_weights_are_no_export" else test(wrong, wrong.open(1))
