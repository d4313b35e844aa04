"""A scenario that does what an imported run did, as far as its log says, and the check of the models against it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml
from msgspec.structs import replace

from penstock.messages.errors import UserFault
from penstock.runtime.output_file import write_output
from penstock.runtime.prediction.forecast import play
from penstock.runtime.prediction.models import Check
from penstock.runtime.scenario.modelled import modelled_from
from penstock.runtime.scenario.source import Place, Source

if TYPE_CHECKING:
    from penstock.runtime.prediction.imports.measured import Measured
    from penstock.runtime.prediction.models import Models
    from penstock.runtime.scenario.source import Plain

NUM_STEPS: Final = 16
PLACEHOLDERS: Final = "Model, data and reward are placeholders, which a simulation does not look at."


def described(found: Measured, models: Models) -> dict[str, Plain]:
    """The scenario, as plain data."""
    about = found.about
    num_samples = float(found.num_samples.mean())
    group_size = min(about.group_size, max(1, round(num_samples)))
    on_engine = math.ceil(num_samples / about.engines)
    context = models.engines.prompt_tokens + models.max_response_tokens + 1
    return {
        "run": {"name": f"imported_{found.system.replace('-', '_')}", "num_steps": NUM_STEPS},
        "model": {"max_context": max(1024, context)},
        "data": {"path": "lines:100000"},
        "sampling": {"samples_per_group": group_size, "max_response_tokens": models.max_response_tokens},
        "reward": {"function": "lines"},
        "filter": {"drop_zero_spread": False},
        "staleness": {"policy": found.policy},
        "engines": {
            "count": about.engines, "slots": about.slots or on_engine,
            **({"placement": "colocate"} if about.colocated and found.policy != "fully_async" else {}),
        },
        "learner": {"groups_per_batch": max(1, round(num_samples / group_size))},
    }  # fmt: skip


def write_described(found: Measured, models: Models, path: Path) -> None:
    """Write the scenario as YAML.

    Raises:
        UserFault: it cannot be written.
    """
    head = f"# A run of {found.system}, as its log describes it.\n# {PLACEHOLDERS}\n"
    text = head + yaml.safe_dump(described(found, models), sort_keys=False, width=100)
    write_output(path, text)


def checked_import(found: Measured, models: Models) -> Models:
    """The models with a check: the scenario of the run, played with them, beside the steps as they were logged."""
    source = Source(described(found, models), {(): Place("the scenario of the log", Path.cwd())})
    try:
        played = play(models.applied(modelled_from(source)[0]), 0)
    except UserFault as error:
        return replace(models, unknown=(*models.unknown, f"the run was not played again as a check: {error}"))
    step_s = found.mean_step_s
    check = Check(
        folder=models.runs[0].folder,
        policy=found.policy,
        step_s=step_s,
        step_error=played.step_s / step_s - 1,
        engines_busy=found.engines_busy,
        engines_busy_predicted=played.engines_busy,
        learner_busy=found.learner_busy,
        learner_busy_predicted=played.learner_busy,
    )
    return replace(models, checks=(check,))
