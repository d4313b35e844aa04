"""What engines count of the work that a sample took, from the server's answer to the ledger and to the figures of a
step: absent where nobody tells it, and never 0."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

import ledger_entries as make
import msgspec
import pytest
from engine_bench import manifest
from msgspec.structs import replace
from older_ledger import make_older
from test_sglang_experts import PROMPT, generated, opened

from penstock.actors.buffer.books import note_of
from penstock.actors.buffer.report import step_report
from penstock.backends.episodes.transcript import Transcript
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import COUNTED, LEDGER_FILE
from penstock.messages.arrays import pack_tokens
from penstock.messages.engine_counts import EngineCounts, added, in_words
from penstock.messages.parts import cut, join
from penstock.messages.samples import Part, Prompt, VersionSpan
from penstock.messages.training import Balance, StepFinished

if TYPE_CHECKING:
    from pathlib import Path

TOLD = EngineCounts(10, 4, 6, 3)
CACHED = EngineCounts(10, 6)
COLUMNS = ", ".join(column.name for column in COUNTED)


def part(counts: EngineCounts | None) -> Part:
    return Part(tokens=pack_tokens([5, 6]), logprobs=bytes(8), spans=(VersionSpan(0, 2),), counts=counts)


def test_sums_are_of_those_that_tell() -> None:
    assert added([TOLD, None, CACHED]) == EngineCounts(20, 10, 6, 3)
    assert added([None, None]) is None
    assert added([EngineCounts(3), EngineCounts(4)]) == EngineCounts(7, None, None, None)


def test_joined_stretches_add_up_and_a_cut_one_tells_nothing() -> None:
    assert join((part(TOLD), part(CACHED))).counts == EngineCounts(20, 10, 6, 3)
    assert cut(part(TOLD), 0).counts == TOLD
    assert cut(part(TOLD), 1).counts is None


def test_words_leave_out_what_is_not_told() -> None:
    assert in_words(TOLD) == "4 of 10 read tokens from the cache, 3 of 6 drafted tokens kept"
    assert in_words(CACHED) == "6 of 10 read tokens from the cache"
    assert in_words(None) == in_words(EngineCounts(10)) == ""


# --- from the server ----------------------------------------------------------------------------------------------


def answer(tokens: list[int], finish: dict[str, Any], **meta: int) -> bytes:
    told = {
        "finish_reason": finish, "prompt_tokens": 3, "completion_tokens": len(tokens), "weight_version": "v0",
        "output_token_logprobs": [[-0.5, token, None] for token in tokens], **meta,
    }  # fmt: skip
    return msgspec.json.encode({"output_ids": tokens, "meta_info": told})


STOP = {"type": "stop", "matched": 1}


def test_what_a_server_says_is_in_the_sample() -> None:
    request = opened(None)
    request.call(manifest(0))
    said = generated(
        answer([4, 1], STOP, cached_tokens=2, spec_num_proposed_drafts=9, spec_num_correct_drafts=5, spec_verify_ct=3)
    )
    assert request.take(said) is not None
    assert request.part.counts == EngineCounts(len(PROMPT), 2, 9, 5)


def test_a_request_that_is_sent_again_counts_what_it_reads_anew() -> None:
    request = opened(None)
    request.call(manifest(0))
    request.is_sent_again = True
    assert request.take(generated(answer([4, 5], {"type": "abort"}, cached_tokens=1))) is None
    request.call(manifest(1))
    request.take(generated(answer([6, 1], STOP, cached_tokens=3)))
    assert request.part.counts == EngineCounts(len(PROMPT) + len(PROMPT) + 2, 4)


def test_a_server_that_says_nothing_leaves_nothing() -> None:
    request = opened(None)
    request.call(manifest(0))
    request.take(generated(answer([4, 1], STOP)))
    assert request.part.counts is None


def test_the_turns_of_an_episode_add_up() -> None:
    transcript = Transcript(Prompt(row=0, epoch=0, tokens=pack_tokens(PROMPT)))
    transcript.add_model(part(None))
    transcript.counts = added((TOLD, CACHED))
    assert transcript.whole().counts == EngineCounts(20, 10, 6, 3)
    assert transcript.slice(0).counts is None, "what is told on the way is told again at the end"


# --- to the ledger ------------------------------------------------------------------------------------------------


def with_counts(store: SqliteStore) -> None:
    entry = make.admitted(0)
    assert entry.payload is not None
    samples = tuple(replace(s, parts=(replace(s.parts[0], counts=TOLD),)) for s in entry.payload.samples[:1])
    payload = replace(entry.payload, samples=(*samples, *entry.payload.samples[1:]))
    store.commit([make.run(), make.granted(0, 1), replace(entry, samples=tuple(map(note_of, payload.samples)))])


def rows(path: Path) -> list[tuple[int | None, ...]]:
    with sqlite3.connect(path) as database:
        return database.execute(f"SELECT {COLUMNS} FROM samples ORDER BY sample_index").fetchall()


def test_the_ledger_has_a_row_of_it(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / LEDGER_FILE)
    store.claim(1)
    with_counts(store)
    store.close()
    assert rows(tmp_path / LEDGER_FILE) == [(10, 4, 6, 3), (None, None, None, None)]


def test_a_ledger_of_before_is_read_and_gets_the_columns_when_it_is_written_on(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    store = SqliteStore(path)
    store.claim(1)
    store.commit(make.whole_run())
    store.close()
    make_older(path, 5)
    before = audit_ledger(path)
    with pytest.raises(sqlite3.OperationalError):
        rows(path)
    SqliteStore(path).close()
    assert set(rows(path)) == {(None, None, None, None)}
    assert audit_ledger(path).findings == before.findings


# --- to the figures -----------------------------------------------------------------------------------------------


def figures(*counts: EngineCounts | None) -> dict[str, float]:
    group = make.admitted(0).payload
    assert group is not None
    told = tuple(
        replace(sample, parts=(replace(sample.parts[0], counts=one),))
        for sample, one in zip(group.samples, counts, strict=True)
    )
    report = step_report(
        (replace(group, samples=told),),
        StepFinished(version=1, group_ids=(0,), num_trained_tokens=4, max_staleness=0),
        (),
        num_steps=1,
        balance=Balance(issued=2, in_system=2, ended=()),
    )
    return {m.name: m.value for m in report.metrics if m.name.startswith(("rollout/prefix", "rollout/spec"))}


def test_shares_of_a_step_are_over_all_samples_that_tell() -> None:
    assert figures(TOLD, CACHED) == {"rollout/prefix_cache_hit_rate": 0.5, "rollout/spec_accept_rate": 0.5}
    assert figures(TOLD, None) == {"rollout/prefix_cache_hit_rate": 0.4, "rollout/spec_accept_rate": 0.5}
    assert figures(CACHED, EngineCounts(100)) == {"rollout/prefix_cache_hit_rate": 0.6}
    assert figures(EngineCounts(10, 0), None) == {"rollout/prefix_cache_hit_rate": 0.0}
    assert figures(None, None) == {}
