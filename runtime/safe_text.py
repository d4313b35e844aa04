"""Text of rows, models, tools, judges and users' code, made safe to print on a terminal or to write into a log.

Whoever wrote such a text may have put control characters into it. A terminal obeys them: they move the cursor, hide or
rewrite what was printed, change the window's title, fill the clipboard, or answer back as if typed. What is left of
each is its escape as Python spells it (``\\x1b``), so that a reader sees that it was there. The spelling is for reading
and cannot be undone: a backslash stays a backslash.

Replaced are the C0 and C1 controls and DEL; the controls of bidirectional text, which let a line read otherwise than it
is written; the separators of lines and paragraphs; and surrogates, which no output stream can encode.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Final

from penstock.messages.texts import without_credentials as without_credentials

_UNSAFE: Final = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_A_LINE: Final = re.compile(f"[{_UNSAFE}]")
_IN_LINES: Final = re.compile(f"(?![\\n\\t])[{_UNSAFE}]")
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_CUT: Final = "…"


def terminal_text(text: str, *, max_chars: int | None = None) -> str:
    """The text on one line: no control is left, not even a line feed or a tab.

    At most ``max_chars`` characters long where that is given, which must be at least 1; ``…`` ends what was cut off.
    """
    return _safe(_IN_A_LINE, text, max_chars)


def terminal_lines(text: str, *, max_chars: int | None = None) -> str:
    """As :func:`terminal_text`, but line feeds and tabs stay."""
    return _safe(_IN_LINES, text, max_chars)


class LogFormatter(logging.Formatter):
    """Of logs that somebody is going to read on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """With tracebacks on lines of their own, and without the passwords of addresses."""
        return without_credentials(terminal_lines(super().format(record)))


def log_to_stderr() -> None:
    """From now on, in place of whatever was set up before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _safe(unsafe: re.Pattern[str], text: str, max_chars: int | None) -> str:
    if max_chars is None:
        return unsafe.sub(_spelled, text)
    assert max_chars >= 1, "room for the sign that something was cut off"
    # Each character becomes at least one, so the rest cannot be shown and is not looked at: a text may be megabytes.
    shown = unsafe.sub(_spelled, text[: max_chars + 1])
    return shown if len(shown) <= max_chars else shown[: max_chars - 1] + _CUT


def _spelled(found: re.Match[str]) -> str:
    character = found.group()
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
