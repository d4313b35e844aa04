"""What a scenario may set of an SGLang server, how it is refused, and the command line that it becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.backends.engines.served.sglang.environment import SGLANG_VERSION
from penstock.backends.engines.served.sglang.reserved_options import RESERVED
from penstock.backends.engines.served.sglang.server_options import (
    ServerOptionError,
    check_server_options,
    command_line,
    defaults,
    merged,
    option_named,
    supports_seeded_sampling,
)
from penstock.messages.errors import UserFault
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.engines.options import OptionValue


def refusal(options: dict[str, OptionValue]) -> str:
    with pytest.raises(ServerOptionError) as caught:
        check_server_options(options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp_size": 2, "mem_fraction_static": 0.8}, ["--tp-size=2", "--mem-fraction-static=0.8"]),
        ({"tensor_parallel_size": 4}, ["--tp-size=4"]),
        ({"disable_radix_cache": True, "enable_lora": False}, ["--disable-radix-cache"]),
        ({"enable_tf32_matmul": False, "dllm_fdfo": True}, ["--no-enable-tf32-matmul", "--dllm-fdfo"]),
        ({"max_total_tokens": "16Ki", "context_length": 8192}, ["--max-total-tokens=16Ki", "--context-length=8192"]),
        ({"cuda_graph_bs_decode": [1, 2, 4]}, ["--cuda-graph-bs-decode", "1", "2", "4"]),
        ({"json_model_override_args": '{"a": 1}'}, ['--json-model-override-args={"a": 1}']),
        ({"random_seed": -1}, ["--random-seed=-1"]),
        ({"model_checksum": True}, ["--model-checksum"]),
        ({"model_checksum": "abc"}, ["--model-checksum=abc"]),
        ({"tp_size": None}, []),
        ({"nnodes": 2}, []),  # asked of the placement, which tells each server
    ],
)  # fmt: skip
def test_options_become_the_words_that_the_server_takes(options: dict[str, OptionValue], words: list[str]) -> None:
    check_server_options(options)
    assert command_line(options) == words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tp_sise": 2},
            f"engines.sglang.tp_sise: SGLang {SGLANG_VERSION} has no such option; did you mean",
        ),
        ({"tp": 2}, "engines.sglang.tp: SGLang 0.5.23 has no such option; did you mean 'tp_size'?"),
        ({"tp-size": 2}, "engines.sglang.tp-size: write it 'tp_size'"),
        ({"tp_size": "2"}, "engines.sglang.tp_size: takes a whole number; found '2'"),
        ({"tp_size": True}, "takes a whole number; found true"),
        ({"tp_size": [2]}, "takes a whole number, not a list; found [2]"),
        ({"mem_fraction_static": "most"}, "takes a number; found 'most'"),
        (
            {"max_total_tokens": "16 k"},
            "whole number, or one with a suffix as in '16k' or '16Ki'; found '16 k'",
        ),
        ({"disable_radix_cache": 1}, "takes true or false; found 1"),
        ({"served_model_name": 4}, "takes a text; found 4; put it in quotes"),
        ({"attention_backend": "flashinfr"}, "'flashinfr' is none of its choices; did you mean 'flashinfer'?"),
        ({"schedule_policy": "zzz"}, "'zzz' is none of its choices; there are dfs-weight, "),
        ({"decode_log_interval": 0}, "decode_log_interval: must be at least 1; found 0, which ends the server at"),
        ({"cuda_graph_bs_decode": 1}, "takes a list; found 1"),
        ({"cuda_graph_bs_decode": []}, "takes a list of at least one; found an empty one"),
        ({"encoder_urls": ["--host"]}, "no item of the list can begin with '-'; found '--host'"),
        ({"forward_hooks": "[1"}, "takes JSON in a text; found '[1'"),
        ({"tp_size": 2, "tensor_parallel_size": 2}, "is another name of 'tp_size', which is given as well; remove one"),
        ({"log_level": "error"}, "must be one of info, debug, trace"),
        ({"model": "x"}, "engines.sglang.model: cannot be set: it is model.path of the scenario"),
        ({"nccl_init_addr": "a:1"}, "cannot be set: it follows from where the engine's GPUs are"),
        ({"port": None}, "cannot be set: each server gets an address"),
    ],
)
def test_what_the_server_would_not_take_is_refused(options: dict[str, OptionValue], message: str) -> None:
    assert message in refusal(options)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_options_that_are_not_the_users_exist_and_are_refused_with_the_reason(name: str) -> None:
    assert name in {flag.removeprefix("--").replace("-", "_") for flag in option_named(name).flags}
    assert refusal({name: None}).endswith(RESERVED[name])


def test_own_options_are_laid_over_the_defaults_whichever_name_they_use() -> None:
    over = merged(defaults(is_cpu=True), {"sleep_on_idle": False, "tp_size": 1}, {"tensor_parallel_size": 2})
    assert over == {"sleep_on_idle": False, "device": "cpu", "attention_backend": "torch_native", "tp_size": 2}
    assert "--device=cpu" in command_line(over)


@pytest.mark.parametrize(
    ("options", "is_cpu", "can"),
    [
        ({}, False, False),
        ({"enable_deterministic_inference": True}, False, True),
        ({"enable_deterministic_inference": True, "attention_backend": "fa3"}, False, True),
        ({"rl_on_policy_target": "fsdp"}, False, True),
        ({"enable_deterministic_inference": False, "attention_backend": "fa3"}, False, False),
        ({"enable_deterministic_inference": True, "attention_backend": "torch_native"}, False, False),
        ({"enable_deterministic_inference": True, "decode_attention_backend": "flashmla"}, False, False),
        ({"enable_deterministic_inference": True}, True, False),
    ],
)
def test_a_seed_counts_only_where_the_server_infers_deterministically(
    options: dict[str, OptionValue], is_cpu: bool, can: bool
) -> None:
    assert supports_seeded_sampling(options, is_cpu=is_cpu) is can


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    file = tmp_path / "served.yaml"
    file.write_text(
        "run:\n  name: served\ndata:\n  path: lines:100\nmodel:\n  make: xs\n"
        "engines:\n  backend: sglang\n  sglang:\n    mem_fraction_static: 0.5\n    attention_backend: fa33\n"
    )
    return file


def test_a_wrong_server_option_is_refused_with_file_line_and_key(scenario_file: Path) -> None:
    with pytest.raises(UserFault) as caught:
        load_scenario(scenario_file)
    where = f"{scenario_file}:11: engines.sglang.attention_backend: "
    assert str(caught.value) == f"{where}'fa33' is none of its choices; did you mean 'fa3'?"


def test_engines_beside_others_are_checked_too(scenario_file: Path) -> None:
    scenario_file.write_text(scenario_file.read_text().replace("fa33", "fa3"))
    more = "engines.more=[{backend: sglang, sglang: {host: 0.0.0.0}}]"
    with pytest.raises(UserFault, match=r"engines\.more\[0\]\.sglang\.host: cannot be set") as caught:
        load_scenario(scenario_file, [more])
    assert more in str(caught.value)


def test_seeded_sampling_is_refused_unless_the_server_can(scenario_file: Path) -> None:
    scenario_file.write_text(scenario_file.read_text().replace("fa33", "fa3"))
    with pytest.raises(UserFault, match=r"engines\.seeded_sampling: an SGLang server draws"):
        load_scenario(scenario_file, ["engines.seeded_sampling=true"])
    able = ["engines.seeded_sampling=true", "engines.sglang.enable_deterministic_inference=true"]
    assert load_scenario(scenario_file, able).engines.seeded_sampling
    with pytest.raises(UserFault, match=r"engines\.seeded_sampling"):
        load_scenario(scenario_file, [*able, "engines.device=cpu"])
