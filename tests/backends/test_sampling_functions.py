"""Users' functions that decide about sampling, in real processes: filters of samples, the hook, curricula."""

from __future__ import annotations

import queue
import textwrap
from typing import TYPE_CHECKING

import msgspec
import pytest
from reward_driver import prompt_of, sample_of

from penstock.backends.data.row_chooser import ChoosingSettings
from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.rewards import open_filters
from penstock.backends.rewards.row_choosing import ChoosingPrompts
from penstock.backends.rewards.sampling import PriorityFunction
from penstock.backends.rewards.sampling_calls import PromptHistory
from penstock.messages.base import Metric
from penstock.messages.commands import ChooseRows, JudgeGroup, JudgeSamples, ShowGroup, StreamPlace
from penstock.messages.flow import RowOutcome
from penstock.messages.local import GroupJudged, LocalEvent, RowsDrawn, SamplesJudged
from penstock.messages.samples import Completed, Group, Prompt, Reward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.backends.protocol import Backend
    from penstock.messages.commands import FilterCommand, PromptCommand

WAIT_S = 60.0


class Told:
    """What backends have said."""

    def __init__(self) -> None:
        self.events: queue.Queue[LocalEvent | BaseException] = queue.Queue()

    def next(self) -> LocalEvent:
        event = self.events.get(timeout=WAIT_S)
        if isinstance(event, BaseException):
            raise event
        return event


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def opened(tmp_path: Path, tokenizer_folder: Path, told: Told) -> Iterator[Callable[..., Backend[FilterCommand]]]:
    backends: list[Backend[FilterCommand]] = []

    def make(code: str, **names: str) -> Backend[FilterCommand]:
        file = tmp_path / "mine.py"
        file.write_text(textwrap.dedent(code), encoding="utf-8")
        spec = {name: f"{file}:{value}" for name, value in names.items()}
        backend = open_filters(spec.get("function"), spec.get("sample"), spec.get("hook"), tokenizer_folder)
        backend.start(told.events.put, told.events.put)
        backends.append(backend)
        return backend

    yield make
    for backend in backends:
        backend.close(WAIT_S)


def group(*texts: str, group_id: int = 0, rewards: tuple[float, ...] = ()) -> Group:
    values = rewards or tuple(float(index) for index in range(len(texts)))
    samples = tuple(
        msgspec.structs.replace(
            sample_of(text, index, group_id=group_id),
            outcome=Completed(reward=Reward(value=value, components=(Metric("format", value / 2),))),
        )
        for index, (text, value) in enumerate(zip(texts, values, strict=True))
    )
    return Group(group_id=group_id, prompt=prompt_of("the label", {"level": 3}), samples=samples)


def gauge(backend: Backend[FilterCommand], name: str) -> float:
    return {metric.name: metric.value for metric in backend.gauges()}[name]


SIFT = """
def sift(response, reward, components, outcome, label, metadata, index, truncated):
    assert (label, metadata, outcome, truncated) == ("the label", {"level": 3}, "completed", False)
    assert components == {"format": reward / 2}
    if response == "bad":
        raise ValueError("no")
    if response == "odd":
        return "perhaps"
    if response == "hm":
        return False
    return (len(response) < 5, "too long")
"""


def test_each_sample_is_judged_with_what_the_function_asks_for(
    opened: Callable[..., Backend[FilterCommand]], told: Told
) -> None:
    backend = opened(SIFT, sample="sift")
    backend.execute(JudgeSamples(group("fine", "much too long", "bad", "odd", "hm", group_id=7)))
    told_of = told.next()
    assert isinstance(told_of, SamplesJudged)
    assert [(one.index, one.cause) for one in told_of.dropped] == [
        (1, "too long"),
        (2, "sample_filter_error"),
        (3, "sample_filter_error"),
        (4, "user_sample_filter"),
    ]
    reasons = [one.reason for one in told_of.dropped]
    assert (reasons[0], reasons[3]) == ("", "")
    assert all("(mine.py:" in reason for reason in reasons[1:3]), reasons
    assert gauge(backend, "filter/samples_failed") == 2


def test_every_group_gets_one_verdict_and_the_filter_of_groups_works_beside(
    opened: Callable[..., Backend[FilterCommand]], told: Told
) -> None:
    code = SIFT + "\ndef judge(rewards):\n    return (sum(rewards) > 1, 'dull')\n"
    backend = opened(code, sample="sift", function="judge")
    for group_id in range(20):
        backend.execute(JudgeSamples(group("a", "b", group_id=group_id)))
    backend.execute(JudgeGroup(group("a", "b", group_id=99, rewards=(0.0, 0.0))))
    heard = [told.next() for _ in range(21)]
    sifted = [event.group_id for event in heard if isinstance(event, SamplesJudged)]
    assert sorted(sifted) == list(range(20))
    assert [event for event in heard if isinstance(event, GroupJudged)] == [
        GroupJudged(group_id=99, keep=False, cause="dull")
    ]


def test_a_function_for_samples_that_cannot_be_loaded_stops_the_run(
    opened: Callable[..., Backend[FilterCommand]], told: Told
) -> None:
    opened("def sift(answer):\n    return True\n", sample="sift")
    with pytest.raises(UserCodeError, match=r"asks for 'answer'.*reward"):
        told.next()


HOOK = """
from pathlib import Path

def look(group, rewards, responses, kept, cause, label):
    if group.group_id == 1:
        raise RuntimeError("not today")
    with (Path(__file__).parent / "seen").open("a") as file:
        print(group.group_id, rewards, responses, kept, cause or "-", len(group.ended), file=file)
    if group.group_id == 2:
        import os
        os._exit(3)
"""


def wait_for(backend: Backend[FilterCommand], name: str, value: float, told: Told) -> None:
    """Its figure reaches this value; a failure that comes meanwhile is raised."""
    import time

    until_s = time.monotonic() + WAIT_S
    while gauge(backend, name) < value:
        assert time.monotonic() < until_s, backend.gauges()
        try:
            raise AssertionError(told.events.get(timeout=0.02))
        except queue.Empty:
            continue


def test_the_hook_sees_every_group_and_its_failures_are_counted_and_stop_nothing(
    opened: Callable[..., Backend[FilterCommand]], told: Told, tmp_path: Path
) -> None:
    backend = opened(HOOK, hook="look")
    for group_id, cause in enumerate(("", "", "zero_spread", "")):
        backend.execute(ShowGroup(group("a", "b", group_id=group_id), cause))
    wait_for(backend, "filter/hook_shown", 4, told)
    assert gauge(backend, "filter/hook_failed") == 2  # one raised, one ended its process
    seen = (tmp_path / "seen").read_text(encoding="utf-8").splitlines()
    assert seen == [
        "0 [0.0, 1.0] ['a', 'b'] True - 0",
        "2 [0.0, 1.0] ['a', 'b'] False zero_spread 0",
        "3 [0.0, 1.0] ['a', 'b'] True - 0",
    ]


def test_a_hook_that_cannot_be_loaded_is_off_and_what_it_does_not_see_is_counted(
    opened: Callable[..., Backend[FilterCommand]], told: Told
) -> None:
    backend = opened("raise OSError('no disk')\n", hook="look")
    backend.execute(ShowGroup(group("a")))
    wait_for(backend, "filter/hook_skipped", 1, told)
    backend.execute(ShowGroup(group("b")))
    assert gauge(backend, "filter/hook_skipped") == 2
    assert told.events.empty()


# --- curricula ----------------------------------------------------------------------------------------------------


def priority_function(tmp_path: Path, code: str, timeout_s: float = 20.0) -> PriorityFunction:
    file = tmp_path / "curriculum.py"
    file.write_text(textwrap.dedent(code), encoding="utf-8")
    return PriorityFunction(f"{file}:prefer", timeout_s)


def row_prompt(row: int) -> Prompt:
    return Prompt(row=row, epoch=0, tokens=b"", text=f"prompt {row}", label=str(row))


NO_HISTORY = PromptHistory(0, 0, None, None)


def test_a_curriculum_gives_numbers_none_and_failures_that_count_as_nothing(tmp_path: Path, told: Told) -> None:
    function = priority_function(
        tmp_path,
        """
        def prefer(prompt, history, label, row):
            assert prompt == f"prompt {row}" and label == str(row)
            if row == 2:
                return None
            if row == 3:
                raise KeyError("difficulty")
            if row == 4:
                return float("nan")
            return row + (history.mean_reward or 0.0) + 10 * history.rejected
        """,
    )
    function.start(told.events.put)
    history = PromptHistory(3, 1, 0.25, 0.5)
    prompts = [(row_prompt(row), history if row == 1 else NO_HISTORY) for row in range(5)]
    assert function.weigh(prompts) == [0.0, 11.25, None, 0.0, 0.0]
    assert function.num_failed == 2
    function.close(WAIT_S)


def test_a_curriculum_that_hangs_costs_its_deadline_and_nothing_else(tmp_path: Path, told: Told) -> None:
    code = """
        import time
        def prefer(row):
            if row == 1:
                time.sleep(3600)
            return row
    """
    function = priority_function(tmp_path, code, timeout_s=10.0)
    function.start(told.events.put)
    assert function.weigh([(row_prompt(0), NO_HISTORY)]) == [0.0]  # it has started
    assert function.weigh([(row_prompt(row), NO_HISTORY) for row in (5, 1, 6)])[0] == 5.0
    assert function.num_late + function.num_failed >= 1
    function.close(WAIT_S)
    assert told.events.empty()


class NoPrompts:
    """Reads nothing."""

    def start(self, emit: object, fail: object) -> None:
        pass

    def execute(self, command: PromptCommand, /) -> None:
        raise AssertionError(command)

    def gauges(self) -> tuple[Metric, ...]:
        return ()

    def close(self, timeout_s: float) -> None:
        pass


def test_rows_are_drawn_by_the_users_curriculum(tmp_path: Path, told: Told) -> None:
    function = priority_function(tmp_path, "def prefer(history, row):\n    return (history.last_reward or 0, row)[0]\n")
    settings = ChoosingSettings(seed=1, num_rows=6, has_priority=True)
    backend = ChoosingPrompts(NoPrompts(), settings, prompt_of=row_prompt, priority=function)
    backend.start(told.events.put, told.events.put)
    outcomes = (RowOutcome(4, 1.0, False), RowOutcome(2, 0.5, True))
    stream = (StreamPlace(0, 0, 0), StreamPlace(1, 1, 0))
    backend.execute(ChooseRows((0, 1), stream, (), outcomes))
    event = told.next()
    assert isinstance(event, RowsDrawn)
    assert [(row.group_id, row.row, row.epoch, row.position) for row in event.rows] == [(0, 4, 1, -1), (1, 2, 1, -1)]
    backend.close(WAIT_S)
