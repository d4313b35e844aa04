"""``penstock.api``: what is asked of it before any process is started, and what it reads of a run that is over."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from rich.console import Console

import penstock
from penstock import api
from penstock.messages.errors import RunFailedError, UserFault
from penstock.messages.training import Balance
from penstock.runtime.hosts.virtual.simulate import simulated
from penstock.runtime.launch import handle
from penstock.runtime.launch.handle import new_folder
from penstock.runtime.launch.inputs import INPUTS, Rows, write_function, write_rows
from penstock.runtime.launch.progress import Progress, RunPicture
from penstock.runtime.launch.runs import close_record, open_record
from penstock.runtime.observability.following import StepFollower
from penstock.runtime.observability.trackers import METRICS_FILE, StepRow
from penstock.runtime.prediction.argument_words import in_arguments
from penstock.runtime.scenario import dump_scenario, load_scenario
from penstock.runtime.scenario.modelled import load_modelled

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.runtime.launch.status import RunStatus

HOUSE = Path(__file__).parents[2]
SIMULATED = {
    "run": {"name": "small", "num_steps": 3},
    "data": {"path": "lines:100"},
    "engines": {"backend": "simulated"},
    "learner": {"backend": "simulated"},
}


def test_the_package_alone_imports_nothing() -> None:
    code = "import sys; before = set(sys.modules); import penstock; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert {name for name in done.stdout.split() if name.split(".")[0] not in sys.stdlib_module_names} == {"penstock"}


def test_the_package_has_every_name_of_the_api() -> None:
    own = {name for name in dir(penstock) if not name.startswith("_")}
    assert {name for name in own if not isinstance(getattr(penstock, name), ModuleType)} == {
        *api.__all__,
        "TYPE_CHECKING",
    }
    for name in api.__all__:
        assert getattr(penstock, name) is getattr(api, name)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = penstock.trian


def test_what_a_program_calls_has_documented_arguments_and_errors() -> None:
    functions = [getattr(api, name) for name in api.__all__ if not isinstance(getattr(api, name), type)]
    assert len(functions) > 8
    for function in functions:
        for argument in function.__annotations__.keys() - {"return"}:
            said = f"{argument}:" in str(function.__doc__) or f"``{argument}``:" in str(api.__doc__)
            assert said or argument in ("folder", "run"), f"{function.__name__}: {argument}"


def test_the_type_of_what_is_returned_can_be_imported() -> None:
    functions = [getattr(api, name) for name in api.__all__ if not isinstance(getattr(api, name), type)]
    named = {word for each in functions for word in re.findall(r"[A-Z]\w+", str(each.__annotations__["return"]))}
    theirs = {"Result": "SimulationResult"}  # as it is called where it is made
    named |= set(re.findall(r"-> .*?\b([A-Z]\w+)", Path(handle.__file__).read_text().split("def begin(")[0]))
    assert {theirs.get(name, name) for name in named} - {"None", "Iterator", "Path", "Self"} <= set(api.__all__)


def test_what_takes_long_to_be_imported_is_imported_with_its_name() -> None:
    code = (
        "import sys; from penstock import api; names = 'rehearsal', 'planning', 'forecast'; "
        "print(*(n for n in names if f'penstock.runtime.prediction.{n}' in sys.modules)); "
        "from penstock import Forecast; print(Forecast.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "\nForecast\n"
    with pytest.raises(AttributeError, match="no attribute 'Forecasts'"):
        _ = getattr(api, "Forecasts")  # noqa: B009 - a checker would see it


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("--devices: 1 are too few", "num_devices: 1 are too few"),
        ("or fewer --seeds", "or fewer num_seeds"),
        ("or fewer processes with --processes 1", "or fewer processes with num_processes=1"),
        ("say it: --about samples=512", 'say it: about={"samples": 512}'),
        ("which --from-format", "which log_format"),
        ("/runs/a--models b: --modelsx", "/runs/a--models b: --modelsx"),
    ],
)
def test_refusals_name_what_a_program_gave(said: str, wanted: str) -> None:
    @in_arguments
    def refuse() -> None:
        raise UserFault(said)

    with pytest.raises(UserFault) as refused:
        refuse()
    assert str(refused.value) == wanted


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: api.plan(SIMULATED, 0), "num_devices: 0 are too few"),
        (lambda: api.plan(SIMULATED, 8, objective="speed"), "objective: there is no 'speed'"),
        (lambda: api.plan(SIMULATED, 8, price="cheap"), "price: cannot read 'cheap'"),
        (lambda: api.plan(SIMULATED, 8, budget=2), "budget: 2 simulations are too few"),
        (lambda: api.rehearse(SIMULATED, "rain"), "faults: cannot read 'rain'"),
        (lambda: api.calibrate_from("nowhere.jsonl", {"engins": 8}), "about engins: no such key; keys are"),
        (lambda: api.calibrate_from([]), "logs: name at least one file"),
    ],
)
def test_what_the_simulation_cannot_be_asked_is_told_in_its_arguments(ask: Callable[[], object], said: str) -> None:
    with pytest.raises(UserFault) as refused:
        ask()
    assert str(refused.value).startswith(said)
    assert "--" not in str(refused.value)


# --- scenarios --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"staleness.max_staleness": 4}, "staleness.max_staleness=4"),
        ({"learner.learning_rate": 2.5e-7}, "learner.learning_rate=2.5e-7"),
        ({"learner.warm_start": None}, "learner.warm_start=null"),
        ({"runtime.encrypt": False}, "runtime.encrypt=false"),
        ({"run.name": "no"}, "run.name=no"),
        ({"data.metadata": {"a": "x: y", "b": 1}}, "data.metadata={a: 'x: y', b: 1}"),
        ({"data.metadata_keys": ("one", "two")}, "data.metadata_keys=[one, two]"),
        ({"data.path": Path("rows.jsonl")}, "data.path=rows.jsonl"),
    ],
)
def test_overrides_are_those_of_the_command_line(given: dict[str, object], text: str) -> None:
    file = HOUSE / "scenarios" / "quickstart.yaml"
    assert api.load_scenario("quickstart", given) == api.load_scenario(file, given) == load_scenario(file, [text])


@pytest.mark.parametrize("text", ["no", "1e-3", "a: b", "{x", "ü 😀", 'quo"te', "line\nfeed", "null", ""])
def test_a_text_stays_the_text_that_it_is(text: str) -> None:
    assert api.load_scenario(SIMULATED, {"data.metadata": {"a": text}}).data.metadata["a"] == text


def test_a_scenario_may_be_a_mapping_or_one_that_is_loaded() -> None:
    first = api.load_scenario(SIMULATED)
    assert api.load_scenario(first) == first
    changed = api.load_scenario(first, {"engines.count": 3})
    assert changed.engines.count == 3
    assert api.load_scenario(changed, {"engines.count": first.engines.count}) == first
    assert SIMULATED["run"] == {"name": "small", "num_steps": 3}, "what was given stays as it was"


@pytest.mark.parametrize(
    ("scenario", "overrides", "said"),
    [
        (SIMULATED, {"learner.lr": 1}, r"override 'learner\.lr=1'.*learning_rate"),
        ({**SIMULATED, "engnes": {}}, {}, r"the given mapping: engnes: .*engines"),
        (SIMULATED, {"data.path": object()}, r"found object; a scenario has numbers, texts"),
        ("qickstart", {}, "quickstart"),
    ],
)
def test_a_scenario_that_cannot_be_used_is_a_users_error(
    scenario: dict[str, object] | str, overrides: dict[str, object], said: str
) -> None:
    with pytest.raises(UserFault, match=said):
        api.load_scenario(scenario, overrides)


def test_what_this_machine_lacks_is_said_in_sentences(tmp_path: Path) -> None:
    assert api.check(SIMULATED) == []
    missing = api.check("quickstart", {"data.path": tmp_path / "rows.jsonl", "reward.function": "nowhere.py:reward"})
    assert any("rows.jsonl" in each for each in missing)
    assert any("nowhere.py" in each for each in missing)


def test_a_simulation_is_that_of_the_command_line(tmp_path: Path) -> None:
    result = api.simulate(SIMULATED, {"learner.groups_per_batch": 4}, seed=7)
    file = tmp_path / "small.yaml"
    file.write_text(json.dumps(SIMULATED))
    scenario, _ = load_modelled(file, ["learner.groups_per_batch=4"])
    other, _ = simulated(scenario, seed=7, console=Console(quiet=True))
    assert result.completed
    assert result.num_steps == 3
    assert result.digest == other.digest


def test_a_forecast_is_over_seeds() -> None:
    found = api.forecast(SIMULATED, {"run.num_steps": 24, "learner.groups_per_batch": 2}, num_seeds=2, seed=4)
    assert found.seeds == (4, 5)
    assert found.step_s.low <= found.step_s.mean <= found.step_s.high


# --- what is given as values ------------------------------------------------------------------------------------------


def test_rows_are_written_as_they_are(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": "é", "label": 3},
        {"prompt": [{"role": "user", "content": "x"}], "level": None},
    ]
    given = write_rows(tmp_path, "rows", (row for row in rows))
    assert [json.loads(line) for line in Path(given.path).read_text().splitlines()] == rows
    assert given.columns == frozenset(("prompt", "label", "level"))
    assert given.has_chats
    assert Path(given.path).is_relative_to(tmp_path)
    assert write_rows(tmp_path, "rows", "lines:20").path == "lines:20"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["prompt"], r"row 0 is str, and no dictionary; of a DataFrame, give frame\.to_dict"),
        ([{"prompt": "x"}, {"prompt": object()}], r"row 1 cannot be written as JSON: a value is builtins\.object"),
    ],
)
def test_rows_that_cannot_be_written_are_refused(rows: list[dict[str, object]], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=said):
        write_rows(tmp_path, "rows", rows)


def test_an_error_about_what_was_given_names_it_and_no_folder_that_is_gone(tmp_path: Path) -> None:
    folder = Path()

    def fail() -> None:
        nonlocal folder
        with new_folder(tmp_path, "train") as folder:
            inputs = folder / INPUTS
            raise UserFault(f"data.path: {inputs}/rows.jsonl:3: no prompt; {inputs}/held.jsonl, {inputs}/reward.py:f")

    said = "^data.path: the given rows, line 3: no prompt; the given rows 'held', the given function:f$"
    with pytest.raises(UserFault, match=said):
        fail()
    assert folder.parent == tmp_path
    assert not folder.exists()


def contains(response: str, label: str) -> bool:
    return label in response


class Scorer:
    def __call__(self, responses: list[str], **others: object) -> list[float]:
        return [0.0 for _ in responses]


def test_the_arguments_of_a_function_are_known(tmp_path: Path) -> None:
    assert write_function(tmp_path, "reward", "math").arguments == frozenset()
    with pytest.raises(UserFault, match=r"reward: 3 is no function, and no name of one"):
        write_function(tmp_path, "reward", 3)  # type: ignore[arg-type]
    assert write_function(tmp_path, "reward", Scorer).arguments >= {"responses", "metadata"}
    assert write_function(tmp_path, "reward", contains).arguments == {"response", "label"}


def taken_jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """In place of being begun."""
    jobs: list[Any] = []

    def take(job: object, **_: object) -> None:
        jobs.append(job)

    monkeypatch.setattr(api, "begin", take)
    return jobs


def test_what_train_is_given_becomes_a_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = taken_jobs(monkeypatch)
    rows = [{"prompt": [{"role": "user", "content": str(n)}], "answer": n, "level": 1} for n in range(20)]

    def reward(responses: list[str], label: str, metadata: dict[str, object]) -> list[float]:
        return [float(label in response) for response in responses]

    overrides = {"run.folder": tmp_path, "data.label_key": "answer", "run.name": "mine", "learner.groups_per_batch": 4}
    api.train({"make": "xs"}, rows, reward, num_steps=7, overrides=overrides)
    scenario = jobs[0].scenario
    assert (scenario.run.name, scenario.run.num_steps, scenario.runtime.host) == ("mine", 7, "local")
    assert scenario.model.make == "xs"
    assert (scenario.data.label_key, scenario.data.metadata_keys, scenario.data.chat_template) == (
        "answer",
        ("level",),
        True,
    )
    assert scenario.reward.per_group
    assert scenario.learner.groups_per_batch == 4
    assert scenario.reward.function == f"{jobs[0].folder}/inputs/reward.py:reward"
    assert list(tmp_path.iterdir()) == [], "of a run that did not begin no folder is left"

    api.train("some/model", "rows.jsonl", "math", overrides={"run.folder": tmp_path})
    scenario = jobs[1].scenario
    assert (scenario.model.path, scenario.reward.function) == ("some/model", "math")
    assert (scenario.data.path, scenario.data.label_key) == (str(Path.cwd() / "rows.jsonl"), "label")


def test_what_evaluate_is_given_becomes_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = taken_jobs(monkeypatch)
    overrides = {"run.folder": tmp_path, "engines.count": 2}
    data: dict[str, Rows] = {"a": [{"prompt": "x"}], "b": "lines:3"}
    api.evaluate("my/model", data, contains, overrides=overrides)
    job = jobs[0]
    assert job.data == (f"a={job.folder}/inputs/a.jsonl", "b=lines:3")
    assert job.settings == {"reward.function": f"{job.folder}/inputs/reward.py:reward"}
    assert Path(job.folder).name.startswith("evaluate-model-")
    api.evaluate("my/model", [{"prompt": "x"}], settings={"samples_per_prompt": 2}, overrides=overrides)
    assert jobs[1].settings == {"samples_per_prompt": 2, "chat_template": False, "label_key": ""}


# --- a run that is over -----------------------------------------------------------------------------------------------


def step(version: int, **metrics: float | None) -> StepRow:
    return StepRow(
        version=version,
        at_s=float(version),
        num_steps=9,
        metrics=dict(metrics),
        staleness_counts=(),
        response_lengths=(),
        group_ids=(),
        balance=Balance(issued=0, in_system=0, ended=()),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that was stopped after two steps."""
    made = tmp_path / "runs" / "<b>small"
    made.mkdir(parents=True)
    close_record(made, open_record(made, "small"), 143)
    (made / "scenario.yaml").write_text(dump_scenario(api.load_scenario(SIMULATED)))
    rows = [step(1, loss=0.5, **{"rollout/raw_reward": 0.1}), step(2, **{"rollout/raw_reward": 0.3})]
    (made / METRICS_FILE).write_bytes(msgspec.json.Encoder().encode_lines(rows))
    return made


def test_a_run_is_read_from_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = api.open_run(folder)
    assert repr(run) == "<Run <b>small: stopped>"
    status = run.status
    assert (status.state, status.exit_code, status.version, status.num_steps, status.reward) == (
        "stopped",
        143,
        2,
        9,
        0.3,
    )
    assert run.scenario == api.load_scenario(SIMULATED)
    assert run.summary is None
    assert [row.version for row in run.steps()] == [1, 2]
    assert run.wait(progress=False) is run
    assert run.stop() is run
    assert list(run.samples()) == []
    assert run.lanes() == {}
    monkeypatch.chdir(folder.parent.parent)
    assert api.open_run().folder == folder
    assert [each.folder for each in api.list_runs()] == [folder]


def test_figures_are_columns_of_one_length_that_a_frame_is_made_of(folder: Path) -> None:
    pandas: Any = import_module("pandas")
    columns = api.open_run(folder).figures()
    assert columns["loss"] == [0.5, None]
    assert columns["rollout/raw_reward"] == [0.1, 0.3]
    assert list(pandas.DataFrame(columns)["version"]) == [1, 2]


def test_a_folder_without_a_run_is_a_users_error(tmp_path: Path) -> None:
    for ask in (api.open_run, api.audit, api.resume):
        with pytest.raises(UserFault, match="no such folder"):
            ask(tmp_path / "nothing")
    assert api.list_runs(tmp_path) == []


def test_a_run_that_failed_is_raised_with_its_folder(folder: Path) -> None:
    close_record(folder, open_record(folder, "small"), 1)
    with pytest.raises(RunFailedError, match=r"the run has failed\nnothing was recorded yet") as failed:
        api.open_run(folder).wait(progress=False)
    assert failed.value.folder == str(folder)
    assert str(pickle.loads(pickle.dumps(failed.value))) == str(failed.value)
    close_record(folder, open_record(folder, "small"), 2)
    with pytest.raises(UserFault):
        api.open_run(folder).wait(progress=False)


def test_what_a_failed_run_tells_a_program_obeys_no_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prints the message of an exception as it is, and this one quotes a reward's, which quotes a model."""
    close_record(folder, open_record(folder, "small"), 1)
    failed = msgspec.structs.replace(api.open_run(folder).status, story="KeyError: '\x1b]0;owned\x07'")

    def status(_: Path) -> RunStatus:
        return failed

    monkeypatch.setattr(handle, "run_status", status)
    with pytest.raises(RunFailedError, match=re.escape(r"KeyError: '\x1b]0;owned\x07'")):
        api.open_run(folder).wait(progress=False)


def test_a_cell_shows_the_course_of_the_reward_and_runs_nothing_of_it(folder: Path) -> None:
    html = api.open_run(folder)._repr_html_()  # pyright: ignore[reportPrivateUsage]
    assert "&lt;b&gt;small" in html
    assert "<b>small" not in html
    assert "step 2 of 9 · reward 0.300" in html
    assert '<polyline points="0.0,120.0 480.0,0.0"' in html


def test_progress_is_one_line_and_none_where_it_is_turned_off(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Progress(RunPicture(folder), is_shown=False) as shown:
        shown.look()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress(RunPicture(folder), is_shown=True) as shown:
        shown.look()
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert err.startswith("\r0:00  step 2 of 9 · reward 0.300")


def test_before_the_first_step_the_line_is_what_the_run_says(tmp_path: Path) -> None:
    assert RunPicture(tmp_path, lambda: "  0:07  loading\x1b[2J the model").text() == r"loading\x1b[2J the model"
    assert RunPicture(tmp_path).text() == "starting"


def test_steps_are_followed_as_they_are_written(tmp_path: Path) -> None:
    encode: Callable[[object], bytes] = msgspec.json.encode
    follower, file = StepFollower(tmp_path), tmp_path / METRICS_FILE
    assert follower.more() == []
    first, second = encode(step(1)) + b"\n", encode(step(2)) + b"\n"
    file.write_bytes(first + second[:20])
    assert [row.version for row in follower.more()] == [1]
    assert follower.more() == []
    file.write_bytes(first + second + b'{"evaluation":0}\n' + second + encode(step(3)) + b"\n")
    assert [row.version for row in follower.more()] == [2, 3]
    with file.open("ab") as out:
        out.write(b"{}\n")
    with pytest.raises(UserFault, match=METRICS_FILE):
        follower.more()


def test_nothing_here_minds_a_loop_that_runs(folder: Path) -> None:
    async def in_a_kernel() -> str:
        return api.open_run(folder).wait(progress=False).status.state

    assert asyncio.run(in_a_kernel()) == "stopped"
