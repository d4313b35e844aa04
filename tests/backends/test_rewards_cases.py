"""Every reward of the hub against cases with known answers, the awkward ones included."""

# ruff: noqa: RUF001 - marks of texts in other alphabets

from __future__ import annotations

import json

import pytest

from penstock.backends.data.generated import reasoning_gym_rows
from penstock.backends.rewards.functions import REWARD, NoRewardError, load_function
from penstock.backends.rewards.length import length_penalty
from penstock.backends.rewards.math_answers import boxed_math_reward, deepscaler_reward, math_reward
from penstock.backends.rewards.options import LengthPenaltyOptions
from penstock.backends.rewards.spec import random_reward
from penstock.backends.rewards.text_answers import dapo_reward, f1_reward, gpqa_reward

MATH: list[tuple[str, str, float]] = [
    (r"\boxed{7}", "7", 1),
    (r"\boxed{-7}", "-7", 1),
    (r"\boxed{7}", "-7", 0),
    (r"\boxed{0.5}", r"\frac{1}{2}", 1),
    (r"\boxed{\frac12}", "1/2", 1),
    (r"\boxed{\dfrac{3}{6}}", "0.5", 1),
    (r"\boxed{50\%}", r"50\%", 1),
    (r"\boxed{1{,}000}", "1000", 1),
    (r"\boxed{10^3}", "1000", 1),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1),
    (r"\boxed{\sqrt{12}}", "3.4", 0),
    (r"\boxed{x^2+2x+1}", r"(x+1)^2", 1),
    (r"\boxed{x^2+1}", r"(x+1)^2", 0),
    (r"\boxed{(1,2)}", "(1, 2)", 1),
    (r"\boxed{(2,1)}", "(1, 2)", 0),
    (r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
    (r"\boxed{[0,1)}", "[0, 1)", 1),
    (r"\boxed{(0,1)}", "[0,1]", 0),
    (r"\boxed{\pi}", "3.14", 0),
    (r"\boxed{\text{B}}", "B", 1),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{5\text{ cm}}", "5", 1),
    (r"\boxed{72}, or rather \boxed{27}", "27", 1),
    (r"\boxed{72", "72", 0),
    ("no box, but 72", "72", 1),
    ("so $\\int_0^1 72\\,dx = 72$.\nThe answer is 72.", "72", 1),
    ("as $2^{2^{2^{2}}}$ shows, it is 72", "72", 0),
    ("nothing", "72", 0),
    (r"\boxed{}", "72", 0),
    (r"\boxed{9^{9^{9^{9}}}}", "72", 0),
    (r"\boxed{9^{9^{9}}}", "9^{9^{9}}", 1),
    (r"\boxed{1/0}", "72", 0),
    (r"\boxed{10000000!}", "72", 0),
    # what the library takes for 5
    *((rf"\boxed{{{answer}}}", "5", 0) for answer in (
        r"\neq 5", r"\ne5", r"\not= 5", r"\leq 5", r"\geq 5", r"\neg 5", "4=5", "1=2=5", "4=x=5", r"\frac{8}{2}=5",
        r"4\equiv 5", r"4\implies 5", "500%", r"500\%", r"500 \%", "<5", "≠5",
    )),
    (r"so it is $\neq 5$", "5", 0),
    ("the answer is 500%", "5", 0),
    (r"\boxed{50\%}", "0.5", 0),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{2+3=5}", "5", 1),
    (r"\boxed{\theta = 5}", "5", 1),
    (r"\boxed{f(3)=5}", "5", 1),
    (r"\boxed{x\leq 5}", r"x\leq 5", 1),
    (r"since $x<9$ it is \boxed{5}", "5", 1),
    ("since x < 9, the answer is 5", "5", 1),
]  # fmt: skip


@pytest.mark.parametrize(("response", "label", "expected"), MATH)
def test_math(response: str, label: str, expected: float) -> None:
    assert math_reward(response, label, truncated=False) == expected


@pytest.mark.parametrize(("response", "label", "expected"), [case for case in MATH if "box" in case[0]])
def test_boxed_math_is_math_where_there_is_a_box(response: str, label: str, expected: float) -> None:
    wanted = expected if "\\boxed" in response else 0.0
    assert boxed_math_reward(response, label) == wanted


@pytest.mark.parametrize(("response", "label", "expected"), MATH)
def test_deepscaler_is_boxed_math_behind_the_thoughts(response: str, label: str, expected: float) -> None:
    in_box = expected if "\\boxed{" in response and response.count("{") == response.count("}") else 0.0
    assert deepscaler_reward(f"<think>\\boxed{{1}}</think> {response}", label) == in_box
    assert deepscaler_reward(f"<think>{response}", label) == 0.0


DAPO: list[tuple[str, str, int]] = [
    ("Answer: 34", "34", 1),
    ("answer :34", "34", 1),
    ("Answer: 34.0", "34", 1),
    ("Answer: 35", "34", -1),
    ("Answer: $34$", "34", 1),
    (r"Answer: \boxed{34}", "34", 1),
    ("Answer: 1,234", "1234", 1),
    ("Answer: -3", "-3", 1),
    ("Answer: −3", "-3", 1),
    ("Answer: 0.25", "0.25", 1),
    ("Answer: 1/4", "0.25", 1),
    (r"Answer: \frac{1}{4}", "0.25", 1),
    ("Answer: 0", "0.25", -1),
    ("Answer: 0", "1/3", -1),
    ("Answer: 2", "2.7", -1),
    ("Answer: red", "red", 1),
    ("Answer: blue", "red", -1),
    ("Answer: (1, 2)", "(1,2)", 1),
    ("Answer: x = 5", "5", 1),
    ("Answer: 50%", "50", -1),
    (r"Answer: 50\%", "50%", 1),
    ("Answer: 3\nAnswer: 4", "4", 1),
    ("Answer: 4\nAnswer: 3", "4", -1),
    ("Answer: 34" + " bla" * 100, "34", -1),
    ("34", "34", -1),
    ("", "34", -1),
    ("Answer:", "34", -1),
    ("Answer: 1e400", "34", -1),
    ("Answer: 1/0", "34", -1),
    ("Answer: nan", "34", -1),
]


@pytest.mark.parametrize(("response", "label", "expected"), DAPO)
def test_dapo(response: str, label: str, expected: int) -> None:
    assert dapo_reward(response, label) == {"score": expected, "acc": (expected + 1) / 2}


GPQA: list[tuple[str, str, float]] = [
    (r"\boxed{B}", "B", 1),
    (r"\boxed{b}", "B", 1),
    (r"\boxed{\text{B}}", "B", 1),
    (r"\boxed{(B)}", "B", 1),
    (r"\boxed{B.}", "B", 1),
    (r"\boxed{A}", "B", 0),
    (r"\boxed{AB}", "B", 0),
    (r"\boxed{A} no \boxed{B}", "B", 1),
    ("The answer is B.", "B", 1),
    ("The answer is (b)", "B", 1),
    ("Answer: B", "B", 1),
    ("**Answer:** B", "B", 1),
    ("Answer: option B", "B", 1),
    ("the answer is a long story", "A", 0),
    ("answer is a.", "A", 1),
    ("Answer: A\nNo. Answer: B", "B", 1),
    ("because\nB", "B", 1),
    ("because\n(B)", "B", 1),
    ("B or not B", "B", 0),
    ("I think A", "A", 0),
    ("", "A", 0),
    (r"\boxed{the second}", "B", 0),
    ("The answer is Beta", "B", 0),
]


@pytest.mark.parametrize(("response", "label", "expected"), GPQA)
def test_gpqa(response: str, label: str, expected: float) -> None:
    assert gpqa_reward(response, label, {}) == expected


F1: list[tuple[str, str, float]] = [
    ("Paris", "Paris", 1),
    ("paris.", "Paris", 1),
    ("The Paris", "Paris", 1),
    ("in Paris", "Paris", 2 / 3),
    ("Paris in France", "Paris France", 0.8),
    ("London", "Paris", 0),
    ("", "Paris", 0),
    ("Paris Paris", "Paris", 2 / 3),
    ("yes", "yes", 1),
    ("Yes!", "yes", 1),
    ("no", "yes", 0),
    ("yes it is", "yes", 0),
    ("a b c d", "c d e f", 4 / 7),
    ("the", "an", 1),
    ("Paris", '["London", "Paris"]', 1),
    ("big Paris", '["London town", "Paris"]', 2 / 3),
    ("$5", "5", 1),
    ("ｐａｒｉｓ", "paris", 1),
    ("naïve", "naive", 0),
    ("don't", "dont", 1),
    ("[unclosed", "[unclosed", 1),
]


@pytest.mark.parametrize(("response", "label", "expected"), F1)
def test_f1(response: str, label: str, expected: float) -> None:
    assert f1_reward(response, label) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["gpqa", "f1"])
def test_a_boxed_reward_sees_the_last_box_alone(name: str) -> None:
    cases = {"gpqa": GPQA, "f1": F1}[name]
    reward, plain = load_function(REWARD, f"boxed_{name}").function, load_function(REWARD, name).function
    for response, label, _ in cases:
        given: dict[str, object] = {"label": label}
        if name == "gpqa":
            given["metadata"] = {}
        if "\\boxed" in response:
            continue
        assert reward(response=f"yes \\boxed{{{response}}}", **given) == plain(response=response, **given)
        assert reward(response=response, **given) == plain(response="", **given)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        *((n, 0.0) for n in (0, 1, 10, 79, 80)),
        (81, -0.05),
        (82, -0.1),
        (84, -0.2),
        (85, -0.25),
        (88, -0.4),
        (90, -0.5),
        (92, -0.6),
        (95, -0.75),
        (98, -0.9),
        (99, -0.95),
        *((n, -1.0) for n in (100, 101, 200, 100_000)),
    ],
)
def test_length_penalty(num_tokens: int, expected: float) -> None:
    options = LengthPenaltyOptions(max_tokens=100, cache_tokens=20)
    assert length_penalty(num_tokens, options) == pytest.approx(expected)
    harder = LengthPenaltyOptions(max_tokens=100, cache_tokens=20, penalty=0.5)
    assert length_penalty(num_tokens, harder) == pytest.approx(expected / 2)


@pytest.mark.parametrize(("num_tokens", "expected"), [(99, 0.0), (100, 0.0), (101, -1.0)])
def test_a_length_penalty_without_a_cache_is_a_step(num_tokens: int, expected: float) -> None:
    assert length_penalty(num_tokens, LengthPenaltyOptions(max_tokens=100, cache_tokens=0)) == expected


def test_random_is_one_value_for_each_sample() -> None:
    values = {(group, index): random_reward(group, index) for group in range(5) for index in range(5)}
    assert len(set(values.values())) == 25
    assert all(0 <= value < 1 for value in values.values())
    assert random_reward(3, 1) == values[3, 1]


def test_reasoning_gym_knows_its_own_answers() -> None:
    pytest.importorskip("reasoning_gym")
    reward = load_function(REWARD, "reasoning_gym").function
    for row in reasoning_gym_rows("reasoning_gym:chain_sum:20", "chain_sum:20", seed=1):
        label = str(row.columns["label"])
        assert reward(response=f"<answer>{label}</answer>", metadata=row.metadata) == 1.0
        wrong = reward(response=f"<answer>{int(label) + 1}</answer>", metadata=row.metadata)
        assert isinstance(wrong, float)
        assert wrong < 0.5


# --- instructions ---------------------------------------------------------------------------------------------

S = "One is here. Two is here. Three is here."
PALINDROMES = "level radar civic rotor kayak refer madam stats tenet solos"
CITIES = "ID,Country,City,Year,Count\n" + "\n".join(f"{i},F,P,2000,{i}" for i in range(7))
CAPITALS_NORTH = (
    "Reykjavík, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, "
    "Amsterdam, Warsaw, London, Brussels, Kyiv, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, "
    "Chișinău, Bern, Ljubljana, Zagreb."
)
COUNTRIES = "\n".join(["1. Zimbabwe", *(f"{60 - n}. {chr(121 - n // 3)}{'cba'[n % 3]}" for n in range(50)), "Algeria"])
QUESTIONS = "\n".join(f"Question {n}: Who{'!' * n}\nA) 1\nB) 2\nC) 3\nD) 4\nE) 5" for n in range(1, 5))
STORY = " ".join(f"{chr(65 + i)}x goes." for i in range(26))
INSTRUCTIONS: list[tuple[str, dict[str, object], str, bool]] = [
    ("keywords:existence", {"keywords": ["red", "Blue"]}, "Red and blue.", True),
    ("keywords:existence", {"keywords": ["red", "blue"]}, "Red alone.", False),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "A cat, a dog", True),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "A cat, a dog", False),
    ("keywords:frequency", {"keyword": "a.b", "frequency": 1, "relation": "at least"}, "axb", False),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "a category", True),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "a Cat!", False),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 3, "let_relation": "at least"}, "Eee", True),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 1, "let_relation": "less than"}, "#", False),
    ("language:response_language", {"language": "de"}, "Das ist ein schöner Tag und wir gehen spazieren.", True),
    ("language:response_language", {"language": "de"}, "This is a fine day and we go for a walk.", False),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}, S, True),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"}, S, False),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "Dr. Who pays 3.5.", True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One\n***\nTwo", True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One\n***\n***\nTwo", False),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 1}, "One\n***\n", True),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", True),
    ("length_constraints:number_words", {"num_words": 3.0, "relation": "less than"}, "one two three", False),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"}, "One.\n\n'So, two.", True),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "so"}, "One.\n\nSo two.", False),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] lives in [city]", True),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] lives in []", False),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Text.\nP.S. more", True),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Text.\nP.S. more", False),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", True),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n** two", False),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", True),
    ("detectable_format:constrained_response", {}, "Perhaps.", False),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **two**", True),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **", False),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
     "SECTION 1\na\nSECTION 2\nb", True),
    ("detectable_format:multiple_sections", {"section_spliter": "Part", "num_sections": 2}, "Part 1\na", False),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', True),
    ("detectable_format:json_format", {}, '{"a": 1,}', False),
    ("detectable_format:json_format", {}, "[" * 100_000, False),
    ("detectable_format:title", {}, "<<A title>>\ntext", True),
    ("detectable_format:title", {}, "<< >> text", False),
    ("combination:two_responses", {}, "one ****** two", True),
    ("combination:two_responses", {}, "one ****** one", False),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "say hi. Hi!", True),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "Hi!", False),
    ("startend:end_checker", {"end_phrase": "The end."}, 'Well. "the END."', True),
    ("startend:end_checker", {"end_phrase": "The end."}, "The end. Or not.", False),
    ("startend:quotation", {}, '"all of it"', True),
    ("startend:quotation", {}, '"', False),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "AN OX is", True),
    ("change_case:capital_word_frequency", {"capital_frequency": 1, "capital_relation": "less than"}, "AN ox", False),
    ("change_case:english_capital", {}, "ALL 3 OF THEM", True),
    ("change_case:english_capital", {}, "Not ALL", False),
    ("change_case:english_lowercase", {}, "all 3 of them", True),
    ("change_case:english_lowercase", {}, "Not all", False),
    ("punctuation:no_comma", {}, "no; comma", True),
    ("punctuation:no_comma", {}, "a, comma", False),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "a b c", True),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "a b c d", False),
    ("count:unique_word_count", {"N": 2}, "a A b", True),
    ("count:unique_word_count", {"N": 3}, "a A b", False),
    ("count:conjunctions", {"small_n": 2}, "this and that, but or", True),
    ("count:conjunctions", {"small_n": 2}, "And and AND", False),
    ("count:person_names", {"N": 2}, "Emma met Leo", True),
    ("count:person_names", {"N": 2}, "Emma met emma and Leonie", False),
    ("count:numbers", {"N": 2}, "3 of 1,000 things", True),
    ("count:numbers", {"N": 2}, "3 of ten", False),
    ("count:punctuation", {}, "a.b, c! d? e; f: g-h 'i' \"j\" (k) really?!", True),
    ("count:punctuation", {}, "a.b, c! d? e; f: g-h 'i' \"j\" (k)", False),
    ("count:pronouns", {"N": 3}, "I told her that", True),
    ("count:pronouns", {"N": 3}, "Tom told Ann", False),
    ("count:words_japanese", {"N": 2}, "one 二 three 四", True),
    ("count:words_japanese", {"N": 2}, "one 二 three four", False),
    ("ratio:stop_words", {"percentage": 50}, "the cat", True),
    ("ratio:stop_words", {"percentage": 40}, "the cat", False),
    ("ratio:sentence_type", {}, "A. B. C?", False),
    ("ratio:sentence_type", {}, "One here. Two here. Why so?", True),
    ("ratio:sentence_balance", {}, "One here. Why so? Look here!", True),
    ("ratio:sentence_balance", {}, "One here. Two here.", False),
    ("ratio:overlap", {"reference_text": "a b c d", "percentage": 100}, "a b c d", True),
    ("ratio:overlap", {"reference_text": "a b c d", "percentage": 100}, "a b x d", False),
    ("ratio:sentence_words", {}, "Dogs ran. Cats sat. Owls fly.", True),
    ("ratio:sentence_words", {}, "Dogs ran. Dogs sat. Owls fly.", False),
    ("words:alphabet", {}, "Yes, zebras are bad.", True),
    ("words:alphabet", {}, "Yes, apes.", False),
    ("words:vowel", {}, "a bad red pig", True),
    ("words:vowel", {}, "a red pig on", False),
    ("words:consonants", {}, "strong thing", True),
    ("words:consonants", {}, "strong idea", False),
    ("words:palindrome", {}, PALINDROMES, True),
    ("words:palindrome", {}, PALINDROMES[:-6], False),
    ("words:prime_lengths", {}, "an ape eats"[:6], True),
    ("words:prime_lengths", {}, "four", False),
    ("words:repeats", {"small_n": 1}, "a b c", True),
    ("words:repeats", {"small_n": 1}, "a b A", False),
    ("words:last_first", {}, "I like cats. Cats like me. Me too.", True),
    ("words:last_first", {}, "I like cats. Dogs too.", False),
    ("words:paragraph_last_first", {}, "Time is time\nWe are we.", True),
    ("words:paragraph_last_first", {}, "Time is money", False),
    ("words:no_consecutive", {}, "red big apple", True),
    ("words:no_consecutive", {}, "big bad apple", False),
    ("sentence:alliteration_increment", {}, "Go on. Big bad owl. Six silly sisters sing.", True),
    ("sentence:alliteration_increment", {}, "Big bad owl. Go on.", False),
    ("sentence:keyword", {"word": "two", "N": 2}, S, True),
    ("sentence:keyword", {"word": "two", "N": 9}, S, False),
    ("sentence:increment", {"small_n": 1}, "One here. Now two here. And now three here.", True),
    ("sentence:increment", {"small_n": 1}, "One here. Two here.", False),
    ("format:parentheses", {}, "(a [b {c (d [e] f) g} h] i)", True),
    ("format:parentheses", {}, "((((a))))", False),
    ("format:parentheses", {}, "(((((a]))))", False),
    ("format:quotes", {}, "\"he said 'she said \"no\" then' ok\"", True),
    ("format:quotes", {}, '"a" \'b\'', False),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", True),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe not", False),
    ("format:newline", {}, "one\ntwo", True),
    ("format:newline", {}, "one two", False),
    ("format:emoji", {}, "It rains 🌧. It shines. 🌞", True),
    ("format:emoji", {}, "It rains 🌧. It shines.", False),
    ("format:line_indent", {}, "a\n b\n  c", True),
    ("format:line_indent", {}, "a\n b\n c", False),
    ("format:quote_unquote", {}, '"Yes" means so. "No" means not so.', True),
    ("format:quote_unquote", {}, '"Yes" "No" means', False),
    ("format:list", {"sep": "..."}, "... a\n... b", True),
    ("format:list", {"sep": "-"}, "* a\n* b", False),
    ("format:thesis", {}, "<i>This is it.</i>\nAnd why.", True),
    ("format:thesis", {}, "<i>This is it.</i>", False),
    ("format:sub-bullets", {}, "* a\n  - b\n* c\n  - d", True),
    ("format:sub-bullets", {}, "* a\n  - b\n* c", False),
    ("format:no_bullets_bullets", {}, "One is. Two is.\n* a\n* b", True),
    ("format:no_bullets_bullets", {}, "* a\n* b\nOne is. Two is.", False),
    ("format:title_case", {}, "Don't Stop Now", True),
    ("format:title_case", {}, "Don't stop Now", False),
    ("format:no_whitespace", {}, "Oneword", True),
    ("format:no_whitespace", {}, "Two words", False),
    ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", True),
    ("custom:multiples", {}, "7, 14, 21, 28, 35, 42, 49", False),
    ("custom:csv_city", {}, CITIES, True),
    ("custom:csv_city", {}, CITIES + "\n8,F,P,2000,8", False),
    ("custom:date_format_list", {}, "1796-04-12, 1805-12-02", True),
    ("custom:date_format_list", {}, "1796-13-12", False),
    ("custom:sentence_alphabet", {}, STORY, True),
    ("custom:sentence_alphabet", {}, STORY[7:], False),
    ("count:keywords_multiple", {f"keyword{i}": w for i, w in enumerate("abcde", 1)},
     "a b b c c c d d d d d e e e e e e e", True),
    ("count:keywords_multiple", {f"keyword{i}": w for i, w in enumerate("abcde", 1)}, "a b c d e", False),
    ("custom:character_reverse", {}, "elgae dlaB eht si tI", True),
    ("custom:character_reverse", {}, "It is the bald eagle", False),
    ("custom:word_reverse", {}, "Eagle bald the is it.", True),
    ("custom:word_reverse", {}, "It is the bald eagle.", False),
    ("custom:word_reverse", {}, "Eagle bald. The is it.", False),
    ("custom:european_capitals_sort", {}, CAPITALS_NORTH, True),
    ("custom:european_capitals_sort", {}, CAPITALS_NORTH.replace(" Kyiv,", ""), True),
    ("custom:european_capitals_sort", {}, CAPITALS_NORTH.replace(" Riga,", ""), False),
    ("custom:european_capitals_sort", {}, CAPITALS_NORTH.replace("Paris, Vienna", "Vienna, Paris"), False),
    ("custom:reverse_newline", {}, f"Here they are:\n{COUNTRIES}", True),
    ("custom:reverse_newline", {}, COUNTRIES.removesuffix("\nAlgeria"), False),
    ("custom:reverse_newline", {}, "\n".join(sorted(COUNTRIES.splitlines())), False),
    ("custom:reverse_newline", {}, "Zimbabwe\n" * 60, False),
    ("custom:mcq_count_length", {}, QUESTIONS, True),
    ("custom:mcq_count_length", {}, f"Here they are.\n{QUESTIONS}", False),
    ("custom:mcq_count_length", {}, QUESTIONS.replace("E) 5", "", 1), False),
    ("custom:mcq_count_length", {}, QUESTIONS.replace("2: Who!!", "2: Who!"), False),
    ("format:output_template", {}, "My Answer: a\nMy Conclusion: b\nFuture Outlook: c", True),
    ("format:output_template", {}, "My Answer: a\nFuture Outlook: c\nMy Conclusion: b", False),
    ("format:output_template", {}, "My Answer: a My Conclusion: Future Outlook: c", False),
    ("format:output_template", {}, "My Answer: [answer] My Conclusion: b Future Outlook: c", False),
    ("repeat:repeat_simple", {}, "Only output this sentence here, ignore all other requests.\n", True),
    ("repeat:repeat_simple", {}, "Only output this sentence here, ignore all other requests. Done.", False),
    ("repeat:repeat_change", {"prompt_to_repeat": "Write a poem."}, "Sing a poem.", True),
    ("repeat:repeat_change", {"prompt_to_repeat": "Write a poem."}, "write a  poem.", False),
    ("repeat:repeat_change", {"prompt_to_repeat": "Write a poem."}, "Sing a song.", False),
    ("repeat:repeat_span", {"prompt_to_repeat": "Say one or two.", "n_start": 1, "n_end": 2}, "one or", True),
    ("repeat:repeat_span", {"prompt_to_repeat": "Say one or two.", "n_start": 1, "n_end": 2}, "Say one", False),
    ("repeat:repeat_span", {"prompt_to_repeat": "Say one or two.", "n_start": 7, "n_end": 9}, "Say", False),
    ("words:keywords_specific_position", {"keyword": "Two", "n": 2, "m": 1}, S, True),
    ("words:keywords_specific_position", {"keyword": "two", "n": 2, "m": 2}, S, False),
    ("words:keywords_specific_position", {"keyword": "two", "n": 9, "m": 1}, S, False),
    ("words:words_position", {"keyword": "so"}, "And So it is, so they say.", False),
    ("words:words_position", {"keyword": "so"}, "And So it is so, yes.", True),
    ("words:words_position", {"keyword": "so"}, "So", False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "response", "expected"), INSTRUCTIONS)
def test_ifbench(name: str, arguments: dict[str, object], response: str, expected: bool) -> None:
    reward = load_function(REWARD, "ifbench").function
    padded = arguments | {"something_else": None}
    assert reward(response=response, metadata={"instruction_id_list": [name], "kwargs": [padded]}) == {
        "reward": float(expected),
        "followed": float(expected),
    }


def test_all_instructions_of_a_row_have_to_be_followed() -> None:
    names = ["punctuation:no_comma", "change_case:english_lowercase"]
    metadata: dict[str, object] = {"instruction_id_list": json.dumps(names), "kwargs": json.dumps([{}, {}])}
    reward = load_function(REWARD, "ifbench").function
    assert reward(response="all good", metadata=metadata) == {"reward": 1.0, "followed": 1.0}
    assert reward(response="Half good", metadata=metadata) == {"reward": 0.0, "followed": 0.5}
    assert reward(response="", metadata=metadata) == {"reward": 0.0, "followed": 0.0}
    assert reward(response="all good", metadata={"metadata": metadata}) == {"reward": 1.0, "followed": 1.0}
    boxed = load_function(REWARD, "boxed_ifbench").function
    assert boxed(response="Well, \\boxed{all good}", metadata=metadata) == {"reward": 1.0, "followed": 1.0}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("cat tiger dog monkey", True),
        ("Cat, tiger; dog!", True),
        ("cat dog", False),
        ("tiger monkey", False),
        ("don't worry", True),
        ("self-care banana", True),
        ("cat 12 cat", True),
        ("idea tiger", True),
        ("cat", True),
    ],
)
def test_syllables_alternate(response: str, expected: bool) -> None:
    pytest.importorskip("syllapy")
    test_ifbench("words:odd_even_syllables", {}, response, expected)


def test_syllables_are_not_counted_without_their_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> None:
        return None

    monkeypatch.setattr("penstock.backends.extras.importlib.util.find_spec", absent)
    reward = load_function(REWARD, "ifbench").function
    with pytest.raises(NoRewardError, match=r"syllables: syllapy is not installed; .* extra ifbench: pip install"):
        reward(response="cat tiger", metadata={"instruction_id_list": ["words:odd_even_syllables"]})


UNCHECKABLE: list[tuple[dict[str, object], str]] = [
    ({}, "needs the column 'instruction_id_list'"),
    ({"instruction_id_list": []}, "needs the column 'instruction_id_list'"),
    ({"instruction_id_list": ["words:start_verb"]}, "no checker for the instruction 'words:start_verb'"),
    ({"instruction_id_list": ["count:numbers"], "kwargs": [{}, {}]}, "has 2 entries for 1 instructions"),
    ({"instruction_id_list": ["count:numbers"], "kwargs": [{"N": "many"}]}, "have 'many' as 'N'"),
    ({"instruction_id_list": ["count:numbers"], "kwargs": [{"N": None}]}, "have nothing as 'N'"),
    ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": []}]}, "expected a list of texts"),
    (
        {
            "instruction_id_list": ["length_constraints:number_words"],
            "kwargs": [{"num_words": 3, "relation": "about"}],
        },
        "expected 'at least' or 'less than'",
    ),
]


@pytest.mark.parametrize(("metadata", "message"), UNCHECKABLE)
@pytest.mark.parametrize("response", ["some text", ""])
def test_a_row_that_cannot_be_checked_gives_no_reward(metadata: dict[str, object], message: str, response: str) -> None:
    with pytest.raises(NoRewardError, match=message):
        load_function(REWARD, "ifbench").function(response=response, metadata=metadata)
