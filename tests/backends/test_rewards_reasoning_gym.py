"""Answers to reasoning-gym's tasks are data: none is run, whatever it says."""
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import time
from functools import cache
from typing import TYPE_CHECKING

import pytest

from penstock.messages.errors import UserFault

pytest.importorskip("reasoning_gym")
from reasoning_gym import create_dataset
from reasoning_gym.factory import DATASETS

from penstock.backends.data.generated import reasoning_gym_rows
from penstock.backends.rewards.formulas import FormulaError, arithmetic, literal, parsed, polynomial, slope
from penstock.backends.rewards.functions import REWARD, NoRewardError, load_function
from penstock.backends.rewards.reasoning_gym_answers import unsafe_task
from penstock.backends.rewards.reasoning_gym_checkers import CHECKERS, PREPARED, integration
from penstock.backends.rewards.reasoning_gym_scan import evaluates
from penstock.runtime.preflight.rewards import check_rewards
from penstock.runtime.scenario.load import load_scenario

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.data.row import RawRow

AS_MANY = 6
OURS = sorted((*CHECKERS, *PREPARED))


@cache
def rows(name: str, number: int = AS_MANY) -> tuple[RawRow, ...]:
    return tuple(reasoning_gym_rows(f"reasoning_gym:{name}:{number}", f"{name}:{number}", seed=5))


def score(answer: str, row: RawRow) -> float:
    reward = load_function(REWARD, "reasoning_gym").function(
        response=f"<answer>{answer}</answer>", metadata=row.metadata
    )
    assert isinstance(reward, float)
    return reward


def attacks(file: Path) -> list[str]:
    """What wrote a file, or gave 1, when the library's checkers were asked."""
    write = f"__import__('pathlib').Path({str(file)!r}).write_text('x')"
    return [
        write,
        f"[{write}]",
        f"[c for c in [{write}]]",
        f"({write}) or 24",
        f"eval({write!r})",
        f"exec({write!r})",
        f"(lambda: {write})()",
        f"().__class__.__mro__[1].__subclasses__() and {write}",
        f"Symbol({write!r})",
        f"sympify({write!r})",
        f"f'{{{write}}}'",
        "setattr(__import__('reasoning_gym').dataset.ProceduralDataset, 'score_answer', lambda *_: 1.0)",
        "type('x', (str,), {'__eq__': lambda *_: True})()",
    ]


@pytest.mark.parametrize("name", OURS)
def test_an_answer_is_never_run(name: str, tmp_path: Path) -> None:
    file = tmp_path / "written"
    (row, *_) = rows(name)
    for attack in attacks(file):
        assert score(attack, row) < 0.1, attack
        assert not file.exists(), attack
    assert score("nothing of the kind", row) < 0.1  # no checker was replaced
    assert score(str(rows(name)[3].columns["label"]), rows(name)[3]) == 1.0 or "Integral" in str(row.columns["label"])


def test_exactly_the_tasks_whose_checkers_evaluate_have_one_of_ours() -> None:
    """A new version of the library that adds one fails here; until then its task is refused."""
    found = {name for name, (task, _) in DATASETS.items() if evaluates(task)}
    assert found == set(CHECKERS) | set(PREPARED)
    assert all(not unsafe_task(name) for name in DATASETS)


@pytest.mark.parametrize("name", OURS)
def test_a_tasks_own_answers_earn_everything_and_those_of_others_nothing(name: str) -> None:
    readable = [row for row in rows(name) if "Integral" not in str(row.columns["label"])]
    assert len(readable) > AS_MANY // 2
    for row in readable:
        assert score(str(row.columns["label"]), row) == 1.0
    pairs = itertools.pairwise(readable)
    assert all(score(str(other.columns["label"]), row) < 1 for row, other in pairs)


HONEST = {
    "countdown": ["1 + 2", "{label} + 1 - 1", "({label})", " {label} ", "({label})*1", "{label} = 5", "x", "5/0", ""],
    "puzzle24": ["({label})", "1 + 2", "1 + 1 + 1 + 1", "{label} + 1", "x + 1 + 2 + 3", "5/0", ""],
    "string_insertion": ["{listed}", "{listed}x", "[1, 2]", "[]", "'{label}'", ""],
    "spiral_matrix": ["[{commas}]", "({commas})", "[{commas}, 1]", "{label} 1", "7", "[[{commas}]]"],
    "bitwise_arithmetic": ["0x{label}", "-1", "{label}0", "{label} ", "5.0", "x"],
    "polynomial_multiplication": ["{label} + 0", "0 + {label}", "({label})", "{label} + 1", "2*({label})/2", "y", ""],
    "simple_integration": ["{label} + 7", "{label} - K", "({label})*2", "x", "{label} + ", "5", "1/0"],
    "intermediate_integration": ["{label} + 7", "{label} - K", "2*({label})", "x", "5", "{label} + )"],
    "number_sorting": ["{label}", "[]", "[1]", "5", "{{}}", "[{label}]"],
}


@pytest.mark.parametrize("name", sorted(HONEST))
def test_answers_that_are_data_earn_what_the_library_gives(name: str) -> None:
    dataset = create_dataset(name, size=AS_MANY, seed=5)
    for row, entry in zip(rows(name), dataset, strict=True):
        label = str(row.columns["label"])
        for form in HONEST[name]:
            answer = form.format(label=label, listed=str(list(label)), commas=label.replace(" ", ", "))
            if "Integral" not in answer:
                expected = dataset.score_answer(answer.strip(), entry)
                assert score(answer, row) == pytest.approx(expected), (answer, entry["metadata"])


def test_lists_of_lists_earn_what_the_library_gives() -> None:
    for name, share in (("binary_matrix", 0.1), ("n_queens", 0.5)):
        for row in rows(name):
            board = [line.split() for line in str(row.columns["label"]).split("\n")]
            if name == "binary_matrix":
                assert score(str([[int(cell) for cell in line] for line in board]), row) == share
            assert score(str(board), row) == share
            assert score(str(board[1:]), row) == 0.0


def test_where_the_library_can_be_talked_round_nothing_is_earned() -> None:
    puzzle = rows("puzzle24")[0]
    assert score("4*6*1*1", puzzle) < 0.1  # not its numbers
    assert score("7*7/2 + 0", puzzle) < 0.1  # 24.5, cut off
    for row in rows("intermediate_integration"):
        entry = row.metadata["entry"]
        assert isinstance(entry, dict)
        facts = entry["metadata"]
        assert score(f"Integral({facts['integrand']}, {facts['variable']})", row) == 0.0


@pytest.mark.parametrize(
    ("integrand", "answer", "expected"),
    [
        ("1/x", "log(x)", 1.0), ("1/x", "log(Abs(x)) + C", 1.0), ("1/x", "log(5*x)", 1.0), ("1/x", "log(x)*2", 0.0),
        ("2*sin(x)*cos(x)", "sin(x)**2", 1.0), ("2*sin(x)*cos(x)", "-cos(2*x)/2", 1.0), ("tan(x)", "-log(cos(x))", 1.0),
        ("x*exp(x)", "(x - 1)*E**x + k", 1.0), ("x*exp(x)", "x*exp(x)", 0.0), ("log(x)", "x*ln(x) - x", 1.0),
        ("1/(1 + x**2)", "atan(x)", 1.0), ("1/sqrt(1 - x**2)", "asin(x)", 1.0), ("1/sqrt(1 - x**2)", "-acos(x)", 1.0),
        ("x**2", "0.333333333333333*x**3", 1.0), ("x**2", "0.33333333*x**3", 0.0), ("sqrt(x)", "2*x**(3/2)/3", 1.0),
        ("cos(x)", "sin(x) + 1e300*x", 0.0), ("cos(x)", "sin(x) + x**x", 0.0), ("sinh(x)", "cosh(x)", 1.0),
        ("x", "x^2/2", 0.0), ("x", "x**2/2 + C*x", 0.0), ("x", "x**2/2 + C**2 + pi + I", 1.0), ("0", "C", 1.0),
    ],
)  # fmt: skip
def test_an_integral_is_right_if_its_derivative_is_the_integrand(integrand: str, answer: str, expected: float) -> None:
    assert integration(answer, {"metadata": {"integrand": integrand, "variable": "x"}}) == expected


@pytest.mark.parametrize("integrand", ["f(x)", "x +", "__import__('os')", "1/(x - x)"])
def test_a_row_whose_integrand_says_nothing_gives_no_reward(integrand: str) -> None:
    with pytest.raises(NoRewardError, match="integrand"):
        integration("x", {"metadata": {"integrand": integrand, "variable": "x"}})


COSTLY = [
    "9**9**9**9", "(x + 1)**99999999", "9" * 5000, "(" * 5000, "-" * 5000 + "1", "+".join("x" * 3000),
    "1/" * 2000 + "1",
    "*".join(["9" * 900] * 4), "**".join("x" * 1000), "[" * 60000, "x" * 100_000, "((((2**1000)**1000)**1000)**1000)",
    "exp(" * 300 + "x" + ")" * 300, "1e99999*x", " " * 100_000, "(x+y)*" * 600 + "x", "\0", "not " * 20000 + "x",
    "{" * 16000, "'" * 16000, "a." * 8000, "x if " * 3000, "lambda:" * 2000 + "1", "~" * 4000 + "1", "0x" + "f" * 9000,
]  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_no_answer_costs_more_than_a_second(name: str) -> None:
    (row, *_) = rows(name)
    for answer in COSTLY:
        start_s = time.process_time()
        assert score(answer, row) < 1
        assert time.process_time() - start_s < 1.0, answer[:40]


def _slope(text: str) -> object:
    return slope(parsed(text), "x", 0.5)


@pytest.mark.parametrize("answer", COSTLY)
def test_what_is_beyond_the_bounds_is_no_formula(answer: str) -> None:
    start_s = time.process_time()
    for read in (arithmetic, polynomial, literal, _slope):
        try:
            read(answer)
        except FormulaError:
            continue
    assert time.process_time() - start_s < 2.0


class _Evaluating(DATASETS["chain_sum"][0]):  # type: ignore[misc]
    def score_answer(self, answer: str | None, entry: dict[str, object]) -> float:
        return self._judged(answer or "")

    def _judged(self, answer: str) -> float:
        return float(eval(answer))


class _Raising(DATASETS["chain_sum"][0]):  # type: ignore[misc]
    def score_answer(self, answer: str | None, entry: dict[str, object]) -> float:
        if answer == entry["answer"]:
            return 1.0
        raise RecursionError("too deep")


def test_a_task_that_evaluates_and_has_no_checker_of_ours_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(DATASETS, "evaluating", (_Evaluating, DATASETS["chain_sum"][1]))
    (row, *_) = rows("chain_sum", 2)
    with pytest.raises(NoRewardError, match=r"would run them as Python \(.*_judged: eval\)"):
        load_function(REWARD, "reasoning_gym").function(
            response="1", metadata={**row.metadata, "reasoning_gym": "evaluating"}
        )
    file = tmp_path / "example.yaml"
    file.write_text("run: {name: example}\ndata: {path: 'reasoning_gym:evaluating:9'}\nmodel: {make: xs}\n")
    check_rewards(load_scenario(file, ["reward.function=f1"]))
    for function in ("reasoning_gym", "boxed_reasoning_gym"):
        with pytest.raises(UserFault, match=r"^data\.path: answers of reasoning-gym's task 'evaluating' cannot"):
            check_rewards(load_scenario(file, [f"reward.function={function}"]))


def test_what_a_checker_raises_is_a_wrong_answer_unless_it_is_the_rows_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "raising", (_Raising, DATASETS["chain_sum"][1]))
    (row, *_) = rows("chain_sum", 2)
    metadata: dict[str, object] = {**row.metadata, "reasoning_gym": "raising"}
    reward = load_function(REWARD, "reasoning_gym").function
    assert reward(response=str(row.columns["label"]), metadata=metadata) == 1.0
    assert reward(response="(" * 9, metadata=metadata) == 0.0
    with pytest.raises(NoRewardError, match="cannot judge this row: RecursionError"):
        reward(response="5", metadata={**metadata, "entry": {"answer": None}})


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<answer>{}</answer>", 1.0), ("<answer>1</answer> no: <answer> {} </answer>.", 1.0), ("{}", 1.0),
        ("<answer>{}</answer> <answer>1</answer>", 0.0), ("<answer><answer>{}</answer>", 1.0),
        ("<answer>{}", 0.1), ("<answer>" * 20000, 0.0), ("<answer>\n{}\n</answer>" + "<answer>" * 20000, 1.0),
    ],
)  # fmt: skip
def test_the_answer_is_what_stands_in_the_last_marks(response: str, expected: float) -> None:
    (row, *_) = rows("chain_sum", 2)
    start_s = time.process_time()
    written = response.replace("{}", str(row.columns["label"]))
    found = load_function(REWARD, "reasoning_gym").function(response=written, metadata=row.metadata)
    assert isinstance(found, float)
    assert found == 1.0 if expected == 1.0 else found < 0.5
    assert time.process_time() - start_s < 1.0
