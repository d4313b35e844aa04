"""Models and rows by their names on a hub: fetched once, pinned, and read from the cache where there is no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live_run import SCENARIOS, LiveRun
from small_hub import COMMIT, SmallHub

from penstock.backends.checkpoint.make import make_model
from penstock.runtime.launch.runs import SCENARIO_NAME
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from collections.abc import Generator

MODEL, ROWS = "someone/tiny-model", "someone/rows"
UNREACHABLE = "http://127.0.0.1:9"
"""The port of a service that throws everything away, and that no machine has."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Generator[SmallHub]:
    parent = tmp_path_factory.mktemp("hub")
    model, rows = parent / "model", parent / "rows"
    for folder in (model, rows / "data"):
        folder.mkdir(parents=True)
    make_model("xs", model, seed=0)
    (model / "modeling_own.py").write_text("raise SystemExit('code of a repository was run')")
    lines = "".join(json.dumps({"prompt": f"{n}", "label": f"{n}"}) + "\n" for n in range(40))
    (rows / "data" / "train.jsonl").write_text(lines)
    (rows / "data" / "test.jsonl").write_text(lines)
    (rows / "README.md").write_text("rows")
    with SmallHub(models={MODEL: model}, datasets={ROWS: rows}) as served:
        yield served


def variables(cache: Path, endpoint: str) -> dict[str, str]:
    return {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}


def checked(cache: Path, endpoint: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """``penstock data check``, which reads tokenizer and rows as a run would."""
    return subprocess.run(
        [sys.executable, "-m", "penstock", "data", "check", "local_model", *overrides],
        env=os.environ | variables(cache, endpoint),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cache.parent,
    )


def names(model: str = MODEL, rows: str = ROWS) -> tuple[str, str]:
    return f"model.path={model}", f"data.path={rows}"


def test_what_is_named_is_fetched_once_and_read_from_the_cache_without_a_network(hub: SmallHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    done = checked(cache, hub.url, *names())
    assert done.returncode == 0, done.stderr
    assert f"snapshots/{COMMIT}" in done.stdout
    assert not list(cache.rglob("*.py")), "code stays where it is"
    assert not list(cache.rglob("test.jsonl")), "of rows the one file is fetched"
    num_asked = len(hub.asked)
    again = checked(cache, hub.url, *names(rows=f"hub:{ROWS}@main/data/train.jsonl@[0:10]"))
    assert again.returncode == 0, again.stderr
    files = [asked for asked in hub.asked[num_asked:] if asked.endswith((".safetensors", ".jsonl"))]
    assert not [asked for asked in files if asked.startswith("GET")]
    offline = checked(cache, UNREACHABLE, *names())
    assert offline.returncode == 0, offline.stderr
    assert f"snapshots/{COMMIT}" in offline.stdout


@pytest.mark.parametrize(
    ("model", "rows", "said"),
    [
        ("someone/absent", ROWS, "model.path: someone/absent: nothing is here under this name, and http://127.0.0.1:"),
        (f"{MODEL}@v9", ROWS, "has it, but not in this revision"),
        (MODEL, "someone/absent", "data.path: someone/absent: nothing is here under this name"),
        (MODEL, f"hub:{ROWS}/data/valid.jsonl", f"name one: hub:{ROWS}/data/test.jsonl, hub:{ROWS}/data/train.jsonl"),
        (MODEL, "hub:rows", "data.path: hub:rows: expected hub:ORG/NAME, then @REVISION, and of rows /FILE"),
    ],
)
def test_what_cannot_be_fetched_is_one_message(model: str, rows: str, said: str, hub: SmallHub, tmp_path: Path) -> None:
    done = checked(tmp_path / "cache", hub.url, *names(model, rows))
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_network_and_cache_the_message_says_how(tmp_path: Path) -> None:
    done = checked(tmp_path / "cache", UNREACHABLE, *names())
    assert done.returncode == 2
    assert f"{UNREACHABLE} cannot be reached" in done.stderr
    assert "hf download" in done.stderr


def test_what_is_here_is_meant_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = [*names("org/model", "org/rows"), "reward.function=math"]
    loaded = load_scenario(SCENARIOS / "local_model.yaml", overrides)
    assert (loaded.model.path, loaded.data.path) == ("org/model", "org/rows")
    for folder in ("model", "rows"):
        (tmp_path / "org" / folder).mkdir(parents=True)
    loaded = load_scenario(SCENARIOS / "local_model.yaml", overrides)
    assert (loaded.model.path, loaded.data.path) == (str(tmp_path / "org/model"), str(tmp_path / "org/rows"))
    loaded = load_scenario(SCENARIOS / "local_model.yaml", [*names("org/absent", "my/rows.jsonl")])
    assert loaded.data.path == str(tmp_path / "my/rows.jsonl"), "the path of a file that is not there"


@pytest.mark.long_run
@pytest.mark.timeout(300)
def test_a_run_trains_a_model_of_a_hub_on_rows_of_it_and_writes_down_which(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    for name, value in variables(cache, hub.url).items():
        monkeypatch.setenv(name, value)
    small = (
        "run.num_steps=2",
        "learner.groups_per_batch=4",
        "sampling.max_response_tokens=16",
        "reward.function=random",
    )
    with LiveRun("local_model.yaml", tmp_path, (*names(), *small, "model.max_context=64")) as run:
        assert run.finish().completed
        folder = run.folder
    pinned = load_scenario(folder / SCENARIO_NAME)
    assert pinned.model.path is not None
    assert pinned.data.path is not None
    for path in (pinned.model.path, pinned.data.path):
        assert Path(path).is_relative_to(cache)
        assert COMMIT in path
