"""The accounts of a run: what they add up to, what waste costs, and how they are shown."""

from __future__ import annotations

import io
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from penstock.messages.errors import UserFault
from penstock.messages.training import Activity, ActivitySpan, Balance, CauseCount
from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.observability.accounting import (
    KILLED_ENGINES,
    NOT_HANDED_OVER,
    Accounts,
    LaneAccount,
    TokenAccount,
    read_accounts,
    waste_of,
    working_device_s,
)
from penstock.runtime.observability.accounting_view import accounts_tables, time_rows, token_rows
from penstock.runtime.observability.facts import STARTS_FILE, devices_of
from penstock.runtime.observability.summary import SUMMARY_FILE, read_summary, write_summary
from penstock.runtime.observability.trackers import ActivityLog, read_steps
from penstock.runtime.scenario import load_scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"
SMALL = (
    "engines.count=2", "engines.slots=8", "learner.groups_per_batch=4", "run.num_steps=4", "reward.num_workers=3",
    "observability.report=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a simulated run with some waste; tests only read it."""
    folder = tmp_path_factory.mktemp("made") / "run"
    scenario = load_scenario(SCENARIOS / "simulated_1024_engines.yaml", SMALL)
    Simulation(scenario, folder).run()
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(made, tmp_path / "run")


def lane(name: str, working_s: float, *, wall_s: float = 10.0, num_devices: int = 1) -> LaneAccount:
    seconds = dict.fromkeys(Activity, 0.0)
    seconds[Activity.WORKING], seconds[Activity.WAITING_FOR_DEMAND] = working_s, wall_s - working_s
    return LaneAccount(name=name, num_devices=num_devices, seconds=seconds, occupied_s=working_s / 2, wall_s=wall_s)


def balance() -> Balance:
    ended = (
        CauseCount(state="trained", cause="", num_samples=6, num_tokens=60),
        CauseCount(state="evaluated", cause="", num_samples=1, num_tokens=7),
        CauseCount(state="filtered", cause="zero_spread", num_samples=2, num_tokens=25, num_given_tokens=5),
        CauseCount(state="stale", cause="dropped", num_samples=1, num_tokens=3),
        CauseCount(state="cancelled", cause="group_rejected", num_samples=1, num_tokens=0),
    )
    return Balance(issued=15, in_system=4, ended=ended, generated_tokens=100, in_system_tokens=10)


def account(**fields: int) -> TokenAccount:
    wasted, lost = waste_of(balance(), {KILLED_ENGINES: 20, NOT_HANDED_OVER: 0}, 12.0, 100)
    numbers = {"generated": 100, "trained": 60, "evaluated": 7, "in_system": 10} | fields
    return TokenAccount(**numbers, wasted=wasted, lost=lost)


# --- sums -------------------------------------------------------------------------------------------------------


def test_the_balance_adds_up_and_a_token_too_many_does_not() -> None:
    assert balance().is_balanced
    for field in ("generated_tokens", "in_system_tokens"):
        assert not msgspec.structs.replace(balance(), **{field: 11}).is_balanced
    assert msgspec.structs.replace(balance(), generated_tokens=None).is_balanced, "of before they were counted"
    assert account().remainder == 0
    assert account(generated=101).remainder == 1


def test_every_token_costs_the_same_and_all_of_them_cost_what_the_engines_worked() -> None:
    tokens = account()
    assert [(each.state, each.cause, each.num_tokens) for each in tokens.wasted] == [
        ("filtered", "zero_spread", 20), ("stale", "dropped", 3),
    ]  # fmt: skip
    assert [(each.cause, each.num_tokens, each.is_estimate) for each in tokens.lost] == [(KILLED_ENGINES, 20, True)]
    assert [each.device_s for each in (*tokens.wasted, *tokens.lost)] == pytest.approx([2.0, 0.3, 2.0])
    useful_s = 12.0 * (60 + 7 + 10) / 120
    assert useful_s + sum(each.device_s for each in (*tokens.wasted, *tokens.lost)) == pytest.approx(12.0)


def test_an_engine_of_several_devices_costs_each_of_them_and_who_makes_no_tokens_costs_nothing() -> None:
    lanes = [lane("engine/0", 4.0, num_devices=8), lane("engine/1", 1.0), lane("learner", 9.0), lane("teacher/0", 9.0)]
    assert working_device_s(lanes) == 33.0


def test_of_nothing_nothing_is_wasted() -> None:
    empty = Balance(issued=0, in_system=0, ended=(), generated_tokens=0)
    assert waste_of(empty, {KILLED_ENGINES: 0}, 0.0, 0) == ((), ())


def test_a_gap_and_an_overlap_show_in_the_remainder() -> None:
    assert lane("engine/0", 4.0).remainder_s == 0
    gap = msgspec.structs.replace(lane("engine/0", 4.0), wall_s=12.0)
    assert gap.remainder_s == 2.0
    assert msgspec.structs.replace(gap, wall_s=9.0).remainder_s == -1.0


def test_devices_are_gpus_of_engines_and_ranks_of_the_learner() -> None:
    plain = load_scenario(SCENARIOS / "quickstart.yaml", [])
    assert devices_of(plain) == {"learner": 1, "engine/0": 1, "engine/1": 1}
    ranks = load_scenario(SCENARIOS / "learner_ranks.yaml", [])
    assert devices_of(ranks)["learner"] == ranks.learner.num_ranks > 1
    wide = load_scenario(SCENARIOS / "qwen3_32b_64gpus.yaml", [])
    found = devices_of(wide)
    engines = [number for name, number in found.items() if name.startswith("engine/")]
    assert len(engines) == wide.engines.count
    assert set(engines) == {engines[0]} != {1}
    assert sum(found.values()) == 64


# --- from a folder ----------------------------------------------------------------------------------------------


def test_a_simulated_run_is_accounted_without_remainder(made: Path) -> None:
    accounts, summary = read_accounts(made), read_summary(made)
    assert summary is not None
    assert accounts.has_ended
    assert accounts.wall_s == summary.wall_s
    assert [each.name for each in accounts.lanes] == ["learner", "engine/0", "engine/1", "scorer"]
    assert all(abs(each.remainder_s) < 1e-6 * accounts.wall_s for each in accounts.lanes)
    tokens = accounts.tokens
    assert tokens.remainder == 0
    assert tokens.generated == summary.tokens_generated
    assert tokens.num_wasted == sum(each.num_tokens for each in summary.tokens_wasted)
    assert sum(each.device_s for each in accounts.waste) < working_device_s(accounts.lanes)
    assert msgspec.json.decode(msgspec.json.encode(accounts), type=Accounts) == accounts


def test_a_run_that_was_cut_off_is_accounted_up_to_what_is_known(folder: Path) -> None:
    (folder / SUMMARY_FILE).unlink()
    accounts, last = read_accounts(folder), read_steps(folder)[-1]
    assert not accounts.has_ended
    assert accounts.tokens.generated == last.balance.generated_tokens
    assert accounts.tokens.remainder == 0
    assert accounts.tokens.lost == (), "what is under way is not lost"
    assert max(each.remainder_s for each in accounts.lanes) < 0.005 * accounts.wall_s


def test_what_engines_reported_and_nobody_got_is_an_estimate_of_its_own(folder: Path) -> None:
    summary = read_summary(folder)
    assert summary is not None
    generated = summary.tokens_generated
    write_summary(folder, msgspec.structs.replace(summary, tokens_reported=generated + 50, tokens_lost_estimate=9))
    tokens = read_accounts(folder).tokens
    assert {each.cause: each.num_tokens for each in tokens.lost} == {KILLED_ENGINES: 9, NOT_HANDED_OVER: 50}
    assert (tokens.generated, tokens.remainder, tokens.num_lost) == (generated, 0, 59)


def test_an_actor_that_was_never_heard_of_is_missing_time(folder: Path) -> None:
    path = folder / STARTS_FILE
    path.write_text(path.read_text().replace('"engine/1":1', '"engine/1":1,"engine/2":1'))
    accounts = read_accounts(folder)
    assert {each.name: each.remainder_s for each in accounts.lanes}["engine/2"] == accounts.wall_s


def test_at_the_end_an_actor_that_was_never_heard_of_was_starting_all_the_time(tmp_path: Path) -> None:
    added = ActivityLog(tmp_path).close(7.0, ["engine/0"])
    assert added == {"engine/0": [ActivitySpan(Activity.STARTING, 0.0, 7.0)]}


def test_a_folder_without_a_run_has_empty_accounts(tmp_path: Path) -> None:
    accounts = read_accounts(tmp_path)
    assert (accounts.wall_s, accounts.lanes, accounts.tokens.generated, accounts.tokens.remainder) == (0.0, (), 0, 0)


def test_a_ledger_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        database.execute("CREATE TABLE other (x)")
    database.close()
    with pytest.raises(UserFault, match=r"ledger\.sqlite: this file holds no ledger"):
        read_accounts(tmp_path)


# --- shown ------------------------------------------------------------------------------------------------------


def rendered(accounts: Accounts) -> str:
    out = io.StringIO()
    Console(file=out, width=140, no_color=True).print(accounts_tables(accounts))
    return out.getvalue()


def test_the_tables_name_every_lane_and_every_cause(made: Path) -> None:
    accounts = read_accounts(made)
    text = rendered(accounts)
    for part in ("where the time went", "learner", "engine/0", "engine/1", "scorer", "of the workers", "trained"):
        assert part in text
    assert f"{accounts.tokens.generated:,}" in text
    assert "NOT ACCOUNTED" not in text


def test_many_engines_share_a_line_and_time_that_is_missing_is_said() -> None:
    lanes = tuple(lane(f"engine/{number}", 5.0) for number in range(6))
    accounts = Accounts(wall_s=10.0, has_ended=True, lanes=lanes, tokens=account())
    assert [name for name, _ in time_rows(accounts)] == ["6 engines"]
    late = msgspec.structs.replace(lanes[0], wall_s=16.0)
    ((_, text), *_) = time_rows(msgspec.structs.replace(accounts, lanes=(late,)))
    assert text.endswith("37.5 % not reported yet")


def test_a_run_that_begins_has_lanes_without_any_time() -> None:
    begins = Accounts(wall_s=0.0, has_ended=False, lanes=(lane("learner", 0.0, wall_s=0.0),), tokens=account())
    assert "learner" in rendered(begins)


def test_estimates_are_marked_and_what_is_missing_cries() -> None:
    accounts = Accounts(wall_s=10.0, has_ended=True, lanes=(), tokens=account(generated=103))
    rows = {row.what: row for row in token_rows(accounts)}
    assert rows["NOT ACCOUNTED FOR"].num_tokens == 3
    assert [row.num_tokens for row in rows.values() if row.is_estimate] == [20]
    assert "≈ 20" in rendered(accounts)


def test_a_cause_that_a_user_named_cannot_write_to_the_terminal() -> None:
    ended = (CauseCount(state="filtered", cause="\x1b[2J[bold]x", num_samples=1, num_tokens=5),)
    odd = Balance(issued=1, in_system=0, ended=ended, generated_tokens=5)
    wasted, lost = waste_of(odd, {}, 1.0, 5)
    tokens = TokenAccount(generated=5, trained=0, evaluated=0, in_system=0, wasted=wasted, lost=lost)
    text = rendered(Accounts(wall_s=1.0, has_ended=True, lanes=(), tokens=tokens))
    assert "\x1b" not in text
    assert "[bold]x" in text
