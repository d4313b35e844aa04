"""Lives from spans and the ledger's word, as trees and as events for a viewer: what is missing, foreign or overlaps."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import msgspec
import opentelemetry.semconv._incubating.attributes.gen_ai_attributes as convention
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE

from penstock.messages.training import Activity
from penstock.runtime.cli.trace import life_tree
from penstock.runtime.observability import gen_ai
from penstock.runtime.observability.lives import STAGES, Fate, life_of
from penstock.runtime.observability.span_collector import readable_span
from penstock.runtime.observability.span_file import actor_attributes
from penstock.runtime.observability.texts import told
from penstock.runtime.observability.trace_view import write_view
from penstock.runtime.observability.traces import SpanRow
from penstock.runtime.observability.trackers import ActivityRow
from penstock.runtime.terminal import TerminalConsole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.runtime.observability.lives import Life
    from penstock.runtime.observability.spans import AttributeValue

SECOND = 10**9
EVIL = 'cannot <script>alert(1)</script> \x1b]0;title\x07 "quoted" [red]'
TRAINED = Fate(
    12, 3, state="trained", version=4, attempt=0, engine="engine/1", num_tokens=7, oldest_version=2, newest_version=3,
    granted_at=10.0, admitted_at=15.0, leased_at=16.0, trained_at=17.5, ended_at=17.5,
)  # fmt: skip


def span(name: str, start_s: float, end_s: float, **attributes: str | int | float | bool) -> SpanRow:
    return SpanRow(
        actor="engine/1", epoch=1, name=name, trace_id="0" * 32, span_id=f"{name}{start_s}", parent_id="",
        start_ns=round(SECOND * start_s), end_ns=round(SECOND * end_s), attributes=attributes,
    )  # fmt: skip


WHOLE = (
    span("issue", 10, 11, attempt=0, group_id=12),
    span("queue", 11, 11.5, attempt=0),
    span("generate", 11.5, 13, attempt=0, outcome="completed", num_tokens=7),
    span("score", 13, 14),
    span("filter", 14, 15, kept=True),
    span("buffer_wait", 15, 16, version=4),
    span("train", 16.25, 17, version=4),
)


def seconds(life: Life, name: str) -> tuple[float, float, bool]:
    """Of the newest stage of this name."""
    stage = [stage for stage in life.stages if stage.name == name][-1]
    return stage.start_ns / SECOND, stage.end_ns / SECOND, stage.is_recorded


def printed(life: Life) -> str:
    console = TerminalConsole(file=io.StringIO(), width=200, force_terminal=False)
    console.print(life_tree(life))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def view(path: Path, lives: Sequence[Life], **lanes: list[ActivityRow]) -> list[dict[str, Any]]:
    write_view(path, began_ns=10 * SECOND, lanes=lanes, lives=lives, steps=())
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


# --- what is missing -------------------------------------------------------------------------------------------------


def test_a_life_with_all_its_spans_is_as_recorded() -> None:
    life = life_of(TRAINED, WHOLE)
    assert [stage.name for stage in life.stages] == list(STAGES)
    assert all(stage.is_recorded for stage in life.stages)
    assert life.duration_s == 7.0
    assert "≤" not in printed(life)


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("issue", (10.0, 11.0)),
        ("queue", (11.0, 11.5)),
        ("generate", (11.5, 13.0)),
        ("score", (13.0, 14.0)),
        ("filter", (14.0, 15.0)),
        ("buffer_wait", (15.0, 16.0)),
        ("train", (16.0, 17.5)),
    ],
)
def test_a_stage_that_a_killed_actor_took_along_stands_between_what_is_known(
    name: str, times: tuple[float, float]
) -> None:
    life = life_of(TRAINED, [row for row in WHOLE if row.name != name])
    assert seconds(life, name) == (*times, False)
    assert [stage.name for stage in life.stages] == list(STAGES)
    (line,) = [line for line in printed(life).splitlines() if f"  {name}  " in line]
    assert "≤" in line
    assert "not recorded" in line


def test_a_sample_that_was_not_traced_has_the_ledgers_times() -> None:
    life = life_of(TRAINED, ())
    assert not life.is_traced
    assert {name: seconds(life, name) for name in STAGES} == {
        **dict.fromkeys(STAGES[:5], (10.0, 15.0, False)),
        "buffer_wait": (15.0, 16.0, False),
        "train": (16.0, 17.5, False),
    }
    assert "not traced" in printed(life)


def test_the_last_attempt_is_made_whole_and_an_earlier_one_left_as_it_was() -> None:
    fate = Fate(12, 3, state="trained", version=4, attempt=1, engine="engine/0", granted_at=10.0, trained_at=30.0)
    again = [span("issue", 20, 20.5, attempt=1), *(row for row in WHOLE[:2]), span("score", 25, 26)]
    life = life_of(fate, again)
    assert {(stage.name, stage.attempt) for stage in life.stages if stage.attempt == 0} == {("issue", 0), ("queue", 0)}
    assert seconds(life, "generate") == (20.5, 25.0, False)
    shown = printed(life)
    assert "attempt 0  what it generated was not recorded; issued again" in shown
    assert shown.index("attempt 0") < shown.index("attempt 1")


def test_where_the_last_attempt_began_an_earlier_one_does_not_say() -> None:
    fate = Fate(12, 3, state="trained", version=4, attempt=1, engine="engine/0", granted_at=10.0, trained_at=30.0)
    life = life_of(fate, [*WHOLE[:2], span("queue", 20, 21, attempt=1), span("generate", 21, 25, attempt=1)])
    assert seconds(life, "issue") == (11.0, 20.0, False)


def test_a_generation_that_was_interrupted_and_then_lost_is_not_taken_for_the_one_that_ended() -> None:
    rows = [row for row in WHOLE if row.name != "generate"]
    life = life_of(TRAINED, [*rows, span("generate", 11.5, 12, attempt=0, outcome="cancelled")])
    assert [stage.is_recorded for stage in life.stages if stage.name == "generate"] == [True, False]


@pytest.mark.parametrize("state", ["failed", "stale", "cancelled", ""])
def test_nothing_is_added_to_a_life_of_which_nobody_knows_how_far_it_came(state: str) -> None:
    life = life_of(Fate(12, 3, state=state, attempt=0, granted_at=10.0, ended_at=12.0), WHOLE[:1])
    assert [stage.name for stage in life.stages] == ["issue"]


# --- episodes --------------------------------------------------------------------------------------------------------


def step(name: str, start_s: float, end_s: float, parent: str, **attributes: str | int | float | bool) -> SpanRow:
    return msgspec.structs.replace(span(name, start_s, end_s, **attributes), parent_id=parent)


PLAYED = (
    *WHOLE,
    step(
        "chat", 11.5, 11.75, "generate11.5", attempt=0, turn=1, num_context_tokens=9, num_tokens=3, ending="end_token"
    ),
    step("execute_tool look_up", 11.75, 12.5, "generate11.5", attempt=0, after_turn=1, tool="look_up", call_id="c7"),
    step("chat", 12.5, 13, "generate11.5", attempt=0, turn=2, num_context_tokens=20, num_tokens=4, ending="length"),
)


def test_turns_and_calls_stand_below_their_generation(tmp_path: Path) -> None:
    life = life_of(TRAINED, PLAYED)
    assert [one.name for one in life.stages] == list(STAGES)
    assert [one.name for one in life.steps] == ["chat", "execute_tool look_up", "chat"]
    lines = printed(life).splitlines()
    (whole,) = [number for number, line in enumerate(lines) if "  generate  " in line]
    below = lines[whole + 1 : whole + 4]
    assert all(line.startswith("│   ") for line in below)
    assert "turn 1, 9 context tokens, 3 tokens, end_token" in below[0]
    assert "execute_tool look_up  750.0 ms" in below[1]
    assert "call id c7" in below[1]
    events = {event["name"]: event for event in view(tmp_path / "view.json", [life])}
    assert events["execute_tool look_up"]["cat"] == "episode"
    assert events["execute_tool look_up"]["tid"] == events["generate"]["tid"]


def test_a_turn_before_a_save_point_that_the_killed_engine_took_along_is_marked() -> None:
    fate = Fate(12, 3, state="trained", version=4, attempt=1, engine="engine/0", granted_at=10.0, trained_at=30.0)
    rows = [
        *WHOLE[:2],
        step("chat", 11.5, 12, "lost", attempt=0, turn=1),
        span("issue", 20, 20.5, attempt=1), span("queue", 20.5, 21, attempt=1), span("generate", 21, 25, attempt=1),
        step("chat", 21, 22, "generate21", attempt=1, turn=3),
    ]  # fmt: skip
    life = life_of(fate, rows)
    assert [(one.attributes["turn"], one.attempt, one.is_recorded) for one in life.steps] == [
        (1, 0, True),
        (2, 0, False),
        (3, 1, True),
    ]
    assert (life.steps[1].start_ns, life.steps[1].end_ns) == (12 * SECOND, 21 * SECOND)
    first, second = printed(life).split("attempt 1")
    assert "turn 1" in first
    assert "turn 2, not recorded" in first
    assert "turn 3" in second
    assert all(one.is_recorded for one in life_of(msgspec.structs.replace(fate, state="failed"), rows).steps)


def test_names_that_a_model_made_up_are_text_and_long_episodes_are_cut_off() -> None:
    rows = [step(f"execute_tool {EVIL}", 12, 12.5, "generate11.5", attempt=0, after_turn=1, tool=EVIL)]
    shown = printed(life_of(TRAINED, [*WHOLE, *rows]))
    assert "\x1b" not in shown
    assert shown.count("[red]") == 1
    many = [step("chat", 12, 12.1, "generate11.5", attempt=0, turn=number) for number in range(1, 200)]
    shown = printed(life_of(TRAINED, [*WHOLE, *many]))
    assert shown.count("  chat ") == 100
    assert shown.count("… and more") == 1


# --- foreign text, and the viewer ------------------------------------------------------------------------------------


def test_what_others_wrote_is_text_on_the_terminal_and_in_the_file(tmp_path: Path) -> None:
    fate = Fate(1, 0, state="failed", cause="scoring_failed", reason=EVIL)
    life = life_of(fate, [*WHOLE[:3], span("score", 13, 14, failure=EVIL)])
    shown = printed(life)
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert shown.count("<script>") == 2
    assert shown.count("[red]") == 2
    assert "1/0  failed: scoring_failed" in shown
    events = view(tmp_path / "view.json", [life])
    assert [event["args"]["reason"] for event in events if event["cat"] == "sample"] == [EVIL]
    assert "\x1b" not in (tmp_path / "view.json").read_text()


def test_what_overlaps_has_a_track_of_its_own_and_tracks_are_used_again(tmp_path: Path) -> None:
    early = life_of(TRAINED, [*WHOLE, span("generate", 11.75, 13.5, attempt=1, outcome="completed")])
    late = life_of(Fate(13, 0), [span("issue", 30, 31, attempt=0)])
    events = view(tmp_path / "view.json", [late, early])
    tracks = {(event["name"], event["ts"]): event["tid"] for event in events}
    assert len(set(tracks.values())) == 2
    assert tracks["generate", 1.5e6] != tracks["generate", 1.75e6]
    assert tracks["sample 13/0", 20e6] in set(tracks.values())


def test_a_lane_is_drawn_as_it_was_reported(tmp_path: Path) -> None:
    rows = [
        ActivityRow(actor="learner", epoch=1, activity=Activity.STARTING, start_s=0.0, end_s=0.1),
        ActivityRow(actor="learner", epoch=1, activity=Activity.WORKING, start_s=0.1, end_s=0.3000000004),
    ]
    events = view(tmp_path / "view.json", [], learner=rows)
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == [
        ("starting", 0.0, 100_000.0),
        ("working", 100_000.0, 200_000.0),
    ]


# --- conventions -----------------------------------------------------------------------------------------------------


def test_spans_carry_the_names_that_viewers_of_language_models_look_for() -> None:
    exported = readable_span(
        (b"t" * 16, b"s" * 8, b"", "generate", 1, 2, (("outcome", "infra_error"), ("num_tokens", 7)), ()),
        Resource(actor_attributes("engine/0", 1)),
    )
    assert exported.attributes == {
        "outcome": "infra_error",
        "num_tokens": 7,
        convention.GEN_AI_OPERATION_NAME: "text_completion",
        convention.GEN_AI_PROVIDER_NAME: "penstock",
        convention.GEN_AI_USAGE_OUTPUT_TOKENS: 7,
        ERROR_TYPE: "infra_error",
    }
    assert gen_ai.conventional("generate", {"outcome": "completed", "num_tokens": 7, "num_turns": 2}) == {
        convention.GEN_AI_OPERATION_NAME: "invoke_agent",
        convention.GEN_AI_PROVIDER_NAME: "penstock",
    }, "the tokens are its turns'"
    for name in ("chat", "text_completion"):
        assert gen_ai.conventional(name, {"num_context_tokens": 9, "num_tokens": 3}) == {
            convention.GEN_AI_OPERATION_NAME: name,
            convention.GEN_AI_PROVIDER_NAME: "penstock",
            convention.GEN_AI_USAGE_INPUT_TOKENS: 9,
            convention.GEN_AI_USAGE_OUTPUT_TOKENS: 3,
        }
    told: dict[str, AttributeValue] = {"tool": "look_up", "call_id": "c7", "error": "ToolError"}
    assert gen_ai.conventional("execute_tool look_up", told) == {
        convention.GEN_AI_OPERATION_NAME: "execute_tool",
        convention.GEN_AI_TOOL_NAME: "look_up",
        convention.GEN_AI_TOOL_TYPE: "function",
        convention.GEN_AI_TOOL_CALL_ID: "c7",
        ERROR_TYPE: "ToolError",
    }
    assert ERROR_TYPE not in gen_ai.conventional("execute_tool look_up", {"tool": "look_up"})
    assert gen_ai.conventional("score", {"reward": 0.5}) == {
        convention.GEN_AI_EVALUATION_NAME: "reward",
        convention.GEN_AI_EVALUATION_SCORE_VALUE: 0.5,
    }
    assert gen_ai.conventional("score", {"failure": EVIL})[ERROR_TYPE] == "scoring_failed"
    assert gen_ai.conventional("filter", {"kept": True}) == {}


def test_times_of_a_stage_are_told_with_their_unit_after_the_number() -> None:
    assert list(told({"row_wait_s": 1.94e-4, "tool_s": 1.5, "queue_wait_s": 0.25})) == [
        "0.2 ms until its row was there", "1.5 s in tools", "250.0 ms queue wait",
    ]  # fmt: skip
