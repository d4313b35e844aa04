"""Stretches of one response: joined, and cut."""

from __future__ import annotations

import itertools

import actor_driver as drive
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.messages.arrays import ArrayLengthError, pack_tokens
from penstock.messages.kept_tokens import KeptTokens, joined_kept
from penstock.messages.parts import add_span, cut, join, joined_spans, spans_between
from penstock.messages.samples import ExpertChoices, Media, Part, Prompt, VersionSpan

spans = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=5).map(
    lambda found: [span for i, span in enumerate(found) if i == 0 or span[0] != found[i - 1][0]]
)


@given(spans=spans, place=st.integers(0, 25))
def test_what_stands_before_a_cut_and_the_tail_after_it_are_the_whole(spans: list[tuple[int, int]], place: int) -> None:
    whole = drive.part(*spans)
    place = min(place, whole.num_tokens)
    head = Part(
        tokens=whole.tokens[: 4 * place],
        logprobs=whole.logprobs[: 4 * place],
        spans=tuple(span for span in drive.part(*head_spans(spans, place)).spans),
    )
    assert cut(whole, 0, place) == head
    assert join([head, cut(whole, place)]) == whole


@given(spans=spans, begin=st.integers(0, 25), end=st.integers(0, 25))
def test_spans_of_a_stretch_are_those_of_its_tokens(spans: list[tuple[int, int]], begin: int, end: int) -> None:
    whole = [VersionSpan(*span) for span in spans]
    versions = [version for version, number in spans for _ in range(number)]
    between = spans_between(whole, begin, end)
    assert [span.version for span in between for _ in range(span.num_tokens)] == versions[begin : max(begin, end)]
    assert all(span.num_tokens > 0 for span in between)


def test_neighbours_of_one_version_are_one_span_and_empty_ones_none() -> None:
    spans = [VersionSpan(0, 0), VersionSpan(1, 2), VersionSpan(2, 0), VersionSpan(1, 1), VersionSpan(3, 1)]
    assert joined_spans(spans) == (VersionSpan(1, 3), VersionSpan(3, 1))
    add_span(spans, VersionSpan(3, 4))
    assert spans[-1] == VersionSpan(3, 5)


kept_sets = st.lists(st.lists(st.integers(0, 500), max_size=4, unique=True), min_size=1, max_size=9)


def kept_tokens(sets: list[list[int]]) -> KeptTokens:
    return KeptTokens(
        b"".join(len(own).to_bytes(2, "little") for own in sets), pack_tokens(each for own in sets for each in own)
    )


@given(sets=kept_sets, place=st.integers(0, 9), more=st.integers(0, 3))
def test_what_tokens_were_drawn_from_is_cut_and_joined_with_them(sets: list[list[int]], place: int, more: int) -> None:
    bare, length = drive.part((0, more)), len(sets)
    recorded = kept_tokens(sets) if any(sets) else None
    whole = msgspec.structs.replace(drive.part((0, length)), kept=recorded)
    place = min(place, length)
    head, tail = cut(whole, 0, place), cut(whole, place)
    assert [part.kept for part in (head, tail)] == [
        kept_tokens(own) if any(own) else None for own in (sets[:place], sets[place:])
    ]
    assert join([head, tail]).kept == recorded
    longer = [*([list[int]()] * more), *sets]
    assert join([bare, whole]).kept == (kept_tokens(longer) if any(sets) else None)
    assert joined_kept([(None, 3), (None, 0)]) is None


def test_a_record_of_other_tokens_than_there_are_is_refused() -> None:
    with pytest.raises(ArrayLengthError, match="do not add up to 4 bytes of ids"):
        KeptTokens(b"\2\0", b"\1\0\0\0")
    with pytest.raises(ArrayLengthError, match="kept: expected 3 tokens, got 1"):
        msgspec.structs.replace(drive.part((0, 3)), kept=kept_tokens([[1]]))


@given(places=st.lists(st.integers(1, 8), max_size=4), begin=st.integers(0, 40), context=st.booleans())
def test_images_are_cut_and_joined_with_the_tokens_that_stand_for_them(
    places: list[int], begin: int, *, context: bool
) -> None:
    at = list(itertools.accumulate(places))
    media = tuple(Media("image", f"{place}", "d", place, 1) for place in ((-2,) if context else ()) + tuple(at))
    given = b"\5\0\0\0" * 3 if context else b""
    whole = msgspec.structs.replace(drive.part((0, 40)), media=media, context_tokens=given)
    head, tail = cut(whole, 0, begin), cut(whole, begin)
    assert [each.at for each in head.media] == [each.at for each in media if each.at < begin]
    if begin:
        assert [each.at for each in tail.media] == [place - begin for place in at if place >= begin]
        assert join([head, tail]) == whole
    prompt = Prompt(row=0, epoch=0, tokens=b"\6\0\0\0" * 5, media=(Media("image", "p", "p", 1, 2),))
    seen = [(each.reference, each.at) for each in whole.media_after(prompt)]
    if context:
        assert seen == [("-2", 1), *((f"{place}", 3 + place) for place in at)]
    else:
        assert seen == [("p", 1), *((f"{place}", 5 + place) for place in at)]


def head_spans(spans: list[tuple[int, int]], cut: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for version, number in spans:
        kept = min(number, cut - sum(count for _, count in found))
        if kept > 0:
            found.append((version, kept))
    return found


def test_stretches_of_one_version_become_one_span() -> None:
    joined = join([drive.part((0, 2)), drive.part((0, 1), (1, 1)), drive.part((1, 3))])
    assert [(span.version, span.num_tokens) for span in joined.spans] == [(0, 3), (1, 4)]


def test_a_mask_of_one_stretch_holds_for_that_stretch_only() -> None:
    masked = Part(
        tokens=drive.part((0, 2)).tokens,
        logprobs=drive.part((0, 2)).logprobs,
        spans=drive.part((0, 2)).spans,
        loss_mask=b"\0\1",
    )
    assert join([drive.part((0, 1)), masked]).loss_mask == b"\1\0\1"
    assert join([drive.part((0, 1)), drive.part((0, 1))]).loss_mask == b""
    assert cut(masked, 1).loss_mask == b"\1"


def test_the_context_is_that_of_the_first_stretch() -> None:
    first = Part(context_tokens=pack_tokens([7, 8]))
    assert join([first, drive.part((0, 1))]).context_tokens == pack_tokens([7, 8])


def test_nothing_joined_is_an_empty_part() -> None:
    assert join([]) == Part()
    assert cut(drive.part((0, 3)), 3) == Part()


def test_the_whole_of_a_part_keeps_its_context_and_a_later_tail_does_not_repeat_it() -> None:
    whole = msgspec.structs.replace(drive.part((0, 3)), context_tokens=pack_tokens([7, 8]))
    assert cut(whole, 0) == whole
    assert cut(whole, 1).context_tokens == b""


def test_the_experts_of_successive_stretches_are_those_that_the_last_one_names() -> None:
    """A record begins with the context, so that of the last stretch is of all of them."""
    experts = ExpertChoices(num_layers=1, per_token=2, id_bytes=1, ids=b"\0\1" * 4)
    last = msgspec.structs.replace(drive.part((0, 2)), experts=experts)
    assert join([drive.part((0, 2)), last]).experts == experts
    assert join([last, drive.part((0, 1))]).experts is None
    assert cut(last, 0).experts == experts
    assert cut(last, 1).experts is None


def test_a_record_of_experts_has_whole_inputs() -> None:
    assert ExpertChoices(num_layers=2, per_token=2, id_bytes=2, ids=bytes(24)).num_inputs == 3
    with pytest.raises(ArrayLengthError, match="multiple of 4"):
        ExpertChoices(num_layers=2, per_token=2, id_bytes=1, ids=bytes(6))
    with pytest.raises(ArrayLengthError, match="1 or 2 bytes"):
        ExpertChoices(num_layers=2, per_token=2, id_bytes=4, ids=b"")
