"""The pack for a GPU: it goes on where it was cut off, says what failed, and puts all of it on one page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from penstock.benchmarks import gpu
from penstock.benchmarks._harness import fact
from penstock.benchmarks._results import Result
from penstock.benchmarks.gpu import features, limits, runs
from penstock.benchmarks.gpu._stage import Stand
from penstock.messages.errors import UserFault
from penstock.runtime.cli.benches import registered

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.benchmarks._runs import FinishedRun

PRETENDED = ("--pretend", "--repetitions", "1")


def result_of(folder: Path, stage: str) -> Result:
    return msgspec.json.decode((folder / f"pretended_{stage}.json").read_bytes(), type=Result)


def test_a_stage_leaves_a_result_that_is_kept_and_a_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = [*PRETENDED, "--folder", str(tmp_path), "--only", "limits"]
    assert gpu.main(argv) == 0
    first = result_of(tmp_path, "limits")
    assert {figure.unit for figure in first.figures} == {"TFLOP/s", "GB/s"}
    page = (tmp_path / "gpu.html").read_text()
    assert "pretended" in page
    assert "copy within the device" in page

    assert gpu.main(argv) == 0
    assert result_of(tmp_path, "limits").at == first.at
    assert "its result of" in capfd.readouterr().err

    missed = msgspec.structs.replace(first, claims=[fact("a CPU is a GPU", holds=False)])
    (tmp_path / "pretended_limits.json").write_bytes(msgspec.json.encode(missed))
    assert gpu.main(argv) == 0, "a pretended claim is none, and bench --all takes it for no failure"
    assert "a CPU is a GPU" in (tmp_path / "gpu.html").read_text()


def test_a_stage_that_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    assert gpu.main(["--pretend", "--repetitions", "0", "--folder", str(tmp_path), "--only", "limits"]) == 1
    assert "--repetitions 0: at least one is needed" in (tmp_path / "gpu.html").read_text()


def test_without_a_gpu_pack_and_stage_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for main, argv in ((limits.main, ["--history", str(tmp_path)]), (gpu.main, ["--folder", str(tmp_path)])):
        with pytest.raises(UserFault, match=r"no GPU that torch can use was found; .* --pretend runs on the CPU"):
            main(argv)
    assert not list(tmp_path.iterdir()), "bench --all takes it for skipped, not for failed"


def test_its_scenario_is_one(tmp_path: Path) -> None:
    from penstock.runtime.scenario.load import load_scenario

    file = tmp_path / "scenario.yaml"
    file.write_text(runs.SCENARIO.format(num_steps=3, model=tmp_path, dtype="bfloat16", device="cuda", warm_steps=10))
    policies = {name: load_scenario(file, overrides).staleness.policy for name, overrides in runs.ARMS.items()}
    assert policies["colocate"] == "one_step_off"
    assert set(policies) == {"sync", "one_step_off", "fully_async", "colocate"}


@pytest.mark.parametrize("name", features.ARMS)
def test_each_feature_is_a_scenario_that_can_be_run_on_a_gpu(name: str, tmp_path: Path) -> None:
    from penstock.runtime.scenario.load import load_scenario

    arm = features.ARMS[name]
    file = tmp_path / "scenario.yaml"
    file.write_text(
        features.scenario_of(arm, Stand(True, torch.device("cuda:0"), torch.bfloat16), tmp_path, num_steps=3)
    )
    scenario = load_scenario(file, (*features.SHORT, *arm.overrides))
    assert scenario.engines.backend == ("sglang" if arm.is_served else "torch")
    assert scenario.staleness.policy == "sync"


def test_a_run_of_a_feature_is_measured_and_one_that_fails_is_a_claim_that_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def stand_in(scenario: str, overrides: tuple[str, ...], folder: Path) -> FinishedRun:
        done.append(folder.name)
        raise RuntimeError(f"exit code 2\n{folder.name} is not to be had")

    monkeypatch.setattr(features, "run", stand_in)
    argv = ["--pretend", "--output", str(tmp_path / "out.json"), "--history", str(tmp_path)]
    assert features.main(argv) == 1
    result = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Result)
    assert done == ["float16", "FP8", "adapters_alone", "cut-offs_replayed", "profiles", "images"]
    assert [claim.verdict for claim in result.claims] == ["missed"] * 6
    assert "float16 is not to be had" in result.claims[0].text
    assert any("they are not pretended" in each for each in result.not_measured)


def test_it_is_a_benchmark_that_takes_its_own_options() -> None:
    found = registered()["gpu"]
    assert not found.is_on_harness
    assert found.quick == gpu.QUICK
    assert registered()["hop"].is_on_harness
