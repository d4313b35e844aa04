"""How the ``episode:`` block has to fit the others."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from penstock.backends.engines.options import kinds
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


def episode_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """The key to change, and what is wrong with it."""
    episode = s.episode
    if episode.kind == "single":
        return
    if "simulated" in kinds(s.engines):
        yield (
            ("episode", "kind"),
            "a simulated engine has no model to talk to; use torch or sglang engines",
        )
    try:
        ipaddress.ip_address(episode.host)
    except ValueError:
        yield ("episode", "host"), f"must be an address of the engines' machine, or 0.0.0.0; found '{episode.host}'"
    silence_s = episode.take_timeout_s + episode.idle_timeout_s
    if silence_s >= s.prompt_source.lease_timeout_s:
        yield (
            ("prompt_source", "lease_timeout_s"),
            f"a session may wait {silence_s:g} s without a token (episode.take_timeout_s + episode.idle_timeout_s), "
            f"and an engine that makes none for {s.prompt_source.lease_timeout_s:g} s is replaced; raise it above "
            "that, or lower those",
        )
    longest_s = episode.take_timeout_s + episode.timeout_s
    if s.staleness.update_mode is UpdateMode.DRAIN and longest_s >= s.weights.drain_timeout_s:
        yield (
            ("weights", "drain_timeout_s"),
            f"an engine that drains waits for its sessions, up to {longest_s:g} s (episode.take_timeout_s + "
            f"episode.timeout_s), and is replaced after {s.weights.drain_timeout_s:g} s; raise it above that, lower "
            "those, or let staleness.update_mode be interrupt or in_flight",
        )
