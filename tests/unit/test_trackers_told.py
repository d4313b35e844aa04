"""Trackers are told what a run writes; whatever they do costs their own lines, and is told with its reason."""

from __future__ import annotations

import importlib.util
import json
import tempfile
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import test_kept_samples as kept
from test_observability_evaluations import FACTS_WITH_SETS, evaluated
from test_observability_report import finished, step

from penstock.backends.ledger import kept_samples
from penstock.backends.processes.process_facts import facts_of
from penstock.messages.errors import UserFault
from penstock.messages.training import Activity, ActivitySpan, ActorReported
from penstock.runtime.observability.evaluations import read_evaluations
from penstock.runtime.observability.recorder import RunRecorder
from penstock.runtime.observability.summary import RunSummary, read_summary
from penstock.runtime.observability.tracker_process import Setup, Teller
from penstock.runtime.observability.trackers import read_steps
from penstock.runtime.observability.tracking import Trackers
from penstock.runtime.preflight.functions import check_functions_load, check_user_code
from penstock.runtime.scenario import Scenario, load_scenario
from penstock.runtime.scenario.run_options import TrackerOptions

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

TRACKERS = """
import json, os, tempfile, threading


class Notes:
    def __init__(self, run):
        self.file = run.folder / "notes.jsonl"
        self.add("open", run.name, run.scenario, run.options, run.resumes, sorted(os.environ))

    def add(self, *words):
        with self.file.open("a") as file:
            file.write(json.dumps(words) + chr(10))

    def metrics(self, version, metrics):
        self.add("metrics", version, metrics)

    def samples(self, version, samples):
        self.add("samples", version, [each._asdict() for each in samples])

    def finish(self, summary, files):
        self.add("finish", summary["version"], [file.name for file in files if file.stat().st_size])


class Raises(Notes):
    def metrics(self, version, metrics):
        if version == 2:
            raise ValueError("\\x1b[31mno <b>second</b> one")
        super().metrics(version, metrics)


class Exits(Notes):
    def metrics(self, version, metrics):
        os._exit(3)


class Quits(Notes):
    def metrics(self, version, metrics):
        raise SystemExit("enough")


class Hangs(Notes):
    def metrics(self, version, metrics):
        threading.Event().wait()


class HangsAtTheEnd(Notes):
    def finish(self, summary, files):
        threading.Event().wait()


class LeavesFiles(HangsAtTheEnd):
    def metrics(self, version, metrics):
        folder = tempfile.mkdtemp()
        with open(os.path.join(folder, "figures.json"), "w") as file:
            json.dump(metrics, file)
        self.add("left", version, folder)


class Closed:
    def __init__(self, run):
        raise OSError("no such server")


class HangsAtTheStart:
    def __init__(self, run):
        threading.Event().wait()
"""
SCENARIO = "run: {name: quick, seed: 7}\nobservability: {otlp_endpoint: 'https://me:secret@collector'}\n"
LATEST_S = 60.0
"""For trackers that answer."""


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the trackers above."""
    path = tmp_path_factory.mktemp("trackers") / "mine.py"
    path.write_text(TRACKERS)
    return path


def named(file: Path, *names: str, timeout_s: float = LATEST_S) -> list[TrackerOptions]:
    return [TrackerOptions(name=f"{file}:{name}", timeout_s=timeout_s) for name in names]


@contextmanager
def _temporary_files_in(folder: Path) -> Generator[None]:
    """Ours and those of processes that we start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield


def told(
    folder: Path,
    options: Sequence[TrackerOptions],
    *,
    versions: Sequence[int] = (1, 2, 3),
    resumes: bool = False,
    pass_env: Sequence[str] = (),
    evaluation_log: str | None = None,
) -> RunSummary:
    """A run of so many steps and one evaluation, of which these trackers are told."""
    folder.mkdir(exist_ok=True)
    (folder / "scenario.yaml").write_text(SCENARIO)
    _keep_samples(folder, versions)
    (temporary := folder / "tmp").mkdir(exist_ok=True)
    with (
        _temporary_files_in(temporary),
        Trackers(folder, options, pass_env=pass_env, evaluation_log=evaluation_log, resumes=resumes) as trackers,
    ):
        pids = trackers.pids
        recorder = RunRecorder(folder, FACTS_WITH_SETS, trackers=trackers, resumes=resumes)
        for version in versions:
            recorder.step(step(version), 10.0 + version)
            worked = (ActivitySpan(Activity.WORKING, 9.0 + version, 10.0 + version),)
            recorder.actor(ActorReported(name="learner", epoch=1, state="t", activities=worked), 10.0 + version)
        recorder.evaluated(evaluated(int(resumes), 2, passing=1), 15.0)
        summary = recorder.finish(finished(versions[-1]), 20.0)
        assert [pid for pid in pids if facts_of(pid) is not None] == [], "no process is left"
        assert [*temporary.iterdir()] == [], "and nothing that its library staged"
    assert read_summary(folder) == summary
    return summary


def _keep_samples(folder: Path, versions: Sequence[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_samples, "TextTokenizer", kept.Words)
        kept.write(folder, 10, kept.command(versions[0], 0.5), kept.command(versions[1], None, reason="ValueError: x"))


def notes(folder: Path, name: str = "Notes") -> list[Any]:
    lines = (folder / "trackers" / f"mine.{name}" / "notes.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Path:
    """A run with a tracker that notes all; tests only read it."""
    folder = tmp_path_factory.mktemp("clean")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "x")
        patch.setenv("OWN_KEY", "x")
        (usual,) = named(file, "Notes")
        options = [msgspec.structs.replace(usual, options={"team": "a"}, samples=1, samples_every=2)]
        assert told(folder, options, pass_env=["OWN_KEY"]).warnings == ()
    return folder


def test_a_tracker_is_opened_with_what_the_run_is(clean: Path) -> None:
    kind, name, scenario, options, resumes, environment = notes(clean)[0]
    assert (kind, name, options, resumes) == ("open", clean.name, {"team": "a"}, False)
    assert scenario["run"] == {"name": "quick", "seed": 7}
    assert scenario["observability"]["otlp_endpoint"] == "https://***@collector", "passwords stay here"
    assert "OWN_KEY" in environment
    assert "HF_TOKEN" not in environment


def test_it_is_told_every_finite_figure_of_steps_and_evaluations(clean: Path) -> None:
    found = [(version, metrics) for kind, version, metrics in notes(clean)[1:] if kind == "metrics"]
    rows = read_steps(clean)
    assert [version for version, _ in found] == [1, 2, 3, 2]
    for row, (_, metrics) in zip(rows, found, strict=False):
        assert metrics == {
            **{name: value for name, value in row.metrics.items() if value is not None},
            "run/at_s": row.at_s,
            "run/training_s": row.training_s,
            "run/tokens_generated": row.tokens_generated,
        }
    assert "train/grad_norm" not in found[1][1], "infinite there"
    assert found[3][1] == read_evaluations(clean)[0].metrics


def test_it_is_shown_the_newest_samples_now_and_then_and_at_the_end(clean: Path) -> None:
    found = [(version, samples) for kind, version, samples in notes(clean)[1:] if kind == "samples"]
    assert [version for version, _ in found] == [2, 3]
    (sample,) = found[0][1]
    assert (sample["name"], sample["prompt"], sample["fate"]) == ("2/0", "what?", "failed: scoring_failed")
    assert (sample["reward"], sample["reason"]) == (None, "ValueError: x")


def test_samples_that_are_recorded_after_the_figures_of_the_last_step_are_shown_at_the_end(
    tmp_path: Path, file: Path
) -> None:
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    recorder = RunRecorder(tmp_path, FACTS_WITH_SETS)
    options = msgspec.structs.replace(*named(file, "Notes"), samples_every=1)
    teller = Teller(Setup(str(tmp_path), options, is_evaluation_log=False, position=0, resumes=False))
    for version in (1, 2):
        recorder.step(step(version), 10.0 + version)
    teller.tell()
    _keep_samples(tmp_path, (1, 2))
    recorder.finish(finished(2), 20.0)
    teller.finish()
    calls = [(kind, version) for kind, version, *_ in notes(tmp_path)[1:]]
    assert calls == [("metrics", 1), ("metrics", 2), ("samples", 2), ("finish", 2)]
    assert teller.progress.reason == ""


def test_the_report_its_lanes_and_the_summary_come_last(clean: Path) -> None:
    assert notes(clean)[-1] == ["finish", 3, ["report.html", "lanes.png", "summary.json"]]


def test_the_temporary_files_of_a_tracker_go_with_it_even_when_it_is_killed(tmp_path: Path, file: Path) -> None:
    summary = told(tmp_path / "run", named(file, "LeavesFiles", timeout_s=3.0))
    assert any("was not done 3 s after the run" in text for text in summary.warnings)
    left = [folder for kind, _, folder in notes(tmp_path / "run", "LeavesFiles")[1:] if kind == "left"]
    assert len(left) == 4
    assert {Path(folder).parent.parent for folder in left} == {tmp_path / "run" / "tmp"}


LOG = """
from pathlib import Path

def tell(finished):
    with Path(__file__).with_name("told.txt").open("a") as file:
        name = finished.samples_file.name
        print(finished.number, finished.dataset, finished.version, finished.figures["reward_mean"], name, file=file)
    if finished.dataset == "sums":
        raise ValueError("no sums")
"""


def test_a_function_is_told_of_each_dataset_of_each_evaluation_once(tmp_path: Path) -> None:
    (tmp_path / "log.py").write_text(LOG)
    spec = f"{tmp_path}/log.py:tell"
    summary = told(tmp_path / "run", (), evaluation_log=spec)
    lines = (tmp_path / "told.txt").read_text().splitlines()
    assert lines == ["0 sums 2 0.125 000-sums.jsonl", "0 riddles 2 1.0 000-riddles.jsonl"], "also after one that raised"
    assert any("evaluation.log_function" in text and "no sums (log.py:" in text for text in summary.warnings)
    told(tmp_path / "run", (), versions=(4, 5), resumes=True, evaluation_log=spec)
    later = (tmp_path / "told.txt").read_text().splitlines()[2:]
    assert [line.split()[0] for line in later] == ["1", "1"], "what an earlier drive told is not told again"


WRONG = {
    "Raises": "ValueError: .*no <b>second</b> one (mine.py:",
    "Quits": "4 of its calls failed, the first with: SystemExit: enough (mine.py:",
    "Exits": "its process ended with exit code 3; it is told nothing more",
    "Hangs": "was not done 3 s after the run and was ended; it took 0 lines",
    "HangsAtTheEnd": "was not done 3 s after the run",
    "Closed": "it could not be opened: ",
    "HangsAtTheStart": "was not done 3 s after the run",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_tracker_does_wrong_costs_its_own_lines_and_is_told(
    tmp_path: Path, file: Path, clean: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    timeout_s = 3.0 if "Hangs" in name else LATEST_S
    folder = tmp_path / clean.name
    summary = told(folder, [*named(file, name, timeout_s=timeout_s), *named(file, "Notes")])
    said = [text for text in summary.warnings if all(part in text for part in WRONG[name].split(".*"))]
    assert said, summary.warnings
    assert all(text.startswith(f"tracker {file}:{name}: ") for text in summary.warnings)
    assert name in caplog.text
    assert "\x1b" not in caplog.text
    assert (folder / "metrics.jsonl").read_bytes() == (clean / "metrics.jsonl").read_bytes()
    before = read_summary(clean)
    assert before is not None
    assert msgspec.structs.replace(summary, warnings=(), report="", metrics="", started_at="") == (
        msgspec.structs.replace(before, report="", metrics="", started_at="")
    )
    assert [row for row in notes(folder) if row[0] == "metrics"] == [row for row in notes(clean) if row[0] == "metrics"]
    assert f"{file.name}:{name}" in (folder / "report.html").read_text()


def test_a_call_that_failed_is_not_the_last_one(tmp_path: Path, file: Path) -> None:
    told(tmp_path, named(file, "Raises"))
    assert [row[1] for row in notes(tmp_path, "Raises") if row[0] == "metrics"] == [1, 3]
    assert notes(tmp_path, "Raises")[-1][0] == "finish"


def test_a_tracker_that_hangs_is_sent_one_word_and_no_more(tmp_path: Path, file: Path) -> None:
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    with Trackers(tmp_path, named(file, "HangsAtTheStart"), resumes=False) as trackers:
        for _ in range(100_000):
            trackers.grown()
            assert trackers.hear() == []
        (tracking,) = trackers.each
        assert tracking.num_asked == 1
        assert not tracking.process.wants_to_write


def test_a_resumed_run_is_told_on_from_where_it_was(tmp_path: Path, file: Path) -> None:
    told(tmp_path, named(file, "Notes"))
    told(tmp_path, named(file, "Notes"), versions=(3, 4, 5), resumes=True)
    rows = notes(tmp_path)
    assert [row[4] for row in rows if row[0] == "open"] == [False, True]
    assert [row[1] for row in rows if row[0] == "metrics"] == [1, 2, 3, 2, 4, 5, 2]
    assert [row[1] for row in rows if row[0] == "finish"] == [3, 5]


# --- what a scenario may say ------------------------------------------------------------------------------------------


def scenario(tmp_path: Path, trackers: str) -> Scenario:
    path = tmp_path / "a.yaml"
    path.write_text(
        textwrap.dedent(f"""
            run: {{name: a}}
            data: {{path: 'lines:9'}}
            model: {{make: xs}}
            runtime: {{host: local}}
            observability: {{trackers: {trackers}}}
            """)
    )
    return load_scenario(path)


@pytest.mark.parametrize(
    ("trackers", "story"),
    [
        ("[{name: tensorbord}]", "did you mean 'tensorboard'?"),
        ("[{name: notes}]", "no tracker is called 'notes'; there are tensorboard, wandb, mlflow"),
        ("[{name: mine.py}]", "names a file and no function in it"),
        ("[{name: wandb}, {name: wandb}]", "observability.trackers[1].name: 'wandb' is there already"),
        ("[{name: wandb, options: {projekt: a}}]", "observability.trackers[0].options.projekt"),
        ("[{name: wandb, options: {mode: dryrun}}]", "offline or online"),
        ("[{name: tensorboard, options: {a: 1}}]", "remove it"),
        ("[{name: mlflow, timeout_s: 0}]", "observability.trackers[0].timeout_s"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(tmp_path: Path, trackers: str, story: str) -> None:
    with pytest.raises(UserFault) as refused:
        scenario(tmp_path, trackers)
    assert story in str(refused.value)
    assert "observability.trackers" in str(refused.value)


def test_a_library_that_is_missing_is_found_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None: ...

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(UserFault, match=r"trackers\[0\].name: mlflow: .*pip install -e \"\.\[mlflow\]\""):
        check_user_code(scenario(tmp_path, "[{name: mlflow}]"))


def test_a_class_that_is_none_is_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("Notes = 3\n")
    with pytest.raises(UserFault, match=r"trackers\[0\].name: .*mine.py:Notes: expected a class of a tracker"):
        check_functions_load(scenario(tmp_path, "[{name: mine.py:Notes, options: {anything: [1]}}]"))
