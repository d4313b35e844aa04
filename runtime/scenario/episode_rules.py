"""How the ``episode:`` block has to fit the others."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from penstock.backends.engines.options import kinds
from penstock.backends.episodes.functions.loading import MULTI_TURN
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


def episode_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """The key to change, and what is wrong with it."""
    episode = s.episode
    if episode.kind == "single":
        yield from _function_rules(s)
        return
    if "simulated" in kinds(s.engines):
        yield (
            ("episode", "kind"),
            "a simulated engine has no model to talk to; use torch or sglang engines",
        )
    yield from _function_rules(s)
    try:
        ipaddress.ip_address(episode.host)
    except ValueError:
        yield ("episode", "host"), f"must be an address of the engines' machine, or 0.0.0.0; found '{episode.host}'"
    is_session = episode.kind == "gateway"
    take_s, taken = (episode.take_timeout_s, "episode.take_timeout_s + ") if is_session else (0.0, "")
    silence_s = take_s + episode.idle_timeout_s
    if silence_s >= s.prompt_source.lease_timeout_s:
        yield (
            ("prompt_source", "lease_timeout_s"),
            f"an episode may wait {silence_s:g} s without a token ({taken}episode.idle_timeout_s), "
            f"and an engine that makes none for {s.prompt_source.lease_timeout_s:g} s is replaced; raise it above "
            "that, or lower those",
        )
    longest_s = take_s + episode.timeout_s
    if s.staleness.update_mode is UpdateMode.DRAIN and longest_s >= s.weights.drain_timeout_s:
        yield (
            ("weights", "drain_timeout_s"),
            f"an engine that drains waits for its episodes, up to {longest_s:g} s ({taken}episode.timeout_s), and is "
            f"replaced after {s.weights.drain_timeout_s:g} s; raise it above that, lower those, or let "
            "staleness.update_mode be interrupt or in_flight",
        )


def _function_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    episode = s.episode
    if episode.kind != "function":
        unused = [name for name in ("generate", "tools", "environment") if getattr(episode, name)]
        for name in unused:
            yield ("episode", name), f"is of episode.kind: function, and the kind is {episode.kind}; set it to function"
        return
    if episode.generate is None:
        yield (
            ("episode", "generate"),
            "with episode.kind: function say who plays: file.py:function, or multi_turn",
        )
        return
    is_ready = ":" not in episode.generate
    if is_ready and episode.generate != MULTI_TURN:
        yield ("episode", "generate"), f"{episode.generate!r} is neither file.py:function nor {MULTI_TURN}"
    if is_ready and not episode.tools and episode.environment is None:
        yield ("episode", "tools"), "multi_turn needs tools or an environment; without either use episode.kind: single"
    if episode.tool_timeout_s >= episode.idle_timeout_s:
        yield (
            ("episode", "tool_timeout_s"),
            f"a tool may take {episode.tool_timeout_s:g} s, and an episode that asks the model for nothing for "
            f"{episode.idle_timeout_s:g} s (episode.idle_timeout_s) is given up; lower the one or raise the other",
        )
