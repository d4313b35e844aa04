"""Each tracker, read back through its own library: it has what the run wrote. Skipped where a library is not there."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest
from test_trackers_told import SCENARIO, told

from penstock.backends.trackers.protocol import TrackedRun
from penstock.runtime.observability.evaluations import read_evaluations
from penstock.runtime.observability.trackers import read_steps
from penstock.runtime.scenario.run_options import TrackerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

LATEST_S = 120.0
WANDB_BLOCK = 32768
WANDB_HEADER = 7


def run_with(folder: Path, name: str, *, resumed: bool = False, **options: Any) -> Path:  # noqa: ANN401 - of any type
    """The folder of a run that this tracker was told of, and of its second drive."""
    tracker = [TrackerOptions(name=name, options=options, timeout_s=LATEST_S, samples=2, samples_every=2)]
    assert told(folder, tracker).warnings == ()
    if resumed:
        assert told(folder, tracker, versions=(4, 5), resumes=True).warnings == ()
    return folder


def figures(folder: Path) -> dict[str, dict[int, float]]:
    """By name and version, as ``metrics.jsonl`` has them."""
    found: dict[str, dict[int, float]] = {}
    rows: list[tuple[int, Mapping[str, float | None]]] = [(row.version, row.metrics) for row in read_steps(folder)]
    rows += [(row.version, row.metrics) for row in read_evaluations(folder)[:1]]
    for version, metrics in rows:
        for name, value in metrics.items():
            if value is not None:
                found.setdefault(name, {})[version] = value
    assert len(found) > 10
    return found


def is_scenario(text: str) -> bool:
    return "https://***@collector" in text and "quick" in text and "secret" not in text and "secret" in SCENARIO


@pytest.fixture(scope="module")
def tensorboard_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tensorboard")
    return run_with(tmp_path_factory.mktemp("tensorboard"), "tensorboard", resumed=True)


def test_tensorboard_reads_what_the_run_wrote(tensorboard_run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tensorboard_run / "trackers" / "tensorboard"), {"tensors": 0, "scalars": 0}).Reload()
    for name, values in figures(tensorboard_run).items():
        assert {event.step: event.value for event in read.Scalars(name)} == pytest.approx(values, rel=1e-6), name
    texts = {
        tag: [(event.step, event.tensor_proto.string_val[0].decode()) for event in read.Tensors(f"{tag}/text_summary")]
        for tag in ("scenario", "samples", "summary", "files")
    }
    assert [is_scenario(text) for _, text in texts["scenario"]] == [True], "once, not at every drive"
    assert [step for step, _ in texts["samples"]] == [2, 3, 4, 5]
    assert "what?" in texts["samples"][0][1]
    assert all(line.startswith("    ") for _, text in texts["samples"] for line in text.splitlines()), "no Markdown"
    assert [step for step, _ in texts["summary"]] == [3, 5]
    assert str(tensorboard_run / "report.html") in texts["files"][-1][1]
    picture = read.Images("lanes")[-1]
    assert picture.encoded_image_string == (tensorboard_run / "lanes.png").read_bytes()
    assert picture.width > picture.height > 0


@pytest.fixture(scope="module")
def mlflow_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(module)
    return run_with(tmp_path_factory.mktemp("mlflow"), "mlflow", resumed=True, experiment="sums")


def test_mlflow_reads_what_the_run_wrote(mlflow_run: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{mlflow_run}/trackers/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])  # also of the drive that resumed
    run = found.info.run_id
    assert found.info.status == "FINISHED"
    for name, values in figures(mlflow_run).items():
        key = name.replace("@", "_")
        assert {metric.step: metric.value for metric in client.get_metric_history(run, key)} == values
    assert found.data.params["run.name"] == "quick"
    assert found.data.params["observability.otlp_endpoint"] == "https://***@collector"
    assert {each.path for each in client.list_artifacts(run)} == {"lanes.png", "report.html", "summary.json", "samples"}
    assert {each.path for each in client.list_artifacts(run, "samples")} == {
        f"samples/{at}.json" for at in (2, 3, 4, 5)
    }
    with open(client.download_artifacts(run, "samples/2.json", str(tmp_path))) as file:
        assert json.load(file)[0]["prompt"] == "what?"
    with open(client.download_artifacts(run, "report.html", str(tmp_path)), "rb") as file:
        assert file.read().startswith(b"<!DOCTYPE html>")


HOSTILE_NAMES = (
    "..",
    "a//b",
    "/",
    "../../x",
    "./a",
    "a/..",
    "..a",
    "a/",
    "n" * 400,
    "x" * 249 + "/a",
    "a\x1b[2J\n",
    "",
)


def test_mlflow_takes_every_figure_whatever_a_service_calls_it(tmp_path: Path) -> None:
    for module in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(module)
    from mlflow import MlflowClient

    from penstock.backends.trackers.mlflow_runs import MlflowTracker

    run = TrackedRun(
        tracker="mlflow", name="r", run_folder=tmp_path, folder=tmp_path, scenario={"..": 1}, options={}, resumes=False
    )
    names = [*HOSTILE_NAMES, *(f"rollout/reward/{name}" for name in HOSTILE_NAMES)]
    MlflowTracker(run).metrics(1, {"train/loss": 0.5, **dict.fromkeys(names, 1.0)})
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("penstock")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.metrics["train/loss"] == 0.5
    assert found.data.metrics["rollout/reward/_."] == 1.0


@pytest.fixture(scope="module")
def wandb_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("wandb")
    return run_with(tmp_path_factory.mktemp("wandb"), "wandb", project="sums", tags=["a"])


def records(folder: Path) -> Iterator[Any]:
    """Of the file that a run of Weights & Biases writes offline: blocks of a LevelDB log after a header; each record
    is a message of wandb's own (``wandb_internal.proto``)."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (folder / "trackers" / "wandb" / "wandb").glob("offline-run-*/*.wandb")
    data, at, whole = file.read_bytes(), WANDB_HEADER, b""
    assert data.startswith(b":W&B")
    while at + WANDB_HEADER <= len(data):
        if WANDB_BLOCK - at % WANDB_BLOCK < WANDB_HEADER:
            at += WANDB_BLOCK - at % WANDB_BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + WANDB_HEADER : at + WANDB_HEADER + length]
        at += WANDB_HEADER + length
        if kind in (1, 4):  # whole, or its last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_weights_and_biases_reads_what_the_run_wrote(wandb_run: Path) -> None:
    found: dict[str, list[Any]] = {}
    for record in records(wandb_run):
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    told_of: dict[str, dict[int, float]] = {}
    for history in found["history"]:
        row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history.item}
        for name in row.keys() - {"version"}:
            told_of.setdefault(name, {})[row["version"]] = row[name]
    for name, values in figures(wandb_run).items():
        assert told_of[name] == pytest.approx(values), name
    assert told_of["samples/_type" if "samples/_type" in told_of else "samples"].keys() == {2, 3}
    run = found["run"][0]
    assert run.project == "sums"
    assert run.run_id == wandb_run.name
    config = {item.key: item.value_json for item in run.config.update}
    assert is_scenario("".join(config.values()))
    reports = [artifact for artifact in found["artifact"] if artifact.type == "report"]
    assert [sorted(entry.path for entry in each.manifest.contents) for each in reports] == [
        ["lanes.png", "report.html", "summary.json"]
    ]


def test_weights_and_biases_has_the_samples_as_texts(wandb_run: Path) -> None:
    tables = [*(wandb_run / "trackers" / "wandb").rglob("*.table.json")]
    assert len(tables) == 2
    for table in tables:
        cells = json.loads(table.read_text())
        assert cells["columns"][:3] == ["name", "prompt", "response"]
        assert cells["data"][0][1] == "what?"
