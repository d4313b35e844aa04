"""How the ``episode:`` block has to fit the others."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.spec import are_modelled, unable
from penstock.backends.episodes.functions.loading import MULTI_TURN
from penstock.backends.protocol import Capability
from penstock.messages.training import UpdateMode
from penstock.runtime.scenario.evaluation_rules import sets_of
from penstock.runtime.scenario.media_rules import shown_rules
from penstock.runtime.scenario.row_metadata import unnamed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


OF_FUNCTIONS: Final = ("generate", "functions", "function_key", "tools", "environment", "images")


def episode_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """The key to change, and what is wrong with it."""
    episode = s.episode
    yield from _sampling_rules(s)
    yield from shown_rules(s)
    if episode.kind == "single":
        yield from _function_rules(s)
        return
    if are_modelled(s.engines):
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


def _sampling_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    path, others = ("episode", "follow_sampling"), unable(s.engines, Capability.SAMPLES_PER_CALL)
    if s.episode.follow_sampling and s.episode.kind != "gateway":
        yield path, f"is of episode.kind: gateway, and the kind is {s.episode.kind}; remove it"
    elif s.episode.follow_sampling and others:
        yield (
            path,
            f"engines of {', '.join(others)} draw as block sampling: says, not as a request does; set it to false",
        )


def _function_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    episode = s.episode
    if episode.kind != "function":
        for each in sets_of(s):
            if each.generate is not None:
                yield (
                    ("episode", "kind"),
                    f"is {episode.kind}, and the evaluation {each.name!r} has its answers played by a function; set it "
                    "to function, or remove the generate of the evaluation",
                )
        others = ("images",) if episode.kind == "gateway" else ()
        for name in (name for name in OF_FUNCTIONS if getattr(episode, name) and name not in others):
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
    yield from _choice_rules(s)
    if episode.tool_timeout_s >= episode.idle_timeout_s:
        yield (
            ("episode", "tool_timeout_s"),
            f"a tool may take {episode.tool_timeout_s:g} s, and an episode that asks the model for nothing for "
            f"{episode.idle_timeout_s:g} s (episode.idle_timeout_s) is given up; lower the one or raise the other",
        )
    if is_ready and episode.tools and not s.data.chat_template:
        yield ("data", "chat_template"), "multi_turn tells the model of its tools in the chat template; set it to true"


def _choice_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    episode = s.episode
    names = [named.name for named in episode.functions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        yield ("episode", "functions"), f"two functions have the name {twice!r}"
    if bool(names) != (episode.function_key is not None):
        key, other = ("function_key", "functions") if names else ("functions", "function_key")
        yield ("episode", key), f"belongs to episode.{other}; give both or neither"
    elif episode.function_key is not None and (
        problem := unnamed(s, episode.function_key, "no episode gets to see it")
    ):
        yield ("episode", "function_key"), problem
