"""Ages of a batch: as the definition says it, however many versions made a sample."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.learner.batches import oldest_age
from penstock.messages.samples import Completed, Group, Part, Prompt, Sample, SampleKey, VersionSpan
from penstock.messages.training import BatchReady, UpdateMode

PROMPT = Prompt(row=0, epoch=0, tokens=b"")
SPANS = st.lists(st.builds(VersionSpan, st.integers(0, 9), st.integers(0, 3)), max_size=4)
SAMPLES = st.lists(st.lists(SPANS, min_size=1, max_size=2), min_size=1, max_size=4)


def part(spans: list[VersionSpan]) -> Part:
    num_bytes = 4 * sum(span.num_tokens for span in spans)
    return Part(tokens=bytes(num_bytes), logprobs=bytes(num_bytes), spans=tuple(spans))


def made_by(parts: list[list[VersionSpan]]) -> list[int]:
    """Version of each token."""
    return [span.version for spans in parts for span in spans for _ in range(span.num_tokens)]


def sample(index: int, parts: list[list[VersionSpan]]) -> Sample:
    return Sample(key=SampleKey(0, index), parts=tuple(map(part, parts)), outcome=Completed())


@given(SAMPLES)
def test_bounds_are_those_of_the_tokens(samples: list[list[list[VersionSpan]]]) -> None:
    for index, parts in enumerate(samples):
        versions, made = made_by(parts), sample(index, parts)
        assert made.version_bounds == ((min(versions), max(versions)) if versions else None)
        assert (made.oldest_version, made.newest_version) == (min(versions, default=None), max(versions, default=None))


@given(SAMPLES, st.integers(0, 9), st.booleans(), st.booleans())
def test_the_oldest_age_is_that_of_a_token_that_is_trained(
    samples: list[list[list[VersionSpan]]], max_staleness: int, mask_stale: bool, mask_old_tokens: bool
) -> None:
    consumed_at = 9
    batch = BatchReady(
        version=consumed_at + 1,
        groups=(Group(group_id=0, prompt=PROMPT, samples=tuple(sample(i, parts) for i, parts in enumerate(samples))),),
        announced_version=0,
        max_staleness=max_staleness,
        mask_stale=mask_stale,
        mask_old_tokens=mask_old_tokens,
        update_mode=UpdateMode.IN_FLIGHT,
    )
    ages: list[int] = []
    for versions in filter(None, map(made_by, samples)):
        trained = [version for version in versions if version == max(versions) or not mask_old_tokens]
        ages += [consumed_at - version for version in trained]
    assert oldest_age(batch) == max((age for age in ages if age <= max_staleness or not mask_stale), default=0)
