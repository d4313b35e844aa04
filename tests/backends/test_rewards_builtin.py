"""The reward functions that come with penstock, and users' filters."""

from __future__ import annotations

import queue
import textwrap
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from penstock.backends.data.generated import reasoning_gym_rows
from penstock.backends.data.lines import lines_row
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.rewards import open_filter, open_rewards
from penstock.backends.rewards.functions import NoRewardError
from penstock.backends.rewards.math_answers import math_reward
from penstock.backends.rewards.options import RewardOptions
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.base import Metric
from penstock.messages.commands import JudgeGroup, Score
from penstock.messages.local import GroupJudged, SampleJudged
from penstock.messages.samples import (
    Completed,
    Group,
    Part,
    Prompt,
    Reward,
    Sample,
    SampleKey,
    Truncated,
    VersionSpan,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.backends.protocol import Backend
    from penstock.messages.local import LocalEvent

WAIT_S = 60.0
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.WordLevel(vocab={symbol: i for i, symbol in enumerate(CHARACTERS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def part_of(folder: Path, text: str, *, mask: bytes = b"") -> Part:
    (ids,) = TextTokenizer(folder).encode([text], special=False)
    assert isinstance(ids, list)
    n = len(ids)
    return Part(tokens=pack_tokens(ids), logprobs=pack_floats([0.0] * n), spans=(VersionSpan(0, n),), loss_mask=mask)


def answers_of(backend: Backend[Any], commands: Sequence[Score | JudgeGroup]) -> list[LocalEvent | BaseException]:
    """As they come, one for each command."""
    events: queue.Queue[LocalEvent | BaseException] = queue.Queue()
    backend.start(events.put, events.put)
    try:
        for command in commands:
            backend.execute(command)
        return [events.get(timeout=WAIT_S) for _ in commands]
    finally:
        backend.close(WAIT_S)


def score_all(folder: Path, function: str, *commands: Score) -> list[SampleJudged]:
    """The answers in the order of the sample's index."""
    answers = answers_of(open_rewards(RewardOptions(function=function), folder), commands)
    judged = [answer for answer in answers if isinstance(answer, SampleJudged)]
    assert len(judged) == len(commands), answers
    return sorted(judged, key=lambda answer: answer.key)


def judge_all(backend: Backend[JudgeGroup], *commands: JudgeGroup) -> list[GroupJudged]:
    answers = answers_of(backend, commands)
    judged = [answer for answer in answers if isinstance(answer, GroupJudged)]
    assert len(judged) == len(commands), answers
    return sorted(judged, key=lambda answer: answer.group_id)


def command(
    folder: Path, index: int, response: str, *, label: str = "", metadata: bytes = b"", truncated: bool = False
) -> Score:
    outcome = Truncated() if truncated else Completed()
    sample = Sample(key=SampleKey(0, index), parts=(part_of(folder, response),), outcome=outcome)
    prompt = Prompt(row=4, epoch=0, tokens=b"", label=label, metadata=metadata)
    return Score(sample=sample, prompt=prompt, timeout_s=30.0)


def test_lines_gives_the_share_of_right_lines_and_needs_a_label(tokenizer_folder: Path) -> None:
    right, wrong = "AabBab", "AabBaa"
    answers = score_all(
        tokenizer_folder,
        "lines",
        command(tokenizer_folder, 0, right, label=right),
        command(tokenizer_folder, 1, wrong, label=right),
        command(tokenizer_folder, 2, right, label=right, truncated=True),
        command(tokenizer_folder, 3, right),
        command(tokenizer_folder, 4, lines_row(0, 0).answer, label=lines_row(0, 0).answer),
    )
    assert [answer.reward and answer.reward.value for answer in answers] == [1.0, 0.5, 0.0, None, 1.0]
    assert "row 4 has no label" in answers[3].reason


def test_random_is_spread_over_the_unit_and_the_same_each_time(tokenizer_folder: Path) -> None:
    commands = [command(tokenizer_folder, index, "") for index in range(400)]
    first, second = (score_all(tokenizer_folder, "random", *commands) for _ in range(2))
    assert first == second
    values = [answer.reward.value for answer in first if answer.reward]
    assert len(set(values)) == 400
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / 400 - 0.5) < 0.05


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"so \boxed{72}", "72", 1.0),
        (r"so \boxed{73}", "72", 0.0),
        (r"so \boxed{ 072 }", "72", 1.0),
        (r"so \boxed{7{,}200}", "7200", 1.0),
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"so \boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"so \boxed{x+1}", "1+x", 1.0),
        (r"so \boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"so \boxed{(1, 2)}", "(1,2)", 1.0),
        (r"so \boxed{B}", "B", 1.0),
        (r"so \boxed{A}", "B", 0.0),
        (r"first \boxed{1}, no: \boxed{2}", "2", 1.0),
        (r"first \boxed{1}, no: \boxed{2}", "1", 0.0),
        (r"\boxed{1} and \boxed{2}", "1,2", 1.0),
        (r"\boxed{}", "2", 0.0),
        (r"\boxed{\frac{1}{", "2", 0.0),
        ("the answer is 72.", "72", 1.0),
        ("the answer is $72$", "72", 1.0),
        ("no idea", "72", 0.0),
        ("", "72", 0.0),
        (r"\boxed{72}", "Natalia sold 48+24 = 72 clips.\n#### 72", 1.0),
        (r"\boxed{48}", "Natalia sold 48+24 = 72 clips.\n#### 72", 0.0),
        (r"\boxed{72}", r"$72$", 1.0),
        (r"\boxed{72}", r"\boxed{72}", 1.0),
    ],
)
def test_math_compares_answers_as_mathematics(response: str, label: str, expected: float) -> None:
    assert math_reward(response, label, truncated=False) == expected


def test_a_response_that_was_cut_off_has_answered_only_in_a_box() -> None:
    assert math_reward("then we add 72", "72", truncated=True) == 0.0
    assert math_reward(r"\boxed{72} because", "72", truncated=True) == 1.0
    assert math_reward(r"\boxed{72", "72", truncated=True) == 0.0


@pytest.mark.parametrize(
    ("label", "message"), [("", "has no label"), ("  ", "has no label"), ("#### ", "has no label")]
)
def test_a_label_that_says_nothing_gives_no_reward_rather_than_zero(label: str, message: str) -> None:
    with pytest.raises(NoRewardError, match=message):
        math_reward(r"\boxed{1}", label, truncated=False)


def test_math_runs_in_a_process_that_answers_for_labels_it_cannot_read(tokenizer_folder: Path) -> None:
    answers = score_all(
        tokenizer_folder,
        "math",
        command(tokenizer_folder, 0, r"\boxed{1/2}", label="0.5"),
        command(tokenizer_folder, 1, r"\boxed{1/3}", label="0.5"),
        command(tokenizer_folder, 2, r"\boxed{1/3}"),
    )
    assert [answer.reward and answer.reward.value for answer in answers] == [1.0, 0.0, None]
    assert "data.label_key" in answers[2].reason


def test_mathematics_that_would_never_end_is_a_failure_and_no_zero(tokenizer_folder: Path) -> None:
    endless = command(tokenizer_folder, 0, r"\boxed{(a+b+c+d+e+f+g+h)^9(i+j+k+l+m+n+o+p)^9}", label="5")
    quick = command(tokenizer_folder, 1, r"\boxed{1}", label="1")
    answers = score_all(tokenizer_folder, "math", msgspec.structs.replace(endless, timeout_s=3.0), quick)
    assert answers[0].reward is None
    assert "took longer than 3 s" in answers[0].reason
    assert answers[1].reward == Reward(value=1.0, answer="1")


def test_reasoning_gym_asks_the_tasks_own_checker(tokenizer_folder: Path) -> None:
    pytest.importorskip("reasoning_gym")
    (row,) = reasoning_gym_rows("reasoning_gym:chain_sum:1", "chain_sum:1", seed=1)
    metadata, label = msgspec.json.encode(row.metadata), str(row.columns["label"])
    answers = score_all(
        tokenizer_folder,
        "reasoning_gym",
        command(tokenizer_folder, 0, f"thus <answer> {label} </answer>", label=label, metadata=metadata),
        command(tokenizer_folder, 1, f" {label}\n", label=label, metadata=metadata),
        command(tokenizer_folder, 2, f"<answer>{label}</answer> or <answer>nothing</answer>", metadata=metadata),
        command(tokenizer_folder, 3, label, label=label),
    )
    values = [answer.reward.value if answer.reward else None for answer in answers]
    assert values[:2] == [1.0, 1.0]
    assert values[2] is not None
    assert values[2] < 0.1
    assert values[3] is None
    assert "the row is none of reasoning-gym's" in answers[3].reason


def test_tokens_that_others_wrote_are_not_the_response(tokenizer_folder: Path) -> None:
    parts = (part_of(tokenizer_folder, "AaX", mask=b"\x01\x01\x00"), part_of(tokenizer_folder, "b"))
    sample = Sample(key=SampleKey(0, 0), parts=parts, outcome=Completed())
    score = Score(sample=sample, prompt=Prompt(row=0, epoch=0, tokens=b"", label="Aab"), timeout_s=10.0)
    (answer,) = score_all(tokenizer_folder, "lines", score)
    assert answer.reward == Reward(value=1.0)


# --- filters --------------------------------------------------------------------------------------------------


def group(folder: Path, group_id: int, *rewards: float) -> JudgeGroup:
    samples = tuple(
        Sample(
            key=SampleKey(group_id, index),
            parts=(part_of(folder, "ab" * (index + 1)),),
            outcome=Completed(reward=Reward(value=reward)),
        )
        for index, reward in enumerate(rewards)
    )
    prompt = Prompt(row=0, epoch=0, tokens=b"", text="P", label="L", metadata=b'{"m": 1}')
    return JudgeGroup(Group(group_id=group_id, prompt=prompt, samples=samples))


FILTER = """
    import time
    from penstock.messages.samples import Group
    def keep(group, rewards, responses, prompt, label, metadata):
        assert isinstance(group, Group) and len(group.samples) == len(rewards) == len(responses)
        assert (responses[0], prompt, label, metadata) == ("ab", "P", "L", {"m": 1})
        match group.group_id:
            case 0: return True
            case 1: return sum(rewards) > 5
            case 2: return False, "too_easy"
            case 3: return "yes"
            case 4: raise RuntimeError("no")
            case 5: time.sleep(1000)
            case 6: return True, "unused"
    """


def test_a_filter_keeps_or_turns_away_with_its_cause_and_its_faults_have_one_of_their_own(
    tokenizer_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(FILTER))
    backend = open_filter(f"{tmp_path / 'mine.py'}:keep", tokenizer_folder, timeout_s=10.0)
    answers = judge_all(backend, *(group(tokenizer_folder, index, 0.0, 1.0) for index in range(7)))
    assert [(answer.keep, answer.cause) for answer in answers] == [
        (True, ""),
        (False, ""),
        (False, "too_easy"),
        (False, "filter_error"),
        (False, "filter_error"),
        (False, "filter_error"),
        (True, ""),
    ]
    assert "group 3 is turned away because the filter failed on it: the filter returned str 'yes'" in caplog.text
    assert "RuntimeError: no (mine.py:12)" in caplog.text
    assert "the filter function took longer than 10 s" in caplog.text


def test_without_a_filter_every_group_is_kept(tokenizer_folder: Path) -> None:
    (answer,) = judge_all(open_filter(None, tokenizer_folder), group(tokenizer_folder, 3, 0.0))
    assert answer == GroupJudged(group_id=3, keep=True)


def test_a_filter_that_there_is_not_is_refused_at_once(tokenizer_folder: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        open_filter("nowhere.py:keep", tokenizer_folder)


def test_a_function_sees_what_the_model_wrote_and_the_conversation_around_it(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(response, conversation):\n"
        "    return {'reward': len(response), 'all': float(conversation == 'call [42] is 42')}\n"
    )
    mask = b"\1" * 5 + b"\0" * 4 + b"\1" * 6
    sample = Sample(
        key=SampleKey(0, 0), parts=(part_of(tokenizer_folder, "call [42] is 42", mask=mask),), outcome=Completed()
    )
    command = Score(sample=sample, prompt=Prompt(row=0, epoch=0, tokens=b""), timeout_s=30.0)
    (answer,) = score_all(tokenizer_folder, f"{file}:score", command)
    assert answer.reward is not None, answer.reason
    assert (answer.reward.value, answer.reward.components) == (11.0, (Metric("all", 1.0),))
