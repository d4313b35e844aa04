"""The terminal view: plain lines where there is no terminal, a view that leaves no trace where there is one."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console

from penstock.messages.base import Metric
from penstock.messages.reasons import ReasonCount
from penstock.messages.training import (
    Activity,
    ActivitySpan,
    ActorReported,
    Balance,
    CauseCount,
    FailuresCounted,
    StepReported,
)
from penstock.runtime.observability.live import LiveView
from penstock.runtime.observability.live_state import PAUSED_TEXT, LiveState
from penstock.runtime.observability.live_view import draw
from penstock.runtime.observability.report import fact_rows
from penstock.runtime.observability.summary import ActorRestarts, MachineFacts, RunSummary, TokenWaste
from penstock.runtime.observability.summary_view import show_summary
from penstock.runtime.observability.terminal import DetachedConsole
from penstock.runtime.observability.texts import (
    clock_text,
    duration_text,
    fixed,
    number_text,
    short_count,
    sparkline,
    tiles,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def balance(version: int) -> Balance:
    trained = CauseCount(state="trained", cause="", num_samples=8 * version, num_tokens=1000 * version)
    filtered = CauseCount(state="filtered", cause="zero_spread", num_samples=2, num_tokens=64)
    return Balance(
        issued=8 * version + 12,
        in_system=10,
        ended=(trained, filtered),
        generated_tokens=1200 * version,
        in_system_tokens=200 * version - 64,
    )


def step(version: int, num_steps: int = 80) -> StepReported:
    return StepReported(
        version=version,
        num_steps=num_steps,
        group_ids=(),
        metrics=(Metric("rollout/raw_reward", version / num_steps),),
        staleness_counts=(4, 4),
        response_lengths=(10,) * 8,
        balance=balance(version),
    )


def report(name: str, activity: Activity | None = None, *, at_s: float = 0.0, **figures: float) -> ActorReported:
    spans = () if activity is None else (ActivitySpan(activity, at_s, at_s + 1, 0.75),)
    metrics = tuple(Metric(f"engine/{key}", value) for key, value in figures.items())
    return ActorReported(name=name, epoch=1, state="idle", activities=spans, metrics=metrics)


def summary(*, completed: bool = True) -> RunSummary:
    return RunSummary(
        scenario="quickstart",
        penstock_version="0.1.0",
        seed=0,
        policy="fully_async",
        staleness_bound=2,
        started_at="2026-08-01T12:00:00+00:00",
        machine=MachineFacts(system="Linux", python="3.11", num_cpus=2, memory_bytes=1),
        completed=completed,
        story="[bold]Every step[/bold] is trained.",
        version=80,
        num_steps=80,
        wall_s=100.0,
        training_s=90.0,
        first10_reward=0.25,
        last10_reward=0.9,
        mean_staleness=0.5,
        max_staleness=2,
        mean_logprob_abs_diff=0.0125,
        max_logprob_abs_diff=None,
        balance=balance(80),
        tokens_generated=90_000,
        tokens_trained=80_000,
        tokens_wasted=(TokenWaste(state="filtered", cause="zero_spread", num_tokens=64),),
        tokens_lost_estimate=320,
        restarts=(ActorRestarts(name="engine/1", count=2),),
        checkpoint="runs/x/checkpoint",
        report="runs/x/report.html",
        metrics="runs/x/metrics.jsonl",
    )


def plain() -> tuple[LiveView, Clock, io.StringIO]:
    output, clock = io.StringIO(), Clock()
    return LiveView("quickstart", 80, Console(file=output, width=100), clock_s=clock), clock, output


def rendered(what: RenderableType, width: int = 80, height: int = 24) -> str:
    output = io.StringIO()
    Console(file=output, width=width, height=height, force_terminal=True, color_system=None).print(what)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())


# --- without a terminal -----------------------------------------------------------------------------------------


def test_phases_are_printed_when_they_change_and_seldom_in_between() -> None:
    view, clock, output = plain()
    with view:
        view.phase("starting Ray")
        clock.now_s = 2.5
        view.phase("starting actors: scorer ✓")
        clock.now_s = 3.0
        view.phase("starting actors: scorer ✓ filter ✓")
        for percent in range(101):
            clock.now_s = 4.0 + 0.1 * percent
            view.phase(f"warm start {percent} %")
    assert [line.split(maxsplit=1)[1] for line in output.getvalue().splitlines()] == [
        "starting Ray",
        "✓ starting Ray (2.5 s)",
        "starting actors: scorer ✓",
        "✓ starting actors (1.5 s)",
        "warm start 0 %",
        "warm start 50 %",
        "warm start 100 %",
    ]


def test_steps_are_printed_every_few_seconds_and_the_last_one_always() -> None:
    view, clock, output = plain()
    with view:
        for version in range(1, 81):
            clock.now_s = 0.25 * version
            view.step(step(version))
    lines = output.getvalue().splitlines()
    assert [int(re.findall(r"step (\d+)/80", line)[0]) for line in lines] == [1, 21, 41, 61, 80]
    assert lines[1].strip() == (
        "0:05  step 21/80 (26 %) · reward 0.206 · staleness mean 0.5 max 1 · 4,000 trained tokens/s · left 0:15"
    )


def test_the_warm_start_shows_from_the_learner_alone() -> None:
    view, clock, output = plain()
    with view:
        for percent in (0, 40, 100):
            clock.now_s += 10
            metrics = (Metric("learner/warm_start_fraction", percent / 100),)
            view.actor(ActorReported(name="learner", epoch=1, state="starting", metrics=metrics))
            view.actor(report("scorer"))
            view.actor(report("learner"))
        clock.now_s += 5
        view.step(step(1))
    assert [line.split(maxsplit=1)[1] for line in output.getvalue().splitlines()][:-1] == [
        "warm start 0 %",
        "warm start 40 %",
        "✓ warm start (20 s)",
        "generating the first batch: 0 requests running, 0 tokens so far",
        "✓ generating the first batch (5.0 s)",
    ]


def figures_of(name: str, activity: Activity | None = None, **figures: float) -> ActorReported:
    metrics = tuple(Metric(key.replace("__", "/"), value) for key, value in figures.items())
    spans = () if activity is None else (ActivitySpan(activity, 0.0, 1.0),)
    return ActorReported(name=name, epoch=1, state="busy", activities=spans, metrics=metrics)


def test_before_the_first_step_the_phase_says_what_the_run_waits_for() -> None:
    view, clock, output = plain()
    with view:
        view.follow()
        for at_s in range(40):
            clock.now_s = at_s
            view.actor(figures_of("learner", Activity.WAITING_FOR_SAMPLES if at_s > 4 else Activity.STARTING))
            view.actor(figures_of("engine/0", Activity.WORKING, engine__running=3 if at_s < 20 else 0))
            hangs = max(0, at_s - 20)
            view.actor(figures_of("scorer", reward__running=min(hangs, 12), reward__oldest_s=hangs, reward__answered=0))
        view.failures(FailuresCounted(counts=(), num_samples=7))
        clock.now_s = 60
        view.actor(figures_of("scorer", reward__running=1, reward__oldest_s=4, reward__answered=7))
    lines = [line.split(maxsplit=1)[1] for line in output.getvalue().splitlines()]
    assert lines[:2] == ["loading the model", "✓ loading the model (5.0 s)"]
    assert lines[2] == "generating the first batch: 3 requests running, 0 tokens so far"
    waiting = [line for line in lines if line.startswith("waiting for the first rewards: ")]
    assert waiting[0] == "waiting for the first rewards: 3 reward calls running, the oldest for 3 s"
    assert len(waiting) >= 2
    assert lines[-1] == (
        "generating the first batch: 0 requests running, 0 tokens so far, 7 reward calls answered, "
        "1 reward calls running, the oldest for 4 s; 7 samples failed"
    )


def test_without_a_terminal_no_ten_seconds_are_silent() -> None:
    view, clock, output = plain()
    with view:
        view.phase("starting Ray")
        for at_s in range(1, 61):
            clock.now_s = at_s
            view.tick()
        view.step(step(1))
        for at_s in range(61, 121):
            clock.now_s = at_s
            view.tick()
    times = [line.split(maxsplit=1)[0] for line in output.getvalue().splitlines()]
    at = sorted({60 * int(text.split(":")[0]) + int(text.split(":")[1]) for text in times})
    assert max(later - earlier for earlier, later in itertools.pairwise((0, *at, 120))) <= 10
    assert len(times) < 20
    assert "starting Ray (for 30 s)" in output.getvalue()


def test_what_others_say_moves_no_cursor() -> None:
    view, _, output = plain()
    with view:
        view.note("scorer: \x1b[2Jboom\x07")
    assert "\x1b[2J" not in output.getvalue()
    assert "\\x1b[2Jboom\\x07" in output.getvalue()


def test_the_summary_says_why_samples_failed_and_its_paths_can_be_copied() -> None:
    reason = ReasonCount(
        cause="scoring_failed", kind="ValueError (r.py:7)", example="ValueError: [x] \x1b[1m (r.py:7)", num_samples=40
    )
    output, long_path = io.StringIO(), f"/{'folder/' * 30}report.html"
    told = msgspec.structs.replace(summary(), failures=(reason,), num_failures=42, report=long_path)
    show_summary(told, Console(file=output, width=80))
    text = output.getvalue()
    assert "ValueError: [x] \\x1b[1m (r.py:7)" in text
    assert re.search(r"2 +for other reasons", text)
    assert any(long_path in line for line in text.splitlines())


def test_the_picture_says_why_samples_fail() -> None:
    reason = ReasonCount(cause="scoring_failed", kind="k", example="ValueError: boom (r.py:7)", num_samples=3)
    state = LiveState("quickstart", 80, now_s=0.0)
    state.figures.failures = FailuresCounted(counts=(reason,), num_samples=3)
    console = Console(file=io.StringIO(), width=100)
    console.print(draw(state, 1.0, 100, 30))
    assert "3 samples failed, most often: ValueError: boom (r.py:7)" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_console_on_a_terminal_that_is_not_standard_output_knows_its_size() -> None:
    """The driver's standard output goes to a log; a copy of the descriptor still leads to the terminal."""
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(os.dup(theirs), "w") as file:
            console = DetachedConsole(file, environment={"TERM": "xterm"})
            for columns, lines in ((203, 51), (132, 43)):
                fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
                assert (console.width, console.height) == (columns, lines)
            assert DetachedConsole(file, environment={"TERM": "xterm", "COLUMNS": "70"}).width == 70
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_flood_of_notes_is_counted_and_not_printed() -> None:
    view, clock, output = plain()
    with view:
        for number in range(1000):
            view.note(f"engine/{number} was killed")
        clock.now_s = 100.0
        view.note("engine/0 is back")
    lines = [line.split(maxsplit=1)[1] for line in output.getvalue().splitlines()]
    assert len(lines) == 14
    assert lines[12:] == ["(988 further notes were left out)", "engine/0 is back"]


def test_markup_in_what_others_say_is_text() -> None:
    view, _, output = plain()
    with view:
        view.note("[red]engine/0[/] said [/nonsense]")
    assert "[red]engine/0[/] said [/nonsense]" in output.getvalue()


def test_a_run_that_trains_nothing_has_no_steps_to_tell_of() -> None:
    told = msgspec.structs.replace(summary(), version=0, num_steps=0)
    output = io.StringIO()
    show_summary(told, Console(file=output, width=100))
    assert "took" in output.getvalue()
    assert "steps" not in output.getvalue()
    assert dict(fact_rows("runs/x", (), told))["outcome"] == "completed"
    assert dict(fact_rows("runs/x", (), summary()))["outcome"] == "completed at version 80 of 80"
    assert "steps" not in {tile.label for tile in tiles(told, ())}


def test_the_end_is_a_summary() -> None:
    view, _, output = plain()
    with view:
        view.step(step(80))
        view.finish(summary())
    text = output.getvalue()
    for part in (
        "quickstart completed",
        "[bold]Every step[/bold] is trained.",
        "80 of 80 in 1 min 30 s (1 min 40 s in all)",
        "first ten 0.250 → last ten 0.900",
        "largest 2 (bound 2), mean 0.50",
        "mean 0.0125, largest –",
        "90k generated, 80k trained (88.9 %), 1,000/s",
        "64 wasted",
        "beside these about 320 lost with killed engines",
        "engine/1 × 2",
        "balanced",
        "runs/x/report.html",
        "runs/x/checkpoint",
    ):
        assert part in text
    assert "not completed" in rendered_summary(completed=False)


def rendered_summary(*, completed: bool) -> str:
    view, _, output = plain()
    with view:
        view.finish(summary(completed=completed))
    return output.getvalue()


def test_threads_may_report_at_once() -> None:
    view, _, output = plain()

    def feed(engine: int) -> None:
        for at_s in range(200):
            view.actor(report(f"engine/{engine}", Activity.WORKING, at_s=float(at_s), running=3))
            view.step(step(at_s + 1, 200))

    with view:
        threads = [threading.Thread(target=feed, args=(engine,)) for engine in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert "step 200/200 (100 %)" in output.getvalue()


# --- the picture ------------------------------------------------------------------------------------------------


def state(num_engines: int) -> LiveState:
    state = LiveState("quickstart", 80, now_s=0.0)
    for version in range(1, 41):
        for engine in range(num_engines):
            generated = 600.0 * version
            state.actor(
                report(
                    f"engine/{engine}",
                    Activity.WORKING if engine % 2 else Activity.WAITING_FOR_DEMAND,
                    at_s=version,
                    generated_tokens=generated,
                    running=9,
                ),
                float(version),
            )
        state.actor(report("learner", Activity.WORKING, at_s=version), float(version))
        state.step(step(version), float(version))
    for name in ("prompt_source", "scorer", "filter", "buffer", "weight_publisher"):
        state.actor(report(name), 40.0)
    return state


def test_a_pause_that_is_forgotten_is_on_the_screen_and_in_the_lines_of_a_log() -> None:
    paused = ActorReported(name="buffer", epoch=1, state="x", metrics=(Metric("buffer/grants_paused", 1.0),))
    shown = state(2)
    assert PAUSED_TEXT not in rendered(draw(shown, 41.0, 100, 24))
    shown.actor(paused, 41.0)
    assert PAUSED_TEXT in rendered(draw(shown, 41.0, 100, 24))
    shown.actor(msgspec.structs.replace(paused, metrics=(Metric("buffer/grants_paused", 0.0),)), 42.0)
    assert PAUSED_TEXT not in rendered(draw(shown, 42.0, 100, 24))


def test_the_picture_says_which_policy_holds() -> None:
    shown = state(2)
    metrics = (Metric("buffer/max_staleness", 4.0),)
    shown.step(msgspec.structs.replace(step(41), policy="fully_async", metrics=metrics), 42.0)
    assert "largest 1 (fully_async, at most 4)" in rendered(draw(shown, 42.0, 100, 24))


def test_the_picture_shows_progress_figures_and_actors() -> None:
    text = rendered(draw(state(2), 41.0, 80, 24))
    for part in (
        "quickstart",
        "step 40/80",
        "0:41 · 0:40 left",
        "reward     0.444",
        "▁",
        "█",
        "staleness  mean 0.5, largest 1",
        "tokens/s   1,200 generated, 1,000 trained",
        "in all     48k generated, 40k trained",
        "learner           ● working",
        "engine/0          ● waiting for demand",
        "engine/1          ● working             busy 100 %, 9 running, slots 75 %",
        "weight publisher  ● idle",
    ):
        assert part in text


def test_a_lost_engine_is_down_until_it_reports_again() -> None:
    seen = state(2)
    seen.lost("engine/1")
    assert "engine/1 ↻1       ● down, being replaced" in rendered(draw(seen, 41.0, 80, 24))
    seen.actor(report("engine/1", Activity.STARTING, at_s=42.0), 42.0)
    assert "engine/1 ↻1       ● starting" in rendered(draw(seen, 42.0, 80, 24))


def test_many_engines_share_a_line() -> None:
    text = rendered(draw(state(1024), 41.0, 100, 24), width=100)
    assert "1,024 engines     ● 512 working  ● 512 waiting for demand" in text
    assert "engine/7" not in text


@pytest.mark.parametrize(("width", "height"), [(20, 6), (40, 10), (80, 24), (200, 60)])
@pytest.mark.parametrize("num_engines", [0, 2, 20])
def test_the_picture_fits_the_terminal(width: int, height: int, num_engines: int) -> None:
    lines = rendered(draw(state(num_engines), 41.0, width, height), width=width, height=height).splitlines()
    assert len(lines) <= max(height, 9)
    assert max(len(line) for line in lines) <= width


# --- on a terminal ----------------------------------------------------------------------------------------------


def test_an_exception_leaves_the_terminal_as_it_was() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, height=24)
    before = signal.getsignal(signal.SIGTERM)

    def fail() -> None:
        with LiveView("quickstart", 80, console) as view:
            view.step(step(1))
            raise RuntimeError("the learner died")

    with pytest.raises(RuntimeError, match="the learner died"):
        fail()
    text = output.getvalue()
    assert text.count(HIDE) == 1
    assert text.rindex(SHOW) > text.index(HIDE)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_in_the_middle_of_drawing_leaves_the_terminal_as_it_was() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, height=24)

    def interrupt() -> None:
        with LiveView("quickstart", 80, console):
            console.__enter__()  # it buffers from here on, and the interrupt keeps it from ever leaving that
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    text = output.getvalue()
    assert HIDE in text
    assert text.endswith(SHOW)


PROGRAM = """
import signal
import time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts in the background
from rich.console import Console
from penstock.runtime.observability.live import LiveView
with LiveView("quickstart", 80, Console()) as view:
    view.phase("starting Ray")
    print("ready", flush=True)
    time.sleep(60)
"""


def read_until(terminal: int, wanted: str, timeout_s: float) -> str:
    """What the terminal shows, up to ``wanted`` or the end of the program."""
    text, deadline = "", time.monotonic() + timeout_s
    while wanted not in text and (left_s := deadline - time.monotonic()) > 0:
        if not select.select([terminal], [], [], left_s)[0]:
            break
        try:
            data = os.read(terminal, 4096)
        except OSError:  # Linux's word for the end of a pseudo-terminal
            break
        text += data.decode(errors="replace")
    return text


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, None)])
def test_a_signal_leaves_the_terminal_as_it_was(number: signal.Signals, exit_code: int | None) -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    try:
        shown = read_until(master, "ready", 60)
        assert HIDE in shown
        process.send_signal(number)
        shown += read_until(master, SHOW, 30)
        assert SHOW in shown
        read_until(master, "\0", 30)
        returncode = process.wait(30)
        assert returncode == exit_code if exit_code is not None else returncode != 0
    finally:
        process.kill()
        process.wait(10)
        os.close(master)


# --- texts ------------------------------------------------------------------------------------------------------


def test_figures_read_well() -> None:
    assert [short_count(value) for value in (None, 0, 999, 9_999, 12_345, 1_234_567, 2.5e9)] == [
        "–",
        "0",
        "999",
        "9,999",
        "12.3k",
        "1.23M",
        "2.5G",
    ]
    assert [duration_text(value) for value in (None, 0.04, 7.32, 59.6, 75, 3725)] == [
        "–",
        "0.0 s",
        "7.3 s",
        "1 min 0 s",
        "1 min 15 s",
        "1 h 2 min",
    ]
    assert [clock_text(value) for value in (None, 5, 75, 3725)] == ["-:--", "0:05", "1:15", "1:02:05"]
    assert [number_text(value) for value in (float("nan"), 0, 1.2e-5, 0.12345, 1234.5)] == [
        "–",
        "0",
        "1.20e-05",
        "0.1235",
        "1,234",
    ]
    assert fixed(float("inf"), 2) == "–"


def test_a_sparkline_has_the_width_and_the_course() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(1000)), 32)) <= 32
    assert sparkline([5.0, 5.0], 8) == "▄▄"
    assert sparkline([], 8) == ""
    assert sparkline([1.0, 2.0], 0) == ""


def test_a_run_outlives_whoever_read_what_it_shows() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as file:
        console = DetachedConsole(file)
        console.print("read")
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        console.print("by nobody")
        console.print("nor this")
        file.flush()
