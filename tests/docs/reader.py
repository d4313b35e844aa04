"""The files that the pages speak of, and what stands in them for a name that each reader has another one for."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from blocks import HOUSE, blocks

from penstock.runtime.launch.runs import SCENARIO_NAME, close_record, open_record
from penstock.runtime.scenario import dump_scenario, load_scenario

if TYPE_CHECKING:
    from pathlib import Path

RUN_OF = "runs/{}-20260801-120000"
"""A run's folder as the pages write it."""
NEWEST = {"-": "--version 4", "v": "version-0000004"}
"""Of the run that is made for the pages, by the first letter of what names a version."""
OWN_SCENARIOS = ("mine", "math", "qwen3_4b", "my")
_RUN = re.compile(r"(?<![\w.])(?:runs/[a-z0-9-]+-(?:20260801-\d{6}|…)|RUN)(?!\w)")
_SCENARIO = re.compile(r"(?<![\w.=])(?:SCENARIO|FILE|S\.yaml|X)(?![\w.])")


def filled_in(text: str, run: Path | None = None) -> str:
    """The text with a scenario in place of SCENARIO and the like, and a run in place of RUN; a real one of any run."""
    if run is None:
        text = re.sub(r"(?<![\w.])RUN(?!\w)|runs/[a-z0-9-]+-…", RUN_OF.format("quickstart"), text)
    else:
        text = re.sub(r"--version \d+|version-\d+", lambda found: NEWEST[found[0][0]], _RUN.sub(str(run), text))
    return re.sub(r"(?<![\w.])N(?!\w)", "1", _SCENARIO.sub("scenarios/mine.yaml", text))


def make_folder(folder: Path) -> Path:
    """A model, rows, documents, functions and scenarios, named as in the pages."""
    from penstock.backends.checkpoint.make import make_model  # here, as torch is slow to import and few tests want it

    (folder / "scenarios").mkdir()
    for file in (HOUSE / "scenarios").iterdir():
        (folder / "scenarios" / file.name).symlink_to(file)
    few_rows = (HOUSE / "scenarios" / "quickstart.yaml").read_text().replace("path: lines:20000", "path: lines:200")
    for name in OWN_SCENARIOS:
        (folder / "scenarios" / f"{name}.yaml").write_text(few_rows)
    for name in ("quickstart", "mine", "math", "megatron_cpu"):
        run = folder / RUN_OF.format(name.replace("_", "-"))
        run.mkdir(parents=True)
        close_record(run, open_record(run, name), 0)
        (run / SCENARIO_NAME).write_text(dump_scenario(load_scenario(folder / "scenarios" / f"{name}.yaml")))
    (folder / "tests").symlink_to(HOUSE / "tests")
    make_model("xs", folder / "my" / "model", seed=3)
    rows = [
        {"prompt": f"{a}+{b}=", "label": str(a + b), "how": "plain", "task": "chat"} for a in range(9) for b in range(9)
    ]
    for name in ("rows", "tasks", "test", "prompts"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "my" / f"{name}.jsonl").write_text(text)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "slurm.yaml").write_text("partition: gpu\n")
    (folder / "documents.jsonl").write_text(json.dumps({"title": "Amber", "text": "Amber is old resin."}) + "\n")
    (folder / "run-qwen3-4B.sh").write_text("python train.py --rollout-batch-size 32 --n-samples-per-prompt 8\n")
    functions = "\n\n".join(block.text for block in blocks("python") if block.kind == "as")
    (folder / "mine.py").write_text(functions)
    (folder / "my.py").write_text("def reward(prompt, response, label):\n    return len(set(response)) / 80\n")
    return folder
