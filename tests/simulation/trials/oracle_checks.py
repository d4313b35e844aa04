"""What the oracle knows of a run and of its groups, and the checks that need nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.actors.buffer.evaluating import EvaluationSchedule
from penstock.backends.simulated.teacher import teacher_logprobs
from penstock.messages.arrays import tokens_view
from penstock.messages.samples import Group, TerminalState
from penstock.messages.training import OnStale
from penstock.runtime.hosts.virtual.process import Status
from trials.row_watch import RowRules

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.messages.ledger import BatchLeased, GroupRecorded
    from penstock.messages.samples import Prompt, Sample, SampleEnd
    from penstock.runtime.hosts.virtual.process import Process

TOKENS_MODULUS: Final = 1000
"""Token ``t`` of every simulated response is ``t`` modulo this."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What this run was told, as far as it says what must be true."""

    num_steps: int
    groups_per_batch: int
    samples_per_group: int
    max_staleness: int
    on_stale: OnStale
    over_sampling: float = 1.0
    max_concurrent: int | None = None
    max_requeues: int = 0
    max_uses: int = 1
    num_prompts: int | None = None
    keep_checkpoints: int = 1
    has_teachers: bool = False
    evaluation: EvaluationSchedule | None = None
    keep_after_batches: int | None = None
    counts_dropped: bool = False
    rows: RowRules


class WatchedGroup(msgspec.Struct):
    """One granted group, in the oracle's books."""

    group_id: int
    min_version: int
    deadline: int
    max_staleness: int
    payload: Group | None = None
    is_leased: bool = False
    is_closed: bool = False
    num_uses: int = 0
    """Batches that have had it."""


def assert_used_again(entry: BatchLeased, groups: Mapping[int, WatchedGroup], rules: Rules) -> None:
    """What a batch has of groups that were trained before: as often as they may be, and young enough."""
    assert len(entry.uses) in (0, len(entry.group_ids))
    for group_id, use in zip(entry.group_ids, entry.uses or [1] * len(entry.group_ids), strict=True):
        group = groups[group_id]
        group.num_uses += 1
        assert use == group.num_uses <= rules.max_uses, f"use {use} of group {group_id}, it is number {group.num_uses}"
        if use > 1:
            assert group.is_closed, f"group {group_id} is used again before it was used"
            assert group.payload is not None
            oldest = min(versions_of(group.payload.samples))
            assert entry.version - 1 - oldest <= group.max_staleness, f"use {use} of group {group_id} is too old"


def kept_by(processes: Iterable[Process]) -> list[str]:
    """Who still keeps or works on something."""
    found: list[str] = []
    for process in processes:
        if process.status is not Status.RUNNING:
            continue
        kept = [lease.key for lease in process.shell.delivery.leases()]
        held = [lease.key for lease in process.shell.machine.leases()]
        if process.shell.delivery.num_kept or held:
            found.append(f"{process.name} keeps {kept}, works on {held}")
    return found


def assert_places(samples: Sequence[Sample], ended: Sequence[SampleEnd], group: WatchedGroup, rules: Rules) -> None:
    """Every sample of the group stands there once, and so does every place: a replacement only beside the failed one
    that it replaces."""
    failed = {end.key.index for end in ended if end.state is TerminalState.FAILED}
    keys = [*(sample.key for sample in samples), *(end.key for end in ended)]
    assert len(set(keys)) == len(keys), f"group {group.group_id} has a sample twice"
    assert all(key.group_id == group.group_id for key in keys)
    indices = {key.index for key in keys}
    assert set(range(rules.samples_per_group)) <= indices, f"group {group.group_id} lacks samples: {sorted(indices)}"
    for index in indices:
        replaced = index - rules.samples_per_group
        assert replaced < 0 or replaced in failed, f"group {group.group_id} has a place twice: {sorted(indices)}"


def assert_counted(group: Group, rules: Rules) -> None:
    """What counts in the statistics beside the samples was dropped by a filter, each once, where that is so."""
    assert rules.counts_dropped or not group.counted, f"group {group.group_id} counts what is not trained"
    filtered = {end.key.index for end in group.ended if end.state is TerminalState.FILTERED}
    counted = [sample.index for sample in group.counted]
    assert sorted(filtered) == sorted(counted) or not rules.counts_dropped, (filtered, counted)


def assert_noted(entry: GroupRecorded) -> None:
    """What the ledger keeps for good of a group's samples is what the payload says."""
    assert entry.payload is not None
    assert entry.ended == entry.payload.ended
    for note, sample in zip(entry.samples, entry.payload.samples, strict=True):
        versions = versions_of([sample])
        assert (note.index, note.attempt, note.engine) == (sample.key.index, sample.attempt, sample.engine)
        assert (note.num_tokens, note.reward) == (sample.num_tokens, sample.reward)
        expected = (min(versions, default=None), max(versions, default=None))
        assert (note.oldest_version, note.newest_version) == expected


def assert_whole(sample: Sample) -> None:
    """The response has no hole, no repeat, and a version for every token."""
    for part in sample.parts:
        assert_ramp(part.tokens, str(sample.key))


def assert_taught(sample: Sample, prompt: Prompt, *, has_teachers: bool) -> None:
    """What a teacher says of this very sample stands beside each of its tokens; without teachers nothing does."""
    for part in sample.parts:
        wanted = teacher_logprobs(part.context_tokens or prompt.tokens, part.tokens) if has_teachers else b""
        assert part.teacher_logprobs == wanted, f"{sample.key} has other log-probs than a teacher gives it"


def assert_ramp(tokens: bytes, what: str) -> None:
    """Simulated responses count upwards."""
    view = tokens_view(tokens)
    assert all(token == t % TOKENS_MODULUS for t, token in enumerate(view)), f"{what} has a hole or a repeat"


def versions_of(samples: Iterable[Sample]) -> list[int]:
    """The version of every stretch of tokens."""
    return [span.version for sample in samples for part in sample.parts for span in part.spans if span.num_tokens]


def trained_versions(samples: Iterable[Sample], *, newest_only: bool) -> list[int]:
    """The same; ``newest_only``: of each sample its newest one alone."""
    if not newest_only:
        return versions_of(samples)
    return [max(versions) for sample in samples if (versions := versions_of([sample]))]
