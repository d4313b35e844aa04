"""How the ``episode:`` block has to fit the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.messages.errors import UserFault
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from pathlib import Path

BASE = """\
run: {name: r}
data: {path: "lines:100"}
model: {make: xs}
episode: {kind: gateway}
"""


def load(tmp_path: Path, *overrides: str) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(BASE)
    load_scenario(file, overrides)


def test_the_defaults_fit_each_other_under_every_policy(tmp_path: Path) -> None:
    for policy in ("sync", "one_step_off", "fully_async"):
        load(tmp_path, f"staleness.policy={policy}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("engines.backend=simulated", "learner.backend=simulated"), r"episode\.kind.*no model to talk to"),
        (("episode.kind=single", "episode.follow_sampling=true"), r"episode\.follow_sampling.*the kind is single"),
        (
            ("engines.backend=simulated", "learner.backend=simulated", "episode.follow_sampling=true"),
            r"episode\.follow_sampling.*engines of simulated draw as block sampling: says",
        ),
        (("episode.host=nowhere",), r"episode\.host.*found 'nowhere'"),
        (("episode.idle_timeout_s=400",), r"prompt_source\.lease_timeout_s.*640 s without a token"),
        (("staleness.policy=sync", "episode.timeout_s=3500"), r"weights\.drain_timeout_s.*up to 3740 s"),
    ],
)
def test_a_block_that_does_not_fit_is_refused_with_the_key_to_change(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserFault, match=message):
        load(tmp_path, *overrides)


def test_a_long_session_is_no_matter_where_nothing_drains(tmp_path: Path) -> None:
    load(tmp_path, "staleness.policy=fully_async", "staleness.update_mode=interrupt", "episode.timeout_s=7200")


def test_timeouts_of_sessions_are_no_matter_where_there_are_none(tmp_path: Path) -> None:
    load(tmp_path, "episode.kind=single", "episode.timeout_s=99999", "episode.idle_timeout_s=99999")


FUNCTION = ("episode.kind=function", "episode.generate=mine.py:episode", "staleness.policy=fully_async")


def test_a_function_plays_with_the_defaults(tmp_path: Path) -> None:
    load(tmp_path, *FUNCTION)
    load(tmp_path, *FUNCTION[:2], "staleness.policy=sync")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("episode.kind=function",), r"episode\.generate.*say who plays: file\.py:function, or multi_turn"),
        ((*FUNCTION, "episode.generate=multi"), r"episode\.generate.*neither file\.py:function nor multi_turn"),
        ((*FUNCTION, "episode.generate=multi_turn"), r"episode\.tools.*needs tools or an environment"),
        (
            (*FUNCTION, "episode.generate=multi_turn", "episode.tools=[calculator]"),
            r"data\.chat_template.*set it to true",
        ),
        (("episode.generate=mine.py:episode",), r"episode\.generate.*the kind is gateway"),
        ((*FUNCTION, "episode.tool_timeout_s=500"), r"episode\.tool_timeout_s.*episode\.idle_timeout_s"),
        ((*FUNCTION, "episode.idle_timeout_s=700"), r"prompt_source\.lease_timeout_s.*700 s without a token"),
        ((*FUNCTION, "episode.function_key=how"), r"episode\.functions.*give both or neither"),
        (
            (*FUNCTION, "episode.function_key=how", "episode.functions=[{name: a, generate: mine.py:a}]"),
            r"episode\.function_key.*neither among data\.metadata_keys",
        ),
        (
            (*FUNCTION, "engines.backend=simulated", "learner.backend=simulated"),
            r"episode\.kind.*no model to talk to",
        ),
    ],
)
def test_a_function_that_does_not_fit_is_refused_with_the_key_to_change(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserFault, match=message):
        load(tmp_path, *overrides)
