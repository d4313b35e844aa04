"""What users' functions return, raise and hang in: each sample ends with a reward that is a number or with a reason
that people can read, and the ones after it are served."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from episode_functions_bench import FunctionBench
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reward_driver import CHARACTERS, RewardDriver, score_of

from penstock.backends.checkpoint.make import make_model
from penstock.backends.episodes.options import EpisodeOptions
from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.rewards.options import RewardOptions
from penstock.messages.errors import UserFault
from penstock.messages.samples import Completed, InfraError
from penstock.runtime.contracts.kinds import check_function
from penstock.runtime.preflight.functions import check_user_code
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

FUNCTIONS = Path(__file__).parent / "malformed_functions.py"


def is_readable(text: str) -> bool:
    """One line, not endless, and no stack trace."""
    return bool(text) and "\n" not in text and "Traceback" not in text and len(text) < 600


@pytest.fixture(scope="module")
def judge(tokenizer_folder: Path) -> Iterator[RewardDriver]:
    driver = RewardDriver(tokenizer_folder, RewardOptions(function=f"{FUNCTIONS}:score", num_workers=1))
    yield driver
    driver.close()


REWARDS = {
    "raises": "ValueError: no",
    "raises nothing to say": "RuntimeError",
    "asserts": "AssertionError: it is not",
    "finds nothing": "StopIteration",
    "exits": "SystemExit: 3 (malformed_functions.py:",
    "interrupts": "KeyboardInterrupt (malformed_functions.py:",
    "raises above all classes": "BaseException: not even an Exception",
    "raises what cannot be shown": "UnshownError: its message cannot be shown",
    "takes the process down": "exit code 3",
    "recurses": "RecursionError",
    "divides": "ZeroDivisionError",
    "returns itself": "list",
    "returns a function": "function",
    "returns complex": "complex",
    "returns too much": "",
    "returns what cannot be shown": "",
    "prints": "",
    "None": "None",
    "'7'": "str",
    "[1.0]": "list",
    "(1, 2)": "",
    "{'a': 'b'}": "",
    "{1: 2}": "",
    "{'a': 1e999}": "",
    "1e999": "",
    "-1e999": "",
    "b'1'": "bytes",
    "{1, 2}": "set",
    "no literal": "SyntaxError",
}


@pytest.mark.parametrize("what", REWARDS)
def test_what_is_no_reward_is_a_reason(judge: RewardDriver, what: str) -> None:
    (found,) = judge.judged(score_of(what))
    assert found.reward is None
    assert REWARDS[what] in found.reason
    assert is_readable(found.reason), found.reason
    assert judge.values(score_of("0.5")) == [0.5]


@pytest.mark.parametrize("what", ["hangs", "hangs where nothing stops it"])
def test_a_function_that_hangs_costs_its_sample_and_nothing_else(judge: RewardDriver, what: str) -> None:
    (found,) = judge.judged(score_of(what, timeout_s=0.5))
    assert found.reward is None
    assert is_readable(found.reason)
    assert judge.values(score_of("0.25")) == [0.25]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(CHARACTERS[:90], max_size=8)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text("abc", max_size=2) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(value=VALUES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_whatever_is_returned_is_a_finite_reward_or_a_reason(judge: RewardDriver, value: object) -> None:
    text = repr(value)
    if not all(character in CHARACTERS for character in text):
        return
    (found,) = judge.judged(score_of(text))
    if found.reward is None:
        assert is_readable(found.reason), found.reason
    else:
        assert math.isfinite(found.reward.value)
        assert all(math.isfinite(component.value) for component in found.reward.components)


# --- episodes -----------------------------------------------------------------------------------------------------


def player_of(function: str, model: Path) -> FunctionBench:
    make_model("xs", model, 0)
    return FunctionBench(model, EpisodeOptions(kind="function", generate=f"{FUNCTIONS}:{function}", max_turns=2))


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FunctionBench]:
    bench = player_of("episode", tmp_path_factory.mktemp("model"))
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FunctionBench]:
    bench = player_of("answers", tmp_path_factory.mktemp("model"))
    yield bench
    bench.close()


@pytest.mark.parametrize("what", [what for what in REWARDS if what != "None"])
def test_an_episode_that_ends_in_nonsense_is_no_fault_of_the_model(player: FunctionBench, what: str) -> None:
    player.issue(do=what)
    outcome = player.ended().outcome
    assert isinstance(outcome, InfraError), outcome
    assert REWARDS[what] in outcome.detail
    assert is_readable(outcome.detail), outcome.detail
    player.issue(do="0.5")
    assert isinstance(player.ended().outcome, Completed)


@pytest.mark.parametrize("what", ["raises", "finds nothing", "exits", "interrupts", "raises above all classes"])
def test_a_plain_function_that_raises_ends_its_episode_at_once(answering: FunctionBench, what: str) -> None:
    answering.issue(do=what)
    outcome = answering.ended().outcome
    assert isinstance(outcome, InfraError), outcome
    assert REWARDS[what] in outcome.detail
    assert re.search(r"\(malformed_functions.py:\d+\)$", outcome.detail), outcome.detail
    answering.issue(do="0.5")
    assert isinstance(answering.ended().outcome, Completed)


def test_none_of_it_prints_anything(tokenizer_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Their processes are started here, so what they print is what is captured here."""
    judge = RewardDriver(tokenizer_folder, RewardOptions(function=f"{FUNCTIONS}:score"))
    player = player_of("episode", tmp_path)
    try:
        judge.judged(*(score_of(what, index) for index, what in enumerate(REWARDS)))
        for what in REWARDS:
            player.issue(do=what)
            player.ended()
    finally:
        judge.close()
        player.close()
    assert capfd.readouterr().err == ""


ELSEWHERE = {
    ("awaited", "interrupts"): "KeyboardInterrupt",
    ("awaited", "exits"): "SystemExit: 3",
    ("left", "interrupts"): "KeyboardInterrupt",
    ("left", "exits"): "SystemExit: 3",
    ("left", "raises"): "ValueError: no such thing",
    ("left", "raises what cannot be shown"): "UnshownError: its message cannot be shown",
    ("callback", "interrupts"): "KeyboardInterrupt",
}
"""What a task or a callback of an episode does, that ends outside of its function."""
PLACES = re.compile(r"\(malformed_functions\.py:\d+(, called from malformed_functions\.py:\d+)*\)$")


def test_what_a_function_leaves_to_itself_is_one_line_of_the_log_and_costs_nobody_else_anything(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    player = player_of("starts_tasks", tmp_path)
    engine = player.engine
    try:
        for (how, what), text in ELSEWHERE.items():
            engine.is_held = True
            other = player.issue(how="nothing", do="")
            player.until(lambda: len(engine.held) == 1)
            held, pid = engine.held.pop(), player.driver.pid
            engine.is_held = False
            player.issue(how=how, do=what)
            outcome = player.ended().outcome
            if how == "awaited":
                assert isinstance(outcome, InfraError)
                assert text in outcome.detail
            else:
                assert isinstance(outcome, Completed)
            engine.held.append(held)
            engine.answer()
            assert isinstance(player.ended(other).outcome, Completed)
            assert player.driver.pid == pid
            said: list[str] = []

            def is_told(said: list[str] = said) -> bool:
                said.append(capfd.readouterr().err)  # by another process, which may do so after it has answered
                return "penstock: " in "".join(said) and said[-1] == ""

            player.until(is_told)
            assert "Traceback" not in "".join(said)
            (line,) = [line for line in "".join(said).splitlines() if line.startswith("penstock: ")]
            assert line.startswith(
                f"penstock: episode.generate: something that a function had started ended with {text}"
            )
            assert PLACES.search(line), line
    finally:
        player.close()


def test_what_an_async_reward_leaves_to_itself_is_one_line_too(
    tokenizer_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kinds = {"interrupts": "KeyboardInterrupt", "exits": "SystemExit", "raises": "ValueError"}
    driver = RewardDriver(tokenizer_folder, RewardOptions(function=f"{FUNCTIONS}:score_elsewhere"))
    try:
        assert driver.values(*(score_of(what, index) for index, what in enumerate(kinds))) == [0.5] * 3
        assert driver.gauge("reward/replaced_processes") == 0
    finally:
        driver.close()
    lines = capfd.readouterr().err.splitlines()
    assert sorted(re.findall(r"ended with (\w+)", "\n".join(lines))) == sorted(kinds.values())
    assert all(PLACES.search(line) for line in lines)


# --- files and names ----------------------------------------------------------------------------------------------

FILES = {
    "nowhere.py:score": None,
    "empty.py:score": "",
    "broken.py:score": "def score(:\n",
    "null.py:score": "\0",
    "raising.py:score": "raise ValueError('x')\ndef score(response): ...\n",
    "importing.py:score": "import no_such_module_at_all\ndef score(response): ...\n",
    "number.py:score": "score = 7\n",
    "asking.py:score": "def score(response, reference_answer): ...\n",
    "exiting.py:score": "import sys\nsys.exit(3)\n",
    "interrupting.py:score": "raise KeyboardInterrupt\n",
}


@pytest.mark.parametrize("spec", FILES)
def test_a_reward_file_that_is_wrong_is_named(tmp_path: Path, tokenizer_folder: Path, spec: str) -> None:
    name, text = spec.partition(":")[0], FILES[spec]
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserCodeError) as caught:
        open_and_score(tmp_path / spec, tokenizer_folder)
    assert name in str(caught.value)
    assert is_readable(str(caught.value)), caught.value


def open_and_score(spec: Path, folder: Path) -> None:
    driver = RewardDriver(folder, RewardOptions(function=str(spec), num_workers=1))
    try:
        raise driver.failure()
    finally:
        driver.close()


KEYS = ("reward.function", "filter.function", "filter.sample_function", "staleness.policy", "learner.objective")
SPECS = ("nowhere.py:f", "empty.py:f", "broken.py:f", "folder.py:f")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_name_that_is_not_there_is_told_before_a_run(tmp_path: Path, key: str, spec: str) -> None:
    (tmp_path / "empty.py").touch()
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "folder.py").mkdir()
    path = tmp_path / "scenario.yaml"
    path.write_text("run: {name: x}\ndata: {path: 'lines:4'}\nmodel: {make: xs}\n")
    with pytest.raises(UserFault) as caught:
        check_user_code(load_scenario(path, [f"{key}={tmp_path}/{spec}"]))
    assert key.split(".")[0] in str(caught.value)
    assert spec.partition(":")[0] in str(caught.value)
    assert is_readable(str(caught.value))


@pytest.mark.parametrize("kind", ["reward", "loss"])  # a process each, and the road of all is the same
@pytest.mark.parametrize("name", ["not_a_function", "nobody"])
def test_a_hook_that_is_none_fails_its_check_with_a_reason(kind: str, name: str) -> None:
    found = check_function(f"{FUNCTIONS}:{name}", kind, timeout_s=20.0)
    failed = [finding.story for finding in found if finding.state == "failed"]
    assert failed
    assert all("Traceback" not in story for story in failed)
    assert re.search(rf"{name}|number|callable|int", " ".join(failed))
