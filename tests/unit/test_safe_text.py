"""What may stand in a text that strangers wrote, once it is shown."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.safe_text import terminal_lines, terminal_text, without_credentials

ANY_TEXT = st.text(st.characters())  # surrogates as well
BIDIRECTIONAL = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@given(ANY_TEXT)
def test_no_control_of_a_terminal_is_left(text: str) -> None:
    for shown, kept in ((terminal_text(text), ""), (terminal_lines(text), "\n\t")):
        assert all(unicodedata.category(each) not in {"Cc", "Cs", "Zl", "Zp"} or each in kept for each in shown)
        assert not set(shown) & set(BIDIRECTIONAL)
        shown.encode()


@given(ANY_TEXT)
def test_what_was_made_safe_stays_as_it_is(text: str) -> None:
    assert terminal_text(terminal_text(text)) == terminal_text(text)
    assert terminal_lines(terminal_text(text)) == terminal_text(text)


@given(ANY_TEXT, st.integers(1, 40))
def test_a_bound_on_the_length_holds_and_says_where_it_cut(text: str, max_chars: int) -> None:
    whole, shown = terminal_text(text), terminal_text(text, max_chars=max_chars)
    if len(whole) <= max_chars:
        assert shown == whole
    else:
        assert len(shown) == max_chars
        assert shown.endswith("…")
        assert whole.startswith(shown[:-1])


@pytest.mark.parametrize(
    ("text", "line", "lines"),
    [
        ("plain, 日本語, 😀", "plain, 日本語, 😀", "plain, 日本語, 😀"),
        ("two\nlines\tand a tab", "two\\nlines\\tand a tab", "two\nlines\tand a tab"),
        ("back\rover", "back\\rover", "back\\rover"),
        ("\x1b]52;c;YQ==\x07", "\\x1b]52;c;YQ==\\x07", "\\x1b]52;c;YQ==\\x07"),
        ("\x9b31m", "\\x9b31m", "\\x9b31m"),
        ("\u202egnp.exe", "\\u202egnp.exe", "\\u202egnp.exe"),
        ("half \ud83d of it", "half \\ud83d of it", "half \\ud83d of it"),
    ],
)
def test_a_control_is_spelled_so_that_a_reader_sees_it(text: str, line: str, lines: str) -> None:
    assert terminal_text(text) == line
    assert terminal_lines(text) == lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("url: https://user:secret@example.org/v1", "url: https://***@example.org/v1"),
        ("redis://:secret@h:1 and http://token@h", "redis://***@h:1 and http://***@h"),
        ("http://example.org/@user", "http://example.org/@user"),
        ("mail a@example.org about http://b", "mail a@example.org about http://b"),
    ],
)
def test_no_password_of_an_address_is_shown(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
