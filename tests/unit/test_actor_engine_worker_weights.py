"""The EngineWorker and its weights: fetching, the three ways of swapping, wrong digests and canaries."""

from __future__ import annotations

import actor_driver as drive
import pytest
from engine_bench import CANARY, NAN, EngineBench, applied, canary_logprobs, manifest, submitted

from penstock.messages.base import Metric
from penstock.messages.commands import ApplyWeights, FetchWeights, Generate, InterruptGenerations, Send
from penstock.messages.flow import GenerationProgressed, SampleGenerated, SamplesSettled, SettledState
from penstock.messages.local import GenerationAdvanced, WeightsStagedLocally, WeightsSwapped
from penstock.messages.samples import SampleKey
from penstock.messages.training import Activity, NoticeGiven, UpdateMode
from penstock.messages.weights import (
    DrainFinished,
    EngineReady,
    WeightsApplied,
    WeightsCommitted,
    WeightsFetched,
    WeightsStaged,
)

FIRST = SampleKey(0, 0)


# --- staging ------------------------------------------------------------------------------------------------------


def test_staged_weights_are_fetched_while_the_engine_goes_on() -> None:
    bench = EngineBench().serving()
    bench.issue(0)
    assert bench.hear(WeightsStaged(manifest=manifest(1))) == [FetchWeights(manifest(1))]
    assert submitted(bench.issue(1)) == [1]
    fetched = drive.one_sent(bench.fetched(1), WeightsFetched, to="weight_publisher")
    assert (fetched.engine, fetched.version, fetched.publish, fetched.digest, fetched.error) == (
        "engine/0",
        1,
        1,
        "digest-1",
        "",
    )


def test_prompt_source_is_told_what_is_served_after_each_swap_and_of_nothing_when_that_is_wrong() -> None:
    bench = EngineBench().opened(num_slots=3)
    told: list[int] = []
    for publish, digest in ((0, None), (1, None), (2, "other"), (3, None)):
        bench.stage(publish)
        bench.commit(publish)
        ready = drive.one_sent(bench.swap(digest=digest), EngineReady, to="prompt_source")
        assert (ready.engine, ready.engine_epoch, ready.num_slots) == ("engine/0", 0, 3)
        told.append(ready.version)
    assert told == [0, 1, -1, 3]


def test_nothing_is_swapped_before_it_is_committed() -> None:
    assert applied(EngineBench().serving().stage(1)) == []


def test_a_fetch_that_failed_is_told_and_may_be_tried_again() -> None:
    bench = EngineBench().serving()
    assert drive.one_sent(bench.stage(1, digest="", error="no such file"), WeightsFetched).error == "no such file"
    assert bench.commit(1) == []
    assert drive.one_sent(bench.stage(1), WeightsFetched).error == ""
    assert applied(bench.commit(1)) == [1]


def test_weights_of_another_digest_are_an_error_and_are_not_swapped_to() -> None:
    bench = EngineBench().serving()
    fetched = drive.one_sent(bench.stage(1, digest="other"), WeightsFetched)
    assert (fetched.digest, fetched.error) == (
        "other",
        "the weights fetched have the digest other, those exported digest-1",
    )
    assert bench.commit(1) == []


def test_a_newer_version_waits_for_the_fetch_that_runs_and_then_takes_its_place() -> None:
    bench = EngineBench().serving()
    bench.hear(WeightsStaged(manifest=manifest(1)))
    assert bench.hear(WeightsStaged(manifest=manifest(2))) == []
    assert bench.hear(WeightsStaged(manifest=manifest(3))) == []
    commands = bench.fetched(1)
    assert drive.every(commands, FetchWeights) == [FetchWeights(manifest(3))]
    bench.fetched(3)
    assert applied(bench.commit(3)) == [3]


def test_an_answer_to_another_fetch_changes_nothing() -> None:
    bench = EngineBench().serving()
    bench.driver.ignores(WeightsStagedLocally(version=1, publish=1, digest="digest-1"))
    bench.hear(WeightsStaged(manifest=manifest(2)))
    bench.driver.ignores(WeightsStagedLocally(version=1, publish=1, digest="digest-1"))
    assert drive.one_sent(bench.fetched(2), WeightsFetched).error == ""


def test_what_is_staged_already_is_told_again_and_not_fetched_again() -> None:
    bench = EngineBench().serving()
    bench.stage(1)
    commands = bench.hear(WeightsStaged(manifest=manifest(1)))
    assert drive.every(commands, FetchWeights) == []
    assert drive.one_sent(commands, WeightsFetched).publish == 1


def test_what_is_served_already_is_answered_with_what_is_served() -> None:
    bench = EngineBench().serving(publish=4)
    for old in (3, 4):
        commands = bench.hear(WeightsStaged(manifest=manifest(old)))
        assert drive.every(commands, FetchWeights) == []
        assert drive.one_sent(commands, WeightsApplied).publish == 4


def test_an_engine_does_not_go_back_to_an_older_version_under_a_newer_number() -> None:
    """A learner that goes over old batches again publishes old versions again."""
    bench = EngineBench().serving(publish=4)
    commands = bench.hear(WeightsStaged(manifest=manifest(1_000_000, version=3)))
    assert drive.every(commands, FetchWeights) == []
    assert drive.one_sent(commands, WeightsApplied).version == 4


def test_what_is_being_swapped_to_is_not_fetched_again() -> None:
    bench = EngineBench().serving()
    bench.stage(1)
    bench.commit(1)
    bench.driver.ignores(WeightsStaged(manifest=manifest(1)))
    assert drive.one_sent(bench.swap(), WeightsApplied).publish == 1


# --- committing ---------------------------------------------------------------------------------------------------


def test_a_commit_of_what_is_served_or_older_is_answered_and_otherwise_ignored() -> None:
    bench = EngineBench().serving(publish=4)
    for old in (2, 4):
        commands = bench.commit(old)
        assert [type(command) for command in commands] == [Send]
        event = drive.one_sent(commands, WeightsApplied, to="weight_publisher")
        assert (event.version, event.publish, event.digest) == (4, 4, "digest-4")


def test_a_commit_of_what_was_never_fetched_changes_nothing() -> None:
    """It was meant for the incarnation before this one."""
    bench = EngineBench().serving()
    bench.driver.ignores(WeightsCommitted(version=1, publish=1, update_mode=UpdateMode.DRAIN))
    assert applied(bench.stage(1)) == []


def test_an_idle_engine_swaps_at_once_in_every_mode() -> None:
    for mode in UpdateMode:
        bench = EngineBench().serving()
        bench.stage(1)
        commands = bench.commit(1, mode)
        assert drive.one_sent(commands, DrainFinished).publish == 1
        assert drive.every(commands, ApplyWeights) == [ApplyWeights(manifest(1), mode)]
        assert bench.activity() is Activity.APPLYING_WEIGHTS


def test_drain_submits_nothing_more_and_swaps_when_the_last_has_ended() -> None:
    bench = EngineBench().serving(num_slots=2)
    for group_id in range(3):
        bench.issue(group_id)
    bench.stage(1)
    assert bench.commit(1, UpdateMode.DRAIN) == []
    assert bench.worker.state == "draining"
    assert submitted(bench.end(0)) == []
    commands = bench.end(1)
    assert drive.one_sent(commands, DrainFinished, to="weight_publisher").version == 1
    assert applied(commands) == [1]
    assert submitted(commands) == []
    assert submitted(bench.swap()) == [2]


def test_a_drain_ends_too_when_what_runs_is_settled() -> None:
    bench = EngineBench().serving()
    bench.issue(0)
    bench.stage(1)
    bench.commit(1, UpdateMode.DRAIN)
    commands = bench.hear(SamplesSettled(settled=SettledState(1, 1, ())))
    assert applied(commands) == [1]


def test_interrupt_stops_what_runs_swaps_and_goes_on_from_the_tokens_so_far() -> None:
    bench = EngineBench().serving(num_slots=2)
    for group_id in range(3):
        bench.issue(group_id)
    bench.stage(1)
    assert bench.commit(1, UpdateMode.INTERRUPT) == [InterruptGenerations()]
    assert bench.worker.state == "interrupting"
    assert applied(bench.interrupted(0, drive.part((0, 5)))) == []
    commands = bench.end(1)
    assert drive.sent(commands, SampleGenerated) != [], "it came to its end before it could be interrupted"
    assert applied(commands) == [1]
    commands = bench.swap()
    assert [(g.key.group_id, g.attempt, g.prefix) for g in drive.every(commands, Generate)] == [
        (0, 0, drive.part((0, 5))),
        (2, 0, None),
    ]


def test_interrupted_requests_go_on_before_those_that_have_waited() -> None:
    bench = EngineBench().serving(num_slots=1)
    bench.issue(0)
    bench.issue(1)
    bench.stage(1)
    bench.commit(1, UpdateMode.INTERRUPT)
    bench.interrupted(0, drive.part((0, 5)))
    assert submitted(bench.swap()) == [0]


def test_tokens_that_were_not_reported_before_an_interruption_are_reported_then() -> None:
    """PromptSource joins only reports without a gap: with one, the sample could never be continued elsewhere."""
    bench = EngineBench().serving()
    bench.issue(0)
    bench.advance(0, 0, drive.part((0, 4)))
    bench.stage(1)
    bench.commit(1, UpdateMode.INTERRUPT)
    report = drive.one_sent(bench.interrupted(0, drive.part((0, 7))), GenerationProgressed)
    assert (report.from_token, report.num_tokens, report.chunk.num_tokens) == (4, 7, 3)
    assert report.chunk.tokens == drive.part((0, 7)).tokens[16:]
    bench.swap()
    again = drive.one_sent(bench.advance(0, 7, drive.part((1, 2))), GenerationProgressed)
    assert (again.from_token, again.num_tokens) == (7, 9)


def test_an_interruption_that_brings_nothing_new_is_not_reported() -> None:
    bench = EngineBench().serving()
    bench.issue(0, prefix=drive.part((0, 4)))
    bench.stage(1)
    bench.commit(1, UpdateMode.INTERRUPT)
    assert drive.sent(bench.interrupted(0, drive.part((0, 4))), GenerationProgressed) == []


def test_in_flight_swaps_between_two_steps_and_what_runs_goes_on() -> None:
    bench = EngineBench().serving(num_slots=2)
    bench.issue(0)
    bench.stage(1)
    commands = bench.commit(1, UpdateMode.IN_FLIGHT)
    assert drive.every(commands, ApplyWeights) == [ApplyWeights(manifest(1), UpdateMode.IN_FLIGHT)]
    assert drive.every(commands, InterruptGenerations) == []
    assert submitted(bench.issue(1)) == [], "nothing is submitted while the swap is under way"
    assert bench.activity() is Activity.WORKING
    assert drive.sent(bench.end(0), SampleGenerated) != []
    assert submitted(bench.swap()) == [1]


def test_a_swap_is_told_with_the_digest_and_the_canary_of_what_was_loaded() -> None:
    bench = EngineBench().opened()
    bench.stage(3)
    bench.commit(3)
    event = drive.one_sent(bench.swap(), WeightsApplied, to="weight_publisher")
    assert (event.engine, event.engine_epoch, event.version, event.publish) == ("engine/0", 0, 3, 3)
    assert (event.digest, event.canary_logprobs) == ("digest-3", CANARY.logprobs)


def test_an_answer_to_another_swap_changes_nothing() -> None:
    bench = EngineBench().serving()
    swapped = WeightsSwapped(version=9, publish=9, digest="digest-9")
    bench.driver.ignores(swapped)
    bench.stage(1)
    bench.commit(1)
    bench.driver.ignores(swapped)
    assert drive.one_sent(bench.swap(), WeightsApplied).publish == 1


# --- wrong weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("digest", "logprobs", "why"),
    [
        (None, canary_logprobs(off=0.25), "the canary is off by 0.25 of its spread"),
        (None, canary_logprobs(off=NAN), "the canary is off by inf of its spread"),
        (None, b"", "the canary is off by inf of its spread"),
        ("other", CANARY.logprobs, "the digest of what was loaded is other"),
    ],
)
def test_an_engine_with_wrong_weights_says_so_and_passes_nothing_on(
    digest: str | None, logprobs: bytes, why: str
) -> None:
    bench = EngineBench().serving(num_slots=2)
    bench.issue(0)
    bench.issue(1)
    bench.stage(1)
    bench.commit(1)
    commands = bench.swap(digest=digest, canary_logprobs=logprobs)
    assert why in drive.one_sent(commands, NoticeGiven, to="supervisor").text
    event = drive.one_sent(commands, WeightsApplied)
    assert (event.publish, event.canary_logprobs) == (1, logprobs)
    assert bench.worker.state == "spoilt"
    assert drive.one(commands, InterruptGenerations)
    assert drive.one(commands, InterruptGenerations)
    bench.driver.ignores(GenerationAdvanced(key=FIRST, attempt=0, from_token=0, chunk=drive.part((1, 3))))
    assert bench.end(0, drive.part((0, 2), (1, 3))) == [], "what has come to its end with them is dropped as well"
    assert submitted(bench.issue(2)) == []


def test_after_wrong_weights_the_good_ones_are_loaded_again_and_requests_go_on_from_what_they_had() -> None:
    bench = EngineBench().serving(num_slots=2)
    bench.issue(0)
    bench.issue(1)
    bench.advance(0, 0, drive.part((0, 2)))
    bench.stage(1)
    bench.commit(1)
    bench.swap(canary_logprobs=b"")
    assert drive.one(bench.hear(WeightsStaged(manifest=manifest(0))), FetchWeights).manifest.publish == 0
    bench.fetched(0)
    assert bench.commit(0) == [], "two are still to end"
    bench.interrupted(0, drive.part((0, 2), (1, 3)))
    assert applied(bench.interrupted(1, drive.part((1, 4)))) == [0]
    commands = bench.swap()
    assert bench.worker.state == "serving"
    assert bench.worker.metrics == (
        Metric("engine/bad_version_tokens", 7),
        Metric("engine/canary_difference", 0.0),
    )
    again = {generate.key.group_id: generate.prefix for generate in drive.every(commands, Generate)}
    assert again == {0: drive.part((0, 2)), 1: None}


def test_an_engine_that_holds_its_requests_is_not_interrupted_before_a_swap() -> None:
    bench = EngineBench(retracts=True).serving(num_slots=2)
    bench.issue(0)
    bench.stage(1)
    assert bench.commit(1, UpdateMode.INTERRUPT) == [ApplyWeights(manifest(1), UpdateMode.INTERRUPT)]
    assert submitted(bench.issue(1)) == [], "from the pause until the swap is done nothing is submitted"
    assert submitted(bench.swap()) == [1]


def test_a_small_difference_is_the_kernels_own() -> None:
    bench = EngineBench().opened()
    bench.stage(0)
    bench.commit(0)
    bench.swap(canary_logprobs=canary_logprobs(off=0.04))
    assert bench.worker.state == "serving"


def test_an_engine_that_is_told_not_to_checks_no_canary() -> None:
    bench = EngineBench(check_canary=False).opened()
    bench.stage(0)
    bench.commit(0)
    bench.swap(canary_logprobs=b"")
    assert bench.worker.state == "serving"


def test_the_publisher_may_go_back_to_an_older_publish_while_a_newer_one_is_fetched() -> None:
    """The newer one has failed on another engine meanwhile."""
    bench = EngineBench().opened()
    bench.hear(WeightsStaged(manifest=manifest(5)))
    assert bench.hear(WeightsStaged(manifest=manifest(4))) == []
    commands = bench.fetched(5)
    assert drive.one(commands, FetchWeights).manifest.publish == 4
    bench.fetched(4)
    assert applied(bench.commit(4)) == [4]


@pytest.mark.parametrize("is_swapping", [True, False])
def test_an_engine_does_not_go_back_to_weights_that_are_staged_around_its_swap(is_swapping: bool) -> None:
    """A Learner that went back to a checkpoint publishes an older version under a newer number, and the publisher that
    asked for the swap is gone."""
    bench = EngineBench().serving(0)
    bench.stage(2)
    older = manifest(9, 1)
    fetched = WeightsStagedLocally(version=1, publish=9, digest=older.digest)
    committed = WeightsCommitted(version=1, publish=9, update_mode=UpdateMode.IN_FLIGHT)
    if is_swapping:
        bench.commit(2)
        assert drive.every(bench.hear(WeightsStaged(manifest=older)), FetchWeights) == []
    else:
        bench.hear(WeightsStaged(manifest=older))
        bench.commit(2)
        bench.hear(fetched)
    commands = [*bench.swap(), *bench.hear(committed)]
    assert applied(commands) == []
    assert bench.worker.weights.version == 2
    assert {event.version for event in drive.sent(commands, WeightsApplied)} == {2}
