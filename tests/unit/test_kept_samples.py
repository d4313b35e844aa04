"""Samples that are kept for people: of which the Filter keeps what, what the file holds, what is shown of it."""

from __future__ import annotations

import io
import sqlite3
from typing import TYPE_CHECKING

import actor_driver as drive
import msgspec
import pytest
from rich.console import Console
from sample_runs import small_run
from typer.testing import CliRunner

from penstock.actors.filter.machine import Filter
from penstock.actors.filter.options import FilterOptions
from penstock.actors.filter.settings import FilterSettings
from penstock.backends.ledger import kept_samples as module
from penstock.backends.ledger.kept_samples import (
    SAMPLES_FILE,
    KeptSample,
    SampleKeeper,
    clipped,
    kept_samples,
    read_kept,
)
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.base import Metric
from penstock.messages.commands import KeepSamples
from penstock.messages.flow import SampleFailed, SampleScored, ScoringFailed
from penstock.messages.ledger import GroupClosed
from penstock.messages.samples import (
    Completed,
    Group,
    Media,
    Prompt,
    Purpose,
    Reward,
    Sample,
    SampleEnd,
    SampleKey,
    TerminalState,
    evaluation_group_id,
)
from penstock.runtime.cli.app import app
from penstock.runtime.cli.samples import show_sample
from penstock.runtime.observability.samples import ShownSample, chosen_samples, sample_lines, shown_samples

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 2


def filter_of(*, keeps_samples: bool = True) -> drive.Driver[Filter]:
    options = FilterOptions(drop_zero_spread=True, min_group_size=1, max_refills=2)
    return drive.Driver(Filter(FilterSettings(options=options, keeps_samples=keeps_samples)))


def scored(group_id: int, index: int, reward: float, purpose: Purpose = Purpose.TRAIN) -> SampleScored:
    sample = drive.sample(group_id, index, (0, 4), reward=reward)
    return SampleScored(sample=sample, group_size=SIZE, prompt=drive.prompt(group_id), purpose=purpose)


def kept(commands: object) -> list[tuple[list[int], list[str], str]]:
    found = drive.every(commands, KeepSamples)  # type: ignore[arg-type]
    return [
        ([s.key.index for s in command.group.samples], [end.reason for end in command.group.ended], command.cause)
        for command in found
    ]


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_an_admitted_and_a_rejected_group_are_kept_whole() -> None:
    driver = filter_of()
    assert kept(driver.hear(scored(0, 0, 1.0), scored(0, 1, 0.0))) == [([0, 1], [], "")]
    assert kept(driver.hear(scored(1, 0, 1.0), scored(1, 1, 1.0))) == [([0, 1], [], "zero_spread")]


def test_a_sample_that_fails_is_kept_at_once_with_its_response_and_reason() -> None:
    driver = filter_of()
    sample = drive.sample(0, 1, (0, 4))
    fields = {"attempt": 0, "group_size": SIZE, "prompt": drive.prompt(0), "num_tokens": 4}
    failed = ScoringFailed(key=SampleKey(0, 1), reason="it raised", sample=sample, **fields)  # type: ignore[arg-type]
    assert kept(driver.hear(failed)) == [([1], ["it raised"], "")]
    lost = SampleFailed(key=SampleKey(0, 0), reason="no engine", **fields)  # type: ignore[arg-type]
    assert kept(driver.hear(lost)) == [([], ["no engine"], "")]


def test_groups_of_evaluations_are_kept_too() -> None:
    group_id = evaluation_group_id(3)
    commands = filter_of().hear(*(scored(group_id, index, 1.0, Purpose.EVALUATE) for index in range(SIZE)))
    assert kept(commands) == [([0, 1], [], "")]


def test_nothing_is_kept_where_nobody_wants_it() -> None:
    assert kept(filter_of(keeps_samples=False).hear(scored(0, 0, 1.0), scored(0, 1, 0.0))) == []


# --- what the file holds ----------------------------------------------------------------------------------------------


class Words:
    """In place of a tokenizer: each id is a word."""

    def __init__(self, _folder: Path) -> None:
        pass

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def command(group_id: int, *rewards: float | None, reason: str = "", prompt: str = "what?") -> KeepSamples:
    samples = tuple(
        Sample(
            key=SampleKey(group_id, index),
            parts=(drive.part((3, 2)),),
            outcome=Completed(
                reward=None if reward is None else Reward(value=reward, components=(Metric("format", 1.0),))
            ),
        )
        for index, reward in enumerate(rewards)
    )
    key, failed = SampleKey(group_id, 0), TerminalState.FAILED
    ended = (SampleEnd(key=key, state=failed, cause="scoring_failed", reason=reason),) if reason else ()
    asked = Prompt(row=group_id, epoch=0, tokens=b"", text=prompt, label="42")
    return KeepSamples(Group(group_id=group_id, prompt=asked, samples=samples, ended=ended))


def write(folder: Path, limit: int, *commands: KeepSamples) -> None:
    errors: list[BaseException] = []
    keeper = SampleKeeper(folder, folder, limit)
    for one in commands:
        keeper.keep(one, errors.append)
    keeper.close(60.0)
    assert errors == []


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TextTokenizer", Words)


def test_a_kept_sample_has_prompt_response_reward_and_reason(tmp_path: Path) -> None:
    write(tmp_path, 10, command(3, 0.5), command(4, None, reason="ValueError: x (r.py:1)"))
    bad, good = read_kept(tmp_path)
    assert (good.prompt, good.label, good.reward, good.components) == ("what?", "42", 0.5, {"format": 1.0})
    assert (good.response, good.outcome, good.oldest_version) == (Words(tmp_path).decode(ids_of(4)), "completed", 3)
    assert (bad.reward, bad.reason, bad.cause) == (None, "ValueError: x (r.py:1)", "scoring_failed")
    assert bad.response == good.response


def ids_of(group_id: int) -> list[int]:
    from penstock.messages.arrays import tokens_view

    return tokens_view(command(group_id, 0.5).group.samples[0].parts[0].tokens).tolist()


def test_an_image_whose_file_was_deleted_is_said_to_be_gone(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_bytes(b"1")
    media = tuple(Media("image", str(tmp_path / name), name) for name in ("there", "gone"))
    kept = KeptSample(group_id=1, index=0, kept_at=0.0, row=0, prompt="", media=media)
    console = Console(file=io.StringIO(), record=True, width=80)
    show_sample(ShownSample(kept, "", "", None), console, None)
    lines = [line for line in console.export_text().splitlines() if line.startswith("image ")]
    assert lines == [f"image {there}", f"image {tmp_path / 'gone'} (not there any more)"]


def test_images_of_prompt_and_episode_are_kept_each_once() -> None:
    first, second = Media("image", "a.png", "a", 2, 3), Media("image", "b.png", "b", 1, 3)
    seen = msgspec.structs.replace(drive.part((0, 9)), media=(second, first.moved(4)))
    sample = msgspec.structs.replace(drive.sample(1, 0, reward=1.0), parts=(drive.part((0, 2)), seen))
    prompt = msgspec.structs.replace(drive.prompt(1), media=(first, Media("image", "https://a/b.png")))
    group = Group(group_id=1, prompt=prompt, samples=(sample,))
    (one,) = kept_samples(KeepSamples(group=group), lambda ids: "", 0.0)
    assert [each.reference for each in one.media] == ["a.png", "b.png"]


def test_the_file_is_bounded_and_keeps_the_newest_and_the_oddest(tmp_path: Path) -> None:
    commands = [command(number, number / 500, reason="boom" if number in (5, 6) else "") for number in range(200)]
    write(tmp_path, 20, *commands)
    groups = {one.group_id for one in read_kept(tmp_path)}
    assert groups >= set(range(180, 200)), "the newest"
    assert groups >= {5, 6}, "those that failed"
    assert groups >= {0, 1}, "the worst"
    assert len(groups) <= 20 + 3 * 2
    assert [one.group_id for one in read_kept(tmp_path, limit=3)] == [199, 198, 197]


def test_groups_that_come_together_are_one_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOGETHER_S", 60.0)
    connect, statements = sqlite3.connect, list[str]()

    def traced(file: Path, *, timeout: float) -> sqlite3.Connection:
        database = connect(file, timeout=timeout)
        database.set_trace_callback(statements.append)
        return database

    monkeypatch.setattr(sqlite3, "connect", traced)
    write(tmp_path, 10, *(command(number, 0.5) for number in range(5)))
    monkeypatch.undo()
    assert statements.count("COMMIT") == 2, "all groups, and what is too much at the end"
    assert [one.group_id for one in read_kept(tmp_path)] == [4, 3, 2, 1, 0]


def test_a_sample_that_is_kept_again_stands_there_once(tmp_path: Path) -> None:
    write(tmp_path, 10, command(3, 0.5))
    write(tmp_path, 10, command(3, 0.75))
    assert [one.reward for one in read_kept(tmp_path)] == [0.75]


def test_long_texts_keep_their_beginning_and_their_end() -> None:
    text = "a" * 30_000 + "b" * 30_000
    short = clipped(text)
    assert len(short) < 25_000
    assert short.startswith("aaa")
    assert short.endswith("bbb")
    assert "36,000 characters left out" in short
    (one,) = kept_samples(command(1, 1.0, prompt=text), Words(None).decode, 0.0)  # type: ignore[arg-type]
    assert one.prompt == short


def test_a_flood_is_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 0)
    keeper = SampleKeeper(tmp_path, tmp_path, 10)
    keeper.keep(command(1, 0.0, 1.0), pytest.fail)  # type: ignore[arg-type]
    assert keeper.gauges() == (Metric("filter/samples_unkept", 2.0),)
    keeper.close(60.0)
    assert not (tmp_path / SAMPLES_FILE).exists()


# --- what is shown ----------------------------------------------------------------------------------------------------


def run_folder(folder: Path) -> Path:
    """Group 1 is filtered, group 2 has failed, group 3 has not ended."""
    write(folder, 10, command(1, 0.1, 0.2), command(2, None, reason="ValueError: \x1b[31mx (r.py:1)"), command(3, 0.9))
    store = SqliteStore(folder / LEDGER_FILE)
    store.claim(1)
    filtered = tuple(
        SampleEnd(key=SampleKey(1, index), state=TerminalState.FILTERED, cause="zero_spread") for index in range(2)
    )
    failed = SampleEnd(key=SampleKey(2, 0), state=TerminalState.FAILED, cause="scoring_failed", reason="ValueError")
    store.commit([GroupClosed(group_id=1, ended=filtered), GroupClosed(group_id=2, ended=(failed,))])
    store.close()
    return folder


def test_samples_are_shown_with_what_the_ledger_says_of_them(tmp_path: Path) -> None:
    samples = shown_samples(run_folder(tmp_path))
    assert [(one.name, one.fate) for one in samples] == [
        ("3/0", "in the system"),
        ("2/0", "failed: scoring_failed"),
        ("1/1", "filtered: zero_spread"),
        ("1/0", "filtered: zero_spread"),
    ]
    assert samples[0].rewarded == "reward 0.9 (format 1)"


def test_it_is_said_when_none_is_what_was_asked_for(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["samples", str(small_run(tmp_path)), "--grep", "nobody wrote this"])
    assert shown.exit_code == 0
    assert shown.output.strip() == "none is what was asked for; 1 sample kept"


def test_samples_are_chosen_by_fate_reward_and_text(tmp_path: Path) -> None:
    samples = shown_samples(run_folder(tmp_path))

    def names(**conditions: object) -> list[str]:
        return [one.name for one in chosen_samples(samples, **conditions)]  # type: ignore[arg-type]

    assert names(failed=True) == ["2/0"]
    assert names(dropped=True) == ["1/1", "1/0"]
    assert names(failed=True, dropped=True) == ["2/0", "1/1", "1/0"]
    assert names(worst=True) == ["1/0", "1/1", "3/0"]
    assert names(worst=True, limit=1) == ["1/0"]
    assert names(grep="VALUEERROR") == ["2/0"]
    assert names(step=4) == []


def test_a_sample_on_the_terminal_moves_no_cursor(tmp_path: Path) -> None:
    sample = next(one for one in shown_samples(run_folder(tmp_path)) if one.has_failed)
    out = io.StringIO()
    show_sample(sample, Console(file=out, force_terminal=False), None)
    assert "\x1b[31m" not in out.getvalue() + sample_lines(sample.kept)
    assert "\\x1b[31mx (r.py:1)" in out.getvalue()
