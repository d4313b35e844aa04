"""The contract of a routing policy."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from penstock.actors.prompt_source.policies import RoutedEngine, RoutedSample
from penstock.runtime.contracts.checks import check_same
from penstock.runtime.run.own_routing import OwnRouting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.contracts.checks import Checks


def check_routing(checks: Checks) -> None:
    """Of its choices, with one engine and with several, idle and nearly full."""
    built: list[OwnRouting] = []
    if checks.run("it is built without arguments and has a method choose", lambda: built.append(_built(checks))):
        checks.run("choose names one of the engines, or none", lambda: _check_choices(built[0]))
        checks.run("two of it that are asked the same answer the same", lambda: _check_pure(checks))


def _built(checks: Checks) -> OwnRouting:
    return OwnRouting(checks.spec)


def _choices(policy: OwnRouting) -> Iterator[str | None]:
    for count, full, row in product((1, 2, 5), (False, True), range(4)):
        engines = [
            RoutedEngine(name=f"engine/{i}", num_slots=4, capacity=6, load=5 if full else i % 3, version=i % 2)
            for i in range(count)
        ]
        for index in range(3):
            last = engines[0].name if index else ""
            yield policy.choose(
                RoutedSample(
                    group_id=row,
                    index=index,
                    row=row,
                    num_prompt_tokens=7,
                    min_version=1,
                    deadline_version=3,
                    group_engine=last,
                ),
                engines,
            )


def _check_choices(policy: OwnRouting) -> None:
    list(_choices(policy))


def _check_pure(checks: Checks) -> None:
    check_same(list(_choices(_built(checks))), list(_choices(_built(checks))))
