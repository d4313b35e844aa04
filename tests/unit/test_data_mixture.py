"""Several sources of prompts: shares, order, what each says of its own rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from data_cases import make_tokenizer
from data_cases import write_lines as write
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.actors.prompt_source.order import PromptOrder, mixture_pattern, row_in_blocks
from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.duplicates import duplicates_in, duplicates_text, rows_in_both
from penstock.backends.data.mixture import MAX_PERIOD, shares_of
from penstock.backends.data.options import DataOptions, SourceOptions
from penstock.messages.errors import UserFault
from penstock.messages.rows import RowSource
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from pathlib import Path

SHARES = st.lists(st.integers(1, 60), min_size=2, max_size=6)


def order(*sources: tuple[int, int], seed: int = 3, shuffle: bool = True) -> PromptOrder:
    """Of sources with so many rows and such shares."""
    rows = [RowSource(name=f"s{i}", num_rows=n, share=share) for i, (n, share) in enumerate(sources)]
    return PromptOrder(rows, seed=seed, shuffle=shuffle)


@given(shares=SHARES)
@settings(max_examples=60)
def test_any_stretch_of_prompts_has_the_share_of_each_source_to_within_two(shares: list[int]) -> None:
    pattern = mixture_pattern(shares) * 2
    counts = [[0] * (len(pattern) + 1) for _ in shares]
    for place, index in enumerate(pattern):
        for source, numbers in enumerate(counts):
            numbers[place + 1] = numbers[place] + (source == index)
    for share, numbers in zip(shares, counts, strict=True):
        lags = [numbers[n] - n * share / sum(shares) for n in range(len(numbers))]
        assert max(lags) - min(lags) < 2
        assert numbers[sum(shares)] == share


@given(shares=SHARES, data=st.data())
@settings(max_examples=30)
def test_a_source_is_gone_through_in_epochs_of_its_own(shares: list[int], data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 12)) for _ in shares]
    mixed = order(*zip(sizes, shares, strict=True))
    num_prompts = mixed.num_prompts(2)
    seen = [mixed.row_of(ordinal) for ordinal in range(num_prompts)]
    start = 0
    for index, size in enumerate(sizes):
        own = [(row - start, epoch) for row, epoch in seen if start <= row < start + size]
        assert len(own) == mixed.counts(num_prompts)[index] >= 2 * size
        for epoch in range(2):
            assert sorted(row for row, at in own if at == epoch) == list(range(size))
        start += size


def test_the_row_of_a_place_needs_nothing_but_the_place() -> None:
    mixed, again = order((5, 7), (11, 2)), order((5, 7), (11, 2))
    places = [0, 10**12, 17, 3, 10**12 + 1]
    assert [mixed.row_of(place) for place in places] == [again.row_of(place) for place in reversed(places)][::-1]
    assert order((5, 7), (11, 2), seed=4).row_of(17) != mixed.row_of(17)


def test_sources_without_weights_are_gone_through_as_one_dataset() -> None:
    rows = [order((5, 0), (7, 0)).row_of(place) for place in range(24)]
    assert sorted(row for row, epoch in rows if epoch == 0) == list(range(12))
    assert sorted(row for row, epoch in rows if epoch == 1) == list(range(12))
    assert order((5, 0), (7, 0)).num_prompts(3) == 36
    single = PromptOrder([RowSource(name="x", num_rows=12)], seed=3, shuffle=True)
    assert [single.row_of(place) for place in range(24)] == rows


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((0.7, 0.2, 0.1), (7, 2, 1)),
        ((1, 1), (1, 1)),
        ((3, 6), (1, 2)),
        ((0.25, 1.5), (1, 6)),
        ((None, None), (0, 0)),
        ((2.0,), (0,)),
    ],
)
def test_weights_become_the_least_whole_shares(weights: tuple[float | None, ...], expected: tuple[int, ...]) -> None:
    assert shares_of(weights) == expected


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=8))
@settings(max_examples=60)
def test_weights_that_are_no_small_fractions_are_rounded(weights: list[float]) -> None:
    shares = shares_of(weights)
    assert min(shares) >= 1
    assert sum(shares) <= MAX_PERIOD + len(shares)
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share / sum(shares) - weight / sum(weights)) <= len(shares) / MAX_PERIOD


@pytest.mark.parametrize(("num_rows", "block_rows"), [(1, 1), (10, 3), (12, 3), (100, 7), (33, 32), (64, 16), (5, 4)])
def test_a_shuffle_by_blocks_is_a_permutation_in_which_few_blocks_are_at_hand(num_rows: int, block_rows: int) -> None:
    for epoch in range(3):
        first = epoch * num_rows
        placed = [row_in_blocks(first + n, num_rows=num_rows, block_rows=block_rows, seed=9) for n in range(num_rows)]
        assert sorted(row for row, _ in placed) == list(range(num_rows))
        assert {at for _, at in placed} == {epoch}
        for start in range(0, num_rows, 4 * block_rows):
            blocks = {row // block_rows for row, _ in placed[start : start + 4 * block_rows]}
            assert len(blocks) <= 6


# --- what each source says of its rows ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_each_source_has_its_own_columns_and_metadata(tmp_path: Path, tokenizer_folder: Path) -> None:
    sums = write(tmp_path / "sums.jsonl", {"prompt": "1+1=", "label": 2}, {"prompt": "2+2=", "label": 4})
    names = write(tmp_path / "names.jsonl", {"q": "ab", "level": "easy"}, {"q": "cd", "level": "hard"})
    options = DataOptions(
        metadata={"reward": "math", "set": 1},
        sources=(
            SourceOptions(path=sums, weight=3),
            SourceOptions(
                path=f"{names}@[1:]",
                name="words",
                weight=1,
                prompt_key="q",
                label_key="",
                metadata_keys=("level",),
                metadata={"reward": "f1"},
            ),
        ),
    )
    dataset = load_dataset(options, tokenizer_folder, seed=0, max_context=64)
    assert dataset.sources == (
        RowSource(name="sums", num_rows=2, share=3),
        RowSource(name="words", num_rows=1, share=1),
    )
    prompts = [dataset.prompt(row, 0) for row in range(3)]
    assert [prompt.text for prompt in prompts] == ["1+1=", "2+2=", "cd"]
    assert [prompt.label for prompt in prompts] == ["2", "4", ""]
    assert msgspec.json.decode(prompts[0].metadata) == {"reward": "math", "set": 1}
    assert msgspec.json.decode(prompts[2].metadata) == {"reward": "f1", "set": 1, "level": "hard"}
    assert dataset.place_of(2) == f"{names}:2"


def test_prompts_that_come_again_are_told_with_their_places(tmp_path: Path, tokenizer_folder: Path) -> None:
    one = write(tmp_path / "one.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"})
    two = write(tmp_path / "two.jsonl", {"prompt": "c"}, {"prompt": "b"})
    options = DataOptions(label_key=None, sources=(SourceOptions(path=one), SourceOptions(path=two)))
    dataset = load_dataset(options, tokenizer_folder, seed=0, max_context=64)
    found = duplicates_in(dataset.hashes)
    assert duplicates_text(found, dataset.place_of) == (
        f"2 rows have the prompt of an earlier one ({one}:3 as {one}:1, {two}:2 as {one}:2)"
    )
    other = load_dataset(DataOptions(path=two, label_key=None), tokenizer_folder, seed=0, max_context=64)
    both = rows_in_both(dataset.hashes, other.hashes)
    assert (both.num_rows, both.examples) == (2, ((0, 3), (1, 1)))


@given(values=st.lists(st.integers(0, 9), max_size=40), pass_rows=st.integers(1, 50))
@settings(max_examples=60)
def test_duplicates_are_the_same_however_many_are_looked_at_together(values: list[int], pass_rows: int) -> None:
    import numpy as np

    found = duplicates_in(np.array(values, dtype=np.uint64), pass_rows=pass_rows)
    repeated = [(row, values.index(value)) for row, value in enumerate(values) if value in values[:row]]
    assert found == (len(repeated), tuple(repeated[:3]))


# --- the scenario -------------------------------------------------------------------------------------------------

HEAD = "run: {name: x}\nmodel: {make: xs}\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{}", "data.path: there are no rows"),
        ("{path: 'lines:4', sources: [{path: 'lines:4'}]}", "named here and under data.sources"),
        ("{sources: [{path: 'lines:4', weight: 1}, {path: 'lines:5'}]}", r"sources\[1\].weight: other sources have"),
        ("{sources: [{path: 'lines:4'}, {path: 'lines:5'}]}", "two sources are called 'lines'"),
        ("{sources: [{path: 'lines:4', weight: 0}]}", "weight"),
        ("{sources: [{path: 'a.jsonl@[5:2]'}]}", r"data.sources\[0\].path: .*the slice \[5:2\] is empty"),
        ("{path: 'lines:4', system_prompt: hi}", "data.system_prompt: is for the chat template"),
        ("{path: 'lines:4', template_arguments: {a: 1}}", "data.template_arguments: is for the chat template"),
        ("{path: 'lines:4', stream: true}", "data.stream: lines:4 is made, not read"),
        ("{path: 'a.jsonl.gz', stream: true}", "data.stream: .*a.jsonl.gz is compressed"),
        ("{path: 'a.jsonl', multimodal_keys: {image: images}}", "data.multimodal_keys: where images"),
        (
            "{path: a.jsonl, chat_template: true, multimodal_keys: {image: x}}",
            "model.make: takes text only, and rows have images; set it to vlm_xs",
        ),
        ("{path: 'a.jsonl', multimodal_keys: {smell: x}}", "smell"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key(tmp_path: Path, data: str, message: str) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(f"{HEAD}data: {data}\n")
    with pytest.raises(UserFault, match=message):
        load_scenario(path)


def test_paths_of_sources_are_looked_for_beside_the_scenario(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(f"{HEAD}data: {{sources: [{{path: 'a.jsonl@[:5]'}}, {{path: 'lines:4'}}]}}\n")
    assert [source.path for source in load_scenario(path).data.sources] == [f"{tmp_path}/a.jsonl@[:5]", "lines:4"]
