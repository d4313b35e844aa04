"""``docs/scenarios.md``: every key of a scenario with its type, bounds, default and meaning, read off the structs."""

from __future__ import annotations

import enum
import inspect
import json
import re
from typing import TYPE_CHECKING

import msgspec
from msgspec import NODEFAULT
from msgspec import inspect as shapes

from penstock.runtime.scenario.keys import allowed, block_paths, field_docs, shape_of
from penstock.runtime.scenario.part_names import choice_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.runtime.scenario.source import KeyPath

    Places = Mapping[type[msgspec.Struct], KeyPath]
    """Where the page shows each kind of block."""

HEADER = """\
# Scenarios

<!-- Written by `make docs` from the option structs of each part. Change those, not this page. -->

A scenario is one YAML file. Unknown keys are errors, and so are values out of bounds: the message names file, line,
key and what is allowed. Every key can be set on the command line as well, over what the file says:

```sh
penstock run scenarios/fully_async.yaml staleness.max_staleness=4 run.seed=1
```

`penstock run FILE --dry-run` prints what a scenario sets, with `--full` every key, and asks this machine everything
that a run asks before it starts: what is missing stands at the end, and the exit code is 2. `penstock schema` prints
the JSON Schema for your editor (also in [scenario.schema.json](scenario.schema.json)).

Numbers and words are read by the YAML 1.2 core schema: `1e-3` is a number, `no` is a string. A relative path in a file
starts from that file's folder, one on the command line from the current folder; runs are written under `run.folder`
of the current folder. `~` is your home folder; variables (`$DATA`, `${oc.env:DATA}`) are expanded by your shell, on the
command line, and not in a file.

A function of your own is named `file.py:function`, a staleness policy of your own `file.py:Name`. A block that several
others hold is shown once; their rows lead there.
"""


BROUGHT = "one that [another package](extending.md) brings"


def scenario_reference() -> str:
    """The page as Markdown. A kind of block that stands in several places is shown at the shortest of their paths."""
    places: dict[type[msgspec.Struct], KeyPath] = {}
    for path, struct in block_paths():
        if struct not in places or len(path) < len(places[struct]):
            places[struct] = path
    shown = ((path, struct) for path, struct in block_paths() if path and places[struct] == path)
    return HEADER + "".join(_section(path, struct, places) for path, struct in shown)


def _section(path: KeyPath, struct: type[msgspec.Struct], places: Places) -> str:
    docs = field_docs(struct)
    rows = [_row(struct, field, docs.get(field.name, ""), places) for field in shape_of(struct).fields]
    level = "#" * (1 + len(path))
    intro = _marked(inspect.cleandoc(struct.__doc__ or ""))
    table = "| key | allowed | default | meaning |\n|---|---|---|---|\n" + "".join(rows)
    return f"\n{level} `{_title(path)}`\n\n{intro}\n\n{table}"


def _title(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _row(struct: type, field: shapes.Field, doc: str, places: Places) -> str:
    choice = choice_at(struct, field.name)
    words = _allowed(field.type, places) if choice is None else f"{_choices(choice.builtin())}, or {BROUGHT}"
    cells = (f"`{field.encode_name}`", words, _default(field), _marked(doc))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _allowed(shape: shapes.Type, places: Places) -> str:
    match shape:
        case shapes.UnionType(types=types):
            return ", or ".join(_allowed(part, places) for part in types)
        case shapes.StructType(cls=cls):
            title = _title(next(path for struct, path in places.items() if issubclass(struct, cls)))
            return f"a block: [`{title}`](#{re.sub(r'[^a-z0-9_]', '', title)})"
        case shapes.VarTupleType(item_type=shapes.StructType() as item):
            return f"a list, each item {_allowed(item, places)}"
        case shapes.LiteralType(values=values):
            return _choices(values)
        case shapes.EnumType(cls=cls):
            return _choices(member.value for member in cls)
        case _:
            return allowed(shape)


def _choices(values: Iterable[object]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _default(field: shapes.Field) -> str:
    if field.default_factory is not NODEFAULT:
        default = field.default_factory()
    elif field.default is NODEFAULT:
        return "must be given"
    else:
        default = field.default
    if isinstance(default, msgspec.Struct):
        return "as there"
    plain = default.value if isinstance(default, enum.Enum) else default
    return f"`{plain}`" if isinstance(plain, str) else f"`{json.dumps(plain)}`"


def _marked(doc: str) -> str:
    """As Markdown: code, and links to other pages."""
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", doc.replace("``", "`"))
