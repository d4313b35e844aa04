"""What a scheduler is given: read as the scheduler reads it, and held to what is published of its fields."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from typer.testing import CliRunner

from penstock.messages.errors import UserFault
from penstock.runtime.cli.app import app
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.keys import field_docs
from penstock.runtime.submit.options import OPTIONS, read_options
from penstock.runtime.submit.scheduler_names import Scheduler

SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "submit_schemas.json").read_text())
TYPES = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list, "number": float}
RAYJOB = "image: registry.example/penstock\nvolume_claim: runs\nshared_folder: /shared/runs\n"
SKYPILOT = "shared_folder: /shared/runs\naccelerators: H100\nvolumes: {/shared: runs}\n"
HOSTILE = """it's "x" $(touch owned) `id` \\ # - {a: b}"""

HARD = "it's 100% mine"

Manifest = dict[str, Any]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(scheduler: str, scenario: str, config: str = "", *more: str) -> str:
    """What the dry run prints."""
    words = ["run", scenario, "--submit", scheduler, "--dry-run", *more]
    if config:
        Path("submit.yaml").write_text(config)
        words += ["--submit-config", "submit.yaml"]
    result = CliRunner().invoke(app, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(scheduler: str, scenario: str, config: str = "", *more: str) -> str:
    words = ["run", scenario, "--submit", scheduler, "--dry-run", *more]
    if config:
        Path("submit.yaml").write_text(config)
        words += ["--submit-config", "submit.yaml"]
    with pytest.raises(UserFault) as error:
        CliRunner().invoke(app, words, catch_exceptions=False)
    return str(error.value)


def check_bash(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def directives(script: str) -> dict[str, str]:
    """``#SBATCH`` lines before the first command, as Slurm reads them."""
    found: dict[str, str] = {}
    for line in script.splitlines():
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH --"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            found[name] = value
    return found


def commands(script: str) -> str:
    """The script without the scenario in it."""
    before, _, rest = script.partition("<<'END-")
    delimiter, _, text = rest.partition("'\n")
    return before + text.partition(f"\nEND-{delimiter}\n")[2]


def scenario_in(script: str) -> Any:  # noqa: ANN401 - YAML
    delimiter, _, text = script.partition("<<'END-")[2].partition("'\n")
    return yaml.safe_load(text.partition(f"\nEND-{delimiter}\n")[0])


@pytest.mark.parametrize(
    ("scenario", "config", "nodes", "gpus"),
    [
        ("quickstart", "", "1", None),
        ("llama3_8b_8gpus", "", "1", "8"),
        ("qwen3_32b_64gpus", "", "8", "8"),
        ("llama3_8b_8gpus", "gpus_per_node: 4", "2", "4"),
        ("quickstart", "nodes: 3", "3", None),
    ],
)
def test_slurm_is_asked_for_the_nodes_and_gpus_of_the_scenario(
    scenario: str, config: str, nodes: str, gpus: str | None
) -> None:
    script = written("slurm", scenario, config)
    check_bash(script)
    found = directives(script)
    assert found["nodes"] == nodes
    assert found.get("gpus-per-node") == gpus
    assert found["ntasks-per-node"] == "1"
    assert int(found["cpus-per-task"]) >= 2 * int(gpus or 1)


def test_the_script_of_slurm_holds_what_the_config_says_and_is_one_that_bash_reads() -> None:
    config = f"""
partition: gpu
account: lab
time_limit: 1-12:00:00
requeue: true
memory: 500G
exclusive: true
directives: [--constraint=h100]
setup: [module load cuda]
environment: {{NOTE: {json.dumps(HOSTILE)}}}
ports: [21000, 22000]
nodes: 2
"""
    script = written("slurm", "quickstart", config, "run.seed=7")
    check_bash(script)
    found = directives(script)
    expected = {"partition": "gpu", "account": "lab", "time": "1-12:00:00", "mem": "500G", "constraint": "h100"}
    assert {key: found[key] for key in expected} == expected
    assert {"exclusive", "requeue", "no-kill"} <= found.keys()
    assert found["signal"] == "B:USR1@120"
    assert Path(found["output"]).parent.is_dir(), "Slurm makes no folders"
    assert "\nmodule load cuda\n" in script
    assert "--ports 21000-22000" in script
    line = next(line for line in script.splitlines() if line.startswith("export NOTE="))
    told = subprocess.run(["bash", "-c", f'{line}; printf %s "$NOTE"'], capture_output=True, text=True, timeout=30)
    assert told.stdout == HOSTILE
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    ("config", "override"),
    [
        ("", "run.folder='runs\n\ntouch owned #'"),
        ('partition: "a\\n"', "run.num_steps=1"),
        ('memory: "1\\n"', "run.num_steps=1"),
    ],
    ids=["folder", "partition", "memory"],
)
def test_no_line_break_ends_a_directive_of_the_script(config: str, override: str) -> None:
    assert "has a line break" in refused("slurm", "quickstart", config, override)


def test_the_script_begins_with_a_dry_run_and_starts_ray_for_itself_alone() -> None:
    one, two = (commands(written("slurm", "quickstart", config)) for config in ("", "nodes: 2"))
    for script in (one, two):
        assert script.index("--dry-run") < script.index("--run-folder")
        assert "ray stop" not in script, "it would end every Ray of the user on the node"
    assert "ray.node" not in one, "on one node Ray is embedded"
    assert "runtime.ray_address=null" in one
    assert two.index("--dry-run") < two.index("ray.node")
    assert "with" in two


def test_the_scenario_in_the_script_is_the_one_that_was_asked_for() -> None:
    found = scenario_in(written("slurm", "quickstart", "", "run.seed=7", f"run.folder={json.dumps(HARD)}"))
    assert (found["run"]["seed"], found["run"]["folder"]) == (7, HARD)
    Path("again.yaml").write_text(yaml.safe_dump(found))
    assert load_scenario(Path("again.yaml")) == load_scenario(
        Path(__file__).parents[2] / "scenarios/quickstart.yaml", ["run.seed=7", f"run.folder={json.dumps(HARD)}"]
    )


def test_sglang_is_looked_for_where_the_login_node_has_it_and_containers_run_what_the_config_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_ENVS", "/shared/my envs")
    script = written("slurm", "qwen3_8b_8gpus")
    assert "export PENSTOCK_ENVS='/shared/my envs'\n" in script
    assert commands(script).index("penstock env sglang") < commands(script).index("--dry-run")
    for container, words in (
        ("apptainer", "apptainer exec --nv --bind \"$run\" --bind /data image.sif"),
        ("pyxis", "--container-image=image.sif --container-mounts=\"$run:$run\",/data:/data"),
    ):  # fmt: skip
        inside = written("slurm", "qwen3_8b_8gpus", f"image: image.sif\ncontainer: {container}\nmounts: [/data]")
        check_bash(inside)
        assert words in inside
        assert "PENSTOCK_ENVS" not in commands(inside)


def check_level(found: Manifest, level: Manifest) -> None:
    """Every field is known and of its type, none is missing."""
    assert found.keys() <= level["fields"].keys()
    assert set(level["required"]) <= found.keys()
    for key, value in found.items():
        kind = level["fields"][key]
        if kind in TYPES:
            assert isinstance(value, TYPES[kind]), (key, value)
            assert not (kind == "integer" and isinstance(value, bool))
        assert value in level.get("enum", {}).get(key, [value])


def check_pod(template: Manifest) -> None:
    levels = SCHEMAS["rayjob"]
    check_level(template, levels["template"])
    pod = template["spec"]
    check_level(pod, levels["pod"])
    for each in pod.get("tolerations", ()):
        check_level(each, levels["tolerations"])
    for volume in pod["volumes"]:
        check_level(volume, levels["volumes"])
        for kind in ("emptyDir", "secret", "persistentVolumeClaim"):
            if kind in volume:
                check_level(volume[kind], levels[kind])
    names = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        check_level(container, levels["containers"])
        check_level(container["resources"], levels["resources"])
        for part in ("env", "envFrom", "volumeMounts"):
            for each in container.get(part, ()):
                check_level(each, levels[part])
        assert {mount["name"] for mount in container["volumeMounts"]} == names
        assert all(isinstance(each["value"], str) for each in container["env"])


@pytest.mark.parametrize(
    ("scenario", "config", "workers", "gpus"),
    [("quickstart", "", 0, None), ("llama3_8b_8gpus", "", 0, "8"), ("qwen3_32b_64gpus", "memory: 900Gi", 7, "8")],
)
def test_the_manifest_has_the_fields_that_kuberay_publishes(
    scenario: str, config: str, workers: int, gpus: str | None
) -> None:
    more = (
        f"namespace: research\nservice_account: trainer\nsecrets: [hub]\nimage_pull_secrets: [pull]\nretries: 2\n"
        f"time_limit_s: 3600\nnode_selector: {{gpu: h100}}\nenvironment: {{NOTE: {json.dumps(HOSTILE)}}}\n"
    )
    secret, job = cast("list[Manifest]", list(yaml.safe_load_all(written("rayjob", scenario, RAYJOB + more + config))))
    levels = SCHEMAS["rayjob"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    check_level(job["spec"], levels[""])
    cluster = job["spec"]["rayClusterSpec"]
    check_level(cluster, levels["rayClusterSpec"])
    check_level(cluster["authOptions"], levels["authOptions"])
    assert tuple(map(int, cluster["rayVersion"].split(".")[:2])) >= (2, 52), "KubeRay wants it named for tokens"
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ())]
    check_level(groups[0], levels["headGroupSpec"])
    assert sum(group["replicas"] for group in groups[1:]) == workers
    for group in groups[1:]:
        check_level(group, levels["workerGroupSpecs"])
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    for group in groups:
        check_pod(group["template"])
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        [container] = group["template"]["spec"]["containers"]
        assert container["resources"].get("limits", {}).get("nvidia.com/gpu") == gpus
        assert {"name": "NOTE", "value": HOSTILE} in container["env"]
    name = job["metadata"]["name"]
    assert len(name) <= 47
    assert secret["metadata"] == {"name": name, "namespace": "research"}
    script = secret["stringData"]["run.sh"]
    check_bash(script)
    assert script.index("--dry-run") < script.index("--run-folder")
    assert f"--num-nodes {workers + 1} " in script
    assert yaml.safe_load(secret["stringData"]["scenario.yaml"])["runtime"]["ray_address"] == "auto"
    assert "/shared/runs/" in script


@pytest.mark.parametrize(("scenario", "nodes"), [("quickstart", 1), ("qwen3_32b_64gpus", 8)])
def test_the_task_has_the_fields_that_skypilot_publishes(scenario: str, nodes: int) -> None:
    more = (
        "infra: aws/us-east-1\nuse_spot: true\nmemory: 256+\ndisk_size: 500\nnetwork_tier: best\nworkdir: .\n"
        "image: penstock\ninstall: [pip install penstock]\nsecrets: [HF_TOKEN]\nfile_mounts: {/data: /local}\n"
        f"environment: {{NOTE: {json.dumps(HOSTILE)}}}\n"
    )
    task: Manifest = yaml.safe_load(written("skypilot", scenario, SKYPILOT + more, "runtime.pass_env=[MY_KEY]"))
    levels = SCHEMAS["skypilot"]
    check_level(task, levels["task"])
    check_level(task["resources"], levels["resources"])
    check_level(task["resources"]["autostop"], levels["autostop"])
    assert task["num_nodes"] == nodes
    assert task["resources"].get("accelerators") == ("H100:8" if nodes > 1 else None)
    assert task["secrets"] == {"HF_TOKEN": None, "MY_KEY": None}
    assert task["envs"] == {"NOTE": HOSTILE}
    check_bash(task["setup"])
    check_bash(task["run"])
    assert "pip install penstock" in task["setup"]
    assert ("penstock env sglang" in task["setup"]) == (nodes > 1)
    assert scenario_in(task["run"])["run"]["name"].startswith(scenario[:5])
    script = commands(task["run"])
    assert script.index("--dry-run") < script.index("--run-folder")
    assert ('"${node[@]}" with "$ray" --num-nodes 8' in script) == (nodes > 1)


def test_a_template_of_the_users_takes_the_place_of_ours() -> None:
    Path("own.j2").write_text("#!/bin/bash\n#SBATCH --nodes={{ plan.num_nodes }}\nrun {{ plan.run_folder|sh }}\n")
    script = written("slurm", "qwen3_32b_64gpus", "template: own.j2")
    assert script.startswith("#!/bin/bash\n#SBATCH --nodes=8\nrun /")
    Path("own.j2").write_text("{{ plan.nodes }}\n")
    assert "own.j2: the template cannot be filled in: " in refused("slurm", "quickstart", "template: own.j2")
    Path("own.j2").write_text("\n{% if %}\n")
    assert "own.j2:2: not a Jinja template" in refused("slurm", "quickstart", "template: own.j2")
    assert "no such template: none.j2" in refused("slurm", "quickstart", "template: none.j2")


@pytest.mark.parametrize(
    ("scheduler", "config", "said"),
    [
        ("slurm", "partitoin: gpu", "submit.yaml:1: partitoin: no such key; did you mean 'partition'?"),
        ("slurm", "namespace: x", "namespace: a key of --submit rayjob, and not of --submit slurm"),
        ("slurm", "nodes: many", "submit.yaml:1: nodes: must be a whole number"),
        ("slurm", "time_limit: tomorrow", "submit.yaml:1: time_limit: must be a string"),
        ("slurm", "image: x", "image and container go together"),
        ("slurm", "ports: [20000, 20100]", "ports: 20000 to 20100 are too few: Ray takes 256 on a node"),
        ("slurm", 'setup: ["a\\nb"]', "submit.yaml:1: setup[0]: must be a string"),
        ("rayjob", "image: x", "missing"),
        ("skypilot", "shared_folder: runs", "shared_folder: must be a string"),
    ],
)
def test_a_config_that_is_wrong_is_refused_with_its_line_and_key(scheduler: str, config: str, said: str) -> None:
    assert said in refused(scheduler, "quickstart", config)


def test_what_cannot_run_on_a_cluster_is_refused_before_anything_is_written() -> None:
    assert "is a cluster that runs already" in refused("slurm", "quickstart", "", "runtime.ray_address=10.0.0.1:6379")
    assert "3 of the submit config are too few; the scenario takes 8" in refused(
        "slurm", "qwen3_32b_64gpus", "nodes: 3"
    )
    assert "accelerators: missing" in refused("skypilot", "llama3_8b_8gpus", "shared_folder: /shared")
    assert "runtime.host: local" in refused("slurm", "quickstart", "nodes: 2", "runtime.host=local")
    assert "takes about" in refused("slurm", "llama3_8b_8gpus", "", "runtime.gpu_memory_gb=8")
    assert not list(Path("runs").glob("*"))


def test_what_has_to_be_said_is_named_where_there_is_no_config() -> None:
    with pytest.raises(UserFault, match="keys image, volume_claim, shared_folder is needed") as error:
        read_options(Scheduler.RAYJOB, None)
    assert "--submit-config FILE" in str(error.value)


@pytest.mark.parametrize("scheduler", list(Scheduler))
def test_every_key_stands_in_the_page_with_what_it_says(scheduler: Scheduler) -> None:
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    for key, says in field_docs(OPTIONS[scheduler]).items():
        rows = [line for line in page.splitlines() if line.startswith(f"| `{key}` | ")]
        assert any(scheduler in row.split("|")[2] or " all " in row.split("|")[2] for row in rows), key
        assert key == "image" or any(says.replace("``", "`") in row for row in rows), key
    assert set(OPTIONS[scheduler].__struct_fields__) == set(field_docs(OPTIONS[scheduler]))
