"""The command line, the environment and the log of an SGLang server of ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypedDict, Unpack, cast

import pytest

from penstock.backends.engines.options import EnginesOptions
from penstock.backends.engines.served.sglang.log_lines import news_in, port_in, reason_in, says_ready, tail_of
from penstock.backends.engines.served.sglang.opening import launch_options, passes_per_line
from penstock.backends.engines.served.sglang.server_options import command_line
from penstock.backends.engines.served.sglang.settings import SglangSettings
from penstock.backends.engines.spec import EngineSetup

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.engines.options import OptionValue
    from penstock.backends.engines.served.sglang.server_facts import ServerInfo

PORT_LINE = "[2026-11-21 18:00:15] INFO:     Uvicorn running on http://127.0.0.1:35967 (Press CTRL+C to quit)"
BAR = "Multi-thread loading shards:  50% Completed | 1/2 [00:00<?, ?it/s]"


class Changes(TypedDict, total=False):
    options: tuple[str, ...]
    owner: str
    environment: dict[str, str]
    on_cpu: bool
    num_threads: int
    num_nodes: int
    node_rank: int
    dist_init_address: str
    admin_api_key: str


def settings(**changes: Unpack[Changes]) -> SglangSettings:
    plain = SglangSettings(
        python=Path("/env/bin/python"), model_folder=Path("/models/m"), options=("--tp", "2"),
        admin_api_key="secret1", log_path=Path("/logs/server.log"), start_timeout_s=60.0,
    )  # fmt: skip
    return replace(plain, **changes)


def test_the_key_is_on_no_command_line() -> None:
    words = settings().command(Path("/tmp/key.yaml"))
    assert not any("secret1" in word for word in words)
    assert words[words.index("--config") + 1] == "/tmp/key.yaml"
    assert settings().key_file_text() == "admin-api-key: secret1\n"


def test_the_port_is_the_kernels_and_the_warm_up_off() -> None:
    words = settings().command(Path("k.yaml"))
    assert words[words.index("--port") + 1] == "0"
    assert words.count("--skip-server-warmup") == 1
    assert settings(options=("--skip-server-warmup",)).command(Path("k")).count("--skip-server-warmup") == 1


def test_several_nodes_meet_at_one_place() -> None:
    words = settings(num_nodes=2, node_rank=1, dist_init_address="10.0.0.1:5000").command(Path("k.yaml"))
    text = " ".join(words)
    assert "--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:5000" in text


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"options": ("--port", "30000")}, "--port is set by Penstock itself"),
        ({"options": ("--admin-api-key=x",)}, "--admin-api-key is set by Penstock itself"),
        ({"options": ("--log-level", "warning")}, "the port is read from the server's log"),
        ({"options": ("--log-level-http=error",)}, "the port is read from the server's log"),
        ({"num_nodes": 2}, "needs dist_init_address"),
        ({"num_nodes": 2, "node_rank": 2, "dist_init_address": "a:1"}, "node_rank must be between 0 and 1"),
        ({"admin_api_key": ""}, "letters and digits"),
    ],
)
def test_what_the_launch_decides_itself_is_refused(changes: Changes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        settings(**changes)


def test_nothing_of_our_python_of_ray_or_of_a_proxy_gets_into_the_environment() -> None:
    ours = {
        "PYTHONPATH": "/x", "PYTHONHOME": "/x", "RAY_ADDRESS": "a", "MASTER_PORT": "1", "RANK": "3",
        "VIRTUAL_ENV": "/v", "HTTPS_PROXY": "p", "http_proxy": "p", "PENSTOCK_STORY_PIPE": "7", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    kept = {
        "PENSTOCK_RUN_ID": "r", "PENSTOCK_RUN_FOLDER": "/r", "CUDA_VISIBLE_DEVICES": "2,3", "NCCL_SOCKET_IFNAME": "e",
        "HOME": "/h", "SGLANG_X": "1",
    }  # fmt: skip
    made = settings(owner="engine_worker_0", environment={"SGLANG_X": "2"}).environment_of(
        {**ours, **kept, "PATH": "/bin"}, "id1"
    )
    assert not set(ours) & set(made)
    assert {name: made[name] for name in kept} == {**kept, "SGLANG_X": "2"}
    assert made["PATH"] == "/env/bin:/bin"
    assert made["HF_HUB_OFFLINE"] == "1"
    assert (made["PENSTOCK_SERVER"], made["PENSTOCK_SERVER_OWNER"]) == ("id1", "engine_worker_0")
    assert "SGLANG_USE_CPU_ENGINE" not in made


def test_no_server_keeps_what_it_has_seen_through_new_weights() -> None:
    assert settings().environment_of({"SGLANG_VLM_CACHE_SIZE_MB": "100"}, "id1")["SGLANG_VLM_CACHE_SIZE_MB"] == "0"


def test_a_cpu_has_its_own_engine_and_as_many_threads_as_it_is_given() -> None:
    made = settings(on_cpu=True, num_threads=3).environment_of({}, "id1")
    assert (made["SGLANG_USE_CPU_ENGINE"], made["OMP_NUM_THREADS"]) == ("1", "3")


@pytest.mark.parametrize(
    ("line", "port"),
    [
        (PORT_LINE, 35967),
        ("INFO:     Uvicorn running on http://[::1]:41 (Press CTRL+C to quit)", 41),
        ("[2026-11-21 18:00:15] Uvicorn running on 10.1.2.3:8000 with 2 SO_REUSEPORT workers", 8000),
        ("[2026-11-21 18:00:15] server_args={'host': '127.0.0.1', 'port': 0}", None),
        ("", None),
    ],
)
def test_the_port_is_read_from_the_line_that_says_it(line: str, port: int | None) -> None:
    assert port_in(line) == port


def test_a_node_that_does_not_serve_is_ready_in_other_words() -> None:
    fired_up = "[2026-11-21 18:00:15] The server is fired up and ready to roll!"
    dummy = "[2026-11-21 18:00:15] Dummy health check server started in background thread at 127.0.0.1:0"
    assert says_ready(fired_up, serves=True)
    assert says_ready(dummy, serves=False)
    assert not says_ready(dummy, serves=True)
    assert not says_ready(PORT_LINE, serves=True)


@pytest.mark.parametrize(
    ("line", "news"),
    [
        ("[2026-11-21 18:00:15] Load weight begin. avail mem=20 GB", "Load weight begin. avail mem=20 GB"),
        ("[2026-11-21 18:00:15 TP1] Load weight begin.", "TP1: Load weight begin."),
        (BAR, BAR),
        ("[2026-11-21 18:00:15] server_args={'a': 1}", ""),
        ("[2026-11-21 18:00:15] Ignore import error when loading sglang.srt.models.x", ""),
        ('  File "x.py", line 3, in f', ""),
        ("/x.py:71: UserWarning: old", ""),
    ],
)
def test_news_are_the_steps_of_a_start(line: str, news: str) -> None:
    assert news_in(line) == news


def test_the_reason_is_the_last_error_that_was_named() -> None:
    refused = ["usage: x", "sglang serve: error: unrecognized arguments: --foo 3"]
    raised = [
        "ValueError: a",
        "During handling",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "[2026-01-01 00:00:00] bye",
    ]
    assert reason_in(refused) == "unrecognized arguments: --foo 3"
    assert reason_in(raised) == "torch.OutOfMemoryError: CUDA out of memory."
    assert reason_in(["all is well"]) == ""


def test_the_tail_has_no_noise() -> None:
    lines = ["a", "", "/x.py:71: UserWarning: old", "usage: y", "     [--no-foo]", "b"]
    assert tail_of(lines) == ("a", "b")
    assert tail_of(lines, 1) == ("b",)


def options_of(sglang: dict[str, OptionValue], *, is_cpu: bool, sleeps: bool = False) -> Mapping[str, OptionValue]:
    setup = EngineSetup(
        name="engine/0",
        place=0,
        model_folder=Path(),
        run_folder=Path(),
        options=EnginesOptions(backend="sglang", sglang=sglang),
        max_context=512,
        dtype="bfloat16",
        data=None,
        sleeps=sleeps,
    )
    return launch_options(setup, is_cpu=is_cpu)


def test_the_log_times_passes_where_one_batch_is_decoded_at_a_time() -> None:
    def per_line(dp_size: int = 1, pp_size: int = 1, **sglang: OptionValue) -> int:
        info = cast("ServerInfo", SimpleNamespace(dp_size=dp_size, pp_size=pp_size))
        return passes_per_line(options_of(sglang, is_cpu=True), info)

    assert "--decode-log-interval=10" in command_line(options_of({}, is_cpu=False))
    assert per_line() == 10
    assert per_line(decode_log_interval=7) == 7
    assert per_line(decode_log_interval=None) == per_line(dp_size=2) == per_line(pp_size=2) == 0


def test_a_server_that_takes_turns_on_a_gpu_is_started_so_that_it_can_give_its_memory_up() -> None:
    def options(*, sleeps: bool, is_cpu: bool) -> Mapping[str, OptionValue]:
        return options_of({"mem_fraction_static": 0.7}, is_cpu=is_cpu, sleeps=sleeps)

    assert "--enable-memory-saver" in command_line(options(sleeps=True, is_cpu=False))
    assert "--enable-memory-saver" not in command_line(options(sleeps=True, is_cpu=True))
    assert "--enable-memory-saver" not in command_line(options(sleeps=False, is_cpu=False))
    assert options(sleeps=True, is_cpu=False)["mem_fraction_static"] == 0.7
