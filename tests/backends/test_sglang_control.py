"""The control calls against what a SGLang server answers to them, and what they send."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pytest
from sglang_replay import ReplayServer, replay

from penstock.backends.engines.served.base.health import Check
from penstock.backends.engines.served.base.http import BadReply, CallError, Refused, ServerBusy, ServerError, ServerHttp
from penstock.backends.engines.served.sglang.bucket_push import ServerRanks, reaches_draft
from penstock.backends.engines.served.sglang.control import (
    CacheNotFlushed,
    GroupMember,
    NoOpenSession,
    PauseMode,
    SessionAlreadyOpen,
    SglangControl,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TIMEOUT_S = 20.0
T = TypeVar("T")

OPEN = b'{"success": false, "message": "a weight-update session is already open; call end_weight_update() first"}'
NOT_OPEN = b'{"success": false, "message": "no weight-update session is open; call begin_weight_update() first"}'
OUTSIDE = (
    b'{"success": false, "message": "update_weights_from_tensor must run between begin_weight_update() and '
    b'end_weight_update()"}'
)
NOT_FLUSHED = (
    b'{"success": false, "message": "Weights were updated, but the cache was not flushed because requests are still '
    b'running or queued. Retract or finish them, then call /flush_cache.", "num_paused_requests": 0}'
)
SUCCESS = b'{"success": true, "message": "Success"}'


def ask(
    act: Callable[[SglangControl], Awaitable[T]], answers: dict[str, tuple[int, bytes]]
) -> tuple[T, list[tuple[str, Any, str]]]:
    """What the call returned, and what the server was told."""

    async def work() -> tuple[T, ReplayServer]:
        async with replay() as server:
            server.control = answers
            http = ServerHttp(server.url, admin_api_key="secret")
            try:
                return await act(SglangControl(http)), server
            finally:
                await http.close()

    returned, server = asyncio.run(asyncio.wait_for(work(), TIMEOUT_S))
    return returned, server.told


TENSORS = ["QUJD"]
GROUP = GroupMember("10.0.0.1", 29500, 1, 3, "weights", "nccl")

TOLD: dict[str, tuple[Callable[[SglangControl], Awaitable[None]], str, dict[str, Any]]] = {
    "pause": (lambda c: c.pause(PauseMode.RETRACT), "/pause_generation", {"mode": "retract"}),
    "pause in place": (lambda c: c.pause(PauseMode.IN_PLACE), "/pause_generation", {"mode": "in_place"}),
    "continue": (lambda c: c.continue_(), "/continue_generation", {}),
    "begin": (lambda c: c.begin_update(), "/begin_weight_update", {"selector": "target"}),
    "end": (lambda c: c.end_update(), "/end_weight_update", {}),
    "from disk": (
        lambda c: c.update_from_disk("/weights/7", version="v7", flush=False),
        "/update_weights_from_disk",
        {"model_path": "/weights/7", "weight_version": "v7", "flush_cache": False, "abort_all_requests": False},
    ),
    "from tensors": (
        lambda c: c.update_from_tensor(TENSORS, load_format="flattened_bucket", flush=True),
        "/update_weights_from_tensor",
        {
            "serialized_named_tensors": TENSORS,
            "load_format": "flattened_bucket",
            "flush_cache": True,
            "weight_version": None,
            "abort_all_requests": False,
            "selector": "target",
        },
    ),
    "from a group": (
        lambda c: c.update_from_distributed(["a"], ["float32"], [[2, 3]], group="weights", flush=False, version="v8"),
        "/update_weights_from_distributed",
        {
            "names": ["a"],
            "dtypes": ["float32"],
            "shapes": [[2, 3]],
            "group_name": "weights",
            "weight_version": "v8",
            "flush_cache": False,
            "load_format": None,
            "abort_all_requests": False,
            "selector": "target",
        },
    ),
    "join": (
        lambda c: c.init_group(GROUP),
        "/init_weights_update_group",
        {
            "master_address": "10.0.0.1",
            "master_port": 29500,
            "rank_offset": 1,
            "world_size": 3,
            "group_name": "weights",
            "backend": "nccl",
        },
    ),
    "leave": (lambda c: c.destroy_group("weights"), "/destroy_weights_update_group", {"group_name": "weights"}),
    "version": (
        lambda c: c.update_weight_version("v9"),
        "/update_weight_version",
        {"new_version": "v9", "abort_all_requests": False},
    ),
    "adapter": (
        lambda c: c.load_adapter("v9.1.9", "/weights/v9"),
        "/load_lora_adapter",
        {"lora_name": "v9.1.9", "lora_path": "/weights/v9"},
    ),
    "no adapter": (lambda c: c.unload_adapter("v9.1.9"), "/unload_lora_adapter", {"lora_name": "v9.1.9"}),
    "release": (lambda c: c.release_memory(), "/release_memory_occupation", {}),
    "resume": (
        lambda c: c.resume_memory(("weights",)),
        "/resume_memory_occupation",
        {"tags": ["weights"]},
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_call_sends_what_it_says_and_leaves_nothing_to_defaults_that_abort(name: str) -> None:
    act, path, body = TOLD[name]
    _, told = ask(act, {path: (200, SUCCESS)})
    assert told == [(path, body, "")]


@pytest.mark.parametrize("name", TOLD)
def test_success_false_inside_a_200_is_a_refusal(name: str) -> None:
    act, path, _ = TOLD[name]
    with pytest.raises(Refused, match="it did not work"):
        ask(act, {path: (200, b'{"success": false, "message": "it did not work"}')})


@pytest.mark.parametrize("name", TOLD)
def test_an_error_of_the_server_is_not_swallowed(name: str) -> None:
    act, path, _ = TOLD[name]
    with pytest.raises(ServerError):
        ask(act, {path: (500, b"Internal Server Error")})


@pytest.mark.parametrize(
    ("name", "body", "error"),
    [
        ("begin", OPEN, SessionAlreadyOpen),
        ("end", NOT_OPEN, NoOpenSession),
        ("from tensors", OUTSIDE, NoOpenSession),
        ("from disk", NOT_FLUSHED, CacheNotFlushed),
        ("from disk", b'{"success": false, "message": "no such directory"}', Refused),
        ("leave", b'{"success": false, "message": "The group to be destroyed does not exist."}', Refused),
    ],
)
def test_a_refusal_is_of_the_kind_that_the_server_words(name: str, body: bytes, error: type[CallError]) -> None:
    act, path, _ = TOLD[name]
    with pytest.raises(CallError) as caught:
        ask(act, {path: (400, body)})
    assert type(caught.value) is error
    assert caught.value.status == 400


def test_a_flush_waits_at_the_server_and_says_when_requests_stood_in_the_way() -> None:
    _, told = ask(lambda c: c.flush_cache(wait_s=2.5), {"/flush_cache": (200, b"Cache flushed.\n")})
    assert told == [("/flush_cache", {}, "timeout=2.5")]
    with pytest.raises(CacheNotFlushed):
        ask(lambda c: c.flush_cache(), {"/flush_cache": (400, b"Flush cache failed.\n")})


@pytest.mark.parametrize(("code", "is_paused"), [(200, False), (503, True)])
def test_the_main_process_says_whether_generation_is_paused(code: int, is_paused: bool) -> None:
    assert ask(lambda c: c.ask(Check.FRONT, TIMEOUT_S), {"/ready": (code, b"")})[0] is is_paused
    with pytest.raises(ServerError):
        ask(lambda c: c.ask(Check.FRONT, TIMEOUT_S), {"/ready": (500, b"")})


@pytest.mark.parametrize(("check", "code"), [(Check.FRONT, 504), (Check.SCHEDULER, 503)])
def test_a_part_that_is_merely_busy_says_nothing_of_a_pause(check: Check, code: int) -> None:
    with pytest.raises(ServerBusy):
        ask(lambda c: c.ask(check, TIMEOUT_S), {SglangControl.questions[check]: (code, b"")})


def test_loads_are_added_up_over_data_parallel_ranks() -> None:
    rank = {
        "num_running_reqs": 3,
        "num_waiting_reqs": 2,
        "num_used_tokens": 100,
        "max_total_num_tokens": 400,
        "queues": {"waiting": 2, "paused": 1, "retracted": 4},
    }
    body = msgspec.json.encode({"timestamp": "now", "loads": [rank, rank]})
    loads, _ = ask(lambda c: c.loads(), {"/v1/loads": (200, body)})
    assert (loads.num_running, loads.num_waiting, loads.num_retracted) == (6, 4, 8)
    assert loads.token_usage == 0.25


def test_checksums_are_told_by_rank_and_parameter() -> None:
    rank = {
        "checksums": {"model.norm.weight": "2f20"},
        "per_gpu_checksum": "6fbd",
        "parallelism_info": [{"role": "target", "tp_rank": 1, "tp_size": 2, "dp_rank": 0, "pp_rank": 0}],
    }
    body = {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": "9031"}
    answers = {"/weights_checker": (200, msgspec.json.encode(body))}
    found, told = ask(lambda c: c.weights_checksum(), answers)
    assert told == [("/weights_checker", {"action": "checksum"}, "")]
    assert (found.overall, found.ranks[0].tp_rank, found.ranks[0].overall) == ("9031", 1, "6fbd")
    assert found.ranks[0].checksums == {"model.norm.weight": "2f20"}


def test_checksums_of_no_rank_are_no_answer() -> None:
    with pytest.raises(BadReply):
        ask(lambda c: c.weights_checksum(), {"/weights_checker": (200, b'{"success": true, "ranks": []}')})
    with pytest.raises(Refused):
        ask(lambda c: c.weights_checksum(), {"/weights_checker": (200, b'{"success": false, "message": "no"}')})


def test_what_the_server_says_of_itself_is_as_its_scheduler_resolved_it() -> None:
    state = {
        "weight_version": "v3",
        "effective_max_running_requests_per_dp": 16,
        "attention_backend": "torch_native",
        "incremental_streaming_output": True,
        "tp_size": 2,
        "dp_size": 2,
        "admin_api_key": "secret",
    }
    body = {
        "version": "0.5.23",
        "model_path": "/m",
        "weight_version": "default",
        "attention_backend": None,
        "max_total_num_tokens": 16384,
        "max_req_input_len": 2042,
        "internal_states": [state, state],
    }
    info, _ = ask(lambda c: c.server_info(), {"/server_info": (200, msgspec.json.encode(body))})
    assert (info.weight_version, info.attention_backend, info.incremental_streaming) == ("v3", "torch_native", True)
    assert info.max_running_requests == 32
    assert not info.deterministic
    assert "secret" not in repr(info)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/m"}, True),
        ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/draft"}, False),
        ({}, False),
    ],
)
def test_a_server_says_whether_it_drafts_with_layers_of_its_model(said: dict[str, str], expected: bool) -> None:
    state = {"weight_version": "v", "effective_max_running_requests_per_dp": 1, **said}
    body = {
        "version": "0.5.23", "model_path": "/m", "max_total_num_tokens": 1, "max_req_input_len": 1,
        "internal_states": [state],
    }  # fmt: skip
    info, _ = ask(lambda c: c.server_info(), {"/server_info": (200, msgspec.json.encode(body))})
    assert info.drafts_from_model is expected


def test_an_update_reaches_the_draft_where_its_session_was_opened_for_it() -> None:
    async def update(control: SglangControl) -> None:
        for with_draft in (True, False):
            await control.begin_update(with_draft=with_draft)
            await control.update_from_tensor(TENSORS, load_format=None, flush=False)
            await control.update_from_distributed([], [], [], group="g", flush=False)

    paths = ("/begin_weight_update", "/update_weights_from_tensor", "/update_weights_from_distributed")
    _, told = ask(update, dict.fromkeys(paths, (200, SUCCESS)))
    assert [body["selector"] for _, body, _ in told] == ["all"] * 3 + ["target"] * 3


def test_layers_that_predict_reach_the_draft_that_is_made_of_them_and_no_other() -> None:
    own, other = (ServerRanks("engine-0", tp_size=1, drafts_from_model=is_own) for is_own in (True, False))
    model = ["model.layers.3.mlp.down_proj.weight", "lm_head.weight"]
    assert reaches_draft(own, [*model, "model.layers.4.eh_proj.weight"])
    assert not reaches_draft(own, model)
    assert not reaches_draft(other, [*model, "model.layers.4.eh_proj.weight"])


def test_an_answer_that_is_none_is_a_bad_reply() -> None:
    for body in (b"<html>", b"{}", b"\xff"):
        with pytest.raises(BadReply):
            ask(lambda c: c.server_info(), {"/server_info": (200, body)})
        with pytest.raises(BadReply):
            ask(lambda c: c.loads(), {"/v1/loads": (200, body)})


@pytest.mark.parametrize(("preferred", "expected"), [(None, False), ({"temperature": 0.5}, True)])
def test_sampling_parameters_that_a_server_prefers_are_told(preferred: object, expected: bool) -> None:
    body = {"model_path": "/m", "weight_version": "v1", "architectures": ["A"], "preferred_sampling_params": preferred}
    info, _ = ask(lambda c: c.model_info(), {"/model_info": (200, msgspec.json.encode(body))})
    assert info.preferred_sampling is expected
    assert info.architectures == ("A",)
