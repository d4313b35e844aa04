"""Instructions of IFBench (Pyatkin et al., arXiv 2507.02833) about how a response is written, strictly. Those that fix
what it says are in :mod:`.ifbench_answers`.
"""

# ruff: noqa: RUF001, SIM905 - quotation marks of texts; tables of words

from __future__ import annotations

import csv
import io
import re
import string
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from penstock.backends.rewards.instruction_text import Given, lines, paragraphs, sentences, spoken_words, words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Check = Callable[[str, Given], bool]

CONJUNCTIONS: Final = frozenset("for and nor but or yet so".split())
PERSON_NAMES: Final = tuple(
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia "
    "Benjamin Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob "
    "Scarlett Nathan Victoria Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora "
    "Andrew Aria Joseph Claire Ryan Stella Jonathan".split()
)
"""Names of persons, as the instruction itself lists them."""
PRONOUNS: Final = frozenset(
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself "
    "she her hers herself it its itself they them their theirs themselves this that these those who whom "
    "whose which what someone somebody something anyone anybody anything everyone everybody everything "
    "nobody nothing none each other another one oneself".split()
)
STOP_WORDS: Final = frozenset(
    "a an the and or but if while of at by for with about against between into through during before "
    "after above below to from up down in out on off over under again further then once here there when "
    "where why how all any both each few more most other some such no nor not only own same so than too "
    "very can will just should now i me my myself we our ours ourselves you your yours yourself "
    "yourselves he him his himself she her hers herself it its itself they them their theirs themselves "
    "what which who whom this that these those am is are was were be been being have has had having do "
    "does did doing as until because don t s".split()
)
PRIMES: Final = frozenset(n for n in range(2, 200) if all(n % d for d in range(2, int(n**0.5) + 1)))
PUNCTUATION: Final = (".", ",", "!", "?", ";", ":", "-", "'", '"', "(", ")")
VOWELS: Final = frozenset("aeiou")
MAX_OPTIONS: Final = 100
_NUMBER: Final = re.compile(r"(?<![\w.])[-+]?\d++(?:,\d{3}(?!\w))*+(?:\.\d++(?!\w))?+(?!\w)")
_THESIS: Final = re.compile(
    r"^[^\S\n]*+<(i|em)>(?=[^\S\n]*+[^<\s])[^<\n]*+</\1>(.*)", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
_JAPANESE: Final = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uff66-\uff9f]")
_EMOJI_END: Final = re.compile(
    "[\u2190-\u21ff\u2300-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff][\ufe0f\u200d\U0001f3fb-\U0001f3ff]{0,3}$"
)
_END_BEFORE_EMOJI: Final = re.compile(
    r"(?<![.!?])[.!?]++\s*+(?=[\u2190-\u21ff\u2300-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff])"
)
_DATE: Final = re.compile(r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])")
_PAIRS: Final = {")": "(", "]": "[", "}": "{"}


def _bare(word: str) -> str:
    return word.strip(string.punctuation + "“”‘’…—").casefold()


def _first_letters(text: str) -> list[str]:
    return [bare[0] for word in text.split() if (bare := _bare(word))]


def _types(response: str) -> Counter[str]:
    return Counter(sentence.rstrip("\"'”’)]*_ ")[-1:] for sentence in sentences(response))


def _stop_words(response: str, given: Given) -> bool:
    found = words(response)
    share = sum(1 for word in found if word.casefold() in STOP_WORDS)
    return bool(found) and 100 * share <= given.number("percentage") * len(found)


def _balance(response: str, given: Given) -> bool:
    types = _types(response)
    return types["."] == types["?"] == types["!"] > 0


def _two_to_one(response: str, given: Given) -> bool:
    types = _types(response)
    return types["?"] > 0 and types["."] == 2 * types["?"]


def _overlap(response: str, given: Given) -> bool:
    def trigrams(text: str) -> set[tuple[str, ...]]:
        tokens = re.findall(r"\w+|[^\w\s]", text)
        return set(zip(tokens, tokens[1:], tokens[2:], strict=False))

    own, reference = trigrams(response), trigrams(given.text("reference_text"))
    share = 100 * len(own & reference) / len(own) if own else 0.0
    return bool(own) and abs(share - given.number("percentage")) <= 2


def _is_alphabet(letters: Sequence[str]) -> bool:
    if not letters or not all(letter in string.ascii_lowercase for letter in letters):
        return False
    return all((ord(after) - ord(before)) % 26 == 1 for before, after in pairwise(letters))


def _clusters(response: str, given: Given) -> bool:
    found = [_bare(word) for word in response.split() if _bare(word)]
    return bool(found) and all(re.search(r"[b-df-hj-np-tv-z]{2}", word) for word in found)


def _rising_alliteration(response: str, given: Given) -> bool:
    def longest(sentence: str) -> int:
        best = run = 0
        before = ""
        for letter in _first_letters(sentence):
            run = run + 1 if letter == before else 1
            best, before = max(best, run), letter
        return best

    runs = [longest(sentence) for sentence in sentences(response)]
    return bool(runs) and all(after > before for before, after in pairwise(runs))


def _palindromes(response: str, given: Given) -> bool:
    found = [word for word in map(str.casefold, words(response)) if len(word) >= 5 and word == word[::-1]]
    return len(found) >= 10


def _punctuation(response: str, given: Given) -> bool:
    interrobang = any(mark in response for mark in ("?!", "!?", "‽"))
    without = response.replace("?!", "").replace("!?", "").replace("‽", "")
    return interrobang and all(mark in without for mark in PUNCTUATION)


def _nested(response: str, given: Given) -> bool:
    """Five levels that are closed, one in the other, in the right order."""
    open_ones: list[str] = []
    peak = 0
    for character in response:
        if character in "([{":
            open_ones.append(character)
            peak = max(peak, len(open_ones))
        elif character in _PAIRS:
            if not open_ones or open_ones.pop() != _PAIRS[character]:
                open_ones, peak = [], 0
            elif peak >= 5 and len(open_ones) == 0:
                return True
    return False


def _nested_quotes(response: str, given: Given) -> bool:
    marks = [m[0] for m in re.finditer(r'"|(?<!\w)\'|\'(?!\w)', response.translate(str.maketrans("“”‘’", "\"\"''")))]
    open_ones: list[str] = []
    peak = 0
    for mark in marks:
        if open_ones and open_ones[-1] == mark:
            open_ones.pop()
            if peak >= 3 and not open_ones:
                return True
        else:
            open_ones.append(mark)
            peak = max(peak, len(open_ones))
    return False


def _options(response: str, given: Given) -> bool:
    listed = [part.strip() for part in re.split(r"/|,|\bor\b", given.text("options"))][:MAX_OPTIONS]
    wanted = {_bare(option) for option in listed if _bare(option)}
    return _bare(response.strip()) in wanted


def _emoji_ends(response: str, given: Given) -> bool:
    """An emoji may stand behind the mark that ends its sentence."""
    text = _END_BEFORE_EMOJI.sub("", response)
    pieces = [piece.strip() for line in lines(text) for piece in sentences(_with_ends(line)) if piece.strip()]
    return bool(pieces) and all(_EMOJI_END.search(piece.rstrip(".!? \"'”")) for piece in pieces)


def _with_ends(line: str) -> str:
    """A sentence begins behind an emoji that a capital letter follows."""
    return re.sub(r"([\U0001f000-\U0001faff\u2600-\u27bf][\ufe0f\u200d]{0,2})\s++(?=[A-Z\"“])", r"\1. ", line)


def _three_sentences(response: str, given: Given) -> bool:
    found = sentences(response)
    if len(found) != 3 or len({len(sentence) for sentence in found}) != 1:
        return False
    all_words = [word.casefold() for sentence in found for word in spoken_words(sentence)]
    return len(all_words) == len(set(all_words))


def _japanese(response: str, given: Given) -> bool:
    found, n = response.split(), given.number("N")
    places = found[n - 1 :: n] if n > 0 else []
    return bool(places) and all(_JAPANESE.search(word) for word in places)


def _repeats(response: str, given: Given) -> bool:
    counts = Counter(word.casefold() for word in words(response))
    return max(counts.values(), default=0) <= given.number("small_n")


def _keyword_in_sentence(response: str, given: Given) -> bool:
    found, n = sentences(response), given.number("N")
    return 1 <= n <= len(found) and given.text("word").strip().casefold() in found[n - 1].casefold()


def _last_first(response: str, given: Given) -> bool:
    found = [s for sentence in sentences(response) if (s := [w.casefold() for w in spoken_words(sentence)])]
    return bool(found) and all(before[-1] == after[0] for before, after in pairwise(found))


def _paragraph_last_first(response: str, given: Given) -> bool:
    found = [[w.casefold() for w in spoken_words(line)] for line in lines(response)]
    return bool(found) and all(part and part[0] == part[-1] for part in found)


def _rising_words(response: str, given: Given) -> bool:
    counts = [len(spoken_words(sentence)) for sentence in sentences(response)]
    step = given.number("small_n")
    return bool(counts) and all(after - before == step for before, after in pairwise(counts))


def _no_consecutive(response: str, given: Given) -> bool:
    letters = _first_letters(response)
    return bool(letters) and all(before != after for before, after in pairwise(letters))


def _stairs(response: str, given: Given) -> bool:
    indents = [len(line) - len(line.lstrip()) for line in lines(response)]
    return len(indents) > 1 and all(after > before for before, after in pairwise(indents))


def _quotes_explained(response: str, given: Given) -> bool:
    text = response.translate(str.maketrans("“”", '""')).strip()
    if text.count('"') < 2 or text.count('"') % 2 or text.rstrip(" .,!?;:").endswith('"'):
        return False
    between = text.split('"')[2::2]
    return all(any(character.isalnum() for character in part) for part in between)


def _list(response: str, given: Given) -> bool:
    mark = given.text("sep").strip()
    return sum(1 for line in lines(response) if line.lstrip().startswith(mark)) >= 2


def _thesis(response: str, given: Given) -> bool:
    found = _THESIS.search(response)
    return found is not None and bool(re.sub(r"<(i|em)>[^<]*</\1>", "", found[2]).strip())


def _sub_bullets(response: str, given: Given) -> bool:
    bullets: list[int] = []
    for line in lines(response):
        text = line.lstrip()
        if text.startswith("*") and not text.startswith("**"):
            bullets.append(0)
        elif text.startswith("-") and bullets:
            bullets[-1] += 1
    return bool(bullets) and all(bullets)


def _some_bullets(response: str, given: Given) -> bool:
    starts = [place for place, line in enumerate(lines(response)) if line.lstrip().startswith("*")]
    if len(starts) < 2:
        return False
    before = "\n".join(lines(response)[: starts[0]])
    return sum(1 for sentence in sentences(before) if sentence.endswith(".")) >= 2


def _csv_rows(response: str, delimiter: str) -> list[list[str]]:
    body = re.sub(r"\A\s*```\w*\n|\n?```\s*\Z", "", response).strip()
    try:
        return [row for row in csv.reader(io.StringIO(body), delimiter=delimiter, strict=True) if row]
    except csv.Error:
        return []


def _is_table(rows: list[list[str]], columns: str, num_rows: int) -> bool:
    names = columns.split()
    return len(rows) == num_rows + 1 and rows[0] == names and all(len(row) == len(names) for row in rows)


def _csv_special(response: str, given: Given) -> bool:
    rows = _csv_rows(response, ",")
    quoted = re.findall(r'"([^"\n]*)"', response)
    has_special = any(re.search(r"[^\w\s]", field) for field in quoted)
    return _is_table(rows, "ProductID Category Brand Price Stock", 14) and has_special


def _csv_quoted(response: str, given: Given) -> bool:
    body = [line for line in lines(response) if not line.startswith("```")]
    all_quoted = all(re.fullmatch(r'"[^"]*"', field.strip()) for line in body for field in line.split("\t"))
    return all_quoted and _is_table(_csv_rows(response, "\t"), "StudentID Subject Grade Semester Score", 3)


def _dates(response: str, given: Given) -> bool:
    parts = [part.strip() for part in response.strip().rstrip(".").split(",")]
    return all(_DATE.fullmatch(part) for part in parts)


def _keywords_multiple(response: str, given: Given) -> bool:
    found = Counter(word.casefold() for word in words(response))
    wanted = zip(range(1, 6), (1, 2, 3, 5, 7), strict=True)
    return all(found[given.text(f"keyword{place}").strip().casefold()] == count for place, count in wanted)


def _all_words(response: str, test: Callable[[str], object]) -> bool:
    found: Iterable[str] = [bare for word in response.split() if (bare := _bare(word))]
    return bool(found) and all(test(word) for word in found)


def _title_case(response: str, given: Given) -> bool:
    letters = [word[0] for word in spoken_words(response) if word[0].isalpha()]
    return bool(letters) and all(letter.isupper() or letter.lower() == letter.upper() for letter in letters)


def _alphabet_story(response: str, given: Given) -> bool:
    letters = [found[0] for sentence in sentences(response) if (found := _first_letters(sentence))]
    return len(letters) == 26 and letters[0] == "a" and _is_alphabet(letters)


CHECKERS: Final[Mapping[str, Check]] = {
    "count:word_count_range": lambda r, g: g.number("min_words") <= len(words(r)) <= g.number("max_words"),
    "count:unique_word_count": lambda r, g: len({w.casefold() for w in words(r)}) >= g.number("N"),
    "count:conjunctions": lambda r, g: len(CONJUNCTIONS & {w.casefold() for w in words(r)}) >= g.number("small_n"),
    "count:person_names": lambda r, g: len({*PERSON_NAMES} & {*words(r)}) >= g.number("N"),
    "count:numbers": lambda r, g: len(_NUMBER.findall(r)) == g.number("N"),
    "count:punctuation": _punctuation,
    "count:pronouns": lambda r, g: sum(w.casefold() in PRONOUNS for w in words(r)) >= g.number("N"),
    "count:words_japanese": _japanese,
    "count:keywords_multiple": _keywords_multiple,
    "ratio:stop_words": _stop_words,
    "ratio:sentence_type": _two_to_one,
    "ratio:sentence_balance": _balance,
    "ratio:overlap": _overlap,
    "ratio:sentence_words": _three_sentences,
    "words:alphabet": lambda r, g: _is_alphabet(_first_letters(r)),
    "words:vowel": lambda r, g: len(paragraphs(r)) == 1 and len(VOWELS & set(r.casefold())) <= 3,
    "words:consonants": _clusters,
    "words:palindrome": _palindromes,
    "words:prime_lengths": lambda r, g: _all_words(r, lambda word: len(word) in PRIMES),
    "words:repeats": _repeats,
    "words:last_first": _last_first,
    "words:paragraph_last_first": _paragraph_last_first,
    "words:no_consecutive": _no_consecutive,
    "sentence:alliteration_increment": _rising_alliteration,
    "sentence:keyword": _keyword_in_sentence,
    "sentence:increment": _rising_words,
    "format:parentheses": _nested,
    "format:quotes": _nested_quotes,
    "format:options": _options,
    "format:newline": lambda r, g: bool(lines(r)) and all(len(line.split()) == 1 for line in lines(r)),
    "format:emoji": _emoji_ends,
    "format:line_indent": _stairs,
    "format:quote_unquote": _quotes_explained,
    "format:list": _list,
    "format:thesis": _thesis,
    "format:sub-bullets": _sub_bullets,
    "format:no_bullets_bullets": _some_bullets,
    "format:title_case": _title_case,
    "format:no_whitespace": lambda r, g: bool(r) and not any(character.isspace() for character in r),
    "custom:multiples": lambda r, g: [int(n) for n in re.findall(r"\d{1,9}", r)] == [14, 21, 28, 35, 42, 49],
    "custom:csv_city": lambda r, g: _is_table(_csv_rows(r, ","), "ID Country City Year Count", 7),
    "custom:csv_special_character": _csv_special,
    "custom:csv_quotes": _csv_quoted,
    "custom:date_format_list": _dates,
    "custom:sentence_alphabet": _alphabet_story,
}
"""By the name that rows have under ``instruction_id_list``."""
