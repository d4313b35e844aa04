"""``docs/events.md``: what the actors say to each other, read off the structs of :mod:`penstock.messages`."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import pkgutil
import re
import textwrap
from functools import cache
from types import ModuleType, UnionType
from typing import TYPE_CHECKING, TypeVar, get_args

from penstock import messages
from penstock.messages import base, books, inboxes, local, option_keys, wire
from penstock.messages.base import Delivery, Event
from penstock.runtime.scenario.keys import field_docs

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec

Kind = TypeVar("Kind", bound=base.Value | Event)

HEADER = """\
# Events

<!-- Written by `make docs` from the structs in messages/. Change those, not this page. -->

Everything that the actors say to each other, in the order of the modules that define it. An event is a fact and is
named in the past tense; it is a frozen [msgspec](https://jcristharif.com/msgspec/) struct, decoded once, by type, at
the socket. The design behind it is in [architecture.md](architecture.md).

"""

DELIVERY_TITLE = "## Delivery\n\nWhat the runtime promises for an event is part of its type.\n\n"
INBOX_TITLE = "\n## Inboxes\n\nWhat each actor can hear from others.\n\n"
VALUE_TITLE = "\n## Values\n\nWhat events are made of; never sent alone.\n"
ARROW = "→"


def events_catalogue() -> str:
    """The page as Markdown."""
    events = [found for module in _modules() if module not in (local, wire) for found in _structs(module, Event)]
    values = [found for module in _modules() if module not in (base, books) for found in _structs(module, base.Value)]
    values.append(base.Metric)
    enums = [found for module in _modules() if module is not option_keys for found in _enums(module)]
    parts = [
        HEADER,
        DELIVERY_TITLE,
        "".join(f"* `{member.value}`: {text}\n" for member, text in _members(Delivery)),
        INBOX_TITLE,
        _inboxes(),
        "\n## Events between actors\n",
        *(_event(event) for event in events),
        "\n## Events that stay in their process\n\n" + _first_line(local) + "\n",
        *(_event(event) for event in _structs(local, local.LocalEvent)),
        VALUE_TITLE,
        *(_value(value) for value in values),
        "\n## Words\n\nClosed sets of names that fields hold.\n",
        *(_enum(found) for found in enums if found is not Delivery),
    ]
    return "".join(parts)


def _modules() -> list[ModuleType]:
    names = [found.name for found in pkgutil.iter_modules(messages.__path__)]
    return [importlib.import_module(f"penstock.messages.{name}") for name in names]


def _structs(module: ModuleType, kind: type[Kind]) -> list[type[Kind]]:
    """The structs that this module defines below ``kind``, in the order of the source."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, kind)
        and value is not kind
        and value.__module__ == module.__name__
    ]


def _enums(module: ModuleType) -> Iterator[type[enum.Enum]]:
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, enum.Enum) and value.__module__ == module.__name__:
            yield value


def _value(value: type[base.Value]) -> str:
    return f"\n### {value.__name__}\n\n{_doc(value)}\n{_fields(value)}"


def _event(event: type[Event]) -> str:
    route, text = _route(_doc(event))
    heading = f"\n### {event.__name__}\n\n"
    facts = [f"*{route}*"] if route else []
    if event.delivery is not Delivery.LOCAL:
        facts.append(f"delivery `{event.delivery.value}`")
    return heading + (", ".join(facts) + "\n\n" if facts else "") + text + "\n" + _fields(event)


def _route(doc: str) -> tuple[str, str]:
    """Split ``A → B: text`` into the route and the text."""
    route, separator, text = doc.partition(": ")
    if ARROW not in route or not separator:
        return "", doc
    return " ".join(route.split()), text[:1].upper() + text[1:]


def _fields(struct: type[msgspec.Struct]) -> str:
    rows: list[str] = []
    for name, annotation in _annotations(struct):
        doc = field_docs(struct).get(name, "").replace("``", "`").replace("|", "\\|")
        rows.append(f"| `{name}` | `{annotation.replace('|', chr(92) + '|')}` | {doc} |\n")
    return "\n| field | type | meaning |\n|---|---|---|\n" + "".join(rows) if rows else ""


@cache
def _annotations(struct: type) -> tuple[tuple[str, str], ...]:
    """Name and type of each field, as the source has them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(struct)))
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef)
    return tuple(
        (node.target.id, ast.unparse(node.annotation))
        for node in body.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not ast.unparse(node.annotation).startswith("ClassVar")
    )


def _inboxes() -> str:
    rows: list[str] = []
    for name, union in vars(inboxes).items():
        if name.endswith("Wire") and isinstance(union, UnionType):
            members = ", ".join(f"[{event.__name__}](#{event.__name__.lower()})" for event in get_args(union))
            rows.append(f"* **{name.removesuffix('Wire')}**: {members}\n")
    return "".join(rows)


def _enum(found: type[enum.Enum]) -> str:
    rows = "".join(f"* `{member.value}`{': ' + text if text else ''}\n" for member, text in _members(found))
    return f"\n### {found.__name__}\n\n{_doc(found)}\n\n{rows}"


def _members(found: type[enum.Enum]) -> Iterator[tuple[enum.Enum, str]]:
    docs = field_docs(found)
    for member in found:
        yield member, docs.get(member.name, "").replace("``", "`")


def _doc(thing: type) -> str:
    text = " ".join(inspect.cleandoc(thing.__doc__ or "").split()).replace("``", "`")
    return re.sub(r":(?:mod|class|data):(?=`)", "", text)


def _first_line(module: ModuleType) -> str:
    return (inspect.getdoc(module) or "").partition("\n\n")[0]
