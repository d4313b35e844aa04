"""``docs/scenarios.md``: every key of a scenario with its type, bounds, default and meaning, read off the structs."""

from __future__ import annotations

import enum
import inspect
import json
from typing import TYPE_CHECKING

import msgspec
from msgspec import NODEFAULT
from msgspec import inspect as shapes

from penstock.runtime.scenario.keys import allowed, block_paths, field_docs, shape_of

if TYPE_CHECKING:
    from penstock.runtime.scenario.source import KeyPath

HEADER = """\
# Scenarios

<!-- Written by `make docs` from the option structs of each part. Change those, not this page. -->

A scenario is one YAML file. Unknown keys are errors, and so are values out of bounds: the message names file, line,
key and what is allowed. Every key can be set on the command line as well, over what the file says:

    penstock run scenarios/fully_async.yaml staleness.max_staleness=4 run.seed=1

`penstock run FILE --dry-run` prints what a scenario sets, with `--full` every key, and asks this machine everything
that a run asks before it starts: what is missing stands at the end, and the exit code is 2. `penstock schema` prints
the JSON Schema for your editor (also in [scenario.schema.json](scenario.schema.json)).

Numbers and words are read by the YAML 1.2 core schema: `1e-3` is a number, `no` is a string. A relative path in a file
starts from that file's folder, one on the command line from the current folder; runs are written under `run.folder`
of the current folder.

A function of your own is named `file.py:function`, a staleness policy of your own `file.py:Name`.
"""


def scenario_reference() -> str:
    """The page as Markdown."""
    sections = [_section(path, struct) for path, struct in block_paths() if path]
    return HEADER + "".join(sections)


def _section(path: KeyPath, struct: type[msgspec.Struct]) -> str:
    title = ".".join(map(str, path))
    rows = [_row(field, field_docs(struct).get(field.name, "")) for field in shape_of(struct).fields]
    level = "#" * (1 + len(path))
    intro = _code_marks(inspect.cleandoc(struct.__doc__ or ""))
    table = "| key | allowed | default | meaning |\n|---|---|---|---|\n" + "".join(rows)
    return f"\n{level} `{title}`\n\n{intro}\n\n{table}"


def _row(field: shapes.Field, doc: str) -> str:
    cells = (f"`{field.encode_name}`", _allowed(field.type), _default(field), _code_marks(doc))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _allowed(shape: shapes.Type) -> str:
    if isinstance(shape, shapes.UnionType):
        return ", or ".join(_allowed(part) for part in shape.types)
    if isinstance(shape, shapes.StructType):
        return "a block, below"
    if isinstance(shape, shapes.LiteralType | shapes.EnumType):
        values = shape.values if isinstance(shape, shapes.LiteralType) else [m.value for m in shape.cls]
        return ", ".join(f"`{value}`" for value in values)
    return allowed(shape)


def _default(field: shapes.Field) -> str:
    if field.default_factory is not NODEFAULT:
        default = field.default_factory()
    elif field.default is NODEFAULT:
        return "must be given"
    else:
        default = field.default
    if isinstance(default, msgspec.Struct):
        return "as below"
    plain = default.value if isinstance(default, enum.Enum) else default
    return f"`{plain}`" if isinstance(plain, str) else f"`{json.dumps(plain)}`"


def _code_marks(doc: str) -> str:
    return doc.replace("``", "`")
