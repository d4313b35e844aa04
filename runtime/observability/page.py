"""Pages of HTML that need nothing else: styles, script and data are in them, and nothing else is let in.

Invariants:

* Every text is escaped, and controls in it are spelled out. Were one not escaped, the page's policy (CSP) would still
  run no script but ours, and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup

from penstock.runtime.observability.texts import count_text, number_text
from penstock.runtime.safe_text import terminal_lines

_HERE: Final = Path(__file__).parent


def render_page(template: str, **values: Any) -> str:  # noqa: ANN401 - whatever the template names
    """A page from a template beside this module."""
    style, script = (Markup((_HERE / f"report.{kind}").read_text(encoding="utf-8")) for kind in ("css", "js"))
    return _environment().get_template(template).render(style=style, script=script, **values)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_readable,
    )
    environment.filters |= {
        "count": count_text,
        "number": number_text,
        "svg": Markup,  # our own drawings; everything else is escaped
        "hash": _hash,
    }
    return environment


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file whole or not at all; returns its path.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_suffix(".partial")
    partial.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.replace(partial, path)
    return path


def _readable(value: object) -> object:
    """Text without the controls that would make it read otherwise than it is written."""
    return terminal_lines(value) if type(value) is str else value


def _hash(text: str) -> str:
    """As a content security policy names a style or a script that is in the page."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
