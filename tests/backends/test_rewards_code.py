"""Programs of the model: right ones earn the reward, and none of those that mean to talk it round."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import pytest

from penstock.backends.processes.sandbox.warded import SandboxFailedError
from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.rewards import code_answers
from penstock.backends.rewards.code_answers import CodeReward, program_of
from penstock.backends.rewards.code_cases import read_cases, same_output, same_result
from penstock.backends.rewards.functions import NoRewardError
from penstock.backends.rewards.functions_asked import asked_functions
from penstock.backends.rewards.options import CodeOptions, RewardOptions
from penstock.messages.errors import UserFault
from penstock.runtime.preflight.rewards import check_rewards
from penstock.runtime.scenario.load import load_scenario

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = CodeOptions(wall_s=30.0, cpu_s=2, total_s=300.0)
STDIN = json.dumps({"inputs": ["3 4\n", "10 -2\n"], "outputs": ["7\n", "8\n"]})
CALLS = json.dumps({"inputs": [[3, 4], [10, -2]], "outputs": [7, 8], "fn_name": "add"})
ASSERTS = "assert add(3, 4) == 7\nassert add(10, -2) == 8"


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward(OPTIONS)


def fenced(program: str) -> str:
    return f"Here it is.\n```python\n{program}\n```\nDone."


def scores(reward: CodeReward, *pairs: tuple[str, str]) -> list[float]:
    async def ask() -> list[float]:
        return await asyncio.gather(*(reward(response=fenced(program), label=label) for program, label in pairs))

    return asyncio.run(ask())


READS = "a, b = map(int, input().split())\n"
RIGHT = [
    (READS + "print(a + b)", STDIN),
    ("import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())), '')", STDIN),
    ("import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin.read().split())), end='')", STDIN),
    (READS + "print(a + b)\nimport sys\nprint('thinking', file=sys.stderr)\nsys.exit(0)", STDIN),
    ("def add(a, b):\n    return a + b", CALLS),
    ("def add(a: List[int], b: Optional[int] = 0) -> int:\n    print('working on it')\n    return a + b", CALLS),
    ("class Solution:\n    def add(self, a, b):\n        return a + b", CALLS),
    ("def add(a, b):\n    return a + b\nprint('PASSED')", ASSERTS),
    ("add = lambda *numbers: sum(numbers)", ASSERTS),
]


def test_right_programs_earn_everything(reward: CodeReward) -> None:
    assert scores(reward, *RIGHT) == [1.0] * len(RIGHT)


AGREES = "class A(int):\n    __eq__ = lambda *_: True\n    __ne__ = lambda *_: False\n    __hash__ = int.__hash__\n"
CLAIMS = "import os\nfor fd in range(64):\n    try: os.write(fd, {!r})\n    except OSError: pass\n"
FORGED = [
    # how it ends
    "import os\nos._exit(0)",
    "import sys\nsys.exit(0)",
    "exit()",
    "raise SystemExit",
    "import os\ndef add(a, b): os._exit(0)",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return None",
    "import sys\nsys.excepthook = lambda *_: print('PASSED')\nraise ValueError",
    # what it says of itself
    "print('PASSED')",
    "print('7\\n8')",
    "print('OK'); print('{\"passed\": true, \"reward\": 1.0}')",
    "def add(a, b): return True",
    "def add(a, b): return 'PASSED'",
    AGREES + "def add(a, b): return A(5)",
    "class A:\n    def __eq__(self, other): return True\ndef add(a, b): return A()",
    "class A(str):\n    def __eq__(self, other): return True\ndef add(a, b): return A('x')",
    "class A(list):\n    def __eq__(self, other): return True\ndef add(a, b): return A()",
    "class A(float):\n    def __repr__(self): return '7'\ndef add(a, b): return A(1.5)",
    "def add(a, b): return float('nan')",
    "def add(a, b): return [7, 8]",
    # at those who judge it
    "import json\njson.dumps = lambda *_, **__: 'true'\ndef add(a, b): return 1",
    "import builtins\nbuiltins.exec = builtins.compile = lambda *_: None\ndef add(a, b): return True",
    "import sys\nframe = sys._getframe()\nwhile frame:\n    frame.f_locals.update(arguments=[0, 7], claim=b'true')\n"
    "    frame = frame.f_back\ndef add(a, b): return None",
    "import gc\nprint([x for x in gc.get_objects() if type(x) is dict and 'outputs' in x])\ndef add(a, b): return 0",
    "import os\nprint(os.environ, open('/proc/self/environ').read())",
    CLAIMS.format(b'{"id": 0, "reward": 1.0}\n'),
    CLAIMS.format(b'[0, 0, "", true, 0]\n') + "os._exit(0)",
    "import os\nos.write(1, b'7')\ndef add(a, b): return 7",  # right in one case alone, and said twice
    # by using much
    "while True: pass",
    "print('7' * 10**9)",
    "x = [0] * 10**12",
    "def add(a, b): return add(a, b)",
    "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "def add(a, b): return 10 ** 5000",
    "def add(a, b): return 10 ** 400",
    "",
    "def add(",
    "\0",
]


def test_no_other_program_earns_anything(reward: CodeReward) -> None:
    pairs = [(program, label) for program in FORGED for label in (STDIN, CALLS)]
    found = scores(reward, *pairs)
    assert [pair for pair, score in zip(pairs, found, strict=True) if score] == []


def test_what_is_expected_never_enters_the_sandbox(reward: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    real = reward.sandbox.run

    async def watched(source: str, *, stdin: str = "", is_plain: bool = False) -> object:
        given.append(source + stdin)
        return await real(source, stdin=stdin, is_plain=is_plain)

    monkeypatch.setattr(reward.sandbox, "run", watched)
    secret = {"inputs": [[1]], "outputs": ["unguessable"], "fn_name": "f"}
    assert scores(reward, ("def f(x): return 'unguess' + 'able'", json.dumps(secret))) == [1.0]
    assert scores(reward, ("print('unguess' + 'able')", '{"inputs": ["1"], "outputs": ["unguessable"]}')) == [1.0]
    assert len(given) == 2
    assert not any("unguessable" in text for text in given)


def test_with_partial_the_share_of_the_cases_is_earned_and_only_the_first_are_tried() -> None:
    half = "def add(a, b): return 7"
    assert scores(CodeReward(CodeOptions(partial=True, wall_s=30.0, total_s=300.0)), (half, CALLS)) == [0.5]
    assert scores(CodeReward(CodeOptions(max_cases=1, wall_s=30.0, total_s=300.0)), (half, CALLS)) == [1.0]


def test_cases_that_the_time_of_a_response_does_not_reach_are_not_passed() -> None:
    short = CodeReward(CodeOptions(total_s=1e-6, partial=True))
    (found,) = scores(short, RIGHT[0])
    assert found <= 0.5


def test_a_sandbox_that_breaks_gives_no_reward(reward: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object, **__: object) -> object:
        raise SandboxFailedError("no room")

    monkeypatch.setattr(reward.sandbox, "run", broken)
    with pytest.raises(NoRewardError, match="the sandbox could not run the program: no room"):
        scores(reward, RIGHT[0])


def test_a_machine_that_shuts_nothing_in_is_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: object, **__: object) -> object:
        raise UserFault("programs of the model cannot be shut in on this machine")

    file = tmp_path / "example.yaml"
    file.write_text("run: {name: example}\ndata: {path: 'lines:9'}\nmodel: {make: xs}\nreward: {function: code}\n")
    check_rewards(load_scenario(file, []))
    monkeypatch.setattr(code_answers, "Sandbox", refused)
    with pytest.raises(UserCodeError, match="cannot be shut in"):
        CodeReward(OPTIONS)
    with pytest.raises(UserFault, match=r"^reward\.code: programs of the model cannot be shut in"):
        check_rewards(load_scenario(file, []))


def test_its_deadline_is_beyond_that_of_its_programs() -> None:
    (function,) = asked_functions(RewardOptions(function="code", code=CodeOptions(total_s=100.0, wall_s=9.0))).every()
    assert function.timeout_s is not None
    assert function.timeout_s > 109
    assert function.code == CodeOptions(total_s=100.0, wall_s=9.0)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\na\n```\nno:\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```json\n{}\n```", "a\n"),
        ("<think>```python\na\n```</think> nothing", None),
        ("```python\na\n```</think>\n```python\nb\n```", "b\n"),
        ("```python\nunfinished", None),
        ("print(1)", None),
        ("```python\n   \n```", None),
        ("  ```python3 title\nx\n  ```", "x\n"),
        ("```" + " " * 100_000 + "`", None),
        ("```" + "a" * 100_000 + "`", None),
        ("```\n" * 25_000, None),
    ],
)
def test_the_program_is_the_last_fenced_block_of_python(response: str, program: str | None) -> None:
    start_s = time.process_time()
    assert program_of(response) == program
    assert time.process_time() - start_s < 1.0


def test_the_forms_of_cases() -> None:
    assert read_cases(STDIN)[0][:2] == ("3 4\n", "7\n")
    assert read_cases('[{"input": "1", "output": "2", "testtype": "stdin"}]')[0][:2] == ("1", "2")
    assert read_cases('{"cases": [{"input": "1", "output": "2"}]}')[0][:2] == ("1", "2")
    assert read_cases('{"inputs": [["1", "2"]], "outputs": [["3"]]}')[0][:2] == ("1\n2", "3")
    assert read_cases(CALLS)[1][2:] == ("add", (10, -2), 8)
    assert read_cases('[{"input": "[1]\\n2", "output": "[3]", "fn_name": "f"}]')[0][2:] == ("f", ([1], 2), [3])
    assert read_cases("[\"assert f((1, 2), 'a') == {'x': (3,)}\"]")[0][2:] == ("f", ([1, 2], "a"), {"x": [3]})
    assert [case.arguments for case in read_cases(f"# cases\n{ASSERTS}\n")] == [(3, 4), (10, -2)]


@pytest.mark.parametrize(
    "label",
    [
        "", " ", "{}", "[]", "5", '{"inputs": ["1"], "outputs": []}', '{"inputs": [1], "outputs": ["1"]}',
        '{"inputs": [1], "outputs": [1], "fn_name": "f"}', '{"inputs": [[1]], "outputs": [1], "fn_name": "f()"}',
        "assert f(x) == 1", "assert f(1)", "assert f(1) == __import__('os').getpid()", "import os", "assert 1 == 1",
        "assert f(1) == {1, 2}", '["assert f(1) == 1", 5]', '[{"input": "[", "output": "1", "fn_name": "f"}]', "a b",
        "assert f(" + "(" * 300 + ") == 1", "[" * 5000,
    ],
)  # fmt: skip
def test_a_row_without_cases_gives_no_reward(label: str, reward: CodeReward) -> None:
    with pytest.raises(NoRewardError):
        read_cases(label)


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("7", "7\n", True), ("7  \n\n", "7", True), ("7 8", "7\n8", False), ("7  8", "7 8", True), ("07", "7", False),
        ("0.5", "0.50", True), ("0.5000001", "0.5", True), ("0.51", "0.5", False), ("nan", "0.5", False),
        ("7.0", "7", False), ("", "7", False), ("", "", True), ("inf", "1.5", False), ("Yes", "YES", False),
        ("7\n8", "7", False), ("1.0000001", "1.0", True), ("a.b", "a.c", False), (" 7", "7", True),
    ],
)  # fmt: skip
def test_outputs_are_the_same_line_by_line(found: str, wanted: str, same: bool) -> None:
    assert same_output(found, wanted) is same


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        (1, 1, True), (1, True, False), (True, 1, False), (1.0, 1, True), (1, 1.0, True), (True, 1.0, False),
        ("1", 1, False), ([1, [2]], [1, [2]], True), ([1], [1, 2], False), ([1, 2], [1], False), (None, None, True),
        (None, False, False), ({"a": 1}, {"a": 1}, True), ({"a": 1}, {"a": 1, "b": 2}, False), (0.1 + 0.2, 0.3, True),
        ({"a": [0.1 + 0.2]}, {"a": [0.3]}, True), ([], None, False), ([], {}, False),
        (0, False, False), ("", [], False),
    ],
)  # fmt: skip
def test_values_are_the_same_as_json_has_them(found: object, wanted: object, same: bool) -> None:
    assert same_result(found, wanted) is same
