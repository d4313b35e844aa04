"""The base of served engines under a second server, which speaks another dialect than SGLang's.

It runs as a process of its own, launched as a server of ours is, and passes the suite that every engine has to pass.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING
from unittest.mock import Mock

import msgspec
import pytest
from engine_cases import make_case, random_tokens, reference_canary, weights_of
from other_dialect import OTHER, Load, OtherControl, OtherEndpoint, open_server
from other_server import LOGPROB, TOKEN_S
from test_contracts import CANARY_TOKENS, context_of

from penstock.backends.checkpoint.hf_config import read_config
from penstock.backends.contracts.engine import EngineContract, EngineSubject, serve
from penstock.backends.contracts.hearing import Driven
from penstock.backends.engines.decode_passes import DecodeBand, bands_in
from penstock.backends.engines.options import EnginesOptions
from penstock.backends.engines.served.base.dialect import EngineFailedError
from penstock.backends.engines.served.base.launched import LaunchedServer
from penstock.backends.engines.served.base.log_passes import LogPasses
from penstock.backends.engines.served.base.settings import OWNER_VARIABLE
from penstock.backends.engines.served.base.teacher import ServedTeacherBackend
from penstock.backends.engines.spec import EngineSetup
from penstock.backends.episodes.backend import EpisodeBackend
from penstock.backends.episodes.judge_endpoint.backend import JudgingEngine
from penstock.backends.processes.process_facts import marked_processes
from penstock.backends.protocol import Leaver
from penstock.backends.weights.spec import DISK
from penstock.backends.weights.transports import open_exporter
from penstock.messages.arrays import floats_view, pack_tokens
from penstock.messages.commands import ApplyWeights, ComputeLogprobs, FetchWeights, OpenEngine, SleepEngine
from penstock.messages.local import (
    EngineOpened,
    EngineSlept,
    GenerationEnded,
    LogprobsComputed,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import Completed, InfraError, Prompt, SampleKey, Truncated
from penstock.messages.teaching import GivenTokens
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator


@pytest.fixture
def other(tmp_path: Path) -> EngineSubject:
    case = make_case("qwen3_tied", tmp_path / "model")
    exporter = open_exporter(DISK, run_id="contract", learner_epoch=0, folder=tmp_path / "weights")
    canary = reference_canary(case.model, CANARY_TOKENS)
    context = context_of(case.folder, EnginesOptions(backend="other", slots=3, device="cpu", progress_tokens=4))
    return EngineSubject(
        spec=OTHER,
        context=context,
        export=lambda version, publish: exporter.export(
            weights_of(case.model), version=version, publish=publish, canary=canary
        ),
        prompt=lambda number: Prompt(row=number, epoch=0, tokens=pack_tokens(random_tokens(6, seed=number))),
    )


class TestOther(EngineContract):
    @pytest.fixture
    def subject(self, other: EngineSubject) -> EngineSubject:
        return other


@pytest.fixture
def engine(other: EngineSubject) -> Iterator[Driven]:
    driven = Driven(other.spec.open(other.context), other.timeout_s)
    driven.ask(OpenEngine(), EngineOpened)
    serve(driven, other.export(0, 0))
    yield driven
    driven.close()


def test_the_configuration_of_the_model_is_read_once(other: EngineSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(wraps=read_config)
    monkeypatch.setattr("penstock.backends.engines.served.base.opened.read_config", read)
    driven = Driven(other.spec.open(other.context), other.timeout_s)
    try:
        driven.ask(OpenEngine(), EngineOpened)
    finally:
        driven.close()
    read.assert_called_once()


def server_of(subject: EngineSubject) -> int:
    """Its main process."""
    owner = f"{OWNER_VARIABLE}={subject.context.name} of {subject.context.run_folder}"
    command = b"other_server.py"
    (pid,) = (
        pid
        for pid in marked_processes([owner.encode()])
        if command in Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")[1]
    )
    return pid


def test_it_gives_its_memory_up_and_takes_it_again_with_the_next_weights(other: EngineSubject, engine: Driven) -> None:
    engine.ask(SleepEngine(), EngineSlept)
    serve(engine, other.export(1, 1))
    assert isinstance(engine.ask(other.generate(1), GenerationEnded).outcome, Completed | Truncated)


def test_a_token_outside_the_embedding_is_not_sent(other: EngineSubject, engine: Driven) -> None:
    bad = msgspec.structs.replace(other.generate(1), prompt=Prompt(row=0, epoch=0, tokens=pack_tokens([1 << 20])))
    outcome = engine.ask(bad, GenerationEnded).outcome
    assert isinstance(outcome, InfraError)
    assert "is outside" in outcome.detail
    assert isinstance(engine.ask(other.generate(2), GenerationEnded).outcome, Completed | Truncated)


def test_a_server_that_dies_takes_the_engine_with_it_and_leaves_its_last_words(
    other: EngineSubject, engine: Driven
) -> None:
    os.kill(server_of(other), signal.SIGTERM)
    error = engine.failure()
    assert isinstance(error, EngineFailedError)
    assert "the Other server died" in str(error)
    assert "it said: fatal: told to end" in str(error)


def test_an_engine_tells_of_the_passes_that_stand_in_the_log_of_its_server_but_of_none_amid_a_swap(
    other: EngineSubject, engine: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline_s, number, told = time.monotonic() + 20, 0, list[DecodeBand]()
    while not told:  # the log comes by another way than the answers
        assert time.monotonic() < deadline_s
        number += 1
        engine.ask(other.generate(number), GenerationEnded)
        told = bands_in({metric.name: metric.value for metric in engine.backend.gauges()})
    assert told[0].least == 1
    assert told[0].seconds / told[0].passes == pytest.approx(TOKEN_S)
    held_up, loads = LogPasses.held_up, list[str]()

    @contextlib.contextmanager
    def watched(passes: LogPasses) -> Generator[None]:
        with held_up(passes):
            loads.append("begun")
            yield
            loads.append("ended")

    async def load_folder(endpoint: OtherEndpoint, folder: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        loads.append("loaded")
        await load(endpoint, folder, label, flush=flush, timeout_s=timeout_s)

    load = OtherEndpoint.load_folder
    monkeypatch.setattr(LogPasses, "held_up", watched)
    monkeypatch.setattr(OtherEndpoint, "load_folder", load_folder)
    serve(engine, other.export(1, 1))
    assert loads == ["begun", "loaded", "ended"]


def processes_of(subject: EngineSubject) -> dict[int, int]:
    """Guardian and server."""
    return marked_processes([f"{OWNER_VARIABLE}={subject.context.name} of {subject.context.run_folder}".encode()])


def test_the_server_of_an_engine_that_leaves_waits_for_no_successor(
    engine: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: Queue[LaunchedServer] = Queue()

    def be_last(server: LaunchedServer) -> None:
        said.put(server)

    monkeypatch.setattr(LaunchedServer, "be_last", be_last)
    assert isinstance(engine.backend, Leaver)
    engine.backend.leaves()
    assert said.get(timeout=20).port


def test_a_server_whose_engine_leaves_before_it_is_ready_is_ended(other: EngineSubject) -> None:
    driven = Driven(other.spec.open(other.context), other.timeout_s)
    try:
        driven.tell(OpenEngine())
        assert isinstance(driven.backend, Leaver)
        driven.backend.leaves()
        deadline_s = time.monotonic() + 20
        while processes_of(other):
            assert time.monotonic() < deadline_s, "it is still there"
            time.sleep(0.02)  # between two looks at the kernel's tables
        assert driven.left_over(EngineOpened) == []
    finally:
        driven.close()


def of_episodes(inner: Mock) -> Leaver:
    return EpisodeBackend(inner, Mock())


def of_a_judge(inner: Mock) -> Leaver:
    return JudgingEngine(inner, Mock(), num_slots=1, canary_tolerance=None)


@pytest.mark.parametrize("wrap", [of_episodes, of_a_judge])
def test_what_wraps_an_engine_hands_on_that_it_leaves(wrap: Callable[[Mock], Leaver]) -> None:
    inner = Mock(spec=["leaves"])
    wrap(inner).leaves()
    inner.leaves.assert_called_once_with()
    wrap(Mock(spec=["execute"])).leaves()


def test_weights_that_are_other_ones_on_the_server_are_named(
    other: EngineSubject, engine: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = OtherControl.loads

    async def bent(control: OtherControl) -> Load:
        found = await loads(control)
        return msgspec.structs.replace(found, checksums={**found.checksums, "model.norm.weight": "0"})

    monkeypatch.setattr(OtherControl, "loads", bent)
    manifest = other.export(1, 1)
    engine.ask(FetchWeights(manifest), WeightsStagedLocally)
    swapped = engine.ask(ApplyWeights(manifest, UpdateMode.DRAIN), WeightsSwapped)
    assert swapped.digest == f"not {manifest.digest}: model.norm.weight differ on the server"


@pytest.fixture
def teacher(other: EngineSubject) -> Iterator[Driven]:
    context = other.context
    setup = EngineSetup(
        name="teacher/0", place=0, model_folder=context.model_folder, run_folder=context.run_folder,
        options=context.options, max_context=64, dtype="float32", data=None,
    )  # fmt: skip
    backend = ServedTeacherBackend(partial(open_server, setup, print), num_slots=5, timeout_s=other.timeout_s)
    driven = Driven(backend, other.timeout_s)
    assert driven.ask(OpenEngine(), EngineOpened).num_slots == 5
    yield driven
    driven.close()


def test_a_teacher_scores_each_text_and_refuses_what_cannot_be_scored(teacher: Driven) -> None:
    texts = (
        GivenTokens(context=pack_tokens([1, 2, 3]), tokens=pack_tokens([4, 5])),
        GivenTokens(context=pack_tokens([1]), tokens=b""),
    )
    told = teacher.ask(ComputeLogprobs(key=SampleKey(0, 0), attempt=0, texts=texts), LogprobsComputed)
    assert told.error == ""
    assert [list(floats_view(each)) for each in told.logprobs] == [pytest.approx([LOGPROB] * 2), []]
    bad = (GivenTokens(context=b"", tokens=pack_tokens([4])),)
    told = teacher.ask(ComputeLogprobs(key=SampleKey(0, 1), attempt=0, texts=bad), LogprobsComputed)
    assert "nothing stands before the first token" in told.error
