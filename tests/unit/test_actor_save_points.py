"""What PromptSource keeps of an episode whose engine is lost: what stands before its last save point."""

from __future__ import annotations

import pytest

from penstock.actors.prompt_source.leases import Lease
from penstock.messages.arrays import pack_floats, pack_tokens, tokens_view
from penstock.messages.parts import cut, join
from penstock.messages.samples import Part, SampleKey, SavePoint, VersionSpan

FIRST = SavePoint(3, 1, b"first")
SECOND = SavePoint(5, 2, b"second")


def chunk(*ids: int, version: int = 0, mask: bytes = b"", point: SavePoint | None = None, context: bytes = b"") -> Part:
    return Part(
        tokens=pack_tokens(ids),
        logprobs=pack_floats([-1.0] * len(ids)),
        spans=(VersionSpan(version, len(ids)),) if ids else (),
        loss_mask=mask,
        save_point=point,
        context_tokens=context,
    )


def lease_with(*chunks: Part) -> Lease:
    lease, num_tokens = Lease(SampleKey(0, 0)), 0
    for each in chunks:
        lease.add_progress(num_tokens, each)
        num_tokens += each.num_tokens
    return lease


def test_a_lost_episode_goes_back_to_its_last_save_point() -> None:
    lease = lease_with(
        chunk(1, 2, 3, context=pack_tokens([9])),
        chunk(point=FIRST),
        chunk(4, 5, version=1, mask=b"\0\1"),
        chunk(point=SECOND),
        chunk(6, 7, version=2),
    )
    lease.back_to_save_point()
    prefix = lease.prefix()
    assert prefix is not None
    assert lease.num_tokens == prefix.num_tokens == 5
    assert tokens_view(prefix.tokens).tolist() == [1, 2, 3, 4, 5]
    assert prefix.spans == (VersionSpan(0, 3), VersionSpan(1, 2))
    assert prefix.loss_mask == b"\1\1\1\0\1"
    assert prefix.save_point == SECOND
    assert prefix.context_tokens == pack_tokens([9])


def test_it_goes_on_from_there_a_second_time() -> None:
    lease = lease_with(chunk(1, 2, 3), chunk(point=FIRST), chunk(4))
    lease.back_to_save_point()
    lease.add_progress(3, chunk(5, 6))
    lease.back_to_save_point()
    assert lease.num_tokens == 3


@pytest.mark.parametrize("chunks", [(), (chunk(1, 2),), (chunk(1), chunk(point=FIRST))])
def test_an_episode_without_a_save_point_that_is_known_whole_begins_again(chunks: tuple[Part, ...]) -> None:
    lease = lease_with(*chunks)
    lease.back_to_save_point()
    assert lease.prefix() is None
    assert lease.num_tokens == 0


def test_a_report_that_does_not_follow_brings_no_save_point() -> None:
    lease = lease_with(chunk(1, 2, 3))
    lease.add_progress(5, chunk(point=SECOND))
    lease.back_to_save_point()
    assert lease.prefix() is None


def test_a_head_is_what_a_longer_part_begins_with() -> None:
    whole = join([chunk(1, 2), chunk(3, version=4), chunk(4, 5, version=5)])
    assert cut(whole, 0, 3) == join([chunk(1, 2), chunk(3, version=4)])
    assert cut(whole, 0, 5) == whole
