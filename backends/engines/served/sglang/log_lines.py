"""What the lines of a server's log say. Pure functions of text.

The texts are those of SGLang 0.5.23 and of the uvicorn it brings.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.served.base.settings import Decoded, Told

if TYPE_CHECKING:
    from collections.abc import Sequence

TAIL_LINES: Final = 30
_PORT: Final = re.compile(r"Uvicorn running on (?:https?://)?(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d+)\b")
_READY: Final = "The server is fired up and ready to roll!"
_RANK_READY: Final = "Dummy health check server started in background thread at"
_STAMP: Final = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?P<rank>[^\]]*)\]\s*")
_BAR: Final = re.compile(r"\d+%\s*(\||Completed)|\bit/s\]")
_RAISED: Final = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception|Interrupt|Exit)\b(?::\s.*)?$")
_REFUSED: Final = re.compile(r"\berror: (?P<text>.*)$")
_NOISE: Final = re.compile(
    r"Ignore import error when loading|UserWarning|FutureWarning|DeprecationWarning|post-warmup freeze_gc failed"
    r"|^usage: |^\s+\[--?\w|\] Decode batch\b"
)
_NEWS_LENGTH: Final = 160
_RUNNING: Final = re.compile(r"#running-req: (\d{1,6})\b")
_HELD: Final = re.compile(r"#(?:full )?token: (\d{1,12})\b")
"""``full``: of models that have layers with a window, or with a state, besides."""
_RATE: Final = re.compile(r"gen throughput \(token/s\): (\d{1,9}(?:\.\d{1,9})?)(?![\d.])")


def port_in(line: str) -> int | None:
    """The port that the server has bound, when this is the line that says so."""
    found = _PORT.search(line)
    return int(found[1]) if found else None


def says_ready(line: str, *, serves: bool) -> bool:
    """Whether this line says that the server takes requests, or that a node which takes none has loaded its part."""
    return (_READY if serves else _RANK_READY) in line


def news_in(line: str) -> str:
    """What a line says to somebody who waits for a start: empty for warnings, tracebacks and the list of options."""
    stamp = _STAMP.match(line)
    if (stamp is None and not _BAR.search(line)) or _NOISE.search(line) or "server_args=" in line:
        return ""
    text = line[stamp.end() :] if stamp else line
    if stamp and stamp["rank"].strip():
        text = f"{stamp['rank'].strip()}: {text}"
    text = text.strip()
    return text if len(text) <= _NEWS_LENGTH else f"{text[: _NEWS_LENGTH - 1]}…"


def passes_in(line: str) -> Decoded | Told | None:
    """What the scheduler says of its passes: of each that reads prompts, and of every so many that decode."""
    stamp = _STAMP.match(line)
    said = line[stamp.end() :] if stamp else ""
    if said.startswith("Prefill batch"):
        return Told.READ
    if not said.startswith("Decode batch"):
        return None
    running, held, rate = _RUNNING.search(said), _HELD.search(said), _RATE.search(said)
    if running is None or rate is None:
        return Told.UNREADABLE
    return Decoded(int(running[1]), int(held[1]) if held else 0, float(rate[1]))


def reason_in(lines: Sequence[str]) -> str:
    """The last line that names an error, which is the one that the server ended with; empty when there is none."""
    for line in reversed(lines):
        text = _STAMP.sub("", line).strip()
        if refused := _REFUSED.search(text):
            return refused["text"]
        if _RAISED.match(text):
            return text
    return ""


def tail_of(lines: Sequence[str], count: int = TAIL_LINES) -> tuple[str, ...]:
    """The last lines that are worth reading."""
    return tuple(line for line in lines if line.strip() and not _NOISE.search(line))[-count:]
