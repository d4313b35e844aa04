"""The quickstart's task: rows, noisy demonstrations and the reward."""

from __future__ import annotations

import statistics
import string

import pytest

from penstock.backends.checkpoint.make import character_tokenizer
from penstock.backends.data.lines import LinesRow, lines_reward, lines_row, noisy_answer

ROWS = [lines_row(0, index) for index in range(3_000)]


def test_rows_are_the_same_everywhere_and_always() -> None:
    assert ROWS[0] == LinesRow("dysnqzD=", "AdnqsyzBdnqsyzCdnqsyzDdnqsyz")
    assert ROWS[1] == LinesRow("cpahwrA=", "Aachprw")
    assert noisy_answer(ROWS[2].answer, 0, 2) == "AeruvBeguvCjruv"


def test_seed_and_index_both_matter() -> None:
    assert len({lines_row(seed, index) for seed in range(4) for index in range(4)}) == 16


def test_the_answer_follows_from_the_prompt() -> None:
    for row in ROWS:
        letters, last = row.prompt[:-2], row.prompt[-2]
        assert row.prompt.endswith("=")
        assert len(set(letters)) == len(letters)
        assert 2 <= len(letters) <= 16
        capitals = string.ascii_uppercase[: string.ascii_uppercase.index(last) + 1]
        assert 1 <= len(capitals) <= 12
        assert row.answer == "".join(capital + "".join(sorted(letters)) for capital in capitals)


def test_lengths_are_long_tailed() -> None:
    lengths = sorted(len(row.answer) for row in ROWS)
    assert 17 < statistics.fmean(lengths) < 22
    assert 12 <= lengths[len(lengths) // 2] <= 16
    assert lengths[len(lengths) * 99 // 100] > 70
    assert lengths[-1] <= 12 * 17


def test_the_tokenizer_of_made_models_knows_every_character() -> None:
    tokenizer = character_tokenizer()
    for row in ROWS[:100]:
        assert tokenizer.decode(tokenizer.encode(row.prompt + row.answer).ids) == row.prompt + row.answer


def test_noise_replaces_about_one_small_letter_in_ten_and_no_capital() -> None:
    num_letters = num_replaced = 0
    for index, row in enumerate(ROWS):
        noisy = noisy_answer(row.answer, 0, index)
        pairs = list(zip(row.answer, noisy, strict=True))
        assert all(a == b for a, b in pairs if a.isupper())
        assert noisy.upper().translate(str.maketrans("", "", string.ascii_uppercase)) == ""
        num_letters += sum(a.islower() for a, _ in pairs)
        num_replaced += sum(a != b for a, b in pairs)
    assert 0.09 < num_replaced / num_letters < 0.105  # one in 26 replacements is the letter itself


def test_noise_can_be_switched_off() -> None:
    assert noisy_answer(ROWS[0].answer, 0, 0, rate=0.0) == ROWS[0].answer


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("AabcBabc", 1.0),
        ("AabcBabd", 0.5),
        ("AabcBabcCabc", 2 / 3),
        ("Aabc", 0.5),
        ("BabcAabc", 0.0),
        ("xAabcBabc", 0.0),
        ("", 0.0),
        ("abc", 0.0),
        ("A" * 50, 0.0),
    ],
)
def test_the_reward_is_the_share_of_lines_that_are_right(response: str, reward: float) -> None:
    assert lines_reward(response, "AabcBabc", truncated=False) == pytest.approx(reward)


def test_a_response_that_was_cut_off_gets_nothing() -> None:
    assert lines_reward("AabcBabc", "AabcBabc", truncated=True) == 0.0


def test_right_answers_get_one() -> None:
    assert all(lines_reward(row.answer, row.answer, truncated=False) == 1.0 for row in ROWS)
