"""What is decided before a server is started, and what one that was left is asked."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest
import torch
from sglang_replay import events, replay

from penstock.backends.engines.served.base.hand_over import NotHandedOverError
from penstock.backends.engines.served.base.opened import libraries_of
from penstock.backends.engines.served.base.taking_over import LeftWeights
from penstock.backends.engines.served.base.updates import checksum_of
from penstock.backends.engines.served.sglang.opening import look_at, meets_itself

if TYPE_CHECKING:
    from penstock.backends.engines.served.base.launched import LaunchedServer

TIMEOUT_S = 20.0


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


LEFT = LeftWeights(label="v3", checksum=checksum_of(["9031"]))
SUCCESS = b'{"success": true, "message": "Success"}'
INFO = {
    "version": "0.5.23", "model_path": "/m", "max_total_num_tokens": 1, "max_req_input_len": 1,
    "internal_states": [{"weight_version": "v3", "effective_max_running_requests_per_dp": 1}],
}  # fmt: skip
RANK: dict[str, object] = {"checksums": {}, "per_gpu_checksum": "6fbd", "parallelism_info": []}
CHECKED: dict[str, object] = {"success": True, "message": "", "ranks": [RANK]}
IDLE = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0, "max_total_num_tokens": 1}
ANSWERS = {
    "/end_weight_update": (200, SUCCESS),
    "/continue_generation": (200, SUCCESS),
    "/flush_cache": (200, SUCCESS),
    "/server_info": (200, msgspec.json.encode(INFO)),
    "/weights_checker": (200, msgspec.json.encode(CHECKED | {"per_engine_checksum": "9031"})),
    "/v1/loads": (200, msgspec.json.encode({"loads": [IDLE]})),
}


def asked_of(left: LeftWeights | None) -> list[str]:
    """What a server is asked that serves version v3 and was left with these weights, or amid a load."""

    async def work() -> list[str]:
        async with replay(events(b"{}")) as server:
            server.control = ANSWERS
            launched = SimpleNamespace(address=server.url, settings=SimpleNamespace(admin_api_key="key"))
            await look_at(cast("LaunchedServer", launched), left)
            return [path for path, _, _ in server.told]

    return asyncio.run(asyncio.wait_for(work(), TIMEOUT_S))


def test_a_server_that_was_left_amid_a_load_is_not_asked_for_a_checksum_that_nothing_is_compared_with() -> None:
    asked = asked_of(LEFT)
    assert "/weights_checker" in asked
    assert asked_of(None) == [path for path in asked if path not in ("/server_info", "/weights_checker")]


@pytest.mark.parametrize("other", [{"label": "v4"}, {"checksum": "0" * 64}])
def test_a_server_with_other_weights_than_it_was_left_with_is_refused(other: dict[str, str]) -> None:
    with pytest.raises(NotHandedOverError, match="its weights are not those that it was left with: v3, checksum"):
        asked_of(msgspec.structs.replace(LEFT, **other))
