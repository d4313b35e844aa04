"""``penstock run --dry-run``: the plan is printed whatever this machine lacks, and what it lacks is said."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from penstock.backends.engines.served.sglang.environment import has_cuda_gpu
from penstock.runtime.cli.dry_run import machine_text, show_plan
from penstock.runtime.launch.machine import ask_machine
from penstock.runtime.scenario import load_scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"
SHIPPED = sorted((*SCENARIOS.glob("*.yaml"), *SCENARIOS.glob("examples/vlm*.yaml")))


def machine(name: str, *overrides: str) -> dict[str, str]:
    """Each check and its outcome."""
    return ask_machine(load_scenario(SCENARIOS / f"{name}.yaml", overrides), Path.cwd())


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_shipped_scenario_can_be_planned_here_and_the_plan_is_a_scenario_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ENVS", str(tmp_path))
    scenario = load_scenario(file)
    plan = tmp_path / "plan.yaml"
    for is_full in (True, False):
        out = StringIO()
        show_plan(scenario, Console(file=out), is_full=is_full)
        plan.write_text(out.getvalue())
        assert load_scenario(plan) == scenario
    assert "\n# prompt_source " in out.getvalue()
    assert "\n# this machine" in out.getvalue()


def test_no_password_of_an_address_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ENVS", str(tmp_path))
    judge = ("reward.function=judge", "reward.judge.url=https://me:secret@example.org/v1")
    out = StringIO()
    show_plan(load_scenario(SCENARIOS / "local_model.yaml", judge), Console(file=out))
    assert "secret" not in out.getvalue()
    assert "url: https://***@example.org/v1" in out.getvalue()


def test_what_is_missing_is_said_and_what_hangs_on_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ENVS", str(tmp_path))
    found = machine("qwen3_4b_gsm8k_h100", "model.path=/nowhere")
    assert found["model.path"].startswith("failed: model.path: ")
    assert found["room for weights"] == "left out: it needs model.path"
    assert found["data"].startswith("failed: data.path: there is no file")
    assert found["SGLang's environment"].startswith("failed: engines.backend: sglang: no environment of SGLang")
    assert found["functions of the user"] == "ok"
    lines = machine_text(found).splitlines()
    failed = [subject for subject, outcome in found.items() if outcome.startswith("failed")]
    end = lines.index(f"# {len(failed)} of {len(found)} checks failed:")
    assert [line.partition(":")[0] for line in lines[end + 1 :]] == [f"# {subject}" for subject in failed]


def test_what_is_on_the_hub_is_named_and_not_fetched() -> None:
    found = machine("qwen3_4b_gsm8k_h100")
    assert found["the hub"].startswith(
        "left out: model.path: Qwen/Qwen3-4B: on the hub, and fetched when the run starts"
    )
    assert found["model.path"] == "left out: it needs the hub"
    assert found["room for weights"] == "left out: it needs model.path"


def test_what_a_cluster_has_cannot_be_asked_here() -> None:
    found = machine("glm4_9b_disaggregated")
    elsewhere = {
        subject for subject, outcome in found.items() if outcome.startswith("left out: ") and "cluster" in outcome
    }
    assert elsewhere == {"devices", "SGLang's environment", "GPUs"}


def test_a_machine_that_has_everything_is_said_to_have_it() -> None:
    found = machine("quickstart")
    assert set(found.values()) == {"ok"}


@pytest.mark.skipif(has_cuda_gpu(), reason="this machine has a GPU")
def test_gpus_that_are_not_there_are_counted() -> None:
    found = machine("quickstart", "engines.backend=sglang", "engines.device=cuda", "engines.sglang.tp_size=4")
    assert found["GPUs"].startswith("failed: engines: ")
    assert "4 GPUs each" in found["GPUs"]
