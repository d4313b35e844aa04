"""The driver's book of a run, its summary, and the report that is made from the folder alone."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import re
from datetime import UTC, datetime
from html import unescape as html_text
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from penstock import __version__
from penstock.backends.ledger import kept_samples
from penstock.backends.ledger.kept_samples import SampleKeeper
from penstock.backends.ledger.sqlite import open_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.base import Metric
from penstock.messages.commands import KeepSamples
from penstock.messages.errors import UserFault
from penstock.messages.ledger import PolicyRecorded
from penstock.messages.reasons import ReasonCount
from penstock.messages.samples import Completed, Group, Part, Prompt, Reward, Sample, SampleKey
from penstock.messages.training import (
    Activity,
    ActivitySpan,
    ActorReported,
    Balance,
    CauseCount,
    FailuresCounted,
    OnStale,
    RunFinished,
    StepReported,
    UpdateMode,
)
from penstock.runtime.observability import page, trackers
from penstock.runtime.observability.charts import MAX_POINTS, Chart, line_of
from penstock.runtime.observability.facts import Package, RunFacts, read_starts
from penstock.runtime.observability.figures import RunFigures, RunningTotal
from penstock.runtime.observability.jsonl import JsonLinesWriter, read_rows
from penstock.runtime.observability.metrics import RunMetrics
from penstock.runtime.observability.nvml import GPU_FILE, GpuRow
from penstock.runtime.observability.recorder import RunRecorder
from penstock.runtime.observability.report import balance_rows, render_report, write_report
from penstock.runtime.observability.summary import (
    ActorCost,
    ActorRestarts,
    HeldPolicy,
    MachineFacts,
    RunSummary,
    TokenWaste,
    machine_facts,
    read_summary,
)
from penstock.runtime.observability.summary_view import show_summary
from penstock.runtime.observability.trackers import StepRow, read_activity, read_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

MACHINE = MachineFacts(system="Linux x86_64", python="3.11.7", num_cpus=2, memory_bytes=8 << 30)
FACTS = RunFacts(
    scenario="quick<start>",
    seed=7,
    policy="fully_async",
    staleness_bound=2,
    num_steps=25,
    progress_tokens=64,
    machine=MACHINE,
    model="Qwen/Qwen3-0.6B@<commit>",
    backends="engines 2 × torch on auto; learner 1 × torch on auto",
    command="penstock run 'a<b>.yaml'",
    git_commit="0123456789" * 4,
    git_is_dirty=True,
    packages=(Package("Penstock", "1.0"), Package("torch", "2.13")),
)
SCRIPT = (Path(page.__file__).parent / "report.js").read_text()
STEPS = [float(step) for step in range(1, 26)]
SCENARIO = "run:\n  name: quick<start>\n  seed: 7\n"


def balance(version: int, in_system: int = 8) -> Balance:
    ended = (
        CauseCount(state="trained", cause="", num_samples=8 * version, num_tokens=160 * version),
        CauseCount(state="filtered", cause="zero_spread", num_samples=2 * version, num_tokens=30 * version),
        CauseCount(state="failed", cause="reward: <timeout>", num_samples=1, num_tokens=0),
    )
    in_system_tokens = 10 * version if in_system else 0
    return Balance(
        issued=10 * version + 1 + in_system,
        in_system=in_system,
        ended=ended,
        generated_tokens=190 * version + in_system_tokens,
        in_system_tokens=in_system_tokens,
    )


def step(version: int) -> StepReported:
    return StepReported(
        version=version,
        num_steps=25,
        group_ids=(2 * version, 2 * version + 1),
        metrics=(
            Metric("rollout/raw_reward", version / 25),
            Metric("train/train_rollout_logprob_abs_diff", 0.01 * version),
            Metric("train/grad_norm", float("inf") if version == 2 else 0.5),
            Metric("rollout/raw_reward_std", 0.25),
            Metric("train/kl_loss", 0.001 * version),
            Metric("train/ppo_kl", 0.0),
            Metric("mine/longest", float(version)),
            *((Metric("rollout/zero_std/count_0.0", 2.0),) if version == 1 else ()),
        ),
        staleness_counts=(8,) if version == 1 else (2, 4, 2),
        response_lengths=(5, 10, 15, 20, 20, 25, 30, 35),
        balance=balance(version),
    )


def spans(version: int, start_s: float) -> tuple[ActivitySpan, ...]:
    return (
        ActivitySpan(Activity.WAITING_FOR_SAMPLES, start_s, start_s + 0.25),
        ActivitySpan(Activity.WORKING, start_s + 0.25, start_s + 1.0, 0.5),
    )


def run(
    folder: Path, num_steps: int, finished: RunFinished | None, metrics: RunMetrics | None = None
) -> RunSummary | None:
    """A run with one engine that is lost once; without ``finished`` its driver was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scenario.yaml").write_text(SCENARIO)
    started_at = datetime(2026, 8, 1, 12, 0, 0, tzinfo=UTC)
    recorder = RunRecorder(folder, FACTS, metrics=metrics, started_at=started_at)
    epoch, generated = 1, 0.0
    for version in range(1, num_steps + 1):
        at_s = 10.0 + version
        if version == 1:
            recorder.training.everyone_is_up(11.0)
            recorder.training.everyone_is_up(12.0)
        generated += 200
        figures = (Metric("engine/generated_tokens", generated), Metric("engine/running", 10))
        recorder.actor(ActorReported(name="learner", epoch=1, state="t", activities=spans(version, at_s - 1)), at_s)
        recorder.actor(
            ActorReported(
                name="engine/0", epoch=epoch, state="g", activities=spans(version, at_s - 1), metrics=figures
            ),
            at_s,
        )
        recorder.step(step(version), at_s)
        if version == 5:
            recorder.lost("engine/0", "engine/0 was killed")
            epoch, generated = 2, 0.0
        if version == 7:
            recorder.warn("learner: the engine computes <another> model")
            recorder.warn("learner: the engine computes <another> model")
    if finished is None:
        recorder.abandon()
        return None
    return recorder.finish(finished, 10.0 + num_steps + 0.5)


def finished(version: int, *, completed: bool = True, story: str = "Every step is trained.") -> RunFinished:
    return RunFinished(
        completed=completed,
        story=story,
        version=version,
        max_staleness=2,
        balance=balance(version, 0 if completed else 8),
        checkpoint="runs/x/checkpoints/25" if completed else "",
    )


@pytest.fixture(scope="module")
def completed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 25 steps; tests only read it."""
    folder = tmp_path_factory.mktemp("completed")
    run(folder, 25, finished(25))
    return folder


# --- the book ---------------------------------------------------------------------------------------------------


def test_the_summary_is_what_was_reported(tmp_path: Path) -> None:
    summary = run(tmp_path, 25, finished(25))
    assert summary is not None
    assert msgspec.structs.asdict(summary) == {
        "scenario": "quick<start>",
        "penstock_version": __version__,
        "seed": 7,
        "policy": "fully_async",
        "policies": (HeldPolicy(from_step=1, policy="fully_async", max_staleness=2),),
        "staleness_bound": 2,
        "started_at": "2026-08-01T12:00:00+00:00",
        "machine": MACHINE,
        "completed": True,
        "story": "Every step is trained.",
        "warnings": ("learner: the engine computes <another> model",),
        "version": 25,
        "num_steps": 25,
        "wall_s": 35.5,
        "training_s": 24.5,
        "first10_reward": pytest.approx(5.5 / 25),
        "last10_reward": pytest.approx(20.5 / 25),
        "mean_staleness": pytest.approx(24 / 25),
        "max_staleness": 2,
        "mean_logprob_abs_diff": pytest.approx(0.13),
        "max_logprob_abs_diff": 0.25,
        "balance": balance(25, 0),
        "tokens_generated": 4000 + 750,
        "tokens_trained": 4000,
        "tokens_wasted": (TokenWaste(state="filtered", cause="zero_spread", num_tokens=750),),
        "tokens_lost_estimate": 320,
        "tokens_reported": 1000 + 4000,
        "costs": (),
        "restarts": (ActorRestarts(name="engine/0", count=1),),
        "failures": (),
        "num_failures": 0,
        "evaluations": (),
        "checkpoint": "runs/x/checkpoints/25",
        "report": str(tmp_path / "report.html"),
        "metrics": str(tmp_path / "metrics.jsonl"),
    }
    assert read_summary(tmp_path) == summary
    assert summary.goodput == pytest.approx(4000 / 4750)
    assert summary.tokens_per_s == pytest.approx(4750 / 24.5)


def test_the_files_are_complete(completed: Path) -> None:
    assert [row.version for row in read_steps(completed)] == list(range(1, 26))
    for rows in read_activity(completed).values():
        assert rows[0].start_s == 0
        assert rows[-1].end_s == 35.5
        assert all(one.end_s == other.start_s for one, other in itertools.pairwise(rows))


def test_metrics_and_files_agree(tmp_path: Path) -> None:
    metrics = RunMetrics(scenario="x", policy="sync", num_steps=25)
    run(tmp_path, 25, finished(25), metrics)
    value = metrics.registry.get_sample_value
    for name, rows in read_activity(tmp_path).items():
        for activity in Activity:
            seconds = sum(row.end_s - row.start_s for row in rows if row.activity is activity)
            labels = {"actor": name, "activity": activity.value}
            assert (value("penstock_activity_seconds_total", labels) or 0) == pytest.approx(seconds)
    assert value("penstock_generated_tokens_total") == read_steps(tmp_path)[-1].tokens_generated == 5000
    assert value("penstock_tokens_in_system") == 250
    assert value("penstock_lost_tokens_estimate_total") == 320


def test_a_run_without_a_step_has_a_summary(tmp_path: Path) -> None:
    summary = run(tmp_path, 0, RunFinished(
        completed=False, story="the learner did not start", version=0, max_staleness=0,
        balance=Balance(issued=0, in_system=0, ended=()),
    ))  # fmt: skip
    assert summary is not None
    assert (summary.first10_reward, summary.last10_reward, summary.mean_staleness) == (None, None, None)
    assert (summary.training_s, summary.goodput, summary.tokens_per_s) == (0.0, None, None)
    assert read_summary(tmp_path) == summary


def test_a_total_goes_on_over_incarnations_and_ignores_the_past() -> None:
    total = RunningTotal()
    for actor, epoch, value in [
        ("a", 1, 5.0),
        ("b", 1, 2.0),
        ("a", 1, 9.0),
        ("a", 1, 7.0),
        ("a", 2, 1.0),
        ("a", 1, 50.0),
    ]:
        total.report(actor, epoch, value)
    assert total.total == 9 + 2 + 1


def test_cpu_time_adds_up_over_incarnations_and_is_in_summary_and_report(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, FACTS)
    for name, epoch, cpu_s in [("scorer", 1, 2.0), ("scorer", 1, 5.0), ("scorer", 2, 1.5), ("buffer", 1, 0.25)]:
        metrics = (Metric("process/cpu_s", cpu_s),)
        recorder.actor(ActorReported(name=name, epoch=epoch, state="idle", metrics=metrics), 1.0)
    summary = recorder.finish(finished(0), 2.0)
    assert summary.costs == (ActorCost(name="buffer", cpu_s=0.25), ActorCost(name="scorer", cpu_s=6.5))
    assert "CPU time buffer 0.2 s, scorer 6.5 s" in Page((tmp_path / "report.html").read_text()).text


def test_what_prompt_source_counts_stands_beside_each_step_and_goes_on_when_a_run_is_resumed(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, FACTS)
    for version, epoch, saved in [(1, 1, 100.0), (2, 2, 30.0)]:
        metrics = (Metric("prompt_source/salvaged_tokens", saved),)
        recorder.actor(ActorReported(name="prompt_source", epoch=epoch, state="issuing", metrics=metrics), version)
        recorder.step(step(version), float(version))
    recorder.finish(finished(2, completed=False), 3.0)
    recorder = RunRecorder(tmp_path, FACTS, resumes=True)
    metrics = (Metric("prompt_source/salvaged_tokens", 7.0),)
    recorder.actor(ActorReported(name="prompt_source", epoch=1001, state="issuing", metrics=metrics), 4.0)
    recorder.step(step(3), 5.0)
    assert [row.metrics["prompt_source/salvaged_tokens"] for row in read_steps(tmp_path)] == [100.0, 130.0, 137.0]


def test_what_engines_pass_on_stands_beside_each_step_over_all_of_them_and_their_incarnations(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, FACTS)
    told = [("engine/0", 1, 100.0), ("engine/1", 1, 40.0), ("engine/0", 2, 30.0), ("engine/1", 1, 50.0)]
    for version, (name, epoch, num_bytes) in enumerate(told, start=1):
        metrics = (Metric("engine/weights_passed_on_bytes", num_bytes), Metric("engine/running", 3))
        recorder.actor(ActorReported(name=name, epoch=epoch, state="generating", metrics=metrics), float(version))
        recorder.step(step(version), float(version))
    rows = [row.metrics for row in read_steps(tmp_path)]
    assert [metrics["engine/weights_passed_on_bytes"] for metrics in rows] == [100.0, 140.0, 170.0, 180.0]
    assert all("engine/running" not in metrics for metrics in rows)


def test_a_version_that_is_trained_again_counts_once() -> None:
    figures = RunFigures(progress_tokens=64)
    for version in (1, 2, 3, 2, 3, 4):
        figures.step(step(version), StepRow.of(float(version), step(version)))
    assert (figures.version, len(figures.rewards)) == (4, 4)
    assert sum(figures.staleness_counts) == 32
    assert figures.tokens_trained == 640


@pytest.mark.parametrize("was_killed", [True, False])
def test_figures_add_up_over_the_drives_of_a_run(tmp_path: Path, was_killed: bool) -> None:
    run(tmp_path, 6, None if was_killed else finished(6, completed=False))
    recorder = RunRecorder(tmp_path, FACTS, resumes=True)
    assert (recorder.figures.version, recorder.figures.tokens_generated) == (6, 1200)
    assert recorder.figures.tokens_reported == (0 if was_killed else 1200)
    assert read_summary(tmp_path) is None  # it is that of an earlier drive
    recorder.training.everyone_is_up(1010.0)
    figures = (Metric("engine/generated_tokens", 300.0), Metric("process/cpu_s", 2.0))
    recorder.actor(ActorReported(name="engine/0", epoch=1001, state="g", metrics=figures), 1011.0)
    recorder.step(step(7), 1012.0)
    summary = recorder.finish(finished(7), 1020.0)
    assert summary.tokens_generated == 7 * 190
    assert summary.tokens_reported == (300 if was_killed else 1500)
    assert summary.training_s == 10.0 + (5.0 if was_killed else 5.5)
    assert [row.version for row in read_steps(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    assert summary.first10_reward == pytest.approx(4 / 25)
    assert summary.mean_staleness == pytest.approx((6 * 8) / (7 * 8))
    assert [(restart.name, restart.count) for restart in summary.restarts] == ([] if was_killed else [("engine/0", 1)])
    assert (tmp_path / "summary-0.json").exists() != was_killed


def test_a_summary_from_before_the_last_step_does_not_take_the_balance_back(tmp_path: Path) -> None:
    run(tmp_path, 6, finished(6, completed=False))
    killed = RunRecorder(tmp_path, FACTS, resumes=True)
    assert killed.figures.tokens_generated == 6 * 200
    for version in (7, 8):
        killed.step(step(version), 1000.0 + version)
    killed.abandon()
    assert RunRecorder(tmp_path, FACTS, resumes=True).figures.tokens_generated == 8 * 200


def test_tokens_of_samples_that_ended_count_although_their_engine_was_killed_before_it_said_so(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, FACTS)
    recorder.step(step(3), 1.0)
    assert recorder.figures.tokens_generated == 3 * (160 + 30 + 10)
    summary = recorder.finish(finished(4), 2.0)  # samples have ended since the last report of a step
    assert summary.tokens_generated == 4 * (160 + 30)


def test_why_samples_failed_is_in_summary_and_report_and_goes_on_when_a_run_is_resumed(tmp_path: Path) -> None:
    reason = ReasonCount(cause="scoring_failed", kind="k", example="ValueError: <script> (r.py:7)", num_samples=3)
    recorder = RunRecorder(tmp_path, FACTS)
    recorder.failures(FailuresCounted(counts=(reason,), num_samples=4))
    summary = recorder.finish(finished(0, completed=False), 1.0)
    assert (summary.failures, summary.num_failures) == ((reason,), 4)
    page = (tmp_path / "report.html").read_text()
    assert "ValueError: &lt;script&gt; (r.py:7)" in page
    assert Page(page).scripts == [SCRIPT]
    resumed = RunRecorder(tmp_path, FACTS, resumes=True)
    assert resumed.finish(finished(0, completed=False), 1.0).failures == (reason,)


def test_samples_are_in_the_report_as_text(tmp_path: Path) -> None:
    class Words:
        def __init__(self, _folder: Path) -> None: ...

        def decode(self, _ids: list[int]) -> str:
            return "</pre><script>alert(1)</script>"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_samples, "TextTokenizer", Words)
        keeper = SampleKeeper(tmp_path, tmp_path, 10)
        sample = Sample(
            key=SampleKey(3, 0), parts=(Part(),), outcome=Completed(reward=Reward(value=0.5)), engine="engine/0"
        )
        prompt = Prompt(row=0, epoch=0, tokens=b"", text="<b>2 + 2</b>")
        keeper.keep(KeepSamples(Group(group_id=3, prompt=prompt, samples=(sample,))), pytest.fail)  # type: ignore[arg-type]
        keeper.close(60.0)
    page = render_report(tmp_path)
    assert "&lt;b&gt;2 + 2&lt;/b&gt;" in page
    assert "&lt;/pre&gt;&lt;script&gt;" in page
    assert Page(page).scripts == [SCRIPT]


def test_the_machine_is_described() -> None:
    facts = machine_facts()
    assert facts.num_cpus >= 1
    assert facts.memory_bytes > 1 << 20


def test_a_damaged_summary_is_named(tmp_path: Path) -> None:
    assert read_summary(tmp_path) is None
    (tmp_path / "summary.json").write_text('{"scenario": 3}')
    with pytest.raises(UserFault, match=r"summary\.json is no summary of a run: Expected `str`, got `int`"):
        read_summary(tmp_path)


# --- the report -------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The text of a page, its drawings and charts, and everything that it refers to or that could run."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.scripts: list[str] = []
        self.charts: dict[str, Chart] = {}
        self.svgs = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
        self._within = ""
        self.feed(html)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        is_data = tag == "script" and ("type", "application/json") in attrs
        self._within = "data" if is_data else tag

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within == "data":
            chart = msgspec.json.decode(data, type=Chart)
            self.charts[chart.title] = chart
        elif self._within == "script":
            self.scripts.append(data)
        elif self._within != "style":
            self.texts.append(data)


def policy(html: str) -> list[str]:
    """What the page lets in."""
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert found is not None
    return html_text(found[1]).split("; ")


def sha256(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_report_shows_the_run(completed: Path) -> None:
    page = Page((completed / "report.html").read_text())
    for text in (
        "quick<start>",
        "completed",
        "Every step is trained.",
        "reward, last 10 0.820 first 10: 0.220",
        "largest staleness 2 bound 2, mean 0.96",
        "200 trained samples, mean age 0.96 versions; the bound is 2.",
        "trained 200 79.7 % 4,000",
        "filtered zero_spread 50 19.9 % 750",
        "failed reward: <timeout> 1 0.4 % 0",
        "issued 251 100.0 % 4,750",
        "balanced Every sample that was issued is in exactly one line.",
        "never arrived: made by engines since their last report, and killed with them ≈ 320",
        "2026-08-01T12:00:00+00:00",
        "Linux x86_64, 2 CPU cores, 8.0 GiB",
        "name: quick<start>",
    ):
        assert text in page.text


def test_the_report_needs_nothing_but_itself_and_lets_nothing_else_in(completed: Path) -> None:
    html = (completed / "report.html").read_text()
    page = Page(html)
    names = {name for name, _ in page.attributes}
    assert not {"src", "href", "xlink:href", "style"} & names
    assert not [name for name in names if name.startswith("on")]
    assert not {"link", "iframe", "img", "object", "form", "base"} & page.tags
    assert page.scripts == [SCRIPT]
    [style] = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert not re.search(r"@import|url\(", style)
    assert policy(html) == [
        "default-src 'none'",
        f"style-src {sha256(style)}",
        f"script-src {sha256(SCRIPT)}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert str(completed.parent) not in html.replace(str(completed / "report.html"), "")


def test_every_drawing_is_well_formed(completed: Path) -> None:
    html = (completed / "report.html").read_text()
    svgs = Page(html).svgs
    assert len(svgs) == 1  # the lanes
    for svg in svgs:
        ElementTree.fromstring(svg)
    assert re.findall(r'\sid="([^"]+)"', html) == ["smoothing", "smoothed"]


def test_it_says_what_was_started_in_which_state_of_the_project(completed: Path) -> None:
    text = Page((completed / "report.html").read_text()).text
    for fact in (
        "command penstock run 'a<b>.yaml'",
        f"commit {FACTS.git_commit} and changes that are in no commit",
        "software Penstock 1.0, torch 2.13, Python 3.11.7",
        "model Qwen/Qwen3-0.6B@<commit>",
        "backends engines 2 × torch on auto; learner 1 × torch on auto",
        "machine Linux x86_64, 2 CPU cores, 8.0 GiB, no GPU",
        "policy fully_async, staleness at most 2",
        "seed 7",
        "outcome completed at version 25 of 25",
        "duration 36 s, of it 24 s training",
    ):
        assert fact in text
    assert "before 2026" not in text


def test_the_charts_have_every_step(completed: Path) -> None:
    charts = Page((completed / "report.html").read_text()).charts
    [reward] = charts["Reward"].lines
    assert (reward.x, reward.y) == (STEPS, [round(step / 25, 6) for step in STEPS])
    assert reward.spread == [0.25] * 25
    [norm] = charts["Gradient norm"].lines
    assert norm.y == [0.5, None, *[0.5] * 23]  # an infinity is a gap
    longest, most, mean = charts["Response length"].lines
    assert (longest.y[0], most.y[0], mean.y[0]) == (35, 35, 20)
    assert [line.label for line in charts["KL divergence"].lines] == ["kl_loss", "ppo_kl"]
    assert charts["mine/longest"].lines[0].y[:3] == [1, 2, 3]
    assert not {"rollout/raw_reward", "rollout/raw_reward_std", "train/kl_loss"} & set(charts)
    assert charts["Staleness"].are_bars
    assert charts["Staleness"].lines[0].x == [0, 1, 2]
    assert [line.label for line in charts["Staleness over time"].lines] == ["oldest", "mean", "bound"]
    assert charts["Goodput"].lines[0].y[-1] == pytest.approx(160 / 200)


def test_the_spread_of_a_step_without_one_is_a_gap_in_the_band(tmp_path: Path) -> None:
    run(tmp_path, 3, None)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"rollout/raw_reward_std":0.25,', "", 1))  # a version that had none
    [line] = Page(render_report(tmp_path)).charts["Reward"].lines
    assert (len(line.y), line.spread) == (3, [None, 0.25, 0.25])


def test_groups_that_are_not_reported_are_none(tmp_path: Path) -> None:
    run(tmp_path, 3, None)
    [line] = Page(render_report(tmp_path)).charts["Groups without spread"].lines
    assert (line.label, line.y) == ("count_0.0", [2, 0, 0])


def test_what_was_not_trained_is_a_share_of_what_ended_at_each_step(completed: Path) -> None:
    lines = Page((completed / "report.html").read_text()).charts["Not trained"].lines
    assert [line.label for line in lines] == ["failed: reward: <timeout>", "filtered: zero_spread"]
    failed, filtered = lines
    assert failed.y[:2] == [pytest.approx(1 / 11), 0]
    assert filtered.y[1:] == [0.2] * 24


def test_a_long_line_has_means_of_neighbours() -> None:
    line = line_of("a", [float(x) for x in range(2 * MAX_POINTS)], [float("nan"), 1.0] * MAX_POINTS)
    assert len(line.x) == len(line.y) == MAX_POINTS
    assert (line.x[:2], line.y[:2]) == ([0.5, 2.5], [1, 1])


def test_a_run_without_rewards_begins_with_its_loss(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, FACTS)
    for version in (1, 2):
        metrics = (Metric("train/loss", 4.0 - version), Metric("train/sft_loss", 4.0 - version))
        recorder.step(msgspec.structs.replace(step(version), metrics=metrics), float(version))
    recorder.finish(finished(2), 3.0)
    page = Page((tmp_path / "report.html").read_text())
    assert "loss, last 10 2.500 first 10: 2.500" in page.text
    assert [line.label for line in page.charts["Loss"].lines] == ["loss", "sft_loss"]
    assert "Reward" not in page.charts


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202e'\"&"


def test_no_text_of_scenario_rows_models_or_functions_becomes_markup(tmp_path: Path) -> None:
    facts = msgspec.structs.replace(FACTS, scenario=HOSTILE, command=HOSTILE, model=HOSTILE, git_commit=HOSTILE)
    recorder = RunRecorder(tmp_path, facts)
    recorder.warn(HOSTILE)
    recorder.failures(
        FailuresCounted(counts=(ReasonCount(cause=HOSTILE, kind="k", example=HOSTILE, num_samples=3),), num_samples=3)
    )
    metrics = (Metric(f"rollout/reward/{HOSTILE}", 1.0), Metric(HOSTILE, 2.0))
    ended = (CauseCount(state="failed", cause=HOSTILE, num_samples=1, num_tokens=0),)
    named = msgspec.structs.replace(
        step(1), metrics=metrics, balance=Balance(issued=1, in_system=0, ended=ended)
    )  # fmt: skip
    recorder.step(named, 1.0)
    (tmp_path / "scenario.yaml").write_text(f"run: {{name: {HOSTILE}}}")
    recorder.finish(
        RunFinished(
            completed=False, story=HOSTILE, version=1, max_staleness=0, balance=named.balance, checkpoint=HOSTILE
        ),
        2.0,
    )
    html = (tmp_path / "report.html").read_text()
    page = Page(html)
    assert page.scripts == [SCRIPT]
    assert "img" not in page.tags
    assert "\u202e" not in html
    spelled = HOSTILE.replace("\u202e", "\\u202e")
    assert page.text.count(spelled) >= 10
    assert [line.label for line in page.charts["Components of the reward"].lines] == [spelled]
    assert spelled in page.charts
    assert page.charts["Not trained"].lines[0].label == f"failed: {spelled}"


def test_a_run_that_goes_on_is_said_to(tmp_path: Path) -> None:
    run(tmp_path, 7, finished(7, completed=False))
    text = Page(render_report(tmp_path, is_running=True)).text
    assert "quick<start> running The run goes on." in text
    assert "outcome" not in text


def test_each_start_of_a_run_is_kept(tmp_path: Path) -> None:
    run(tmp_path, 2, None)
    moved = msgspec.structs.replace(FACTS, git_commit="f" * 40, git_is_dirty=False)
    RunRecorder(tmp_path, moved, resumes=True).abandon()
    assert [start.facts.git_commit for start in read_starts(tmp_path)] == [FACTS.git_commit, "f" * 40]
    text = Page(render_report(tmp_path)).text
    assert f"commit {'f' * 40} software" in text
    assert f"before 2026-08-01T12:00:00+00:00 {FACTS.command} 012345678901 " in text


def test_the_states_of_every_lane_add_up_to_a_hundred(completed: Path) -> None:
    rows = re.findall(r"<tr><td>((?:learner|engine)[^<]*)</td>(.*?)</tr>", render_report(completed), re.DOTALL)
    assert [name for name, _ in rows] == ["learner", "engine/0"]
    for _, cells in rows:
        *shares, total, _slots = [cell.strip() for cell in re.findall(r"<td[^>]*>([^<]*)</td>", cells)]
        assert total == "100.0"
        assert round(sum(float(share) for share in shares), 1) == 100.0


def test_activity_is_read_once(completed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def counted(path: Path, row_type: type[Any], **options: Any) -> Iterator[Any]:  # noqa: ANN401
        read.append(path)
        return read_rows(path, row_type, **options)

    monkeypatch.setattr(trackers, "read_rows", counted)
    render_report(completed)
    assert [path.name for path in read].count("activity.jsonl") == 1


def switched(folder: Path, *policies: PolicyRecorded) -> Path:
    """Its ledger says that an operator has switched to these, before a step was recorded."""
    store = open_ledger(folder)
    store.claim(0)
    store.commit(list(policies))
    store.close()
    return folder


SYNC = PolicyRecorded(policy="sync", max_staleness=0, update_mode=UpdateMode.DRAIN, on_stale=OnStale.WAIT)


def test_the_summary_has_the_policies_in_order_and_the_step_from_which_each_held(tmp_path: Path) -> None:
    switched(tmp_path, SYNC)
    summary = run(tmp_path, 25, finished(25))
    assert summary is not None
    assert (summary.policy, summary.staleness_bound) == ("sync", 2)
    assert summary.policies == (
        HeldPolicy(from_step=1, policy="fully_async", max_staleness=2),
        HeldPolicy(from_step=1, policy="sync", max_staleness=0),
    )
    said = io.StringIO()
    show_summary(summary, Console(file=said, width=200))
    assert "fully_async, η = 2, from step 1, then sync, η = 0, from step 1" in said.getvalue()


def test_a_ledger_that_cannot_be_read_leaves_a_summary_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / LEDGER_FILE).write_bytes(b"no database" * 100)
    recorder = RunRecorder(tmp_path, msgspec.structs.replace(FACTS, report=False))
    summary = recorder.finish(finished(0), 1.0)
    assert [each.policy for each in summary.policies] == [FACTS.policy]
    assert any("what an operator changed is not known" in warning for warning in summary.warnings)


def test_a_run_that_failed_has_a_report(tmp_path: Path) -> None:
    run(tmp_path, 7, finished(7, completed=False, story="the learner died 10 times: <CUDA & co>"))
    page = Page((tmp_path / "report.html").read_text())
    assert "not completed the learner died 10 times: <CUDA & co>" in page.text
    assert "in the system 8" in page.text
    assert "checkpoint none" in page.text


def test_a_run_that_was_cut_off_has_a_report(tmp_path: Path) -> None:
    run(tmp_path, 7, None)
    assert not (tmp_path / "summary.json").exists()
    page = Page(write_report(tmp_path).read_text())
    assert "cut off The run left no summary: its driver was killed." in page.text
    assert "steps 7" in page.text
    assert "trained 56" in page.text


def test_the_lanes_are_a_picture_beside_the_report(completed: Path) -> None:
    assert (completed / "lanes.png").read_bytes().startswith(b"\x89PNG")
    assert not list(completed.glob("*.partial"))


def test_a_run_that_never_began_has_a_report(tmp_path: Path) -> None:
    assert write_report(tmp_path) == tmp_path / "report.html"
    assert not (tmp_path / "lanes.png").exists()
    page = Page((tmp_path / "report.html").read_text())
    for text in ("No step was recorded.", "Nobody reported its time.", "scenario.yaml is missing."):
        assert text in page.text


def test_a_run_of_one_step_has_a_report(tmp_path: Path) -> None:
    run(tmp_path, 1, finished(1, completed=False))
    assert (
        "8 trained samples, mean age 0.00 versions; the bound is 2."
        in Page((tmp_path / "report.html").read_text()).text
    )


def test_a_balance_that_does_not_add_up_is_said(tmp_path: Path) -> None:
    wrong = Balance(issued=99, in_system=0, ended=(CauseCount(state="trained", cause="", num_samples=8, num_tokens=1),))
    run(tmp_path, 1, RunFinished(completed=True, story="", version=1, max_staleness=0, balance=wrong))
    assert "not balanced The lines do not add up" in Page((tmp_path / "report.html").read_text()).text


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    run(tmp_path, 3, None)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(lines[0] + b'{"version": "x"}\n' + lines[2])
    with pytest.raises(UserFault, match=r"metrics\.jsonl, line 2: "):
        write_report(tmp_path)


def test_many_engines_share_the_room(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, FACTS)
    for engine in range(40):
        recorder.actor(ActorReported(name=f"engine/{engine}", epoch=1, state="g", activities=spans(1, 0.0)), 1.0)
    recorder.finish(finished(0), 1.0)
    text = Page((tmp_path / "report.html").read_text()).text
    assert "24 further engines are not drawn; the mean below includes them." in text
    assert "all 40 engines" in text
    assert "engine/9 " in text


def test_gpus_are_drawn_where_there_were_some(tmp_path: Path) -> None:
    assert "GPUs" not in Page(render_report(tmp_path)).text
    lines = JsonLinesWriter(tmp_path / GPU_FILE)
    for at_s in range(5):
        for utilisation in (0.5, None):
            lines.append(
                GpuRow(at_s=at_s, gpu=0, name="G", utilisation=utilisation, memory_used_bytes=1, memory_total_bytes=2)
            )
    lines.close()
    assert "What NVML calls utilisation" in Page(render_report(tmp_path)).text


def test_the_balance_is_listed_by_state_and_cause() -> None:
    rows = balance_rows(balance(3))
    assert [(row.state, row.cause, row.num_samples) for row in rows] == [
        ("trained", "", 24),
        ("filtered", "zero_spread", 6),
        ("failed", "reward: <timeout>", 1),
        ("in the system", "", 8),
    ]
    assert round(sum(row.share for row in rows), 1) == 100.0
    assert balance_rows(Balance(issued=0, in_system=0, ended=())) == []
