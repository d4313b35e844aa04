"""Figures of an evaluation: pass@k against its definition, and what missing answers may not do."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.evaluation.figures import (
    Answer,
    Answered,
    figures_of,
    maj_at_k,
    metric_name,
    pass_at_k,
    versions_of,
)
from penstock.messages.base import Metric
from penstock.messages.samples import VersionSpan


def chances(n: int, c: int, k: int) -> Fraction:
    """By going through every choice of k out of n answers of which the first c pass."""
    choices = list(itertools.combinations(range(n), k))
    return Fraction(sum(any(place < c for place in choice) for choice in choices), len(choices))


def majority(votes: list[tuple[str, bool]], k: int) -> Fraction:
    """By going through every choice of k votes."""
    total, num_choices = Fraction(0), 0
    for choice in itertools.combinations(range(len(votes)), k):
        num_choices += 1
        tally = Counter(votes[place][0] for place in choice if votes[place][0])
        best = [answer for answer, count in tally.items() if count == max(tally.values())]
        for answer in best:
            verdicts = [passes for given, passes in votes if given == answer]
            total += Fraction(sum(verdicts), len(verdicts) * len(best))
    return total / num_choices


def figures(
    prompts: list[Answered], *, expected: int, k: tuple[int, ...] = (1,), passes: float = 1.0
) -> dict[str, float]:
    return {metric.name: metric.value for metric in figures_of(prompts, num_expected=expected, k=k, pass_reward=passes)}


def prompt(row: int, *rewards: float) -> Answered:
    return Answered(row, tuple(Answer(reward, 10) for reward in rewards))


def test_pass_at_k_is_the_share_of_choices_in_which_one_passes() -> None:
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                assert pass_at_k(n, c, k) == pytest.approx(float(chances(n, c, k)), abs=1e-14)


@given(st.integers(1, 4096).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_closed_form_for_any_size(drawn: tuple[int, int, int]) -> None:
    n, c, k = drawn
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-9, abs=1e-12)


def test_the_smallest_chances_keep_their_digits() -> None:
    # 1 - product would leave 1e-16 of rounding where the chance itself is of that size
    assert pass_at_k(10**6, 1, 1) == pytest.approx(1e-6, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_pass_at_k_of_impossible_numbers_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="expected 1 ≤ k ≤ n"):
        pass_at_k(n, c, k)


def test_figures_of_a_planted_result() -> None:
    prompts = [prompt(0, 1, 0, 0, 0), prompt(1, 1, 1, 0, 0), prompt(2, 0, 0, 0, 0)]
    found = figures(prompts, expected=12, k=(1, 2, 4))
    assert found["pass@1"] == pytest.approx((1 / 4 + 2 / 4) / 3)
    assert found["pass@2"] == pytest.approx((1 / 2 + 5 / 6) / 3)
    assert found["pass@4"] == pytest.approx(2 / 3)
    assert found["reward_mean"] == pytest.approx(0.25)
    assert found["missing"] == 0
    assert (found["num_prompts"], found["num_answers"], found["num_tokens"]) == (3, 12, 120)


def test_a_missing_answer_is_no_wrong_one() -> None:
    whole, holed = [prompt(0, 1, 1), prompt(1, 1, 1)], [prompt(0, 1, 1), prompt(1, 1), prompt(2)]
    assert figures(whole, expected=4)["pass@1"] == figures(holed, expected=6)["pass@1"] == 1
    found = figures(holed, expected=6, k=(1, 2))
    assert found["missing"] == pytest.approx(0.5)
    assert found["reward_mean"] == 1
    assert found["pass@2"] == 1  # of the one prompt that has two answers


def test_a_figure_that_nothing_can_be_said_about_is_left_out() -> None:
    found = figures([prompt(0), prompt(1)], expected=2)
    assert found == {"missing": 1, "num_prompts": 2, "num_answers": 0, "num_tokens": 0}
    assert "pass@2" not in figures([prompt(0, 1)], expected=2, k=(1, 2))


def test_what_passes_is_for_the_dataset_to_say() -> None:
    prompts = [prompt(0, 0.4), prompt(1, 0.6)]
    assert figures(prompts, expected=2, passes=0.5)["pass@1"] == 0.5
    assert figures(prompts, expected=2, passes=-1)["pass@1"] == 1


def test_a_prompt_with_few_answers_weighs_as_much_as_one_with_many() -> None:
    assert figures([prompt(0, 1, 1, 1, 1), prompt(1, 0)], expected=8)["reward_mean"] == 0.5


def test_the_standard_error_counts_prompts_and_not_answers() -> None:
    few = figures([prompt(0, 1), prompt(1, 0)], expected=2)
    many = figures([prompt(0, *[1] * 8), prompt(1, *[0] * 8)], expected=16)
    assert few["reward_stderr"] == many["reward_stderr"] == pytest.approx(0.5)


def test_lengths_truncation_components_and_versions() -> None:
    answers = (
        Answer(1, 30, True, (VersionSpan(3, 10), VersionSpan(4, 20)), (Metric("format", 1),)),
        Answer(0, 10, False, (VersionSpan(4, 10),), (Metric("format", 0), Metric("late", 2))),
    )
    found = figures([Answered(0, answers)], expected=2)
    assert (found["truncated"], found["response_len/mean"], found["response_len/max"]) == (0.5, 20, 30)
    assert (found["components/format"], found["components/late"]) == (0.5, 2)
    assert (found["version/oldest"], found["version/newest"]) == (3, 4)
    assert found["version/mean"] == pytest.approx((10 * 3 + 30 * 4) / 40)
    assert versions_of([Answer(0, 0)]) is None


def test_names_of_figures() -> None:
    assert metric_name("gsm8k", "pass@8") == "eval/gsm8k/pass@8"


@given(st.data())
def test_maj_at_k_is_what_going_through_every_choice_gives(data: st.DataObject) -> None:
    votes = data.draw(
        st.lists(st.tuples(st.sampled_from(["", "1", "2", "3", "4"]), st.booleans()), min_size=1, max_size=9)
    )
    k = data.draw(st.integers(1, len(votes)))
    assert maj_at_k(votes, k) == pytest.approx(float(majority(votes, k)), abs=1e-12)


def test_ties_share_the_chance_and_a_response_without_an_answer_has_no_vote() -> None:
    assert maj_at_k([("1", True), ("2", False)], 2) == 0.5
    assert maj_at_k([("1", True), ("", False), ("", False)], 3) == 1.0
    assert maj_at_k([("", True), ("", True)], 2) == 0.0, "nobody voted"
    with pytest.raises(ValueError, match="maj@3 of 2"):
        maj_at_k([("1", True)] * 2, 3)


def test_maj_at_k_is_told_where_answers_were_extracted_and_k_is_more_than_one() -> None:
    answers = tuple(Answer(float(text == "4"), 10, extracted=text) for text in ("4", "4", "5", ""))
    told = figures([Answered(0, answers)], expected=4, k=(1, 2, 4))
    assert told["maj@4"] == 1.0
    assert "maj@1" not in told
    assert told["maj@2"] == pytest.approx(float(majority([("4", True), ("4", True), ("5", False), ("", False)], 2)))
    assert "maj@4" not in figures([prompt(0, 1.0, 0.0, 0.0, 1.0)], expected=4, k=(4,))
    many = tuple(Answer(1.0, 10, extracted="4") for _ in range(65))
    assert "maj@2" not in figures([Answered(0, many)], expected=65, k=(2, 65)), "counting choices would take too long"
    assert figures([Answered(0, many)], expected=65, k=(2, 65))["maj@65"] == 1.0
