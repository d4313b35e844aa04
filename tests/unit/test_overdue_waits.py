"""The watchdog: which waits are overdue, when that is told, and who waits for whom."""

from __future__ import annotations

from penstock.messages.waits import OWN_BACKEND, OverdueWait, Wait, WaitsReported
from penstock.runtime.observability.wait_graph import WaitBoard, wait_graph
from penstock.runtime.shell.watchdog import Watchdog

SAMPLE = Wait("sample", "12/3", "engine/1", 40)


def told(watchdog: Watchdog, now_s: float, *waits: Wait) -> list[Wait] | None:
    overdue = watchdog.look(waits, now_s)
    return None if overdue is None else [one.wait for one in overdue]


# --- ages ---------------------------------------------------------------------------------------------------------


def test_a_wait_is_told_when_it_is_overdue_and_then_whenever_its_age_has_doubled() -> None:
    watchdog = Watchdog(100.0)
    times = [now_s for now_s in range(0, 2000, 10) if told(watchdog, now_s, SAMPLE) is not None]
    assert times == [100, 200, 400, 800, 1600]


def test_the_age_counts_from_when_it_was_first_seen() -> None:
    watchdog = Watchdog(100.0)
    watchdog.look([SAMPLE], 70.0)
    assert watchdog.look([SAMPLE], 170.0) == (OverdueWait(SAMPLE, 70.0),)


def test_a_wait_that_comes_closer_to_its_end_begins_anew() -> None:
    watchdog = Watchdog(100.0)
    for now_s in range(0, 1000, 50):
        assert told(watchdog, now_s, Wait("sample", "12/3", "engine/1", now_s)) is None


def test_a_wait_that_ended_and_is_there_again_begins_anew() -> None:
    watchdog = Watchdog(100.0)
    watchdog.look([SAMPLE], 0.0)
    watchdog.look([], 60.0)
    watchdog.look([SAMPLE], 70.0)
    assert told(watchdog, 120.0, SAMPLE) is None


def test_how_many_others_there_are_makes_it_no_other_wait() -> None:
    watchdog = Watchdog(100.0)
    watchdog.look([Wait("sample", "12/3", "engine/1", 40, 9)], 0.0)
    assert told(watchdog, 100.0, Wait("sample", "12/3", "engine/1", 40, 2)) is not None


def test_a_report_has_everything_that_is_overdue_and_nothing_else() -> None:
    watchdog = Watchdog(100.0)
    other, young = Wait("reward of", "7/0", OWN_BACKEND), Wait("reward of", "8/0", OWN_BACKEND)
    watchdog.look([SAMPLE], 0.0)
    watchdog.look([SAMPLE, other], 90.0)
    assert told(watchdog, 150.0, SAMPLE, other, young) == [SAMPLE]
    assert told(watchdog, 190.0, SAMPLE, other, young) == [SAMPLE, other]


def test_the_end_of_all_that_was_overdue_is_told_once() -> None:
    watchdog = Watchdog(100.0)
    watchdog.look([SAMPLE], 0.0)
    watchdog.look([SAMPLE], 100.0)
    assert told(watchdog, 110.0) == []
    assert told(watchdog, 120.0) is None


# --- the graph ----------------------------------------------------------------------------------------------------


def report(name: str, *waits: Wait, since_s: float = 0.0, epoch: int = 0, at_s: float = 0.0) -> WaitsReported:
    return WaitsReported(name=name, epoch=epoch, at_s=at_s, waits=tuple(OverdueWait(w, since_s) for w in waits))


def test_nothing_overdue_gives_no_graph() -> None:
    assert wait_graph([], 10.0) == ""
    assert wait_graph([report("learner")], 10.0) == ""


def test_a_chain_is_followed_to_its_root() -> None:
    graph = wait_graph(
        [
            report("learner", Wait("offer of", "batch 8", "buffer"), since_s=10.0),
            report("buffer", Wait("group", "12", "filter"), since_s=11.0),
            report("filter", Wait("sample", "12/5", "prompt_source", 125), since_s=12.0),
            report("prompt_source", Wait("sample", "12/5", "engine/1", 64), since_s=13.0),
            report(
                "engine/1", Wait("tokens of", "12/5", OWN_BACKEND, 64), Wait("tokens of", "12/7", OWN_BACKEND, 0, 4)
            ),
        ],
        250.0,
    )
    assert graph.splitlines() == [
        "engine/1 waits for tokens of 12/5, 12/7 and 3 more from engine/1's backend, for 250 s",
        "learner waits for offer of batch 8 from buffer, for 240 s",
        "buffer waits for group 12 from filter, for 239 s",
        "filter waits for sample 12/5 from prompt_source, for 238 s",
        "prompt_source waits for sample 12/5 from engine/1, for 237 s",
        "at the root: engine/1's backend (tokens of 12/5, 12/7 and 3 more)",
    ]


def test_a_sample_that_its_source_has_let_go_of_is_found_with_whoever_has_it() -> None:
    graph = wait_graph(
        [
            report("filter", Wait("sample", "12/5", "prompt_source")),
            report("prompt_source", Wait("sample", "9/0", "engine/1")),
            report("scorer", Wait("reward of", "12/5", OWN_BACKEND)),
        ],
        100.0,
    )
    assert [line for line in graph.splitlines() if line.startswith("at the root")] == [
        "at the root: engine/1 (sample 9/0), which waits for nothing that is overdue",
        "at the root: scorer's backend (reward of 12/5)",
    ]


def test_a_circle_is_named() -> None:
    graph = wait_graph(
        [
            report("learner", Wait("offer of", "batch 8", "buffer")),
            report("buffer", Wait("announcement of", "version 7", "weight_publisher")),
            report("weight_publisher", Wait("publish of", "version 7", "learner")),
            report("engine/0", Wait("weights of", "version 7", "weight_publisher")),
        ],
        100.0,
    )
    circles = [line for line in graph.splitlines() if line.startswith("in a circle")]
    assert len(circles) == 1
    assert sorted(circles[0].removeprefix("in a circle: ").split(" → ")[1:]) == [
        "buffer",
        "learner",
        "weight_publisher",
    ]
    assert "root" not in graph


def test_whoever_waits_for_nothing_is_the_root() -> None:
    graph = wait_graph([report("weight_publisher", Wait("swapped weights of", "version 4", "engine/0"))], 100.0)
    root = "at the root: engine/0 (swapped weights of version 4), which waits for nothing that is overdue"
    assert graph.splitlines()[-1] == root


def test_only_the_newest_report_of_each_actor_counts() -> None:
    old = report("learner", Wait("step on", "batch 3", OWN_BACKEND), epoch=0, at_s=90.0)
    new = report("learner", epoch=1, at_s=50.0)
    assert wait_graph([new, old], 100.0) == ""


def test_a_large_graph_is_cut() -> None:
    reports = [report(f"engine/{i}", Wait("tokens of", f"{i}/0", OWN_BACKEND)) for i in range(1000)]
    lines = wait_graph(reports, 100.0).splitlines()
    assert len(lines) == 81
    assert lines[40] == "and 960 more"


# --- the board ----------------------------------------------------------------------------------------------------


def test_reports_that_come_together_are_shown_together_and_once() -> None:
    board = WaitBoard()
    board.hear(report("learner", Wait("offer of", "batch 8", "buffer")), 100.0)
    board.hear(report("buffer", Wait("group", "12", "filter")), 101.0)
    assert board.take(101.9) == ""
    assert board.take(102.0).count(" waits for ") == 3, "two waits, and that nothing overdue is behind them"
    assert board.take(1000.0) == ""


def test_who_is_gone_or_waits_no_more_is_left_out() -> None:
    board = WaitBoard()
    for name in ("learner", "buffer", "filter"):
        board.hear(report(name, Wait("start of", "x", OWN_BACKEND)), 100.0)
    board.forget("learner")
    board.hear(report("buffer"), 101.0)
    assert board.take(102.0).splitlines() == [
        "filter waits for start of x from filter's backend, for 102 s",
        "at the root: filter's backend (start of x)",
    ]


def test_the_end_of_waits_alone_shows_nothing() -> None:
    board = WaitBoard()
    board.hear(report("buffer"), 100.0)
    assert board.take(200.0) == ""
