# ruff: noqa: ANN401 - what stands in for a part takes whatever the part took
# pyright: reportPrivateUsage=false
"""Recorded runs, replayed: sound rules give every command again, and a changed rule shows where it is applied."""

from __future__ import annotations

import gzip
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from unittest.mock import Mock, patch

import msgspec
import pytest
import test_mutations
from trials.draws import draw_trial
from trials.faults import FaultKind
from trials.fuzz import TrialRun

from penstock import api
from penstock.actors.filter.machine import Filter
from penstock.actors.weight_publisher.machine import WeightPublisher
from penstock.messages.errors import UserFault
from penstock.messages.local import TimerFired
from penstock.runtime.cli import replay as view
from penstock.runtime.hosts.virtual.recording import RunRecording
from penstock.runtime.hosts.virtual.simulate import simulated
from penstock.runtime.launch.runs import close_record, open_record
from penstock.runtime.observability import recording
from penstock.runtime.observability.disk_budget import DiskKeeper
from penstock.runtime.observability.event_observer import EventObserver
from penstock.runtime.observability.recording import Recording, recording_file
from penstock.runtime.observability.trackers import EventLog
from penstock.runtime.run import replay
from penstock.runtime.run.replay import Choice, replay_run
from penstock.runtime.run.wiring import build_machine, hears
from penstock.runtime.scenario import load_scenario
from penstock.runtime.shell.shell import Shell, ShellSettings
from penstock.runtime.terminal import TerminalConsole

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import Any

    from penstock.messages.commands import AnyCommand
    from penstock.runtime.run.replay import Replayed

EVERYTHING = Choice()
NUM_TRIALS = 12


def record(number: int, folder: Path, *, segment_bytes: int = 0) -> Path:
    """One of the random trials, with its faults, in a folder."""
    trial = draw_trial(test_mutations.POLICIES[number % 3], number)
    trial = msgspec.structs.replace(trial, rank="policy", row_choices=())  # of a scenario alone: what a plan holds
    run, plan = TrialRun(trial, with_digest=False), trial.plan
    watcher = RunRecording(folder, lambda _: plan, segment_bytes=segment_bytes)
    run.host.watch(watcher)
    run.run()
    watcher.close()
    return folder


KEPT: list[TemporaryDirectory[str]] = []
"""Until the process ends."""


@cache
def recorded(number: int) -> Path:
    """The same, once for all tests that read it."""
    KEPT.append(TemporaryDirectory(prefix="replay-"))
    return record(number, Path(KEPT[-1].name))


@pytest.mark.parametrize("number", range(NUM_TRIALS))
def test_every_command_of_a_run_with_faults_comes_out_again(number: int) -> None:
    replayed = replay_run(recorded(number), EVERYTHING)
    assert (replayed.moment, replayed.notes) == (None, ())
    assert replayed.num_events > 100
    assert replayed.num_commands > 100


def test_among_these_runs_actors_are_killed_and_replaced_lines_cut_and_machines_lost() -> None:
    names = {path.stem for number in range(NUM_TRIALS) for path in (recorded(number) / "recording").glob("*.jsonl")}
    assert {name.rpartition("-")[0] for name in names if not name.endswith("-0")} >= {"buffer", "filter", "learner"}
    trials = [draw_trial(test_mutations.POLICIES[number % 3], number) for number in range(NUM_TRIALS)]
    kinds = {fault.kind for trial in trials for fault in trial.faults}
    assert kinds >= {FaultKind.KILL, FaultKind.STOP, FaultKind.CUT, FaultKind.MACHINE}


SHOWS_AT: dict[str, tuple[int, str, set[str]]] = {
    "counts_double": (12, "buffer", {"StepFinished"}),
    "loses_a_group": (4, "filter", {"SampleScored", "GroupJudged", "SamplesJudged"}),
    "loses_a_sample": (4, "filter", {"SampleScored"}),
    "bound_is_off_by_one": (12, "buffer", {"VersionAnnounced"}),
    "deadline_is_off_by_one": (4, "buffer", {"StepFinished"}),
    "version_goes_down": (10, "buffer", {"StepFinished", "LearnerReady"}),
    "swallows_a_failure": (12, "filter", {"ScoringFailed"}),
    "turns_failure_into_zero_tokens": (12, "prompt_source", {"GenerationClosed"}),
    "settles_too_early": (12, "buffer", {"VersionAnnounced"}),
    "forms_the_open_batch_anew": (0, "buffer", {"Started"}),
    "forgets_its_grants": (0, "buffer", {"Started"}),
    "loads_what_it_finds": (78, "learner", {"CheckpointNamed"}),
    "believes_that_the_learner_is_level": (0, "buffer", {"LearnerReady"}),
    "ends_without_the_last_checkpoint": (12, "buffer", {"StepFinished"}),
    "releases_what_an_older_checkpoint_needs": (12, "buffer", {"CheckpointSaved"}),
    "records_receipts_again": (0, "buffer", {"StepFinished"}),
    "comes_back_without_telling_anyone": (12, "buffer", {"Started"}),
    "goes_on_from_anywhere": (14, "prompt_source", {"GenerationClosed"}),
    "cuts_behind_the_save_point": (14, "prompt_source", {"GenerationClosed"}),
    "gives_a_source_its_rows_too_often": (14, "prompt_source", {"DemandGranted"}),
    "grants_under_a_pause": (24, "buffer", {"GrantsPaused"}),
    "names_as_a_source_who_has_other_weights": (4, "weight_publisher", {"WeightsApplied", "EngineReady"}),
    "waits_in_a_circle": (16, "weight_publisher", {"WeightsFetched"}),
    "keeps_who_is_given_up": (17, "buffer", {"EngineGivenUp"}),
    "lends_awake": (4, "learner", {"TimerFired"}),
    "keeps_what_it_has": (4, "engine-1", {"GenerationEnded", "DeviceTurned"}),
    "counts_on_who_sleeps": (4, "weight_publisher", {"EngineReady"}),
    "sends_to_who_sleeps": (4, "prompt_source", {"PromptsFetched", "EngineReady", "GenerationClosed"}),
    "wakes_with_what_it_had": (4, "engine-1", {"WeightsStaged", "DeviceTurned"}),
    "says_nothing_after_a_swap": (4, "engine-0", {"WeightsSwapped"}),
    "waits_for_weights_anywhere": (4, "prompt_source", {"PromptsFetched"}),
    "lets_go_what_engines_are_told_of": (12, "learner", {"VersionAnnounced"}),
    "lets_a_checkpoint_too_many_go": (12, "learner", {"CheckpointsKept"}),
    "takes_an_older_yield": (307, "learner", {"CheckpointNamed"}),
    "yields_once": (13, "engine-1", {"EngineSlept"}),
    "passes_on_what_wrong_weights_made": (7, "engine-2", {"WeightsSwapped"}),
    "takes_every_word_for_a_new_turn": (0, "weight_publisher", {"EngineReady"}),
    "believes_every_fetch": (13, "weight_publisher", {"WeightsFetched"}),
    "tries_once": (3, "prompt_source", {"GenerationClosed"}),
    "asks_nobody_after_a_loss": (0, "prompt_source", {"ActorLost"}),
    "begins_every_sample_anew": (10, "prompt_source", {"GenerationClosed"}),
    "waits_for_what_stands_still": (22, "prompt_source", {"LeasesHeld"}),
    "takes_a_census_with_every_sweep": (17, "prompt_source", {"TimerFired"}),
    "trusts_its_backend": (166, "learner", {"TimerFired"}),
    "stops_at_once": (61, "buffer", {"StopAsked"}),
}
"""Of planted bugs: a trial whose run comes to the rule, and the actor and events on which the rule is applied."""
NOT_OF_ACTORS = {"admits_twice", "two_writers", "reads_before_it_claims", "forgets_that_rows_were_chosen"}
"""Bugs of delivery, of the ledger's store and of the plan: they change what an actor hears, not what it makes of it."""


def test_every_planted_bug_is_replayed_or_is_none_of_an_actors() -> None:
    assert {plant.__name__ for plant in test_mutations.MUTATIONS} == SHOWS_AT.keys() | NOT_OF_ACTORS


@pytest.mark.parametrize(
    "plant", [p for p in test_mutations.MUTATIONS if p.__name__ in SHOWS_AT], ids=lambda plant: plant.__name__
)
def test_a_changed_rule_shows_at_the_event_on_which_it_is_applied(
    plant: Callable[[], AbstractContextManager[Any]],
) -> None:
    number, actor, events = SHOWS_AT[plant.__name__]
    folder = recorded(number)
    with plant():
        replayed = replay_run(folder, EVERYTHING)
        found = replayed.moment
        assert found is not None
        assert not replay_run(folder, Choice(actor=actor)).is_same
    assert not replayed.is_same
    assert (found.incarnation.rpartition("-")[0], found.error) == (actor, "")
    assert found.handled.event in events
    assert [command for command in found.commands if not command.is_same]
    assert 0 < replayed.num_events < replay_run(folder, EVERYTHING).num_events


# --- what is shown ----------------------------------------------------------------------------------------------------


def told(folder: Path, choice: Choice = EVERYTHING, *, as_json: bool = False) -> tuple[int, str]:
    """Exit code and output."""
    output = StringIO()
    return view.show_replay(folder, TerminalConsole(file=output, width=200), choice, as_json=as_json), output.getvalue()


def test_a_divergence_is_told_with_both_sides_the_place_and_the_story_of_its_group() -> None:
    folder = recorded(4)
    with test_mutations.loses_a_sample():
        code, text = told(folder)
        json_code, answer = told(folder, as_json=True)
    shown = msgspec.json.decode(answer, type=view.Answer)
    assert code == json_code == 1
    assert shown.moment is not None
    assert not shown.is_same
    (side,) = shown.moment.commands
    assert side.recorded.startswith("JudgeSamples(group=(group_id=0, ")
    assert side.derived.startswith("JudgeSamples(group=(group_id=0, ")
    assert side.first_difference == "group.samples: 4 items → 3"
    group = shown.moment.subject.partition("/")[0]
    story = [line for line in shown.moment.story if line.subject]
    assert story
    assert {line.subject.partition("/")[0] for line in story} == {group}
    assert {"SampleIssued", "GenerationEnded", "SampleJudged"} <= {line.event for line in story}
    assert shown.moment.event_id in text
    assert side.first_difference in text
    assert told(folder)[0] == 0
    assert "no difference in" in told(folder)[1]


def test_it_stops_behind_a_step_behind_an_event_and_where_it_is_asked_to_break() -> None:
    folder = recorded(4)
    step = replay_run(folder, Choice(until="1", breaks_on=""))
    whole = replay_run(folder, EVERYTHING)
    assert 0 < step.num_events < whole.num_events
    broken = replay_run(folder, Choice(until="", breaks_on="GroupAdmitted")).moment
    assert broken is not None
    assert broken.incarnation == "filter-0", "who asks for it comes before who hears it"
    again = replay_run(folder, Choice(until=broken.event_id, breaks_on="")).moment
    assert again == broken
    group = replay_run(folder, Choice(breaks_on="1")).moment
    assert group is not None
    assert group.handled.subject.startswith("1/")
    sample = replay_run(folder, Choice(breaks_on="1/1", actor="scorer")).moment
    assert sample is not None
    assert (sample.incarnation, sample.handled.subject) == ("scorer-0", "1/1")
    code, text = told(folder, Choice(breaks_on="1/1", actor="scorer"))
    assert code == 0
    assert "stopped" in text
    assert sample.event_id in text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"until": "soon"}, "neither the number of a step nor an event"),
        ({"until": "999"}, "step 999 is not in the recording; it has steps 1 to "),
        ({"actor": "nobody"}, "nobody is not in the recording, which has buffer, "),
    ],
)
def test_what_is_not_there_is_told(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserFault, match=why):
        replay_run(recorded(4), Choice(**options))
    assert replay_run(recorded(4), Choice(breaks_on="9999/1")).notes == ("9999/1 did not come",)


def test_a_run_that_was_not_recorded_and_one_of_other_rules_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserFault, match=r"not a run's folder: it has no scenario\.yaml"):
        replay_run(tmp_path, EVERYTHING)
    (tmp_path / "scenario.yaml").touch()
    with pytest.raises(UserFault, match=r"nothing was recorded: run it with observability\.record=true"):
        replay_run(tmp_path, EVERYTHING)
    folder = recorded(4)
    monkeypatch.setattr(replay, "rules_digest", lambda: "0123456789abcdef")
    with pytest.raises(UserFault, match=r"with rules [0-9a-f]{16}; this is .*0123456789abcdef.*--anyway"):
        replay_run(folder, EVERYTHING)
    replayed = replay_run(folder, Choice(anyway=True))
    assert replayed.is_same
    assert len(replayed.notes) == 1
    assert "0123456789abcdef" in replayed.notes[0]


# --- files ------------------------------------------------------------------------------------------------------------


def test_segments_compressed_ones_and_a_torn_last_line_are_read(tmp_path: Path) -> None:
    record(4, tmp_path, segment_bytes=20 << 10)
    whole = replay_run(recorded(4), EVERYTHING)
    assert replay_run(tmp_path, EVERYTHING) == whole
    folder = tmp_path / "recording"
    for segment in folder.glob("*.000001.jsonl"):
        (folder / f"{segment.name}.gz").write_bytes(gzip.compress(segment.read_bytes()))
        segment.unlink()
    assert replay_run(tmp_path, EVERYTHING) == whole
    last = recording_file(tmp_path, "buffer", 0)
    assert last.stat().st_size > 10, "no event came after the newest segment had begun"
    last.write_bytes(last.read_bytes()[:-10])
    torn = replay_run(tmp_path, EVERYTHING)
    assert torn.is_same
    assert torn.num_events == whole.num_events - 1
    first = next(iter(sorted(folder.glob("buffer-0.000001*"))))
    first.unlink()
    with pytest.raises(UserFault, match="its first line does not say what buffer-0 was built with"):
        replay_run(tmp_path, EVERYTHING)


def test_a_recording_ends_at_half_of_the_disk_that_it_may_take_and_replays_up_to_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "FLUSH_BYTES", 1)
    keeper, looked = DiskKeeper(tmp_path, 3e-4), Recording.flush

    def flush(self: Recording) -> None:
        looked(self)
        keeper.look()

    monkeypatch.setattr(Recording, "flush", flush)
    record(7, tmp_path, segment_bytes=16 << 10)
    size = sum(path.stat().st_size for path in (tmp_path / "recording").glob("*"))
    assert 0.15e6 < size < 0.45e6, "half of it, and what was open"
    replayed, whole = replay_run(tmp_path, EVERYTHING), replay_run(recorded(7), EVERYTHING)
    assert replayed.is_same
    assert "the recording ends before the run did" in replayed.notes[0]
    assert 0 < replayed.num_events < whole.num_events
    assert any("half of observability.max_disk_gb" in text for text in keeper.take_news())


def raising(self: Filter, event: Any) -> list[AnyCommand]:
    """A Filter that no timer may wake."""
    if isinstance(event, TimerFired):
        raise KeyError(event.key)
    return []


def test_what_an_actor_raised_is_recorded_and_raised_again(tmp_path: Path) -> None:
    plan, written = draw_trial("sync", 1).plan, Recording(tmp_path, "filter", 1, now_s=lambda: 0.0)
    machine = build_machine("filter", plan, epoch=1)
    written.begin(msgspec.msgpack.encode(plan))
    observer = EventObserver(EventLog(), name="filter", epoch=1, now_s=lambda: 0.0, recording=written)
    host = Mock(now_s=Mock(return_value=0.0))
    settings = ShellSettings(name="filter", epoch=1)
    shell = Shell(machine, host, settings=settings, hears=hears("filter"), observer=observer)
    with patch.object(Filter, "handle", raising):
        shell.start()
        with pytest.raises(KeyError):
            shell.on_local(TimerFired(key="late"))
        written.close()
        same = replay_run(tmp_path, EVERYTHING)
    assert (same.is_same, same.num_events) == (True, 2)
    assert same.notes == ("filter-1:2 (TimerFired) raises KeyError: 'late', as it did in the run",)
    sound = replay_run(tmp_path, EVERYTHING)
    assert not sound.is_same, "it does not raise any more"
    with patch.object(Filter, "handle", side_effect=ValueError("at once")):
        new = replay_run(tmp_path, EVERYTHING).moment
    assert new is not None
    assert (new.event_id, new.error, new.handled.error) == ("filter-1:1", "ValueError: at once", "")


def test_a_simulated_run_that_writes_a_folder_is_recorded_where_its_scenario_says_so(tmp_path: Path) -> None:
    keys = ("observability.record=true", "run.num_steps=2")
    scenario = load_scenario(Path(__file__).parents[1] / "chaos" / "modelled.yaml", keys)
    simulated(scenario, seed=1, run_folder=tmp_path / "run")
    replayed = replay_run(tmp_path / "run", EVERYTHING)
    assert (replayed.moment, replayed.notes, replayed.num_incarnations) == (None, (), 8)


def test_a_command_that_no_longer_comes_is_told() -> None:
    folder, handle = recorded(4), WeightPublisher.handle

    def silent(self: WeightPublisher, event: Any) -> Any:
        return handle(self, event)[:-1]

    with patch.object(WeightPublisher, "handle", silent):
        lost: Replayed = replay_run(folder, Choice(actor="weight_publisher"))
    assert lost.moment is not None
    (command,) = [each for each in lost.moment.commands if not each.is_same]
    assert command.recorded is not None
    assert command.derived is None


def test_a_program_replays_as_the_command_does(tmp_path: Path) -> None:
    folder = record(1, tmp_path)
    close_record(folder, open_record(folder, "small"), 0)
    assert api.replay(folder) == replay_run(folder, EVERYTHING)
    stopped = api.replay(folder, actor="buffer", breaks_on="GroupAdmitted")
    assert stopped == replay_run(folder, Choice(actor="buffer", breaks_on="GroupAdmitted"))
    assert stopped.moment is not None
