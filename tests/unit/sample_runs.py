"""A run whose ledger, texts, archive and spans are made up, for the tests of the Samples and Ledger views."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

import ledger_entries as make
import numpy as np
from dashboard_runs import MARKUP, finished_run

from penstock.backends.learners.step_dumps import FIGURES, DumpedSequence, write_step
from penstock.backends.ledger import kept_samples
from penstock.backends.ledger.archive import archive_samples
from penstock.backends.ledger.kept_samples import SAMPLES_FILE, KeptSample
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.arrays import floats_view, tokens_view
from penstock.messages.ledger import FailuresNoted, PayloadsReleased
from penstock.messages.samples import SampleEnd, SampleKey, TerminalState
from penstock.runtime.dashboard.sample_tokens import whole_group
from penstock.runtime.observability.lives import read_fates
from penstock.runtime.observability.span_file import SpanFile, actor_attributes
from penstock.runtime.observability.spans import SpanRecorder, trace_id_of
from penstock.runtime.observability.traces import open_traces, span_file

if TYPE_CHECKING:
    from pathlib import Path

MILLISECOND = 10**6
EVIL = f"{MARKUP} \x1b]0;title\x07 \u202e\ud800 </pre> [red]"
"""What a model may write."""


def small_run(folder: Path) -> Path:
    """Group 0 is archived and traced, sample 0/0 kept as text; 4 is trained and stands in the ledger; 1/0 failed."""
    finished_run(folder)
    began_ns = time.time_ns()
    with closing(SqliteStore(folder / LEDGER_FILE)) as store:
        store.claim(1)
        entries = make.whole_run()
        store.commit([entry for entry in entries if not isinstance(entry, PayloadsReleased)])
        failed = SampleEnd(key=SampleKey(1, 0), state=TerminalState.FAILED, cause="reward_timeout", reason=EVIL_REASON)
        store.commit([FailuresNoted(ends=(failed,))])
        archive_samples(store.reader(), folder / "samples", 1, 1)
        store.commit([PayloadsReleased(through_version=1)])
    said = KeptSample(
        group_id=0, index=0, kept_at=0.0, row=3, prompt=EVIL, label=EVIL, response=EVIL, reward=0.5,
        components={MARKUP: 1.0}, outcome="completed", detail="end_token", num_tokens=3,
    )  # fmt: skip
    keep(folder, said)
    _trace(folder, began_ns - 100 * MILLISECOND)
    return folder


EVIL_REASON = EVIL.replace("\ud800", "")
"""The ledger keeps no half characters."""


def keep(folder: Path, *samples: KeptSample) -> None:
    """As the Filter's process keeps them."""
    with closing(kept_samples._opened(folder / SAMPLES_FILE)) as database, database:
        rows = [kept_samples._row(_sound(one)) for one in samples]
        database.executemany(kept_samples._INSERT, rows)


def _sound(one: KeptSample) -> KeptSample:
    """msgpack carries no half characters either."""
    texts = {name: getattr(one, name).replace("\ud800", "") for name in ("prompt", "label", "response")}
    return KeptSample(**{name: getattr(one, name) for name in one.__struct_fields__} | texts)


def _trace(folder: Path, began_ns: int) -> None:
    """Of sample 0/0: its engine was killed while it generated, and it was issued again."""
    salt = open_traces(folder)
    trace_id, parent = trace_id_of(salt, 0, 0), bytes(8)
    stages = (
        ("issue", 0, 1, (("attempt", 0), ("engine", "engine/0"))),
        ("queue", 1, 2, (("attempt", 0),)),
        ("issue", 50, 51, (("attempt", 1), ("engine", "engine/1"))),
        ("queue", 51, 52, (("attempt", 1),)),
        ("generate", 52, 90, (("attempt", 1), ("num_tokens", 3), ("versions", "0:1 1:2"), ("outcome", MARKUP))),
        ("score", 90, 95, (("reward", 0.5),)),
    )
    recorder = SpanRecorder()
    for name, start, end, attributes in stages:
        recorder.record(
            trace_id, parent, name, began_ns + start * MILLISECOND, began_ns + end * MILLISECOND, attributes
        )
    written = SpanFile(span_file(folder, "engine/1", 1), actor_attributes(f"engine/1 {MARKUP}", 1))
    written.write(recorder.take(100))
    written.close()


def dump_sample(folder: Path, group_id: int, index: int) -> None:
    """What the learner would have written down of a sample that was trained."""
    (fate,) = read_fates(folder, sample=(group_id, index))
    _, group = whole_group(folder, fate)
    assert group is not None
    assert fate.version is not None
    (part,) = next(sample for sample in group.samples if sample.key.index == index).parts
    count = part.num_tokens
    figures = {name: np.full(count, np.nan, dtype=np.float32) for name in FIGURES}
    figures["rollout_logprobs"] = np.asarray(floats_view(part.logprobs))
    for name, value in (("logprobs", -0.75), ("ratios", 1.25), ("advantages", 2.0)):
        figures[name][:2] = value  # the last token is not trained
    mask = np.arange(count) < 2
    tokens, versions = np.asarray(tokens_view(part.tokens)), np.where(mask, 0, -1).astype(np.int32)
    row = DumpedSequence(group_id, index, 0, np.ones(2, dtype=np.int32), tokens, mask, versions, figures)
    write_step(folder, fate.version, [row])
