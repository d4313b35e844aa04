"""What each actor says it waits for, and on whom."""

from __future__ import annotations

import actor_driver as drive
from buffer_bench import Bench as BufferBench
from buffer_bench import announced
from engine_bench import EngineBench, manifest
from source_bench import SourceBench

from penstock.actors.filter.machine import Filter
from penstock.actors.filter.options import FilterOptions
from penstock.actors.filter.settings import FilterSettings
from penstock.actors.learner.machine import Learner
from penstock.actors.learner.settings import LearnerSettings
from penstock.actors.scorer.machine import Scorer
from penstock.actors.scorer.settings import ScorerSettings
from penstock.actors.waits import MAX_NAMED, several
from penstock.actors.weight_publisher.machine import WeightPublisher
from penstock.actors.weight_publisher.options import WeightsOptions
from penstock.actors.weight_publisher.settings import WeightPublisherSettings
from penstock.messages.flow import SampleFailed, SampleGenerated, SampleScored
from penstock.messages.local import LearnerOpened, Started
from penstock.messages.membership import EngineJoined
from penstock.messages.samples import SampleKey
from penstock.messages.training import CheckpointNamed, LearnerReady, UpdateMode
from penstock.messages.waits import OWN_BACKEND, Wait
from penstock.messages.weights import EngineReady, WeightsExported, WeightsFetched, WeightsStaged


def test_of_many_alike_the_oldest_are_named_and_the_others_counted() -> None:
    waits = several("sample", "engine/0", [(f"0/{index}", index) for index in range(128)])
    assert waits == [
        Wait("sample", "0/0", "engine/0", 0),
        Wait("sample", "0/1", "engine/0", 1),
        Wait("sample", "0/2", "engine/0", 2, 126),
    ]
    assert sum(wait.num for wait in waits) == 128
    assert several("sample", "engine/0", []) == []


# --- PromptSource -------------------------------------------------------------------------------------------------


def test_prompt_source_waits_for_a_grant_when_there_is_nothing_else() -> None:
    bench = SourceBench().started()
    assert bench.source.waits() == (Wait("grant", "group 0", "buffer"),)


def test_prompt_source_waits_for_samples_of_each_engine_and_tokens_begin_the_wait_anew() -> None:
    bench = SourceBench().started()
    bench.grant(2)
    before = bench.source.waits()
    assert [(w.what, w.subject, w.on) for w in before] == [
        ("sample", "0/0", "engine/0"),
        ("sample", "0/1", "engine/0"),
        ("sample", "1/0", "engine/1"),
        ("sample", "1/1", "engine/1"),
    ]
    bench.progressed("engine/0", SampleKey(0, 1), 0, drive.part((0, 5)))
    assert [old.mark != new.mark for old, new in zip(before, bench.source.waits(), strict=True)] == [
        False,
        True,
        False,
        False,
    ]


def test_prompt_source_waits_for_answers_to_its_census_and_for_those_who_are_to_come_back() -> None:
    bench = SourceBench().started()
    bench.loses("filter")
    for name in ("buffer", "engine/0"):
        bench.answer(name)
    subjects = [(w.what, w.subject, w.on) for w in bench.source.waits()]
    assert subjects[:3] == [
        ("answer to", "census 1", "scorer"),
        ("answer to", "census 1", "engine/1"),
        ("return of", "filter", "supervisor"),
    ]


def test_prompt_source_without_an_engine_waits_for_its_start() -> None:
    bench = SourceBench().started(num_engines=0)
    bench.grant(1)
    assert bench.source.waits() == (Wait("start of", "an engine", "supervisor"),)


def test_prompt_source_waits_for_weights_that_no_engine_has() -> None:
    bench = SourceBench().started()
    bench.announced(9)
    for engine in ("engine/0", "engine/1"):
        bench.serves(engine, 4)
    bench.grant(1, min_version=5)  # both were five versions late
    assert bench.source.waits() == (Wait("weights of", "version 5", "weight_publisher"),)
    bench.serves("engine/1", 5)
    assert [wait.on for wait in bench.source.waits()] == ["engine/1"] * 2


# --- EngineWorker -------------------------------------------------------------------------------------------------


def test_an_engine_waits_for_its_backend_and_for_versions_that_requests_need() -> None:
    bench = EngineBench()
    bench.hear(Started(epoch=0))
    assert bench.worker.waits() == (Wait("start of", "the engine", OWN_BACKEND),)
    bench = EngineBench().serving()
    bench.issue(0)
    bench.issue(1, min_version=3)
    bench.hear(WeightsStaged(manifest=manifest(2)))
    assert bench.worker.waits() == (
        Wait("fetched weights of", "version 2", OWN_BACKEND),
        Wait("tokens of", "0/0", OWN_BACKEND),
        Wait("weights of", "version 3", "weight_publisher"),
    )


def test_an_engine_that_has_nothing_to_do_waits_for_nothing() -> None:
    assert EngineBench().serving().worker.waits() == ()


# --- Scorer and Filter --------------------------------------------------------------------------------------------


def test_the_scorer_waits_for_rewards() -> None:
    scorer = Scorer(ScorerSettings(timeout_s=10.0, num_retries=1, grace_s=60.0))
    for index in range(MAX_NAMED + 2):
        scorer.handle(SampleGenerated(sample=drive.sample(3, index), group_size=8, prompt=drive.prompt()))
    assert scorer.waits()[-1] == Wait("reward of", "3/2", OWN_BACKEND, 0, 3)


def test_the_filter_waits_for_the_samples_that_a_group_lacks_replacements_among_them() -> None:
    settings = FilterSettings(
        options=FilterOptions(
            drop_zero_spread=True,
            min_response_tokens=0,
            max_response_tokens=None,
            function="mine.py:judge",
            on_failed_sample="refill",
            max_refills=2,
            min_group_size=2,
        )
    )
    machine = Filter(settings)
    for index in (0, 2):
        scored = drive.sample(7, index, reward=float(index))
        machine.handle(SampleScored(sample=scored, group_size=4, prompt=drive.prompt()))
    key = SampleKey(7, 3)
    machine.handle(SampleFailed(key=key, attempt=2, group_size=4, prompt=drive.prompt(), reason="", num_tokens=0))
    assert machine.waits() == (Wait("sample", "7/1", "prompt_source", 2), Wait("sample", "7/7", "prompt_source", 2))
    for index in (1, 7):
        scored = drive.sample(7, index, reward=float(index))
        machine.handle(SampleScored(sample=scored, group_size=4, prompt=drive.prompt()))
    assert machine.waits() == (Wait("verdict on group", "7", OWN_BACKEND),)


# --- WeightPublisher ----------------------------------------------------------------------------------------------


def test_the_publisher_waits_for_the_learner_and_for_engines_on_their_way() -> None:
    settings = WeightPublisherSettings(
        options=WeightsOptions(
            stage_timeout_s=10.0,
            commit_timeout_s=20.0,
            drain_timeout_s=300.0,
            announce_fraction=0.5,
            canary=True,
            canary_tolerance=0.05,
            max_failed_publishes=3,
        )
    )
    publisher = WeightPublisher(settings)
    for name in ("engine/0", "engine/1", "engine/2"):
        publisher.handle(EngineJoined(name=name, epoch=0))
    for name in ("engine/0", "engine/1"):
        publisher.handle(EngineReady(engine=name, engine_epoch=0, num_slots=4))
    assert publisher.waits() == (
        Wait("start of", "engine/2", "engine/2"),
        Wait("publish of", "version 0", "learner"),
    )
    publisher.handle(WeightsExported(manifest=manifest(0), update_mode=UpdateMode.DRAIN))
    publisher.handle(EngineReady(engine="engine/2", engine_epoch=0, num_slots=4))
    for name in ("engine/0", "engine/1"):
        fetched = WeightsFetched(engine=name, engine_epoch=0, version=0, publish=0, digest="digest-0")
        publisher.handle(fetched)
    assert publisher.waits() == (
        Wait("swapped weights of", "version 0", "engine/0"),
        Wait("canary of", "version 0", "engine/0"),
        Wait("fetched weights of", "version 0", "engine/2"),
    )


# --- Buffer and Learner -------------------------------------------------------------------------------------------


def test_the_buffer_waits_for_a_version_and_the_learner_then_for_groups_then_for_a_receipt() -> None:
    bench = BufferBench(eta=1, groups_per_batch=2)
    bench.hear(Started(epoch=0), LearnerReady(epoch=0, version=-1))
    assert bench.buffer.waits() == (
        Wait("announcement of", "version 0", "weight_publisher"),
        Wait("loading of", "version 0", "learner"),
    )
    bench.hear(announced(0), LearnerReady(epoch=0, version=0))
    assert [(w.what, w.subject, w.on, w.num) for w in bench.buffer.waits()] == [
        ("group", "0", "filter", 1),
        ("group", "1", "filter", 1),
        ("group", "2", "filter", 2),
    ]
    bench.admit(0)
    bench.admit(1)
    assert bench.buffer.waits() == (Wait("receipt of", "batch 1", "learner"),)


def test_the_learner_waits_for_the_buffer_or_for_its_backend() -> None:
    learner = Learner(LearnerSettings(epoch=2, publish_every=1, save_every=1000, step_timeout_s=60.0))
    learner.handle(Started(epoch=2))
    assert learner.waits() == (Wait("name of", "a checkpoint", "buffer"),)
    learner.handle(CheckpointNamed(learner_epoch=2, version=4, path="c4", announced_version=5))
    assert [wait.on for wait in learner.waits()] == [OWN_BACKEND]
    learner.handle(LearnerOpened(version=4))
    assert learner.waits() == (Wait("offer of", "batch 5", "buffer"),)
