"""The Samples view: an index that says what the ledger says, pages through it, and one sample with its life."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import ledger_entries as make
import msgspec
import pytest
from dashboard_runs import MARKUP, served
from PIL import Image
from sample_runs import EVIL, dump_sample, keep, small_run

from penstock.backends.ledger.kept_samples import KeptSample
from penstock.backends.ledger.sqlite import SqliteStore, open_read_only
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.benchmarks.sample_table import make_ledger
from penstock.messages.errors import UserFault
from penstock.messages.samples import Media
from penstock.runtime.dashboard.routes import Query
from penstock.runtime.dashboard.sample_index import INDEXES, ORDERS, advance, index_file, open_index
from penstock.runtime.dashboard.sample_page import (
    NOT_KEPT_LEARNER,
    NOT_KEPT_TEXT,
    NOT_KEPT_TOKENS,
    UNSHOWN,
    SamplePage,
    SampleQuery,
    answer_life,
    answer_sample,
)
from penstock.runtime.dashboard.sample_rows import CountQuery, TableQuery, count, page_statement, table
from penstock.runtime.dashboard.sample_sums import bins, choices

if TYPE_CHECKING:
    from penstock.messages.ledger import LedgerEntry
    from penstock.runtime.dashboard.sample_index import IndexState

NUM_SAMPLES = 8000


def made(folder: Path) -> IndexState:
    """Work on the index until it is complete."""
    for _ in range(1000):
        state = advance(folder)
        if state.is_ready and not state.doing:
            return state
    raise AssertionError("the index is never complete")


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ledger of some thousand samples."""
    folder = tmp_path_factory.mktemp("big")
    make_ledger(folder / LEDGER_FILE, NUM_SAMPLES)
    made(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_run(tmp_path_factory.mktemp("small") / "run")
    made(folder)
    return folder


def in_ledger(folder: Path, sql: str) -> list[Any]:
    with closing(open_read_only(folder / LEDGER_FILE)) as database:
        return database.execute(sql).fetchall()


def names(folder: Path, where: str, order: str = "group_id DESC, sample_index DESC") -> list[str]:
    """Of the samples that pass, straight from the ledger."""
    return [
        f"{g}/{i}"
        for g, i in in_ledger(folder, f"SELECT group_id, sample_index FROM samples WHERE {where} ORDER BY {order}")
    ]


def all_pages(folder: Path, **terms: object) -> list[str]:
    """Names, page after page."""
    found: list[str] = []
    after = ""
    while True:
        page = table(folder, msgspec.convert({**terms, "after": after, "limit": 97}, TableQuery))
        found += [row.name for row in page.rows]
        after = page.after
        if not after:
            return found


# --- the index -------------------------------------------------------------------------------------------------------


def test_every_sample_of_the_ledger_is_in_the_index_as_it_is_there(big: Path) -> None:
    with closing(open_index(big)) as index:
        rows = index.execute(
            "SELECT group_id, sample_index, state, cause, name, step, num_tokens, age FROM samples "
            "JOIN fates USING (fate) LEFT JOIN engines USING (engine) ORDER BY 1, 2"
        ).fetchall()
        rewards = dict(index.execute("SELECT group_id * 100 + sample_index, reward FROM samples").fetchall())
    assert rows == in_ledger(
        big,
        "SELECT group_id, sample_index, state, cause, engine, version, num_tokens, version - 1 - oldest_version "
        "FROM samples ORDER BY 1, 2",
    )
    for key, reward in in_ledger(
        big, "SELECT group_id * 100 + sample_index, reward FROM samples WHERE reward NOT NULL"
    ):
        assert rewards[key] == reward


def test_the_rewards_of_a_group_without_spread_are_their_mean(big: Path) -> None:
    page = table(big, TableQuery(state="filtered", cause="zero_spread", limit=500))
    assert {(row.reward, row.is_flat) for row in page.rows} == {(1.0, True)}
    assert {row.reward for row in table(big, TableQuery(state="failed", limit=500)).rows} == {
        None
    }  # in such groups too


def test_the_ledger_is_never_written(big: Path, tmp_path: Path) -> None:
    shutil.copy(big / LEDGER_FILE, tmp_path)
    before = hashlib.sha256((tmp_path / LEDGER_FILE).read_bytes()).digest()
    made(tmp_path)
    table(tmp_path, TableQuery())
    assert hashlib.sha256((tmp_path / LEDGER_FILE).read_bytes()).digest() == before
    assert {path.name for path in tmp_path.iterdir()} <= {
        LEDGER_FILE,
        f"{LEDGER_FILE}-shm",
        f"{LEDGER_FILE}-wal",
        "cache",
    }


def test_it_is_made_in_pieces_and_what_lacks_is_said(big: Path, tmp_path: Path) -> None:
    shutil.copy(big / LEDGER_FILE, tmp_path)
    with pytest.raises(UserFault, match="not complete yet"):
        table(tmp_path, TableQuery())
    states = [advance(tmp_path, 0.0)]
    while states[-1].doing:
        states.append(advance(tmp_path, 0.0 if states[-1].share < 1 else 0.01))
    shares = [state.share for state in states]
    assert shares == sorted(shares)
    assert 0 < shares[0] <= shares[-1] == 1.0
    assert states[-1].is_ready
    assert states[-1].num_samples == NUM_SAMPLES


def step_by_step() -> list[list[LedgerEntry]]:
    entries = make.whole_run()
    return [entries[:4], entries[4:9], entries[9:15], entries[15:]]


def test_it_follows_the_ledger_of_a_run_that_goes_on(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / LEDGER_FILE)) as store:
        store.claim(1)
        for entries in step_by_step():
            store.commit(entries)
            assert made(tmp_path).share == 1.0
            with closing(open_index(tmp_path)) as index:
                found = index.execute(
                    "SELECT group_id, sample_index, state, cause, step FROM samples JOIN fates USING (fate) "
                    "ORDER BY 1, 2"
                ).fetchall()
            assert found == in_ledger(
                tmp_path,
                "SELECT group_id, sample_index, coalesce(state, 'in the system'), coalesce(cause, ''), version "
                "FROM samples ORDER BY 1, 2",
            )


def test_another_ledger_or_a_damaged_index_is_indexed_anew(big: Path, tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    number = made(tmp_path / "run").num_samples
    index_file(tmp_path / "run").write_bytes(b"no file of SQLite" * 1000)
    assert made(tmp_path / "run").num_samples == number
    for name in (LEDGER_FILE, f"{LEDGER_FILE}-wal", f"{LEDGER_FILE}-shm"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
    shutil.copy(big / LEDGER_FILE, tmp_path / "run")
    assert made(tmp_path / "run").num_samples == NUM_SAMPLES


def test_an_index_that_leads_elsewhere_is_replaced(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    index_file(tmp_path / "run").parent.mkdir()
    index_file(tmp_path / "run").symlink_to(tmp_path / "mine.sqlite")
    assert made(tmp_path / "run").is_ready
    assert not (tmp_path / "mine.sqlite").exists()


def test_who_finds_somebody_else_at_work_tells_how_far_that_one_is(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    made(tmp_path / "run")
    with closing(sqlite3.connect(index_file(tmp_path / "run"), isolation_level=None)) as other:
        other.execute("UPDATE source SET sequence = 1")
        other.execute("BEGIN IMMEDIATE")
        state = advance(tmp_path / "run")
        assert (state.is_ready, state.doing) == (True, "reading the ledger")
        other.execute("ROLLBACK")
    assert not made(tmp_path / "run").doing


def never(_path: Path, _mode: int) -> bool:
    return False


def test_a_folder_that_cannot_be_written_has_its_index_elsewhere(
    big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(big / LEDGER_FILE, tmp_path / "run")
    monkeypatch.setattr(os, "access", never)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert Path(made(tmp_path / "run").file).is_relative_to(tmp_path / "user")
    assert not (tmp_path / "run" / "cache").exists()
    assert table(tmp_path / "run", TableQuery()).rows


def test_a_run_without_a_ledger_waits_for_it(tmp_path: Path) -> None:
    state = advance(tmp_path)
    assert state.is_waiting
    assert "no ledger" in state.doing
    assert not list(tmp_path.iterdir())


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "where"),
    [
        ({}, "1"),
        ({"state": "failed"}, "state = 'failed'"),
        ({"state": "failed", "cause": "deadline"}, "cause = 'deadline'"),
        ({"state": "nothing"}, "0"),
        ({"engine": "engine/3", "min_tokens": 700}, "engine = 'engine/3' AND num_tokens >= 700"),
        (
            {"min_reward": 0.25, "max_reward": 0.5, "state": "trained"},
            "reward BETWEEN 0.25 AND 0.5 AND state = 'trained'",
        ),
        ({"first_step": 3, "last_step": 4, "min_age": 1}, "version IN (3, 4) AND version - 1 - oldest_version >= 1"),
        ({"group": "17"}, "group_id = 17"),
        ({"kind": "evaluation"}, "0"),
        ({"kind": "training", "max_tokens": 60}, "num_tokens <= 60"),
    ],
)
def test_a_filter_finds_what_the_ledger_has(big: Path, terms: dict[str, Any], where: str) -> None:
    expected = names(big, where)
    assert all_pages(big, **terms) == expected
    assert count(big, msgspec.convert(terms, CountQuery)).num_samples == len(expected)


@pytest.mark.parametrize("is_ascending", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_pages_follow_each_other_without_a_gap_in_every_order(big: Path, order: str, is_ascending: bool) -> None:
    with closing(open_index(big)) as index:
        column, way = ORDERS[order], "ASC" if is_ascending else "DESC"
        rows = index.execute(
            f"SELECT group_id, sample_index FROM samples WHERE {column} NOT NULL AND num_tokens < 400 "
            f"ORDER BY {column} {way}, 1 {way}, 2 {way}"
        ).fetchall()
    terms = {"sort": order, "is_ascending": is_ascending, "max_tokens": 399}
    assert all_pages(big, **terms) == [f"{g}/{i}" for g, i in rows]
    first = table(big, msgspec.convert({**terms, "limit": 50}, TableQuery))
    jumped = table(big, msgspec.convert({**terms, "limit": 20, "after": first.after, "skip": 300}, TableQuery))
    assert [row.name for row in jumped.rows] == [f"{g}/{i}" for g, i in rows[350:370]]


@pytest.mark.parametrize(
    "terms", [{}, {"state": "failed", "cause": "deadline"}, {"is_flat": True}, {"engine": "engine/1"}]
)
@pytest.mark.parametrize("order", ORDERS)
def test_no_page_is_sorted_and_each_is_read_from_one_index(big: Path, order: str, terms: dict[str, Any]) -> None:
    query = msgspec.convert({"sort": order, "min_tokens": 10, **terms}, TableQuery)
    for asked in (query, msgspec.structs.replace(query, after=table(big, query).after or "[1,1,1]")):
        with closing(open_index(big)) as index:
            sql, values = page_statement(big, index, asked)
            (plan,) = [row[3] for row in index.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
        index_used = f"COVERING INDEX by_{order} (" if order != "group" else "COVERING INDEX by_fate (fate=?"
        if order == "group" and "state" not in terms:
            index_used = (
                "COVERING INDEX flat" if "is_flat" in terms else "PRIMARY KEY" if asked.after else "SCAN samples"
            )
        assert index_used in plan


def test_an_index_that_is_gone_is_an_error_and_not_a_slow_answer(big: Path, tmp_path: Path) -> None:
    shutil.copytree(big, tmp_path / "copied")
    with closing(sqlite3.connect(index_file(tmp_path / "copied"))) as index:
        index.execute("DROP INDEX by_reward")
    with pytest.raises(UserFault, match="not complete"):
        table(tmp_path / "copied", TableQuery(sort="reward"))
    assert advance(tmp_path / "copied").is_ready
    assert set(INDEXES) >= {"by_reward", "by_fate", "flat"}


@pytest.mark.parametrize("after", ["x", "[1,2]", '["a",1,2]', "[1,2,3,4]", "[1.0,2,3.5]"])
def test_a_place_that_no_page_has_said_is_refused(big: Path, after: str) -> None:
    with pytest.raises(UserFault, match="no place in the table"):
        table(big, TableQuery(after=after))


def test_reward_against_length_counts_every_sample_once(big: Path) -> None:
    whole = bins(big, CountQuery())
    assert (whole.every, sum(cell.num_samples for cell in whole.cells)) == (1, whole.num_samples)
    (expected,) = in_ledger(big, "SELECT count(*) FROM samples WHERE reward NOT NULL OR cause = 'zero_spread'")[0]
    assert whole.num_samples == expected
    few = bins(big, CountQuery(group="17"))
    assert few.cell_tokens == 0
    assert len(few.cells) == few.num_samples <= 8
    flat = bins(big, CountQuery(is_flat=True))
    assert (flat.lowest, flat.highest) == (1.0, 1.0)
    assert {cell.reward for cell in flat.cells} == {1.0}


def test_fates_engines_and_groups_without_spread_are_counted(big: Path) -> None:
    found = choices(big, Query())
    rows = in_ledger(big, "SELECT state, cause, num_samples FROM balance WHERE num_samples > 0")
    counted = {(row[0], row[1]): row[2] for row in rows if row[0] != "in the system"}
    assert {(one.state, one.cause): one.num_samples for one in found.fates} == counted
    assert len(found.engines) == 16
    flat = {row.name.split("/")[0] for row in table(big, TableQuery(is_flat=True, limit=500)).rows}
    assert found.num_flat_groups == sum(one.num_groups for one in found.flat) >= len(flat) > 0


def test_texts_are_found_and_cannot_hurt(small: Path) -> None:
    (row,) = table(small, TableQuery(text="BROKEN=1")).rows
    assert row.name == "0/0"
    assert row.text.startswith(MARKUP)
    assert "\\x1b]0;title\\x07 \\u202e" in row.text
    assert table(small, TableQuery(text="nobody has said this")).rows == []


# --- one sample ------------------------------------------------------------------------------------------------------


def sample(folder: Path, name: str) -> SamplePage:
    return answer_sample(folder, SampleQuery(sample=name))


def test_a_sample_that_is_kept_whole_has_texts_and_tokens(small: Path) -> None:
    page = sample(small, "0/0")
    assert (page.fate, page.reward, page.row, page.step, page.outcome) == (
        "trained at step 1",
        0.5,
        3,
        1,
        "completed end_token",
    )
    assert page.prompt == page.response == page.label
    assert page.prompt.startswith(MARKUP)
    assert "\x1b" not in page.prompt
    assert "\\x1b]0;" in page.prompt
    assert page.components == {MARKUP: 1.0}
    tokens = page.tokens
    assert tokens is not None
    assert tokens.source == "samples/steps-0000001-0000001.parquet"
    assert tokens.logprobs == [-0.5, -1.0, -1.5]
    assert (tokens.versions, tokens.is_made, tokens.starts) == ([0, 0, 0], [True] * 3, [0])
    assert tokens.texts == ["0 ", "0 ", "0 "]  # its tokenizer is gone, so they are shown as ids
    assert page.missing == [NOT_KEPT_LEARNER]
    assert [mate.name for mate in page.group] == ["0/0", "0/1"]
    assert (page.mean, page.deviation) == (0.5, 0.0)


def test_what_the_learner_wrote_down_stands_beside_the_engines_log_probs(small: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(small, tmp_path / "copied")
    dump_sample(copied, 0, 0)
    page = sample(copied, "0/0")
    assert page.missing == []
    tokens = page.tokens
    assert tokens is not None
    assert (tokens.learner_logprobs, tokens.ratios) == ([-0.75, -0.75, None], [1.25, 1.25, None])
    assert tokens.advantages == [2.0, 2.0, None]
    shutil.rmtree(copied / "samples")  # the dump alone has its tokens then
    left = sample(copied, "0/0")
    assert left.tokens is not None
    assert left.missing == page.missing
    assert (left.tokens.source, left.tokens.texts) == ("steps", tokens.texts)
    assert (left.tokens.logprobs, left.tokens.ratios) == (tokens.logprobs, tokens.ratios)
    assert left.tokens.is_made == [True, True, False]
    assert NOT_KEPT_TOKENS in sample(copied, "0/1").missing


def test_tokens_of_a_sample_that_is_still_in_the_ledger_are_found_there(small: Path) -> None:
    page = sample(small, "4/0")
    assert page.tokens is not None
    assert (page.tokens.source, page.tokens.num_tokens) == (LEDGER_FILE, 3)
    assert page.prompt == "2 + 2 ="
    later = answer_sample(small, SampleQuery(sample="4/0", first_token=2)).tokens
    assert later is not None
    assert (later.first, later.logprobs, later.versions, later.is_made) == (2, [-1.5], [1], [True])


def test_what_was_not_kept_is_said_with_the_key_that_keeps_it(small: Path) -> None:
    page = sample(small, "1/0")
    assert (page.state, page.cause) == ("failed", "reward_timeout")
    assert page.reason.startswith(MARKUP)
    assert "\\x1b]0;title" in page.reason
    assert page.missing == [NOT_KEPT_TEXT, NOT_KEPT_TOKENS]
    assert "run.keep_samples=true" in NOT_KEPT_TEXT
    assert "run.keep_samples=true" in NOT_KEPT_TOKENS
    assert page.tokens is None


def test_images_without_a_picture_are_said_with_the_reason(small: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(small, copied)
    Image.new("RGB", (6, 4), (255, 0, 0)).save(tmp_path / "there.png")
    digest = hashlib.sha256((tmp_path / "there.png").read_bytes()).hexdigest()
    there, gone = Media("image", str(tmp_path / "there.png"), digest), Media("image", str(tmp_path / "gone"), "0" * 64)
    shown = {1: (there,), 2: (there, gone), 3: (gone, there, there, there, there, gone)}
    for index, media in shown.items():
        keep(copied, KeptSample(group_id=4, index=index, kept_at=0.0, row=0, prompt="", media=media))
    pages = [sample(copied, f"4/{index}") for index in shown]
    assert [len(page.images) for page in pages] == [1, 1, 3]
    assert pages[0].images[0].pixels == bytes((255, 0, 0, 255)) * 24
    said = [[text for text in page.missing if "image" in text] for page in pages]
    assert said == [
        [],
        [f"1 of its images cannot be shown: {UNSHOWN}"],
        [f"1 of its images cannot be shown: {UNSHOWN}", "2 more images are not shown."],
    ]


@pytest.mark.parametrize("name", ["99/0", "0/9", "e3/0"])
def test_a_sample_of_which_nothing_is_known_is_named(small: Path, name: str) -> None:
    with pytest.raises(UserFault, match="nothing is known"):
        sample(small, name.replace("0/9", "98/9"))


@pytest.mark.parametrize("name", ["", "12", "../etc/passwd", "1/2/3", "-1/0"])
def test_what_is_no_name_of_a_sample_is_refused(small: Path, name: str) -> None:
    with pytest.raises(UserFault, match="GROUP/INDEX"):
        sample(small, name)


def test_a_life_has_its_attempts_and_the_versions_that_made_it(small: Path) -> None:
    life = answer_life(small, SampleQuery(sample="0/0"))
    assert life.is_traced
    told = [(stage.name, stage.attempt) for stage in life.stages]
    assert [one for one in told if one[0] in ("issue", "queue", "generate", "score")] == [
        ("issue", 0),
        ("queue", 0),
        ("issue", 1),
        ("queue", 1),
        ("generate", 1),
        ("score", None),
    ]
    (generate,) = [stage for stage in life.stages if stage.name == "generate"]
    assert generate.versions == [(0, 1), (1, 2)]
    assert generate.actor == f"engine/1 {MARKUP}"
    assert not all(stage.is_recorded for stage in life.stages)  # the learner's span is not there
    other = answer_life(small, SampleQuery(sample="4/0"))
    assert not other.is_traced
    assert "observability.trace_fraction" in other.missing


def test_a_run_that_was_not_traced_says_so(big: Path) -> None:
    life = answer_life(big, SampleQuery(sample="3/0"))
    assert life.stages == []
    assert "observability.tracing" in life.missing


# --- over the wire ---------------------------------------------------------------------------------------------------


def test_the_routes_answer_and_refuse(small: Path) -> None:
    async def ask() -> None:
        async with served([small]) as asker:
            state = await asker.get("/api/samples/index")
            assert (state["is_ready"], state["num_samples"]) == (True, len(names(small, "1")))
            page = await asker.get("/api/samples/table?sort=reward&is_ascending=true&limit=2&min_reward=0.5")
            assert [row["reward"] for row in page["rows"]] == [0.5, 0.5]
            following = await asker.get(
                f"/api/samples/table?sort=reward&is_ascending=true&after={quote(page['after'])}"
            )
            assert page["rows"][-1]["name"] not in [row["name"] for row in following["rows"]]
            assert (await asker.get("/api/samples/count?state=failed"))["num_samples"] == 2
            assert (await asker.get("/api/samples/sample?sample=0%2F0"))["prompt"].startswith(EVIL[:60])
            assert (await asker.get("/api/samples/life?sample=0%2F0"))["is_traced"]
            for wrong in (
                "sort=name",
                "limit=501",
                "skip=-1",
                "min_tokens=x",
                "group=1;",
                "unknown=1",
                "min_reward=nan;",
            ):
                assert (await asker.get(f"/api/samples/table?{wrong}", status=400))["error"]

    asyncio.run(ask())
