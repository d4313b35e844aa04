"""What repetitions tell and what they do not, results and their history, and all benchmarks one after the other."""

from __future__ import annotations

import io
import os
import random
import select
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from penstock import benchmarks
from penstock.benchmarks import _progress
from penstock.benchmarks._harness import (
    MISSED,
    NOT_TOLD,
    Benchmark,
    Measured,
    claim,
    command_text,
    edition_of,
    figures,
    interleaved,
    pairs,
)
from penstock.benchmarks._processes import watched
from penstock.benchmarks._results import Result, change_text, history_of, is_alike, last_alike, markdown, page
from penstock.benchmarks._statistics import differs, estimate, judge
from penstock.messages.errors import UserFault
from penstock.runtime.cli import bench_all, benches
from penstock.runtime.cli.app import app

DOC = "What a planted thing costs.\n\nMore of it."


def noisy(level: float, noise: float, count: int, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [level * chance.gauss(1, noise) for _ in range(count)]


@pytest.mark.parametrize("count", [5, 7, 15])
def test_five_percent_are_told_from_noise_of_one_percent_and_not_from_that_of_twenty(count: int) -> None:
    verdicts = {
        noise: [
            differs(estimate(noisy(100, noise, count, seed)), estimate(noisy(105, noise, count, seed + 1000)))
            for seed in range(200)
        ]
        for noise in (0.01, 0.2)
    }
    assert verdicts[0.01].count("more") > 180
    assert verdicts[0.2].count("no difference that can be told from noise") > 180
    same = [
        differs(estimate(noisy(100, 0.05, count, seed)), estimate(noisy(100, 0.05, count, seed + 1000)))
        for seed in range(400)
    ]
    assert same.count("no difference that can be told from noise") > 0.97 * len(same)


@pytest.mark.parametrize("count", [5, 6, 9, 12])
def test_an_interval_holds_the_true_median_as_often_as_it_says(count: int) -> None:
    chance = random.Random(count)
    found = [estimate([chance.lognormvariate(0, 1) for _ in range(count)]) for _ in range(3000)]
    held = sum(each.low <= 1 <= each.high for each in found) / len(found)
    assert held == pytest.approx(found[0].coverage, abs=0.015)
    assert found[0].coverage > 0.93


def test_order_statistics_of_known_samples() -> None:
    assert [(e.low, e.high, e.coverage) for e in map(estimate, ([3.0], [1.0, 2.0]))] == [(3, 3, 0), (1, 2, 0.5)]
    nine = estimate([9, 1, 8, 2, 7, 3, 6, 4, 5])
    assert (nine.median, nine.low, nine.high, nine.num_repetitions) == (5, 2, 8, 9)
    assert nine.coverage == 1 - 2 * (1 + 9) / 2**9


def test_a_claim_is_too_noisy_where_its_bound_lies_within_the_interval() -> None:
    found = estimate([1.9, 2.0, 2.1, 2.2, 2.3])
    assert judge(found, at_least=1.8) == "met"
    assert judge(found, at_least=2.0) == "too noisy"
    assert judge(found, at_least=2.5) == "missed"
    assert [judge(found, at_most=bound) for bound in (2.4, 2.0, 1.0)] == ["met", "too noisy", "missed"]
    assert judge(estimate([9.0, 9.0, 9.0, 9.0]), at_least=1) == "too few repetitions"


def test_arms_take_turns_and_the_warm_up_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    made: list[str] = []

    def arm(name: str, factor: float) -> float:
        made.append(name)
        return factor * len(made)

    turns = interleaved({"a": lambda: arm("a", 1), "b": lambda: arm("b", 2)}, 2)
    assert made == ["a", "b", "a", "b", "a", "b"]
    one, other = figures(turns, "s", float)
    assert (one.values, other.values, pairs(other, one)) == ([3, 5], [8, 12], [8 / 3, 12 / 5])
    assert one.wall_s is not None
    assert one.cpu_s is not None
    said = capsys.readouterr()
    assert "2 of 6: b, to warm up" in said.err
    assert "6 of 6: b, repetition 2" in said.err
    assert said.out == ""


def bench(folder: Path, values: list[float], *more: str, at_least: float = 90) -> int:
    """A planted benchmark; what it measures is given."""
    benchmark = Benchmark(__file__, DOC, repetitions=5)
    benchmark.option("--size", type=int, default=1)
    found = interleaved({"it": iter(values).__next__}, len(values), warm_up=0)
    measured = Measured(figures(found, "ms", float), [claim("it", values, at_least=at_least)], ("the other",))
    return benchmark.run(["--history", str(folder), *more], lambda _: measured)


def test_a_result_is_kept_shown_and_compared_with_the_last_of_its_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "made" / "result.json"
    assert bench(tmp_path, noisy(100, 0.01, 7, 1), "--output", str(output)) == 0
    assert "first of its kind" in capsys.readouterr().err
    result = msgspec.json.decode(output.read_bytes(), type=Result)
    assert [result] == history_of("test_bench_harness", tmp_path)
    assert (result.benchmark, result.claim, result.arguments) == (
        "test_bench_harness", "What a planted thing costs.", "size=1",
    )  # fmt: skip
    assert (result.not_measured, result.verdicts) == (["the other"], {"met"})
    text = output.with_suffix(".md").read_text()
    assert text == markdown(result)
    assert "Not measured: the other" in text
    assert bench(tmp_path, noisy(105, 0.01, 7, 2)) == 0
    assert "more" in capsys.readouterr().out
    assert bench(tmp_path, noisy(105, 0.2, 7, 3)) == NOT_TOLD
    assert bench(tmp_path, noisy(105, 0.01, 7, 2), at_least=200) == MISSED
    first, second, third, _ = history_of("test_bench_harness", tmp_path)
    assert last_alike(third, [first, second]) == second
    one, two, noise = (result.figures[0].estimate for result in (first, second, third))
    assert change_text(one, two).endswith("×, more")
    assert change_text(two, one).endswith("×, less")
    assert "no difference that can be told from noise (one of" in change_text(two, noise)


def test_only_what_can_be_compared_is(tmp_path: Path) -> None:
    assert bench(tmp_path, [100.0] * 5) == 0
    assert bench(tmp_path, [100.0] * 5, "--size", "2", "--repetitions", "7") == 0
    one, other = history_of("test_bench_harness", tmp_path)
    assert not is_alike(one, other)
    assert is_alike(one, msgspec.structs.replace(one, load=99.0, at="later"))
    assert not is_alike(one, msgspec.structs.replace(one, edition="another"))
    machine = msgspec.structs.replace(one.machine, num_cpus=999)
    assert not is_alike(one, msgspec.structs.replace(one, machine=machine))
    code = tmp_path / "code.py"
    digests: list[str] = []
    for text in ("x = 1\n", "x  =  1  # as before\n", "x = 2\n"):
        code.write_text(text)
        digests.append(edition_of(code))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--history", "/tmp/x", "--steps", "3"], "penstock bench hop --steps 3"),
        (["--history=/tmp/x", "--output", "docs/hop.json"], "penstock bench hop --output docs/hop.json"),
        (["--curves", "/tmp/a b/curves.json"], "penstock bench hop --curves curves.json"),
        (["--output=/tmp/x/y.json", "--reward=0.5"], "penstock bench hop --output=y.json --reward=0.5"),
        (["--history"], "penstock bench hop"),
    ],
)  # fmt: skip
def test_a_kept_command_names_no_folder_of_the_one_who_gave_it(arguments: list[str], said: str) -> None:
    assert command_text("penstock bench hop", arguments) == said


def test_a_history_that_cannot_be_read_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "test_bench_harness.jsonl").write_text('{"benchmark": 3}\n')
    benchmark = Benchmark(__file__, DOC, repetitions=5)

    def measure(_: object) -> Measured:
        raise AssertionError("it is too late then")

    with pytest.raises(UserFault, match=r"test_bench_harness\.jsonl"):
        benchmark.run(["--history", str(tmp_path)], measure)


FAKE = """\
'''A planted benchmark.'''
from penstock.benchmarks._harness import Benchmark
QUICK: Final = ("--size", "1")
QUICK_S: Final = 90
def main(argv): ...
"""
HANGS = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open(sys.argv[-1] + "/pid", "w").write(str(child.pid))
child.wait()
"""
HOLDS = """
import sys
from pathlib import Path
from test_bench_harness import bench
output, history = sys.argv[-3::2]
sys.exit(bench(Path(history), [100.0] * 5, "--output", output))
"""
SPOILS = """
import sys
open(sys.argv[-3], "w").write('{"benchmark": ')
"""
BODIES = {
    "spoils": SPOILS,
    "fails": "import sys; print('\\x1b[31mno such thing', file=sys.stderr); sys.exit(7)",
    "lacks": "import sys; print('penstock: there is no GPU', file=sys.stderr); sys.exit(2)",
    "hangs": HANGS,
    "holds": HOLDS,
}


def planted(name: str) -> list[str]:
    """What runs a planted benchmark."""
    return [sys.executable, "-c", BODIES[name]]


def run_all(names: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, deadline_s: float) -> tuple[int, str]:
    """Exit code, and what was printed, with these benchmarks planted in place of all others."""
    for name in names:
        (folder / f"{name}.py").write_text(FAKE)
    monkeypatch.setattr(benchmarks, "__path__", [str(folder)])
    monkeypatch.setattr(bench_all, "command_of", planted)
    monkeypatch.setattr(_progress, "STILL_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    out = io.StringIO()
    code = bench_all.run_all(Console(width=120, file=out), folder / "made", is_quick=True, deadline_s=deadline_s)
    return code, out.getvalue()


def test_all_run_in_processes_of_their_own_and_one_that_fails_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "endless.py").write_text("'''It has no quick form.'''\ndef main(argv): ...\n")
    code, out = run_all(["fails", "holds", "lacks"], tmp_path, monkeypatch, 100)
    rows = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
    assert code == MISSED
    assert ("skipped" in rows["endless"], "it has no quick form" in rows["endless"]) == (True, True)
    assert ("failed" in rows["fails"], "ended with exit code 7" in rows["fails"]) == (True, True)
    assert "held" in rows["holds"]
    assert ("skipped" in rows["lacks"], "there is no GPU" in rows["lacks"]) == (True, True)
    said = capfd.readouterr().err
    assert "2 of 4: fails, is given 1 min 40 s: A planted benchmark." in said
    assert "fails: failed after" in said
    assert "the rest takes 1 min 40 s at most" in said
    assert "In all at most 5 min 00 s" in out
    assert "no such thing" in said
    assert "\x1b[31m" not in said
    made = (tmp_path / "made" / "benchmarks.md").read_text()
    assert "## test_bench_harness" in made
    assert "* `lacks`: skipped. there is no GPU" in made
    assert len(history_of("test_bench_harness", tmp_path / "made")) == 1


def has_ended(pid: int, *, within_s: float) -> bool:
    """By the kernel's word: what is killed runs on for a moment."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


def test_one_that_hangs_is_killed_at_its_deadline_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out = run_all(["hangs"], tmp_path, monkeypatch, 5)
    assert code == MISSED
    assert "past its deadline" in out
    assert "hangs, for 1 s" in capfd.readouterr().err
    assert has_ended(int((tmp_path / "made" / "pid").read_text()), within_s=5.0)
    assert "* `hangs`: past its deadline. killed after 5 s" in (tmp_path / "made" / "benchmarks.md").read_text()


def test_results_that_there_are_outlive_what_comes_after_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that leaves no result that can be read has failed; what interrupts a later one leaves the page."""
    code, out = run_all(["holds", "spoils"], tmp_path, monkeypatch, 100)
    rows = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
    assert (code, "failed" in rows["spoils"]) == (MISSED, True)

    def interrupted(name: str, *_: object) -> tuple[int, list[str]]:
        if name == "spoils":
            raise KeyboardInterrupt  # as from Ctrl-C
        output = str(tmp_path / "made" / f"{name}.json")
        return watched(name, [*planted(name), "--output", output, "--history", str(tmp_path / "made")], 60)

    (tmp_path / "made" / "benchmarks.md").unlink()
    monkeypatch.setattr(bench_all, "watched", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all(["holds", "spoils"], tmp_path, monkeypatch, 100)
    assert "## test_bench_harness" in (tmp_path / "made" / "benchmarks.md").read_text()


def test_each_quick_form_has_its_own_deadline_unless_it_is_given_another() -> None:
    known = {"a": benches.Benchmark("", ("--x",), 30.0, False), "b": benches.Benchmark("", None, 0.0, False)}
    assert bench_all.budgets_of(known, is_quick=True, deadline_s=None) == {"a": 30.0, "b": 0.0}
    assert bench_all.budgets_of(known, is_quick=True, deadline_s=5.0) == {"a": 5.0, "b": 0.0}
    assert bench_all.budgets_of(known, is_quick=False, deadline_s=None) == {"a": 3600.0, "b": 3600.0}


def test_one_may_have_what_others_leave_and_all_end_in_time() -> None:
    given = bench_all.Allowance({"a": 30.0, "b": 30.0, "c": 20.0}, 100.0)
    assert (given.left_s, given.limit_s("a")) == (100.0, 50.0)
    given.took("a", 10.0)
    assert (given.left_s, given.limit_s("b")) == (90.0, 70.0)
    given.took("b", 70.5)  # killed, which takes a moment
    assert (given.left_s, given.limit_s("c")) == (20.0, 20.0), "its own is nobody else's"
    alone = bench_all.Allowance({"a": 3600.0, "b": 3600.0}, 0.0)
    assert (alone.left_s, alone.limit_s("a")) == (7200.0, 3600.0)
    alone.took("a", 5.0)
    assert (alone.left_s, alone.limit_s("b")) == (3600.0, 3600.0)
    assert bench_all.Allowance({"a": 10.0}, 100.0).limit_s("a") == 30.0, "three times its own at most"


@pytest.mark.parametrize("words", [["hop"], ["--repetitions", "3"]])
def test_all_takes_no_benchmark_and_no_argument_of_one(words: list[str]) -> None:
    with pytest.raises(UserFault, match=f"leave out {' '.join(words)}"):
        app(["bench", "--all", *words], standalone_mode=False)


def test_each_benchmark_has_a_quick_form_or_is_known_to_have_none() -> None:
    assert [name for name, found in benches.registered().items() if found.quick is None] == ["objectives"]
    known = benches.registered()
    assert all(found.quick_s >= 10 for found in known.values() if found.quick is not None)
    assert sum(bench_all.budgets_of(known, is_quick=True, deadline_s=None).values()) < bench_all.QUICK_ALL_S
    assert sum(found.is_on_harness for found in benches.registered().values()) >= 5
    with pytest.raises(UserFault, match="objectives has no quick form"):
        benches.run_benchmark("objectives", [], is_quick=True)


def test_a_page_without_results_says_so() -> None:
    made = page([], ["`hop`: skipped. it has no quick form"])
    assert made.endswith("## What was not measured\n\n* `hop`: skipped. it has no quick form\n")
