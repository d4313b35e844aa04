"""An engine that answers from rows, the way of its samples, and what makes no sense in a scenario."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING

import actor_driver as drive
import pytest
from source_bench import SourceBench, keys

from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.engine_worker.settings import EngineWorkerSettings
from penstock.actors.filter.machine import Filter
from penstock.actors.filter.options import FilterOptions
from penstock.actors.filter.settings import FilterSettings
from penstock.actors.scorer.machine import Scorer
from penstock.actors.scorer.settings import ScorerSettings
from penstock.actors.weight_publisher.machine import WeightPublisher
from penstock.actors.weight_publisher.options import WeightsOptions
from penstock.actors.weight_publisher.settings import WeightPublisherSettings
from penstock.backends.checkpoint.make import END_ID, END_TOKEN, character_tokenizer
from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.options import DataOptions, RecordedOptions
from penstock.backends.data.recorded_rows import RecordedSettings
from penstock.backends.engines.recorded.backend import RecordedEngine
from penstock.backends.weights.no_weights import NoWeightsExporter
from penstock.messages.arrays import tokens_view
from penstock.messages.commands import ApplyWeights, FetchWeights, Generate, OpenEngine, Score, Send
from penstock.messages.errors import UserFault
from penstock.messages.flow import GroupAdmitted, SampleGenerated, SampleIssued, SampleScored
from penstock.messages.local import (
    EngineOpened,
    GenerationEnded,
    LocalEvent,
    Started,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.membership import EngineJoined
from penstock.messages.samples import Completed, Loss, Prompt, Purpose, SampleKey, VersionSpan
from penstock.messages.training import UpdateMode
from penstock.messages.weights import (
    Canary,
    EngineReady,
    VersionAnnounced,
    WeightManifest,
    WeightsApplied,
    WeightsCommitted,
    WeightsExported,
    WeightsFetched,
    WeightsStaged,
)
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.protocol import Backend
    from penstock.messages.commands import EngineCommand

CANARY = Canary(tokens=b"\1\0\0\0\2\0\0\0", logprobs=b"\0\0\0\xbf\0\0\x80\xbf")


def manifest(version: int, publish: int = 0, canary: Canary | None = None) -> WeightManifest:
    described = NoWeightsExporter(1).export({}, version=version, publish=publish, canary=None)
    return WeightManifest(
        version=version,
        publish=publish,
        learner_epoch=1,
        transport=described.transport,
        location="",
        size_bytes=0,
        digest=described.digest,
        canary=canary,
    )


@pytest.fixture
def engine(tmp_path: Path) -> tuple[Backend[EngineCommand], deque[LocalEvent]]:
    """Of a file with one row of two responses."""
    character_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_TOKEN}))
    row = {"prompt": "a=", "response": [[5, END_ID], [6, 7, END_ID]], "reward": [1.0, 0.5]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    data = DataOptions(path=str(tmp_path / "rows.jsonl"), recorded=RecordedOptions(reward_key="reward"))
    settings = RecordedSettings(2, 16, are_all_recorded=True, imitates=False)
    dataset = load_dataset(data, tmp_path, seed=0, max_context=32, recorded=settings, keeps_responses=True)
    backend = RecordedEngine(dataset, num_slots=3)
    answers: deque[LocalEvent] = deque()
    backend.start(answers.append, raised)
    return backend, answers


def raised(error: BaseException) -> None:
    raise error


def generate(index: int, row: int = 0) -> Generate:
    prompt = Prompt(row=row, epoch=0, tokens=b"", is_recorded=True)
    return Generate(
        key=SampleKey(4, index), attempt=0, purpose=Purpose.TRAIN, prompt=prompt, seed=0, deadline_version=9
    )


def test_it_answers_at_once_under_the_version_that_it_serves(
    engine: tuple[Backend[EngineCommand], deque[LocalEvent]],
) -> None:
    backend, answers = engine
    backend.execute(OpenEngine())
    assert answers.popleft() == EngineOpened(num_slots=3)
    for version in (3, 7):
        backend.execute(FetchWeights(manifest(version)))
        assert answers.popleft() == WeightsStagedLocally(version=version, publish=0, digest=manifest(version).digest)
        backend.execute(ApplyWeights(manifest(version), UpdateMode.IN_FLIGHT))
        assert answers.popleft() == WeightsSwapped(version=version, publish=0, digest=manifest(version).digest)
        backend.execute(generate(1))
        ended = answers.popleft()
        assert isinstance(ended, GenerationEnded)
        assert ended.part.spans == (VersionSpan(version, 3),)
        assert [*tokens_view(ended.part.tokens)] == [6, 7, END_ID]
        assert isinstance(ended.outcome, Completed)
        assert ended.outcome.reward is not None
        assert ended.outcome.reward.value == 0.5


def test_a_replacement_is_answered_as_what_it_replaces_and_a_row_without_response_is_an_error_of_ours(
    engine: tuple[Backend[EngineCommand], deque[LocalEvent]],
) -> None:
    backend, answers = engine
    backend.execute(ApplyWeights(manifest(0), UpdateMode.DRAIN))
    backend.execute(generate(0))
    backend.execute(generate(2))
    _, first, third = answers
    assert isinstance(first, GenerationEnded)
    assert isinstance(third, GenerationEnded)
    assert first.part == third.part
    with pytest.raises(IndexError):
        backend.execute(generate(0, row=1))


def test_before_any_version_nothing_can_be_answered(
    engine: tuple[Backend[EngineCommand], deque[LocalEvent]],
) -> None:
    with pytest.raises(RuntimeError, match="before any version was served"):
        engine[0].execute(generate(0))


# --- the way of a sample ------------------------------------------------------------------------------------------


def test_samples_of_rows_go_to_engines_that_know_them_and_neither_kind_waits_for_the_other() -> None:
    bench = SourceBench(
        num_samples=2, recorded_engines=("engine/1",), is_recorded=lambda row: row % 2 == 0, max_load=1.0
    )
    bench.started(num_engines=2, num_slots=2)
    issued = bench.grant(6)
    assert {group for group, _ in keys(issued, "engine/0")} == {1}
    assert {group for group, _ in keys(issued, "engine/1")} == {0}
    more = bench.closed("engine/1", SampleKey(0, 0)) + bench.closed("engine/1", SampleKey(0, 1))
    assert {group for group, _ in keys(more, "engine/1")} == {2}  # row 1 of the other kind is still out
    assert keys(more, "engine/0") == []


def test_an_imitated_sample_needs_no_reward_and_its_group_no_spread() -> None:
    prompt = Prompt(row=0, epoch=0, tokens=b"\1\0\0\0", is_recorded=True, loss=Loss.SUPERVISED)
    worker = EngineWorker(EngineWorkerSettings(name="engine/0", epoch=1))
    scorer = Scorer(ScorerSettings(timeout_s=1.0, num_retries=0))
    gate = Filter(
        FilterSettings(
            options=FilterOptions(
                drop_zero_spread=True,
                min_response_tokens=0,
                max_response_tokens=None,
                on_failed_sample="reject",
                max_refills=0,
                min_group_size=1,
            )
        )
    )
    worker.handle(Started(epoch=1))
    worker.handle(EngineOpened(num_slots=2))
    worker.handle(WeightsStaged(manifest=manifest(0)))
    worker.handle(WeightsStagedLocally(version=0, publish=0, digest="none"))
    worker.handle(WeightsCommitted(version=0, publish=0, update_mode=UpdateMode.DRAIN))
    worker.handle(WeightsSwapped(version=0, publish=0, digest="none"))
    key = SampleKey(0, 0)
    issued = SampleIssued(key=key, attempt=0, group_size=1, prompt=prompt, seed=0, min_version=0, deadline_version=3)
    assert drive.every(worker.handle(issued), Generate)
    ended = GenerationEnded(key=key, attempt=0, outcome=Completed(), part=drive.part((0, 3)))
    (generated,) = [s.event for s in drive.every(worker.handle(ended), Send) if isinstance(s.event, SampleGenerated)]
    assert generated.sample.loss is Loss.SUPERVISED
    commands = scorer.handle(generated)
    assert not drive.every(commands, Score)
    (scored,) = [s.event for s in drive.every(commands, Send) if isinstance(s.event, SampleScored)]
    assert scored.sample.reward is None
    assert [type(send.event) for send in drive.every(gate.handle(scored), Send)] == [GroupAdmitted]


def publisher(*, has_models: bool) -> WeightPublisher:
    machine = WeightPublisher(
        WeightPublisherSettings(
            options=WeightsOptions(
                stage_timeout_s=1.0,
                commit_timeout_s=1.0,
                drain_timeout_s=1.0,
                announce_fraction=1.0,
                canary=True,
                canary_tolerance=0.01,
                max_failed_publishes=3,
            ),
            weightless=("engine/0",),
            has_models=has_models,
        )
    )
    for index in range(2 if has_models else 1):
        machine.handle(EngineJoined(name=f"engine/{index}", epoch=1))
        machine.handle(EngineReady(engine=f"engine/{index}", engine_epoch=1, num_slots=1))
    machine.handle(WeightsExported(manifest=manifest(0, canary=CANARY), update_mode=UpdateMode.IN_FLIGHT))
    return machine


def fetched(machine: WeightPublisher, engine: str) -> list[str]:
    """Who is told to commit when this engine has fetched."""
    event = WeightsFetched(engine=engine, engine_epoch=1, version=0, publish=0, digest="none")
    sends = drive.every(machine.handle(event), Send)
    machine.validate()
    return [send.to for send in sends if isinstance(send.event, WeightsCommitted)]


def applied(machine: WeightPublisher, engine: str, logprobs: bytes) -> list[Send]:
    event = WeightsApplied(engine=engine, engine_epoch=1, version=0, publish=0, digest="none", canary_logprobs=logprobs)
    sends = drive.every(machine.handle(event), Send)
    machine.validate()
    return sends


def test_an_engine_without_weights_is_no_canary_and_keeps_the_announcements_going() -> None:
    machine = publisher(has_models=True)
    assert fetched(machine, "engine/0") == []  # it was not given anything to fetch
    assert fetched(machine, "engine/1") == ["engine/1"]
    sends = applied(machine, "engine/1", CANARY.logprobs)
    assert [send.to for send in sends if isinstance(send.event, WeightsStaged)] == ["engine/0"]
    assert fetched(machine, "engine/0") == ["engine/0"]
    announced = [send.event for send in applied(machine, "engine/0", b"") if isinstance(send.event, VersionAnnounced)]
    assert [event.version for event in announced] == [0, 0, 0]


def test_where_no_engine_has_weights_a_version_is_announced_without_any_canary() -> None:
    machine = publisher(has_models=False)
    assert fetched(machine, "engine/0") == ["engine/0"]
    assert any(isinstance(send.event, VersionAnnounced) for send in applied(machine, "engine/0", b""))


def test_a_publish_that_failed_on_the_only_engine_with_weights_is_tried_there_again() -> None:
    machine = publisher(has_models=True)
    fetched(machine, "engine/0")
    fetched(machine, "engine/1")
    applied(machine, "engine/1", b"\0\0\x80\xc0\0\0\x80\xbf")  # its canary is off, and it becomes suspect
    machine.handle(WeightsExported(manifest=manifest(0, publish=1, canary=CANARY), update_mode=UpdateMode.IN_FLIGHT))
    event = WeightsFetched(engine="engine/1", engine_epoch=1, version=0, publish=1, digest="none")
    sends = drive.every(machine.handle(event), Send)
    assert [send.to for send in sends if isinstance(send.event, WeightsCommitted)] == ["engine/1"]


# --- scenarios ----------------------------------------------------------------------------------------------------

BASE = "run: {name: x}\ndata: {path: 'lines:10'}\nmodel: {make: xs}\n"
SFT = "engines: {backend: recorded}\nlearner: {objective: sft}\nsampling: {samples_per_group: 1}\n"
MIXED = "engines: {more: [{backend: recorded}]}\n"


def test_supervised_and_mixed_scenarios_load(tmp_path: Path) -> None:
    for text, overrides in (
        (SFT, ()),
        (MIXED, ("data.recorded.loss=sft",)),
        (MIXED, ("data.recorded.loss_key=loss",)),
        (SFT, ("learner.objective=dpo", "sampling.samples_per_group=2")),
        (SFT, ("learner.objective=grpo", "sampling.samples_per_group=4", "data.recorded.logprobs_key=lp")),
    ):
        (tmp_path / "s.yaml").write_text(BASE + text)
        assert "recorded" in str(load_scenario(tmp_path / "s.yaml", overrides).engines)


@pytest.mark.parametrize(
    ("text", "overrides", "story"),
    [
        (SFT, ("engines.backend=torch",), "learner.objective.name: sft imitates responses that rows hold"),
        ("", ("data.recorded.loss=sft",), "data.recorded: has no effect without engines that answer from rows"),
        (MIXED, (), "dapo compares the policy with whatever drew a response, and nobody knows"),
        (MIXED, ("learner.objective=sft",), "sft imitates every sample, those too that the run's own engines generate"),
        (SFT, ("data.recorded.path=lines:5",), "no engine of the run generates; name them in data.path"),
        (SFT, ("sampling.temperature=0.7",), "the likelihood of a given response is that at temperature 1"),
        (SFT, ("data.recorded.loss=sft",), "has no effect with learner.objective: sft"),
        (
            SFT,
            ("learner.objective=dpo", "filter.drop_zero_spread=false"),
            "compares the samples of a group, and with one there is nothing",
        ),
        (
            MIXED,
            ("learner.objective=dpo", "data.recorded.loss=sft"),
            "dpo is a mean over responses and imitation one over tokens, which have no denominator in common",
        ),
        (
            "",
            ("learner.objective=rejection_sampling", "filter.drop_zero_spread=true"),
            "learns from a group whose rewards are all equal too",
        ),
        (SFT, ("learner.objective.min_reward=1",), "has no effect with estimator: uniform"),
        (
            "",
            ("learner.objective.estimator=threshold", "filter.drop_zero_spread=false"),
            "threshold gives weights of a likelihood",
        ),
        ("", ("learner.objective=dpo", "learner.objective.kl_coef=0.1"), "dpo_beta holds the policy to the reference"),
        (
            MIXED,
            ("learner.objective=kto", "data.recorded.loss=sft"),
            "kto is a mean over responses and imitation one over tokens",
        ),
        (SFT, ("learner.objective=kto", "learner.groups_per_batch=1"), "groups_per_batch: kto puts responses behind"),
        (SFT, ("learner.objective={name: kto, min_reward: null}",), "the reward from which on a response is desirable"),
        (SFT, ("learner.objective={name: kto, dpo_loss: ipo}",), "dpo_loss: has no effect with policy_loss: kto"),
        ("", ("learner.objective={name: ipo, desirable_weight: 2}",), "has no effect with policy_loss: dpo"),
        ("", ("learner.objective={name: ipo, dpo_label_smoothing: 0.1}",), "smooths the labels of dpo_loss: sigmoid"),
        (SFT, ("learner.objective={name: kto, kl_coef: 0.1}",), "dpo_beta holds the policy to the reference already"),
        ("", ("learner.objective.dpo_beta=0.2",), "dpo_beta: has no effect with policy_loss: ppo"),
        (
            "",
            ("learner.objective=dpo", "learner.objective.clip_high=0.5"),
            "has no effect with policy_loss: dpo",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(
    tmp_path: Path, text: str, overrides: tuple[str, ...], story: str
) -> None:
    (tmp_path / "s.yaml").write_text(BASE + text)
    with pytest.raises(UserFault, match=story.replace("(", r"\(")):
        load_scenario(tmp_path / "s.yaml", overrides)
