"""What is decided before a server is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from penstock.backends.engines.served.base.opened import libraries_of
from penstock.backends.engines.served.sglang.opening import meets_itself


def test_the_libraries_of_an_environment_are_read_without_running_it() -> None:
    found = libraries_of(Path(sys.executable))
    assert found.torch == str(torch.__version__)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"tp_size": 8, "attn_dp_size": 1}, False),
        ({"attn_dp_size": 4}, True),
        ({"enable_dp_attention": True}, True),
        ({"enable_dp_attention": False, "dp_size": 2}, False),
    ],
)
def test_data_parallel_attention_needs_a_place_to_meet_on_one_node_too(
    options: dict[str, bool | int], expected: bool
) -> None:
    assert meets_itself(dict(options)) is expected
