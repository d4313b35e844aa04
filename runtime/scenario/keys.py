"""What the keys of a scenario may hold, read off the structs: for error messages, the JSON Schema and the reference."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
from functools import cache
from typing import TYPE_CHECKING, cast

import msgspec
from msgspec import inspect as shapes

from penstock.messages.base import Options
from penstock.messages.option_keys import Names
from penstock.runtime.scenario.structure import Scenario
from penstock.runtime.scenario.terms import known_elsewhere

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath, Plain


_MISSING = re.compile(r"missing required field `(?P<field>\w+)`")
_AT = re.compile(r" - at `\$(?P<path>.*)`$")
_WORDS = {Names.FILE: "a path", Names.MODEL: "a folder, or a name on a hub", Names.ROWS: "a source of rows"}
_STEP = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]")


@cache
def shape_of(struct: type[msgspec.Struct]) -> shapes.StructType:
    """The fields of a struct with their types and bounds."""
    shape = shapes.type_info(struct)
    assert isinstance(shape, shapes.StructType), struct
    return shape


def shape_at(path: KeyPath, struct: type[msgspec.Struct] = Scenario) -> shapes.Type:
    """The type that a block wants at ``path``; the path must consist of known keys and list indices."""
    shape: shapes.Type = shape_of(struct)
    for part in path:
        block = _block(shape)
        if block is not None:
            shape = next(field.type for field in block.fields if field.encode_name == part)
        elif isinstance(shape, shapes.VarTupleType):
            shape = shape.item_type
        elif isinstance(shape, shapes.TupleType) and isinstance(part, int):
            shape = shape.item_types[min(part, len(shape.item_types) - 1)]
        else:
            raise KeyError(path)
    return shape


def unknown_key(data: Plain, shape: shapes.Type | None = None, path: KeyPath = ()) -> tuple[KeyPath, str] | None:
    """The first key of ``data`` that no struct has, and a sentence that names the nearest known one."""
    return next(unknown_keys(data, shape_of(Scenario) if shape is None else shape, path), None)


def unknown_keys(data: Plain, shape: shapes.Type, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """All of them, in their order."""
    if isinstance(shape, shapes.VarTupleType) and isinstance(data, list):
        for index, item in enumerate(data):
            yield from unknown_keys(item, shape.item_type, (*path, index))
    block = _block(shape)
    if block is None or not isinstance(data, dict):
        return
    known = {field.encode_name: field.type for field in block.fields}
    for key, value in data.items():
        if key in known:
            yield from unknown_keys(value, known[key], (*path, key))
        elif isinstance(value, dict) and not difflib.get_close_matches(key, known, n=1):
            inner = [(at, _elsewhere(at)) for at in _leaves(value, (*path, key))]
            if any(hint for _, hint in inner):
                yield from ((at, hint or "no such key, and none is known by this name") for at, hint in inner)
            else:
                yield (*path, key), _hint((*path, key), tuple(known))
        else:
            yield (*path, key), _hint((*path, key), tuple(known))


def allowed(shape: shapes.Type) -> str:
    """What a value of this type may be, in words: ``a whole number from 0 to 1024, or null``."""
    match shape:
        case shapes.UnionType(types=types):
            return ", or ".join(allowed(part) for part in types)
        case shapes.NoneType():
            return "null"
        case shapes.BoolType():
            return "true or false"
        case shapes.IntType():
            return "a whole number" + _bounds(shape)
        case shapes.FloatType():
            return "a number" + _bounds(shape)
        case shapes.StrType():
            return "a string"
        case shapes.Metadata(extra={"names": Names() as names}):
            return _WORDS.get(names, "file.py:function" if names.is_only_function else "a name, or file.py:name")
        case shapes.LiteralType(values=values):
            return _one_of([str(value) for value in values])
        case shapes.EnumType(cls=cls):
            return _one_of([str(member.value) for member in cls])
        case shapes.VarTupleType(item_type=item) | shapes.ListType(item_type=item):
            return f"a list, each item {allowed(item)}"
        case shapes.DictType(value_type=value):
            return f"a block of names, each with {allowed(value)}"
        case shapes.TupleType(item_types=items):
            return f"a list of {len(items)} items, each {allowed(items[0])}"
        case shapes.StructType():
            return "a block of keys"
        case _:
            raise TypeError(f"no words for {shape}: extend allowed()")


def misfit(error: msgspec.ValidationError, data: Plain, struct: type[msgspec.Struct]) -> tuple[KeyPath, str]:
    """The key of ``data`` that does not fit the struct, and what it may be."""
    at = _AT.search(str(error))
    steps = _STEP.finditer(at["path"]) if at else ()
    path: KeyPath = tuple(int(step["index"]) if step["index"] else step["key"] for step in steps)
    if missing := _MISSING.search(str(error)):
        return (*path, missing["field"]), "missing; it has no default"
    shape = shape_at(path, struct)
    block = _block(shape)
    keys = f"; its keys are {', '.join(field.encode_name for field in block.fields[:4])} …" if block else ""
    return path, f"must be {allowed(shape)}; found {show(_value_at(data, path))}{keys}"


def dotted(path: KeyPath) -> str:
    """``("engines", "simulated", "prefill_s")`` as ``engines.simulated.prefill_s``; indices in brackets."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def show(value: object) -> str:
    """A value as it would stand in YAML, shortened."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return "a block"
        case list():
            text = f"[{', '.join(map(show, cast('list[object]', value)))}]"
            return text if len(text) <= 60 else "a list"
        case str():
            text = repr(value)
            return text if len(text) <= 60 else text[:57] + "…'"
        case _:
            return str(value)


def _value_at(data: Plain, path: KeyPath) -> Plain:
    for part in path:
        match data, part:
            case dict(), str():
                data = data[part]
            case list(), int():
                data = data[part]
            case _:
                raise KeyError(path)
    return data


@cache
def field_docs(struct: type) -> dict[str, str]:
    """The docstring under each field of a struct that has one, on one line.

    These are literals that the interpreter throws away, so they are read from the source.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(struct)))
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef), struct
    docs: dict[str, str] = {}
    for base in struct.__bases__:
        if issubclass(base, Options) and base is not Options:
            docs |= field_docs(base)
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                docs[name] = " ".join(doc.split())
            case _:
                pass
    return docs


def block_paths() -> Iterator[tuple[KeyPath, type[msgspec.Struct]]]:
    """Every block of a scenario, outer ones first, with the struct that defines it."""
    yield from _blocks_within((), Scenario)


def _blocks_within(path: KeyPath, struct: type[msgspec.Struct]) -> Iterator[tuple[KeyPath, type[msgspec.Struct]]]:
    yield path, struct
    for field in shape_of(struct).fields:
        if inner := _block(field.type):
            yield from _blocks_within((*path, field.encode_name), inner.cls)
        elif (item := _item_block(field.type)) and not issubclass(struct, item.cls):  # those have its keys already
            yield from _blocks_within((*path, f"{field.encode_name}[]"), item.cls)


def _block(shape: shapes.Type) -> shapes.StructType | None:
    if isinstance(shape, shapes.UnionType):
        return next((part for part in shape.types if isinstance(part, shapes.StructType)), None)
    return shape if isinstance(shape, shapes.StructType) else None


def _item_block(shape: shapes.Type) -> shapes.StructType | None:
    return _block(shape.item_type) if isinstance(shape, shapes.VarTupleType) else None


def _leaves(data: Plain, path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path


def _hint(path: KeyPath, known: tuple[str, ...]) -> str:
    *outer, key = path
    if hint := _elsewhere(path):
        return hint
    if near := difflib.get_close_matches(str(key), known, n=1):
        return f"no such key; did you mean '{near[0]}'?"
    block = ".".join(map(str, outer))
    return f"no such key; {f'the keys of {block} are' if block else 'the blocks are'} {', '.join(known)}"


def _elsewhere(path: KeyPath) -> str:
    """Where a key of this name is known, here or in other systems; empty where it is not."""
    if term := known_elsewhere(path):
        return term
    blocks = [at for at, struct in block_paths() if path[-1] in struct.__struct_fields__]
    # Datasets of an evaluation may say most of it again: that is seldom what was meant.
    blocks = [at for at in blocks if "evaluation" not in at] or blocks
    blocks = [at for at in blocks if at == path[-2:-1]] or [at for at in blocks if at[-1:] == path[-2:-1]] or blocks
    names = [".".join(map(str, (*at, path[-1]))) for at in blocks]
    return f"no such key here; did you mean {' or '.join(names)}?" if names else ""


def _bounds(shape: shapes.IntType | shapes.FloatType) -> str:
    low, high = (shape.ge, shape.gt), (shape.le, shape.lt)
    match low, high:
        case (None, None), (None, None):
            return ""
        case (float() | int() as least, None), (float() | int() as most, None):
            return f" from {least:g} to {most:g}"
        case _:
            parts = (
                ("at least", shape.ge), ("above", shape.gt), ("at most", shape.le), ("below", shape.lt)
            )  # fmt: skip
            return ", " + " and ".join(f"{word} {bound:g}" for word, bound in parts if bound is not None)


def _one_of(values: list[str]) -> str:
    if len(values) == 1:
        return values[0]
    return f"{', '.join(values[:-1])} or {values[-1]}"
