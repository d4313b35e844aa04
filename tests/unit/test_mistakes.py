"""Mistakes of users around scenario, command line and run folders: the message, the exit code, and nothing started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from mistakes import SCENARIO, Files, Mistake, Place, check

if TYPE_CHECKING:
    from pathlib import Path


def changed(old: str, new: str) -> Files:
    """The scenario with another line."""
    assert old in SCENARIO
    return {"s.yaml": SCENARIO.replace(old, new)}


YAML = (
    Mistake("a scenario that is not there", "run absent.yaml", ("absent.yaml: cannot read", "no such file")),
    Mistake("a folder as scenario", "run model", ("model: a folder, and no scenario; name the YAML file",)),
    Mistake("a shipped scenario misspelt", "run quikstart", ("quikstart", "did you mean quickstart?")),
    Mistake(
        "a tab",
        "RUN",
        ("s.yaml:3", "not valid YAML", "indent with blanks, not with tabs"),
        changed("model: {path", "model:\n\tpath: model\nx: {y"),
    ),
    Mistake(
        "a key too far left",
        "RUN",
        ("s.yaml:3: path: no such key here; did you mean", "model.path"),
        changed("model: {path: model, max_context: 128}", "model:\npath: model"),
    ),
    Mistake(
        "indentation that changes",
        "RUN",
        ("s.yaml:4", "a block mapping that begins in line 1", "begin in the same column"),
        changed("model: {path: model, max_context: 128}", "model:\n  path: model\n max_context: 128"),
    ),
    Mistake(
        "a bracket that is open",
        "RUN",
        ("s.yaml:3", "a flow mapping that begins in line 2"),
        changed("max_context: 128}", "max_context: 128"),
    ),
    Mistake(
        "a key twice",
        "RUN",
        ("s.yaml:2: model.path: this key was given before",),
        changed("{path: model,", "{path: model, path: other,"),
    ),
    Mistake(
        "a block twice",
        "RUN",
        ("s.yaml:7: data: this key was given before",),
        {"s.yaml": SCENARIO + "data: {path: rows.jsonl}\n"},
    ),
    Mistake(
        "no blank after a colon",
        "RUN",
        ("s.yaml:", "data"),
        changed("data: {path: rows.jsonl}", "data:\n  path:rows.jsonl"),
    ),
    Mistake("an empty scenario", "RUN", ("s.yaml:1", "a mapping of blocks"), {"s.yaml": ""}),
    Mistake("a list as scenario", "RUN", ("s.yaml:1", "a mapping of blocks"), {"s.yaml": "- run\n"}),
    Mistake("a program as scenario", "run rewards.py", ("rewards.py:",)),
    Mistake("weights as scenario", "run model/model.safetensors", ("model.safetensors", "no scenario")),
    Mistake(
        "JSON with a comma too many", "RUN", ("s.yaml:", "not valid YAML"), {"s.yaml": '{"run": {"name": "x"},, }'}
    ),
    Mistake(
        "an anchor",
        "RUN",
        ("s.yaml:", "anchors and aliases"),
        {"s.yaml": SCENARIO.replace("model: {path", "model: &m {path") + "teacher: *m\n"},
    ),
    Mistake(
        "a tag",
        "RUN",
        ("s.yaml:2", "tags such as tag:yaml.org,2002:python/name:os.system"),
        changed("path: model,", "path: !!python/name:os.system x,"),
    ),
    Mistake("Latin-1", "RUN", ("s.yaml: not UTF-8", "byte"), {"s.yaml": SCENARIO.encode() + b"# \xe9\n"}),
    Mistake(
        "a quote that is open",
        "RUN",
        ("s.yaml:", "a quoted scalar that begins in line 1"),
        changed("name: mine", "name: 'mine"),
    ),
    Mistake(
        "a Windows path in double quotes",
        "RUN",
        ("s.yaml:3", "unknown escape character", "use single quotes"),
        changed("path: rows.jsonl", 'path: "C:\\data\\rows.jsonl"'),
    ),
    Mistake("a missing block", "RUN", ("s.yaml", "run", "missing"), changed("run: {name: mine, num_steps: 2}\n", "")),
    Mistake(
        "a missing name", "RUN", ("s.yaml:1: run.name: missing; it has no default",), changed("{name: mine, ", "{")
    ),
)
KEYS = (
    Mistake(
        "a misspelt block",
        "RUN",
        ("s.yaml:6: learnr: no such key; did you mean 'learner'?",),
        changed("learner:", "learnr:"),
    ),
    Mistake(
        "a misspelt key",
        "RUN learner.learning_rte=1e-4",
        ("override 'learner.learning_rte=1e-4'", "did you mean 'learning_rate'?"),
    ),
    Mistake("lr", "RUN learner.lr=1e-4", ("learner.lr: no such key", "learner.learning_rate here")),
    Mistake(
        "batch_size",
        "RUN learner.batch_size=4",
        ("learner.batch_size", "learner.groups_per_batch here", "prompts a step"),
    ),
    Mistake("beta", "RUN learner.objective.beta=0.1", ("learner.objective.kl_coef here",)),
    Mistake("num_generations", "RUN num_generations=8", ("num_generations", "sampling.samples_per_group here")),
    Mistake("n_samples_per_prompt", "RUN n_samples_per_prompt=8", ("sampling.samples_per_group here",)),
    Mistake("model_name_or_path", "RUN model.model_name_or_path=x", ("model.path here",)),
    Mistake("output_dir", "RUN output_dir=out", ("run.folder here",)),
    Mistake(
        "a word for a number",
        "RUN run.num_steps=many",
        ("override 'run.num_steps=many': run.num_steps: must be a whole number", "found 'many'"),
    ),
    Mistake("a fraction of a step", "RUN run.num_steps=1.5", ("must be a whole number", "found 1.5")),
    Mistake("a number with commas", "RUN run.num_steps=1,000", ("must be a whole number", "found '1,000'")),
    Mistake("no steps", "RUN run.num_steps=0", ("run.num_steps", "found 0")),
    Mistake("steps below zero", "RUN run.num_steps=-3", ("run.num_steps", "found -3")),
    Mistake("a negative learning rate", "RUN learner.learning_rate=-1e-4", ("learner.learning_rate", "found -0.0001")),
    Mistake("a number with a unit", "RUN reward.timeout_s=10s", ("reward.timeout_s", "found '10s'")),
    Mistake("an infinite number", "RUN reward.timeout_s=1e999", ("reward.timeout_s=1e999", "too large a number")),
    Mistake("yes for a boolean", "RUN data.shuffle=yes", ("data.shuffle", "true or false", "found 'yes'")),
    Mistake("one for a boolean", "RUN data.shuffle=1", ("data.shuffle", "true or false", "found 1")),
    Mistake("a list for a path", "RUN data.path=[a,b]", ("data.path", "found ['a', 'b']")),
    Mistake("a block for a number", "RUN run.seed={a:1}", ("run.seed",)),
    Mistake("null where something must be", "RUN run.name=null", ("run.name", "found null")),
    Mistake("a name with a slash", "RUN run.name=a/b", ("run.name", "found 'a/b'")),
    Mistake("a path through a value", "RUN run.name.x=1", ("run.name is no block, it is 'mine'",)),
    Mistake("no key", "RUN =3", ("override '=3': expected KEY=VALUE",)),
    Mistake("no equals sign", "RUN run.num_steps:3", ("override 'run.num_steps:3': expected KEY=VALUE",)),
    Mistake(
        "a dash before a key",
        "RUN --run.num_steps=3",
        ("--run.num_steps=3: keys of a scenario have no dashes", "write run.num_steps=3"),
    ),
    Mistake(
        "blanks around the equals sign",
        "RUN run.num_steps = 3",
        ("override 'run.num_steps': expected KEY=VALUE in one word",),
    ),
    Mistake("a dot too many", "RUN run..num_steps=3", ("expected KEY=VALUE",)),
    Mistake("an override that is no YAML", "RUN data.path=[a", ("override 'data.path=[a'", "not valid YAML")),
    Mistake("an unknown objective", "RUN learner.objective=grop", ("learner.objective", "grop", "grpo")),
    Mistake("an unknown policy", "RUN staleness.policy=async", ("staleness.policy", "async", "fully_async")),
    Mistake("an unknown backend", "RUN engines.backend=vllm", ("engines.backend", "sglang", "found 'vllm'")),
    Mistake("an unknown reward", "RUN reward.function=gsm8k", ("reward.function", "gsm8k", "math")),
    Mistake(
        "a reward without its function",
        "RUN reward.function=rewards.py",
        ("reward.function", "rewards.py", "no function in it", "rewards.py:reward"),
    ),
    Mistake("an unknown transport", "RUN weights.transport=nccl", ("weights.transport", "distributed", "found 'nccl'")),
    Mistake("an unknown dtype", "RUN model.dtype=fp16", ("model.dtype", "bfloat16", "found 'fp16'")),
    Mistake("an unknown size of a model", "RUN model.path=null model.make=large", ("model.make", "found 'large'")),
    Mistake("two models", "RUN model.make=xs", ("model", "make", "path")),
    Mistake("no model", "RUN model.path=null", ("model", "make", "path")),
    Mistake("one sample a group", "RUN sampling.samples_per_group=1", ("sampling.samples_per_group", "1")),
    Mistake(
        "an answer longer than the context",
        "RUN sampling.max_response_tokens=128",
        ("sampling.max_response_tokens", "128", "model.max_context"),
    ),
    Mistake("a temperature of zero", "RUN sampling.temperature=0", ("sampling.temperature",)),
    Mistake("top_p above one", "RUN sampling.top_p=1.5", ("sampling.top_p", "found 1.5")),
    Mistake(
        "a hub name that is misspelt",
        "RUN model.path=Qwen/Qwen3/0.6B",
        ("model.path", "Qwen/Qwen3/0.6B: no such folder", "a name on the hub (ORG/NAME)"),
    ),
    Mistake("warm-up longer than the run", "RUN learner.warmup_steps=-1", ("learner.warmup_steps", "found -1")),
)
COMMANDS = (
    Mistake("an unknown command", "trian s.yaml", ("No such command 'trian'",), lines=9),
    Mistake("no scenario", "run", ("Missing argument 'SCENARIO'",), lines=9),
    Mistake("a word for an option's number", "RUN --gpus-per-node many", ("--gpus-per-node", "valid integer"), lines=9),
    Mistake("a part that there is not", "RUN --only rollouts", ("--only", "'rollouts'"), lines=9),
    Mistake("learner without a run", "RUN --only learner", ("run.batches_from", "--from")),
    Mistake("a run that is none to learn from", "RUN --only learner --from model", ("model",)),
    Mistake("a run for the whole", "RUN --from model", ("run.batches_from",)),
    Mistake("groups without rollout", "RUN --num-groups 3", ("run.num_groups",)),
    Mistake("options of a dry run", "RUN --gpus-per-node 8", ("--dry-run",)),
    Mistake("resume of no run", "resume model", ("model: not a run's folder",)),
    Mistake("resume of nothing", "resume absent", ("absent: no such folder",)),
    Mistake("resume without runs", "resume", ("runs: no run is there",)),
    Mistake("status of a scenario", "status s.yaml", ("s.yaml: a file, and not a run's folder",)),
    Mistake("stop of no run", "stop absent", ("absent: no such folder",)),
    Mistake("report of no run", "report model", ("model: not a run's folder",)),
    Mistake("ledger of no run", "ledger model --sql SELECT", ("model",)),
    Mistake("samples of no run", "samples model", ("model: not a run's folder",)),
    Mistake("audit of no run", "audit model", ("model",)),
    Mistake("gateway of no run", "gateway model", ("model",)),
    Mistake("runs of no folder", "list absent", ("absent: no such folder", "run.folder")),
    Mistake("an unknown benchmark", "bench thruput", ("no benchmark is called 'thruput'",)),
    Mistake("chaos without faults", "chaos s.yaml", ("--faults", "--num-faults")),
    Mistake("chaos with a fault that is none", "chaos s.yaml --faults explode:engine/0", ("explode",)),
    Mistake("chaos with an actor that is none", "chaos s.yaml --faults kill:engine/9", ("engine/9",)),
    Mistake("simulation of a part", "simulate s.yaml run.only=rollout", ("run.only: rollout",)),
    Mistake("convert to nowhere", "convert model", ("--check",)),
    Mistake("convert of nothing", "convert absent out", ("absent: there is no such folder",)),
    Mistake("convert to an unknown dtype", "convert model out --dtype int4", ("--dtype", "got int4")),
    Mistake("convert to an unknown format", "convert model out --format gguf", ("--format", "got gguf")),
    Mistake(
        "convert of a version that is not there",
        "convert model out --version 3",
        ("model: has no checkpoints", "--version 3"),
    ),
    Mistake(
        "convert to files of no size",
        "convert model out --max-shard-size big",
        ("--max-shard-size: 'big' is no size", "such as 5GB"),
    ),
    Mistake("convert of a script that is not there", "convert scenario absent.sh", ("absent.sh",)),
    Mistake("evaluate of nothing", "evaluate absent --data rows.jsonl", ("absent",)),
    Mistake("evaluate on nothing", "evaluate model", ("--data", "--scenario")),
    Mistake(
        "evaluate a dataset that is not there",
        "evaluate model --data absent.jsonl --reward math",
        ("absent.jsonl", "there is no file"),
    ),
    Mistake(
        "evaluate with k in words", "evaluate model --data rows.jsonl --k two", ("--k two: expected whole numbers",)
    ),
    Mistake(
        "evaluate with a floor that is none",
        "evaluate model --data rows.jsonl --at-least 0.4",
        ("--at-least 0.4: expected DATASET/FIGURE=VALUE",),
    ),
    Mistake(
        "evaluate with a floor of another dataset",
        "evaluate model --data rows.jsonl --reward math --at-least gsm8k/pass@1=0.4",
        ("there is no dataset 'gsm8k'", "rows"),
    ),
    Mistake(
        "figures of an evaluation into a folder",
        "evaluate model --data rows.jsonl --reward math --json model",
        ("--json model: is a folder; name a file",),
    ),
    Mistake(
        "figures of an evaluation into a folder that is none",
        "evaluate model --data rows.jsonl --reward math --json rows.jsonl/figures.json",
        ("--json rows.jsonl/figures.json: its folder is no folder",),
    ),
    Mistake(
        "evaluate with an unknown reward",
        "evaluate model --data rows.jsonl --reward exact",
        ("reward.function", "exact"),
    ),
    Mistake(
        "evaluate a simulated scenario",
        "evaluate model --data rows.jsonl engines.backend=simulated learner.backend=simulated",
        ("the scenario is simulated", "--scenario"),
    ),
    Mistake(
        "init over a file", "init s.yaml --model model --data rows.jsonl --reward math", ("s.yaml: is there already",)
    ),
    Mistake("init without a model", "init new.yaml", ("--model and --data are needed",)),
    Mistake(
        "init with an unknown policy",
        "init new.yaml --model model --data rows.jsonl --reward math --policy fast",
        ("staleness.policy", "fast"),
    ),
    Mistake(
        "init in a folder that is not there",
        "init absent/new.yaml --model model --data rows.jsonl --reward math",
        ("absent/new.yaml: its folder is not there",),
    ),
    Mistake("check of a function without a kind", "check hook rewards.py:reward", ("Missing option '--as'",), lines=9),
    Mistake(
        "check of a function of no kind",
        "check hook rewards.py:reward --as rewrd",
        ("--as rewrd", "did you mean 'reward'?"),
    ),
    Mistake("check of a file", "check hook rewards.py --as reward", ("expected file.py:function",)),
    Mistake(
        "check of a file that is not there",
        "check hook absent.py:reward --as reward",
        ("there is no file", "rewards.py"),
    ),
    Mistake(
        "data check of simulated rows",
        "data check s.yaml learner.backend=simulated engines.backend=simulated",
        ("the scenario is simulated",),
    ),
    Mistake("env that is none", "env vllm", ("No such command 'vllm'",), lines=9),
)
TABLE = (*YAML, *KEYS, *COMMANDS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("right"))


@pytest.mark.parametrize("mistake", TABLE, ids=[each.name for each in TABLE])
def test_a_mistake_is_one_message(
    mistake: Mistake, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(mistake, place.copied(tmp_path, mistake.files), monkeypatch, capsys)
