"""Templates, filled in. Every value goes through ``sh``, ``directive`` or ``yaml``, so that none is read as code."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2

from penstock.messages.errors import UserFault
from penstock.runtime.hosts.ray.cluster import RAY_SETTINGS
from penstock.runtime.submit.options import SlurmOptions
from penstock.runtime.submit.scheduler_names import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.submit.job import JobPlan
    from penstock.runtime.submit.options import SubmitOptions

TEMPLATES: Final = Path(__file__).parent / "templates"
TEMPLATE_NAMES: Final = {
    Scheduler.SLURM: "slurm.sh.j2",
    Scheduler.RAYJOB: "rayjob.yaml.j2",
    Scheduler.SKYPILOT: "skypilot.yaml.j2",
}
PARTS: Final = {Scheduler.RAYJOB: ("run",), Scheduler.SKYPILOT: ("setup", "run")}
"""Scripts within a manifest, from templates of their own; a user's template finds them as ``run_script`` and so on."""


def render_job(scheduler: Scheduler, plan: JobPlan, options: SubmitOptions, secret_names: Sequence[str] = ()) -> str:
    """The script or manifest of a job.

    Args:
        scheduler: whose.
        plan: what the scenario takes.
        options: the submit config; ``template`` in it takes the place of ours.
        secret_names: variables whose values SkyPilot takes from the login node.

    Raises:
        UserFault: the template cannot be read, or does not fit.
    """
    values: dict[str, Any] = {"plan": plan, "options": options, "ray_settings": RAY_SETTINGS}
    values["ray_version"] = version("ray")
    values["delimiter"] = _delimiter(plan.scenario)
    if isinstance(options, SlurmOptions):
        is_own = options.image is None  # the nodes see the environment that this command runs in
        values["search_path"] = str(Path(sys.executable).parent) if is_own else None
        values["python_path"] = os.environ.get("PYTHONPATH") if is_own else None
    if scheduler is Scheduler.SKYPILOT:
        values["secret_names"] = tuple(secret_names)
    for part in PARTS.get(scheduler, ()):
        values[f"{part}_script"] = _fill(TEMPLATES / f"{scheduler}.{part}.sh.j2", values)
    return _fill(Path(options.template) if options.template else TEMPLATES / TEMPLATE_NAMES[scheduler], values)


def _fill(own: Path, values: dict[str, Any]) -> str:
    """A template with its values.

    Raises:
        UserFault: it cannot be read, or does not fit.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([own.parent, TEMPLATES]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # nothing here is HTML
    )
    environment.filters |= {
        "sh": lambda value: shlex.quote(str(value)), "directive": _directive_value, "yaml": _yaml_value
    }  # fmt: skip
    try:
        return environment.get_template(own.name).render(**values)
    except jinja2.TemplateNotFound as error:
        raise UserFault(f"{own}: no such template: {error.name}; see the key template of the submit config") from None
    except jinja2.TemplateSyntaxError as error:
        raise UserFault(f"{error.filename or own}:{error.lineno}: not a Jinja template: {error.message}") from None
    except (jinja2.TemplateError, OSError, UnicodeDecodeError) as error:
        raise UserFault(f"{own}: the template cannot be filled in: {error}") from None


def _directive_value(value: object) -> str:
    """Between quotes, in a comment of a shell, which ends with its line whatever is quoted."""
    if len(str(value).splitlines()) > 1 or str(value)[-1:] in ("\n", "\r"):
        raise UserFault(f"{str(value)!r} has a line break, and stands in one line of the job's script; leave it out")
    return shlex.quote(str(value))


def _yaml_value(value: object) -> str:
    """As JSON, which every reader of YAML takes as it stands."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)  # pyright: ignore[reportUnknownArgumentType]


def _delimiter(text: str) -> str:
    """A line that is not in the text: it has the digest of all of it."""
    return f"END-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
