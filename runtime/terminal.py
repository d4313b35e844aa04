"""The terminal, as everything of ours writes to it.

Whatever text of rows, models, judges or users' code is printed through this console has no control of a terminal left.
Styles are given by markup and by renderables, never by escapes within a text.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.segment import Segment

from penstock.runtime.safe_text import terminal_lines

if TYPE_CHECKING:
    from collections.abc import Iterable

    import msgspec
    from rich.console import ConsoleOptions, RenderableType
    from rich.text import Text


class TerminalConsole(Console):
    """A rich console for foreign text: controls are spelled, and ``:x:`` is no picture."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - those of rich
        options = {"highlight": False, "emoji": False, **options}
        super().__init__(**options)

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401 - those of rich
        """Before anything is laid out, so that what is spelled has its place."""
        return super().render_str(terminal_lines(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What did not come as a string, too."""
        for segment in super().render(renderable, options):
            safe = segment.text if segment.control else terminal_lines(segment.text)
            yield segment if safe == segment.text else Segment(safe, segment.style)


def print_json(value: msgspec.Struct, console: Console) -> None:
    """For programs: in ASCII alone, so that a terminal obeys no text in it; what is no number is null."""
    import msgspec  # here, as no help of a command has to wait for it

    plain = msgspec.json.decode(msgspec.json.encode(value))
    console.print(json.dumps(plain, indent=2), markup=False, soft_wrap=True)
