"""What engines that join and leave (``engines.min``, ``engines.max``), or whose machines may be taken
(``engines.notice_s``), need of the rest of a scenario."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.options import NOTICE_CLOUDS, are_elastic, most_engines
from penstock.backends.engines.spec import ENGINES, are_modelled, capabilities_of, engines_that
from penstock.backends.protocol import Capability
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

JOINING: Final = frozenset((Capability.EMBEDDED, Capability.MODELLED, Capability.JOINS))
"""Any of these is enough for an engine to join and leave."""


def notice_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """Of engines whose machines may be taken."""
    engines = s.engines
    if engines.notice_s is None:
        for name, value in (("notice_file", engines.notice_file), ("notice_url", engines.notice_url)):
            if value is not None:
                yield ("engines", name), "how long before says engines.notice_s; set it as well"
        return
    url = engines.notice_url
    if url is not None and url not in NOTICE_CLOUDS and not url.startswith(("http://", "https://")):
        yield (
            ("engines", "notice_url"),
            f"{url!r} cannot be asked; give one of {', '.join(NOTICE_CLOUDS)}, or an address that begins with "
            "http:// or https://",
        )
    key = ("engines", "notice_s")
    if engines.placement == "colocate":
        yield key, "the machine of a colocated engine is the learner's, which cannot leave; remove it"
    if s.episode.kind == "gateway":
        yield (
            key,
            "an agent outside talks to one engine for a whole session, which an engine that leaves would break off; "
            "take another episode.kind, or remove engines.notice_s",
        )


def _scale_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """Of engines whose number follows the bound."""
    key = ("engines", "scale")
    if not are_elastic(s.engines):
        yield (
            key,
            f"by_bound has no room at engines.count = {s.engines.count}: set engines.max above it or engines.min below",
        )
    if s.engines.addresses:
        yield key, "by_bound cannot start servers that run already (engines.addresses); set it to fixed"
    if s.run.only is not None:
        yield key, f"by_bound needs engines and a learner that trains, and run.only is {s.run.only}; set it to fixed"
    if s.staleness.max_staleness == 0:
        yield (
            key,
            "with staleness.max_staleness 0 generation and training take turns, so both bind; take another "
            "staleness.policy, or set it to fixed",
        )


def _lending_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """Of engines that take the learner's devices while it waits."""
    key, engines = ("engines", "lent"), s.engines
    room = most_engines(engines) - engines.count
    if engines.lent > room:
        yield (
            key,
            f"the run begins with engines.count = {engines.count}, which have devices of their own, and the last of "
            f"engines.max are lent the learner's: set engines.max to {engines.count + engines.lent} or more",
        )
    if s.run.only is not None:
        yield key, "nothing trains, so there is no learner that could lend its devices; remove it, or run.only"
    if engines.addresses:
        yield key, "servers that run already are on no devices of the learner's; remove it, or engines.addresses"
    if Capability.FROM_ROWS in capabilities_of(engines):
        yield key, "engines that answer from rows use no device; remove it"
    if not are_modelled(engines):
        yield from _devices_to_lend(s)


def _devices_to_lend(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """Real engines go where the learner's ranks are, on one node with all of them."""
    key, engines, learner = ("engines", "lent"), s.engines, s.learner
    if engines.device != learner.device:
        yield (
            key,
            f"the engines are on {engines.device} and the learner on {learner.device}, so that lends nothing; give "
            "both the same device, or remove it",
        )
    if engines.device == "cpu":
        return
    try:
        size = ENGINES.spec(engines.backend).size(engines)
    except UserFault:
        return  # another rule's to say
    if size is None:
        return
    if size.node_counts[0] > 1:
        yield key, "an engine over several nodes cannot be on a learner's GPUs, which are on one; remove it, or nnodes"
    elif (num_gpus := engines.lent * size.num_gpus) > learner.num_ranks:
        yield (
            key,
            f"engines that are lent the learner's GPUs take {size.num_gpus} each, {num_gpus} together, and it has "
            f"{learner.num_ranks}, one for each of learner.num_ranks; lend to fewer engines, or to smaller ones",
        )


def elastic_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """Rules that are broken: the key to change, and the reason."""
    engines = s.engines
    if engines.min is not None and engines.min > engines.count:
        yield ("engines", "min"), f"the run begins with engines.count = {engines.count}; set it to that or less"
    if engines.max is not None and engines.max < engines.count:
        yield ("engines", "max"), f"the run begins with engines.count = {engines.count}; set it to that or more"
    if engines.lent:
        yield from _lending_rules(s)
    if engines.scale == "by_bound":
        yield from _scale_rules(s)
    if not are_elastic(engines):
        return
    key = ("engines", "max" if engines.max is not None else "min")
    if engines.more:
        yield (
            key,
            "engines that join and leave are all of one kind: remove engines.more, or engines.min and engines.max",
        )
    if engines.placement == "colocate":
        yield (
            key,
            "colocated engines take turns with the learner, which has to know all of them from the start; take another "
            "engines.placement, or remove engines.min and engines.max",
        )
    if not JOINING & capabilities_of(engines):
        able = ", ".join(dict.fromkeys(name for each in sorted(JOINING) for name in engines_that(each)))
        yield (
            key,
            f"engines of the backend {engines.backend} cannot join or leave a run, those of {able} can; remove "
            "engines.min and engines.max",
        )
    if engines.router is not None:
        yield key, "the servers behind a router are one engine; remove engines.router, or engines.min and engines.max"
    if s.episode.kind == "gateway":
        yield (
            key,
            "an agent outside talks to one engine for a whole session, which an engine that leaves would break off; "
            "take another episode.kind, or remove engines.min and engines.max",
        )
    if s.reward.judge.engine == "self":
        yield (
            key,
            "a judge on the run's own engines asks those of the start; give reward.judge.url, or remove engines.min "
            "and engines.max",
        )
