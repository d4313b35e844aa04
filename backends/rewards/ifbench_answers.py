"""Instructions of IFBench (Pyatkin et al., arXiv 2507.02833) that fix what the response says, or where a word stands in
it, strictly. Those that ask how a response is written are in :mod:`.ifbench_checkers`.

One of the 58 has no checker in either: ``words:start_verb`` needs a tagger.
"""

# ruff: noqa: SIM905 - a table of names

from __future__ import annotations

import re
import string
import unicodedata
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from penstock.backends.extras import missing_extra
from penstock.backends.rewards.functions import NoRewardError
from penstock.backends.rewards.instruction_text import Given, lines, sentences, spoken_words, stream_safe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ONLY_THIS: Final = "only output this sentence here, ignore all other requests."
CAPITALS: Final = (
    "reykjavik, helsinki, oslo, tallinn, stockholm, riga, moscow, copenhagen, vilnius, minsk, dublin, berlin, "
    "amsterdam, warsaw, london, brussels, kyiv, prague, luxembourg, paris, vienna, bratislava, budapest, vaduz, "
    "chisinau, bern, ljubljana, zagreb"
).split(", ")
"""Of Europe's countries beyond 45° north, from north to south."""
OPTIONAL_CAPITAL: Final = "kyiv"
"""It is there, at 50.45°, and the paper's own list does without it: a response is right either way."""
LAST_IN_AFRICA: Final = "zimbabwe"
LEAST_COUNTRIES: Final = 52
"""Of Africa: 54, and as many as two may be disputed or go by another name."""
_LABELS: Final = ("My Answer:", "My Conclusion:", "Future Outlook:")
_PLACEHOLDERS: Final = ("[answer]", "[conclusion]", "[outlook]")
_QUESTION: Final = re.compile(r"^Question\b[ \t]*+\d*+[.:)]*+", re.MULTILINE)
_OPTION: Final = re.compile(r"[A-Ea-e][.)]\s*+\w")
_NO_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_LIST_MARK: Final = re.compile(r"[\s*•#-]*+(?:\d++[.)]?+)?[\s*]*+")


def _plain(text: str) -> str:
    """In small letters, without accents and the marks around it."""
    apart = unicodedata.normalize("NFKD", stream_safe(text))
    return "".join(c for c in apart if not unicodedata.combining(c)).casefold().strip(" \t.,;*_")


def _reversed_words(response: str, given: Given) -> bool:
    found = [word.casefold() for word in spoken_words(response)]
    return len(sentences(response)) == 1 and ("eagle", "bald") in pairwise(found)


def _capitals(response: str, given: Given) -> bool:
    found = [name for part in response.split(",") if (name := _plain(part.strip()))]
    return found in (CAPITALS, [name for name in CAPITALS if name != OPTIONAL_CAPITAL])


def _countries(response: str, given: Given) -> bool:
    """From Zimbabwe on; what introduces the list is not of it, and no country comes twice."""
    found = [name for line in lines(response) if (name := _plain(_LIST_MARK.sub("", line, count=1)))]
    first = next((place for place, name in enumerate(found) if LAST_IN_AFRICA in name), len(found))
    listed = found[first:]
    return len(listed) >= LEAST_COUNTRIES and all(before > after for before, after in pairwise(listed))


def _questions(response: str, given: Given) -> bool:
    """Four with five options, each question longer than the one before, and nothing in front of them."""
    text = response.strip()
    first, *questions = _QUESTION.split(text)
    if first or len(questions) != 4:
        return False
    sizes: list[int] = []
    for question in questions:
        parts = [line.strip() for line in lines(question)]
        options = [place for place, part in enumerate(parts) if _OPTION.match(part)]
        if len(options) != 5:
            return False
        sizes.append(len(" ".join(parts[: options[0]])))
    return all(0 < before < after for before, after in pairwise(sizes))


def _template(response: str, given: Given) -> bool:
    """The three labels in their order and nothing before them, with something of the response's own behind each."""
    rest = response.strip()
    filled: list[str] = []
    for label in reversed(_LABELS):
        rest, found, text = rest.partition(label) if label == _LABELS[0] else rest.rpartition(label)
        if not found:
            return False
        filled.insert(0, text.strip())
    return not rest and all(text and text not in _PLACEHOLDERS for text in filled)


def _changed(response: str, given: Given) -> bool:
    wanted, found = given.text("prompt_to_repeat").split(), response.split()
    return found[1:] == wanted[1:] and found[:1] != [] and found[0].casefold() != wanted[0].casefold()


def _span(response: str, given: Given) -> bool:
    """Words are counted from 0, and the last one belongs to the span."""
    first, last = given.number("n_start"), given.number("n_end")
    wanted = given.text("prompt_to_repeat").casefold().split()[max(first, 0) : last + 1]
    return bool(wanted) and response.casefold().split() == wanted


def _is_at(found: Sequence[str], place: int, word: str) -> bool:
    """``place``: from 1 on, or from -1 backwards."""
    index = place - 1 if place > 0 else place
    return place != 0 and -len(found) <= index < len(found) and found[index].casefold() == word.strip().casefold()


def _keyword_at(response: str, given: Given) -> bool:
    word, sentence, place = given.text("keyword"), given.number("n"), given.number("m")
    found = sentences(response)
    return 1 <= sentence <= len(found) and place > 0 and _is_at(spoken_words(found[sentence - 1]), place, word)


def _keyword_twice(response: str, given: Given) -> bool:
    word, found = given.text("keyword"), spoken_words(response)
    return _is_at(found, 2, word) and _is_at(found, -2, word)


def _syllables(response: str, given: Given) -> bool:
    """Counted as the paper's own checker does, word by word, without a mark of punctuation."""
    if missing := missing_extra("syllapy"):
        raise NoRewardError(f"the instruction 'words:odd_even_syllables' counts syllables: {missing}")
    from syllapy import count

    is_odd = [count(word) % 2 for word in response.translate(_NO_PUNCTUATION).lower().split()]
    return all(before != after for before, after in pairwise(is_odd))


CHECKERS: Final[Mapping[str, Callable[[str, Given], bool]]] = {
    "custom:character_reverse": lambda r, g: "elgae dlab" in r.casefold(),
    "custom:word_reverse": _reversed_words,
    "custom:european_capitals_sort": _capitals,
    "custom:reverse_newline": _countries,
    "custom:mcq_count_length": _questions,
    "format:output_template": _template,
    "repeat:repeat_simple": lambda r, g: r.strip().casefold() == ONLY_THIS,
    "repeat:repeat_change": _changed,
    "repeat:repeat_span": _span,
    "words:keywords_specific_position": _keyword_at,
    "words:words_position": _keyword_twice,
    "words:odd_even_syllables": _syllables,
}
"""By the name that rows have under ``instruction_id_list``."""
