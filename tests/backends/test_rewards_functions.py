"""Users' reward functions in real processes: results, failures, overruns, deaths."""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from penstock.backends.processes import function_pool
from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.rewards import open_rewards
from penstock.backends.rewards.options import RewardOptions
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.base import Metric
from penstock.messages.commands import Score
from penstock.messages.local import SampleJudged
from penstock.messages.samples import Completed, Media, Part, Prompt, Reward, Sample, SampleKey, Truncated, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.protocol import Backend
    from penstock.messages.local import LocalEvent

WAIT_S = 60.0
SYMBOLS = ("<eos>", *"abcdefghijklmnopqrstuvwxyz0123456789 ")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.WordLevel(vocab={symbol: i for i, symbol in enumerate(SYMBOLS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Judge:
    """A backend at work, and what it has said."""

    def __init__(self, folder: Path, function: str, *, num_workers: int = 1) -> None:
        self.backend: Backend[Score] = open_rewards(RewardOptions(function=function, num_workers=num_workers), folder)
        self._events: queue.Queue[LocalEvent | BaseException] = queue.Queue()
        self.backend.start(self._events.put, self._events.put)

    def score(self, *commands: Score) -> dict[SampleKey, SampleJudged]:
        """Submit all, wait for all."""
        for command in commands:
            self.backend.execute(command)
        answers: dict[SampleKey, SampleJudged] = {}
        for _ in commands:
            event = self._events.get(timeout=WAIT_S)
            if isinstance(event, BaseException):
                raise event
            assert isinstance(event, SampleJudged)
            assert event.key not in answers
            answers[event.key] = event
        assert self._events.empty()
        return answers

    def failure(self) -> BaseException:
        """What came to ``fail``."""
        event = self._events.get(timeout=WAIT_S)
        assert isinstance(event, BaseException)
        return event

    def gauge(self, name: str) -> float:
        return {metric.name: metric.value for metric in self.backend.gauges()}[name]


@pytest.fixture
def judges() -> Iterator[list[Judge]]:
    opened: list[Judge] = []
    yield opened
    for judge in opened:
        judge.backend.close(WAIT_S)


def user_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def open_judge(
    judges: list[Judge], tmp_path: Path, folder: Path, text: str, *, name: str = "score", num_workers: int = 1
) -> Judge:
    judge = Judge(folder, f"{user_file(tmp_path, text)}:{name}", num_workers=num_workers)
    judges.append(judge)
    return judge


def command(
    index: int = 0,
    *,
    response: str = "abc",
    label: str = "",
    metadata: bytes = b"",
    truncated: bool = False,
    timeout_s: float = 30.0,
) -> Score:
    ids = [SYMBOLS.index(letter) for letter in response] + [0]
    n = len(ids)
    part = Part(
        tokens=pack_tokens(ids),
        logprobs=pack_floats([0.0] * n),
        spans=(VersionSpan(0, n),),
        media=(Media("image", "b", "b"),),
    )
    prompt = Prompt(
        row=5, epoch=0, tokens=pack_tokens([7, 8]), text="the prompt", label=label, metadata=metadata,
        media=(Media("image", "a", "a"),),
    )  # fmt: skip
    outcome = Truncated() if truncated else Completed()
    sample = Sample(key=SampleKey(3, index), attempt=2, parts=(part,), outcome=outcome)
    return Score(sample=sample, prompt=prompt, timeout_s=timeout_s)


def test_a_function_gets_what_it_asks_for(judges: list[Judge], tmp_path: Path, tokenizer_folder: Path) -> None:
    judge = open_judge(
        judges,
        tmp_path,
        tokenizer_folder,
        """
        def score(
            response, *, label, metadata, truncated, tokens, prompt_tokens, images, prompt, row, group_id, index, own=1
        ):
            expected = ("ab 1", "L", {"a": [1]}, True, [1, 2, 37, 28, 0], [7, 8], ["a", "b"], "the prompt", 5, 3, 9, 1)
            rest = (prompt, row, group_id, index, own)
            got = (response, label, metadata, truncated, tokens, prompt_tokens, images, *rest)
            assert got == expected, got
            return 1
        """,
    )
    asked = command(9, response="ab 1", label="L", metadata=b'{"a": [1]}', truncated=True)
    (answer,) = judge.score(asked).values()
    assert answer == SampleJudged(key=SampleKey(3, 9), attempt=2, reward=Reward(value=1.0))


def test_a_function_with_keyword_arguments_gets_all(
    judges: list[Judge], tmp_path: Path, tokenizer_folder: Path
) -> None:
    judge = open_judge(
        judges,
        tmp_path,
        tokenizer_folder,
        "def score(**given): return {'reward': len(given), 'metadata': len(given['metadata'])}",
    )
    (answer,) = judge.score(command()).values()
    assert answer.reward == Reward(value=12.0, components=(Metric("metadata", 0.0),))


RESULTS: dict[str, float | str | Reward] = {
    "0.25": 0.25,
    "True": 1.0,
    "-3": -3.0,
    "numpy.float32(0.5)": 0.5,
    "numpy.bool_(True)": 1.0,
    "numpy.array(2)": 2.0,
    "{'reward': 1, 'style': 0.5}": Reward(value=1.0, components=(Metric("style", 0.5),)),
    "{'score': 0.5}": 0.5,
    "{'reward': 1, 'score': 2}": Reward(value=1.0, components=(Metric("score", 2.0),)),
    "None": "the reward function returned None; expected a number (mine.py:7)",
    "'1'": "the reward function returned str '1'; expected a number",
    "[1]": "the reward function returned list [1]; expected a number",
    "numpy.ones(2)": "the reward function returned ndarray array([1., 1.]); expected a number",
    "float('nan')": "the reward function returned nan; expected a finite number (mine.py:7)",
    "-float('inf')": "the reward function returned -inf; expected a finite number",
    "10**400": "the reward function returned inf; expected a finite number",
    "{}": "the reward function returned a dict without 'reward' or 'score'; its keys are list []",
    "{'style': 1}": "without 'reward' or 'score'; its keys are list ['style']",
    "{'reward': None}": "'reward' of the reward is None; expected a number",
    "{'reward': 1, 'style': 'good'}": "component 'style' of the reward is str 'good'; expected a number",
    "boom()": "ZeroDivisionError: division by zero (mine.py:5)",
    "sys.exit(3)": "SystemExit: 3 (mine.py:8)",
    "missing": "NameError: name 'missing' is not defined (mine.py:8)",
    "score": "the reward function returned function",
}


def test_only_a_finite_number_becomes_a_reward_and_all_else_a_reason(
    judges: list[Judge], tmp_path: Path, tokenizer_folder: Path
) -> None:
    text = """\
        import sys
        import numpy

        def boom():
            return 1 / 0

        def score(label):
            return eval(label)
        """
    judge = open_judge(judges, tmp_path, tokenizer_folder, text)
    answers = judge.score(*(command(index, label=label) for index, label in enumerate(RESULTS)))
    for index, (label, expected) in enumerate(RESULTS.items()):
        answer = answers[SampleKey(3, index)]
        if isinstance(expected, str):
            assert answer.reward is None, label
            assert expected in answer.reason, label
        else:
            assert answer.reward == (expected if isinstance(expected, Reward) else Reward(value=expected)), label
            assert answer.reason == ""
    assert judge.gauge("reward/failed") == sum(isinstance(expected, str) for expected in RESULTS.values())
    assert judge.gauge("reward/replaced_processes") == 0


HANG = """
    import re, signal, subprocess, sys, time
    def score(label):
        if label == "spin":
            while True: pass
        if label == "sleep":
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL})
            time.sleep(1000)
        if label == "regex":
            re.match(r"(a+)+$", "a" * 60 + "b")
        return 1.0
    """


@pytest.mark.parametrize("how", ["spin", "sleep", "regex"])
def test_a_call_that_hangs_costs_only_itself(
    judges: list[Judge], tmp_path: Path, tokenizer_folder: Path, how: str
) -> None:
    judge = open_judge(judges, tmp_path, tokenizer_folder, HANG)
    hung = 5
    commands = [command(i, label=how if i == hung else "", timeout_s=0.5 if i == hung else 30) for i in range(12)]
    answers = judge.score(*commands)
    failed = answers.pop(SampleKey(3, hung))
    assert failed.reward is None
    assert failed.reason == "the reward function took longer than 0.5 s (reward.timeout_s)"
    assert {answer.reward for answer in answers.values()} == {Reward(value=1.0)}
    assert judge.gauge("reward/replaced_processes") == 1


def test_calls_sent_ahead_of_a_hang_are_not_lost(judges: list[Judge], tmp_path: Path, tokenizer_folder: Path) -> None:
    """Quick calls warm the process up, so that dozens are in its pipe when one of them hangs."""
    judge = open_judge(judges, tmp_path, tokenizer_folder, HANG)
    judge.score(*(command(i) for i in range(200)))
    commands = [
        command(i, label="spin" if i in (100, 101, 180) else "", timeout_s=0.3 if i in (100, 101, 180) else 30)
        for i in range(300)
    ]
    answers = judge.score(*commands)
    assert {key.index for key, answer in answers.items() if answer.reward is None} == {100, 101, 180}


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_python_makes_of_an_escape_reaches_us(
    kind: str, judges: list[Judge], tmp_path: Path, tokenizer_folder: Path
) -> None:
    """No message can hold a half of a surrogate, and one that could not be sent was the end of its process."""
    judge = open_judge(
        judges,
        tmp_path,
        tokenizer_folder,
        f"""
        import json
        HALF = json.loads('"\\\\ud800"')
        {kind} score(response):
            if response == "a":
                raise ValueError("no number: " + HALF)
            return {{"reward": 1.0, HALF: 0.5}}
        """,
    )
    raised, named = judge.score(command(0, response="a"), command(1, response="b")).values()
    assert "ValueError: no number: ?" in raised.reason
    assert named.reward == Reward(value=1.0, components=(Metric("?", 0.5),))
    assert judge.gauge("reward/replaced_processes") == 0


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("os._exit(3)", "the process of the reward function ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL, as the kernel does when memory runs out"),
        ("ctypes.string_at(0)", "was killed by SIGSEGV"),
        (
            "[os.write(int(number), b'\\x04\\0\\0\\0oops') for number in os.listdir('/proc/self/fd') "
            "if 'socket:' in os.path.realpath(f'/proc/self/fd/{number}')]",
            "the process of the reward function said what nobody understands",
        ),
    ],
)
def test_a_call_that_kills_its_process_costs_only_itself(
    judges: list[Judge], tmp_path: Path, tokenizer_folder: Path, how: str, reason: str
) -> None:
    text = "import ctypes, os\ndef score(label):\n    eval(label or '0')\n    return 1"
    judge = open_judge(judges, tmp_path, tokenizer_folder, text)
    answers = judge.score(*(command(i, label=how if i == 3 else "") for i in range(8)))
    failed = answers.pop(SampleKey(3, 3))
    assert failed.reward is None
    assert reason in failed.reason
    assert {answer.reward for answer in answers.values()} == {Reward(value=1.0)}


def test_several_processes_work_side_by_side(judges: list[Judge], tmp_path: Path, tokenizer_folder: Path) -> None:
    """Each call waits for the other's file, so one process alone could answer neither."""
    text = """
        import pathlib, time
        def score(label):
            here = pathlib.Path(__file__).parent
            (here / label).touch()
            while not (here / {"a": "b", "b": "a"}[label]).exists():
                time.sleep(0.01)
            return 1
        """
    judge = open_judge(judges, tmp_path, tokenizer_folder, text, num_workers=2)
    answers = judge.score(command(0, label="a"), command(1, label="b"))
    assert all(answer.reward for answer in answers.values())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while is_running(pid):
        assert time.monotonic() < deadline_s, f"process {pid} is still there"
        time.sleep(0.01)


def test_what_a_function_started_ends_with_it(judges: list[Judge], tmp_path: Path, tokenizer_folder: Path) -> None:
    text = """
        import pathlib, subprocess
        child = subprocess.Popen(["sleep", "1000"])
        pathlib.Path(__file__).with_name("pid").write_text(str(child.pid))
        def score():
            child.wait()
        """
    judge = open_judge(judges, tmp_path, tokenizer_folder, text)
    (answer,) = judge.score(command(timeout_s=1.0)).values()
    assert "took longer than 1 s" in answer.reason
    wait_until_gone(int((tmp_path / "pid").read_text()))


def test_processes_run_with_no_signal_blocked_and_apart_from_the_terminal(
    judges: list[Judge], tmp_path: Path, tokenizer_folder: Path
) -> None:
    text = """
        import os, signal
        def score():
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            return {"reward": len(blocked), "session": os.getsid(0), "pid": os.getpid()}
        """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        judge = open_judge(judges, tmp_path, tokenizer_folder, text)
        (answer,) = judge.score(command()).values()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert answer.reward is not None
    assert answer.reward.value == 0
    session, pid = (component.value for component in answer.reward.components)
    assert session == pid != os.getsid(0)


def test_what_a_function_prints_does_no_harm(judges: list[Judge], tmp_path: Path, tokenizer_folder: Path) -> None:
    text = "import sys\ndef score():\n    print('x' * 100_000, file=sys.stderr)\n    print('y' * 100_000)\n    return 1"
    answers = open_judge(judges, tmp_path, tokenizer_folder, text).score(command(0), command(1))
    assert all(answer.reward for answer in answers.values())


def test_messages_larger_than_a_socket_buffer_get_through(
    judges: list[Judge], tmp_path: Path, tokenizer_folder: Path
) -> None:
    judge = open_judge(judges, tmp_path, tokenizer_folder, "def score(label): return len(label)")
    commands = [command(i, label="x" * 1_000_000) for i in range(5)]
    assert {a.reward for a in judge.score(*commands).values()} == {Reward(value=1_000_000.0)}


def test_a_class_is_made_once_and_called(judges: list[Judge], tmp_path: Path, tokenizer_folder: Path) -> None:
    text = """
        class Mine:
            def __init__(self): self.calls = 0
            def __call__(self, label):
                self.calls += 1
                return self.calls
        """
    judge = open_judge(judges, tmp_path, tokenizer_folder, text, name="Mine")
    answers = judge.score(*(command(i) for i in range(3)))
    assert sorted(answer.reward.value for answer in answers.values() if answer.reward) == [1, 2, 3]


ASYNC = """
    import asyncio, time
    arrived = 0
    async def score(label, index):
        global arrived
        if label == "gather":
            arrived += 1
            while arrived < 20:
                await asyncio.sleep(0.001)
        if label == "forever":
            await asyncio.Event().wait()
        if label == "block":
            time.sleep(1000)
        if label == "raise":
            raise TimeoutError("the judge did not answer")
        return index
    """


def test_calls_of_an_async_function_run_side_by_side(
    judges: list[Judge], tmp_path: Path, tokenizer_folder: Path
) -> None:
    answers = open_judge(judges, tmp_path, tokenizer_folder, ASYNC).score(
        *(command(i, label="gather") for i in range(20))
    )
    assert {key.index: answer.reward and answer.reward.value for key, answer in answers.items()} == {
        i: float(i) for i in range(20)
    }


def test_an_async_call_that_waits_too_long_is_cancelled_alone(
    judges: list[Judge], tmp_path: Path, tokenizer_folder: Path
) -> None:
    judge = open_judge(judges, tmp_path, tokenizer_folder, ASYNC)
    labels = {0: "forever", 1: "raise"}
    answers = judge.score(*(command(i, label=labels.get(i, ""), timeout_s=30 if i else 0.3) for i in range(5)))
    assert answers[SampleKey(3, 0)].reason == "the reward function took longer than 0.3 s"
    assert answers[SampleKey(3, 1)].reason == "TimeoutError: the judge did not answer (mine.py:15)"
    assert all(answers[SampleKey(3, i)].reward for i in (2, 3, 4))
    assert judge.gauge("reward/replaced_processes") == 0


def test_an_async_call_that_blocks_the_others_is_killed_and_they_are_done_again(
    judges: list[Judge], tmp_path: Path, tokenizer_folder: Path
) -> None:
    judge = open_judge(judges, tmp_path, tokenizer_folder, ASYNC)
    commands = [command(i, label="block" if i == 1 else "", timeout_s=0.3 if i == 1 else 30) for i in range(6)]
    answers = judge.score(*commands)
    assert answers.pop(SampleKey(3, 1)).reason == "the reward function took longer than 0.3 s (reward.timeout_s)"
    assert all(answer.reward for answer in answers.values())
    assert judge.gauge("reward/replaced_processes") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def scare(): pass", "mine.py has no 'score'; did you mean 'scare'?"),
        ("def score(:\n  pass", "mine.py:1: invalid syntax: def score(:"),
        (
            "import nothing_of_that_name\ndef score(): pass",
            "ModuleNotFoundError: No module named 'nothing_of_that_name' (mine.py:1)",
        ),
        (
            "x = 1\ny = x / 0\ndef score(): pass",
            "mine.py cannot be imported: ZeroDivisionError: division by zero (mine.py:2)",
        ),
        ("score = 3", "'score' is int, which cannot be called"),
        (
            "def score(answer): pass",
            "asks for 'answer'; a reward function may ask for prompt, response, conversation",
        ),
        (
            "def score(data_source, solution_str, extra_info): pass",
            "group_id, index. What others call data_source is metadata here. What others call solution_str is response",
        ),
        ("def score(response, /): pass", "asks for 'response' by position"),
        ("class score:\n  def __init__(self): raise KeyError('k')", "KeyError: 'k'"),
        ("import sys\nsys.exit('stop')", "SystemExit: stop (mine.py:2)"),
    ],
)
def test_a_function_that_cannot_be_loaded_fails_the_backend_with_its_place(
    judges: list[Judge], tmp_path: Path, tokenizer_folder: Path, text: str, message: str
) -> None:
    failure = open_judge(judges, tmp_path, tokenizer_folder, text).failure()
    assert isinstance(failure, UserCodeError)
    assert message in str(failure)


def test_a_function_whose_process_dies_while_loading_fails_the_backend(
    judges: list[Judge], tmp_path: Path, tokenizer_folder: Path
) -> None:
    failure = open_judge(judges, tmp_path, tokenizer_folder, "import os; os._exit(4)").failure()
    assert "ended with exit code 4 while it loaded, 3 times in a row" in str(failure)


def test_a_function_that_never_loads_fails_the_backend(
    judges: list[Judge], tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_pool, "START_TIMEOUT_S", 0.5)
    failure = open_judge(judges, tmp_path, tokenizer_folder, "import threading; threading.Event().wait()").failure()
    assert str(failure).endswith("mine.py:score did not load within 0.5 s")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "maths",
            "reward.function: no reward function is called 'maths'; did you mean 'math'?",
        ),
        (
            "xyz",
            "there are lines, random, math, deepscaler, dapo, gpqa, f1, ifbench, reasoning_gym, boxed_math, "
            "boxed_gpqa, boxed_f1, boxed_ifbench, boxed_reasoning_gym, length_penalty, remote, judge, reward_model, "
            "code, and file.py:function",
        ),
        ("nowhere.py:score", "there is no file"),
        ("nowhere.py:", "expected file.py:name"),
    ],
)
def test_a_function_that_there_is_not_is_refused_at_once(tokenizer_folder: Path, function: str, message: str) -> None:
    with pytest.raises(UserCodeError) as caught:
        open_rewards(RewardOptions(function=function), tokenizer_folder)
    assert message in str(caught.value)


def test_closing_ends_a_process_that_hangs(tmp_path: Path, tokenizer_folder: Path) -> None:
    text = """
        import os, pathlib
        def score():
            pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
            os.rename(pathlib.Path(__file__).with_name("pid"), pathlib.Path(__file__).with_name("ready"))
            while True: pass
        """
    judge = Judge(tokenizer_folder, f"{user_file(tmp_path, text)}:score")
    judge.backend.execute(command())
    pid = wait_for_pid(tmp_path / "ready")
    judge.backend.close(WAIT_S)
    assert not is_running(pid)


def wait_for_pid(path: Path) -> int:
    deadline_s = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} does not come"
        time.sleep(0.01)
    return int(path.read_text())


PARENT = """
    import sys, time
    from pathlib import Path
    from penstock.backends.rewards import open_rewards
    from penstock.backends.rewards.options import RewardOptions
    from penstock.messages.commands import Score
    from penstock.messages.samples import Completed, Prompt, Sample, SampleKey
    backend = open_rewards(RewardOptions(function=sys.argv[1]), Path(sys.argv[2]))
    backend.start(print, print)
    sample = Sample(key=SampleKey(0, 0), parts=(), outcome=Completed())
    backend.execute(Score(sample=sample, prompt=Prompt(row=0, epoch=0, tokens=b""), timeout_s=1000.0))
    time.sleep(1000)
"""


def test_a_killed_parent_leaves_no_process_behind(tmp_path: Path, tokenizer_folder: Path) -> None:
    text = """
        import os, pathlib, signal, time
        def score():
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
            pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
            os.rename(pathlib.Path(__file__).with_name("pid"), pathlib.Path(__file__).with_name("ready"))
            while True: pass
        """
    spec = f"{user_file(tmp_path, text)}:score"
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(PARENT), spec, str(tokenizer_folder)])
    pid = wait_for_pid(tmp_path / "ready")
    parent.send_signal(signal.SIGKILL)
    parent.wait(WAIT_S)
    wait_until_gone(pid)
