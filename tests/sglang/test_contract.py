"""Engines of SGLang servers, against the suite that an engine of another package has to pass; one server for most."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from conformance_bench import START_S, context_of, reference_canary, weights_of
from served_engines import load, prompt_of

from penstock.backends.contracts.engine import EngineContract, EngineSubject, serve
from penstock.backends.contracts.hearing import Driven
from penstock.backends.engines.options import SamplingOptions
from penstock.backends.engines.spec import ENGINES
from penstock.backends.weights.transports import open_exporter
from penstock.messages.arrays import pack_tokens
from penstock.messages.commands import OpenEngine
from penstock.messages.local import EngineOpened, LocalEvent
from penstock.messages.samples import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

pytestmark = pytest.mark.sglang
TESTS = itertools.count()


@pytest.fixture(scope="module")
def sglang(
    environment: SglangEnvironment, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> EngineSubject:
    assert environment.is_cpu
    folder = tmp_path_factory.mktemp("contract")
    model = load(tiny_model())
    canary = reference_canary(model, prompt_of(1, num_tokens=8))
    exporter = open_exporter("disk", run_id="contract", learner_epoch=0, folder=folder / "weights")
    return EngineSubject(
        spec=ENGINES.spec("sglang"),
        context=context_of("sglang", tiny_model(), folder, SamplingOptions(max_response_tokens=64)),
        export=lambda version, publish: exporter.export(
            weights_of(model), version=version, publish=publish, canary=canary
        ),
        prompt=lambda number: Prompt(row=number, epoch=0, tokens=pack_tokens(prompt_of(number))),
        timeout_s=START_S,
    )


@pytest.fixture(scope="module")
def opened(sglang: EngineSubject) -> Iterator[Driven]:
    driven = Driven(sglang.spec.open(sglang.context), sglang.timeout_s)
    driven.ask(OpenEngine(), EngineOpened)
    yield driven
    driven.close()


class TestSglang(EngineContract):
    @pytest.fixture
    def subject(self, sglang: EngineSubject) -> EngineSubject:
        return replace(sglang, first_attempt=10 * next(TESTS))

    @pytest.fixture
    def engine(self, subject: EngineSubject, opened: Driven) -> Driven:
        serve(opened, subject.export(3, 1))
        opened.left_over(LocalEvent)
        return opened

    def test_it_shows_figures_and_closes_with_work_in_hand(self, subject: EngineSubject) -> None:
        another = replace(subject.context, name="engine/1", place=1)
        super().test_it_shows_figures_and_closes_with_work_in_hand(replace(subject, context=another))
