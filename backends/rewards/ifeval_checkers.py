"""The 25 verifiable instructions of IFEval (Zhou et al., arXiv 2311.07911), strictly: the response as it stands."""

# ruff: noqa: RUF001 - marks of texts in other alphabets

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol, cast

import msgspec

from penstock.backends.rewards.functions import NoRewardError
from penstock.backends.rewards.instruction_text import Given, sentences, stream_safe, words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CONSTRAINED_ANSWERS: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_BULLET: Final = re.compile(r"^[ \t]*(?:\*[^*\n]|-[^-\n])", re.MULTILINE)
_PLACEHOLDER: Final = re.compile(r"\[[^\[\]\n]{1,200}\]")
FENCE: Final = "```"
_SOMETHING: Final = r"(?=[^\S\n]*+[^*\s])"
_HIGHLIGHT: Final = re.compile(rf"\*\*{_SOMETHING}[^*\n]*+\*\*|\*{_SOMETHING}[^*\n]*+\*")
_TITLE: Final = re.compile(r"<<(?=[^\S\n]*+[^<>\s])[^<>\n]*+>>")


class _Langid(Protocol):
    """The part of ``py3langid`` that is used."""

    def classify(self, text: str) -> tuple[str, float]: ...


def _count_word(response: str, word: str) -> int:
    """Whole words, whatever their case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", response, re.IGNORECASE))


def _letter(response: str, given: Given) -> bool:
    letter = given.text("letter").casefold()
    return given.compared(response.casefold().count(letter), "let_frequency", "let_relation")


def _language(response: str, given: Given) -> bool:
    wanted = given.text("language").partition("-")[0]
    import py3langid

    library = cast("_Langid", py3langid)
    return library.classify(stream_safe(response))[0] == wanted


def _paragraphs(response: str, given: Given) -> bool:
    """Between lines of three stars; an empty one in the middle does not count as one."""
    parts = re.split(r"\s?\*\*\*\s?", response)
    inner = parts[1:-1]
    if any(not part.strip() for part in inner):
        return False
    return sum(1 for part in parts if part.strip()) == given.number("num_paragraphs")


def _nth_paragraph(response: str, given: Given) -> bool:
    parts = [part.strip() for part in re.split(r"\n\n", response) if part.strip()]
    nth = given.number("nth_paragraph")
    if len(parts) != given.number("num_paragraphs") or not 1 <= nth <= len(parts):
        return False
    first = parts[nth - 1].split()[0].lstrip("'\"“‘*_(").rstrip(".,?!;:'\"”’*_)")
    return first.casefold() == given.text("first_word").casefold()


def _postscript(response: str, given: Given) -> bool:
    marker = given.text("postscript_marker")
    letters = [re.escape(letter) for letter in re.sub(r"[\s.]", "", marker)]
    return re.search(r"^[^\S\n]*+" + r"\.?[ ]?".join(letters), response, re.IGNORECASE | re.MULTILINE) is not None


def _sections(response: str, given: Given) -> bool:
    splitter = re.escape(given.text("section_spliter").strip())
    return len(re.findall(rf"{splitter}[ \t]*\d+", response)) >= given.number("num_sections")


def _json(response: str, given: Given) -> bool:
    try:
        msgspec.json.decode(_unfenced(response.strip()))
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True


def _unfenced(text: str) -> str:
    if len(text) < 2 * len(FENCE) or not (text.startswith(FENCE) and text.endswith(FENCE)):
        return text
    inside = text[len(FENCE) : -len(FENCE)]
    return inside[4:] if inside[:4] in ("json", "JSON", "Json") else inside


def _two_responses(response: str, given: Given) -> bool:
    parts = response.split("******")
    if any(not part.strip() for part in parts[1:-1]):
        return False
    full = [part.strip() for part in parts if part.strip()]
    return len(full) == 2 and full[0] != full[1]


def _repeat_prompt(response: str, given: Given) -> bool:
    return response.strip().casefold().startswith(given.text("prompt_to_repeat").strip().casefold())


def _end(response: str, given: Given) -> bool:
    ending = response.strip().strip('"').casefold()
    return ending.endswith(given.text("end_phrase").strip().casefold())


def _quoted(response: str, given: Given) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_words(response: str, given: Given) -> bool:
    count = sum(1 for word in re.findall(r"[^\W_]+(?:[-'’][^\W_]+)*", response) if word.isupper())
    return given.compared(count, "capital_frequency", "capital_relation")


def _all_case(response: str, *, upper: bool) -> bool:
    return response.isupper() if upper else response.islower()


CHECKERS: Final[Mapping[str, Callable[[str, Given], bool]]] = {
    "keywords:existence": lambda r, g: all(word.casefold() in r.casefold() for word in g.texts("keywords")),
    "keywords:frequency": lambda r, g: g.compared(_count_word(r, g.text("keyword").strip()), "frequency", "relation"),
    "keywords:forbidden_words": lambda r, g: not any(_count_word(r, word) for word in g.texts("forbidden_words")),
    "keywords:letter_frequency": _letter,
    "language:response_language": _language,
    "length_constraints:number_sentences": lambda r, g: g.compared(len(sentences(r)), "num_sentences", "relation"),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda r, g: g.compared(len(words(r)), "num_words", "relation"),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": lambda r, g: len(_PLACEHOLDER.findall(r)) >= g.number("num_placeholders"),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda r, g: len(_BULLET.findall(r)) == g.number("num_bullets"),
    "detectable_format:constrained_response": lambda r, g: any(answer in r.strip() for answer in CONSTRAINED_ANSWERS),
    "detectable_format:number_highlighted_sections": (
        lambda r, g: len(_HIGHLIGHT.findall(r)) >= g.number("num_highlights")
    ),
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda r, g: _TITLE.search(r) is not None,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end,
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda r, g: _all_case(r, upper=True),
    "change_case:english_lowercase": lambda r, g: _all_case(r, upper=False),
    "punctuation:no_comma": lambda r, g: "," not in r and "，" not in r,
}
"""By the name that rows have under ``instruction_id_list``."""


def unknown_instruction(name: str) -> NoRewardError:
    """There is no checker of this name."""
    return NoRewardError(
        f"there is no checker for the instruction {name[:80]!r}; docs/rewards.md lists those there are"
    )
