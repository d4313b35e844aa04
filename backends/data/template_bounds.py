"""What rendering a chat template may cost. It is a program of the model's authors: Jinja's sandbox keeps it from the
process around it and bounds one ``range``, but neither loops within loops nor macros that call themselves.

Invariants:

* A render is charged for every round of a loop, every call of a macro, and every character that it writes; beyond
  :data:`MAX_WORK` it ends with :class:`TemplateWorkError`. Counted and not timed, so that it ends alike everywhere.
* ``+``, ``~``, ``*`` and ``**`` are charged for what they make, the last two before they make it.

What one filter or method makes is not bounded beforehand: ``'a'.ljust(10 ** 9)`` takes its gigabyte.
"""

# Nodes and values of Jinja are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

MAX_WORK: Final = 1 << 26
"""Of one render, in characters that it writes."""
STEP_WORK: Final = 64
"""A round of a loop, as so many characters, besides what stands in it."""
CALL_WORK: Final = 1024
"""A call of a macro, a block or a recursive loop."""
EXPRESSION_WORK: Final = 4
"""Each that stands in a loop or a macro, with every round or call."""
COPIED_PER_WORK: Final = 64
"""A text that is put together and not written costs a character for so many."""
_START, _STEP, _WRITTEN, _MADE = (f"penstock {what}" for what in ("start", "step", "written", "made"))
"""Names of filters, which have a space so that no template can write them."""


class TemplateWorkError(jinja2.TemplateError):
    """A template that does too much for one conversation."""


class _Meter(threading.local):
    left: int = MAX_WORK


_METER: Final = _Meter()


def bound_rendering() -> None:
    """From now on what transformers renders in this process is bounded."""
    from transformers.utils import chat_template_utils

    utils: Any = chat_template_utils
    if utils._compile_jinja_template is not _compiled:  # a transformers without it fails here, before any rendering
        utils._compile_jinja_template = _compiled


@lru_cache
def _compiled(text: str) -> jinja2.Template:
    """In place of transformers' own, with its filters, tags and globals."""
    from transformers.utils import chat_template_utils

    utils: Any = chat_template_utils
    environment = utils._cached_compile_jinja_template("").environment
    environment.filters.update({_START: _start, _STEP: _step, _WRITTEN: _written, _MADE: _made})
    environment.intercepted_binops = frozenset({"+", "*", "**"})
    environment.binop_table.update({"+": _total, "*": _product, "**": _power})
    tree = _Metering().visit(environment.parse(text))
    tree.set_environment(environment)
    return environment.from_string(tree)  # type: ignore[no-any-return]


class _Metering(NodeTransformer):
    """Puts the charges into a template. The names of its methods are Jinja's."""

    def visit_Template(self, node: nodes.Template) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_asks(_START, nodes.Const(0), node), lineno=node.lineno))
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self._stepping(node)
        if node.test is not None:  # which is asked in a loop of its own
            node.test = nodes.And(_asks(_STEP, nodes.Const(STEP_WORK), node), node.test, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [
            each if isinstance(each, nodes.TemplateData) else _asks(_WRITTEN, each, node) for each in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _asks(_MADE, node, node)

    def _stepping(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        cost = STEP_WORK if isinstance(node, nodes.For) and not node.recursive else CALL_WORK
        cost += sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        cost += EXPRESSION_WORK * sum(1 for _ in node.find_all(nodes.Expr))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_asks(_STEP, nodes.Const(cost), node), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _stepping  # noqa: N815


def _asks(name: str, value: nodes.Expr, at: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=at.lineno)


def _spend(work: int) -> None:
    _METER.left -= work
    if _METER.left < 0:
        raise TemplateWorkError(f"does more than {MAX_WORK // STEP_WORK} rounds of loops or {MAX_WORK} characters")


# They are given the context, which they do not need, so that Jinja does not work them out when it compiles.


@jinja2.pass_context
def _start(_: object, value: int) -> int:
    _METER.left = MAX_WORK
    return value


@jinja2.pass_context
def _step(_: object, work: int) -> bool:
    _spend(work)
    return True


@jinja2.pass_context
def _written(_: object, value: object) -> str:
    text = str(value)
    _spend(len(text))
    return text


@jinja2.pass_context
def _made(_: object, value: object) -> object:
    if isinstance(value, str):
        _spend(len(value) // COPIED_PER_WORK if len(value) <= MAX_WORK else len(value))
    elif isinstance(value, list | tuple):
        _spend(len(value))
    return value


def _total(left: Any, right: Any) -> object:  # noqa: ANN401 - whatever a template adds, and so on
    return _made(None, left + right)


def _product(left: Any, right: Any) -> object:  # noqa: ANN401
    if isinstance(left, int) and isinstance(right, int):
        _spend_bits(left.bit_length() + right.bit_length())
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(times, int):
            _spend(len(many) * max(0, times))
    return left * right


def _power(left: Any, right: Any) -> object:  # noqa: ANN401
    if isinstance(left, int) and isinstance(right, int):
        _spend_bits(left.bit_length() * max(0, right))
    return left**right


def _spend_bits(bits: int) -> None:
    """Of a whole number: numbers of everyday cost nothing, and one of 65536 bits everything."""
    _spend(bits // 64 << 16)
