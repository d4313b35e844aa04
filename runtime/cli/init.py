"""``penstock init``: a scenario for a model, rows and a reward of one's own, from the shipped ``local_model``."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.markup import escape

from penstock.backends.data.problems import DataError
from penstock.backends.data.row import RawRow
from penstock.backends.data.sources import GENERATED, parse_source, read_rows
from penstock.messages.errors import UserFault
from penstock.messages.option_keys import is_user_code
from penstock.runtime.output_file import check_new_output
from penstock.runtime.safe_text import terminal_lines
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.schema import schema_text
from penstock.runtime.scenario.shipped import shipped_scenarios
from penstock.runtime.scenario.source import plain_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

TEMPLATE: Final = "local_model"
PROMPTS: Final = ("prompt", "question", "problem", "query", "instruction", "input")
LABELS: Final = ("label", "answer", "reward_model.ground_truth", "ground_truth", "solution", "target")
"""What datasets call these columns, ours first; of several that a row has, the first is taken."""
SCHEMA: Final = "scenario.schema.json"
"""Written beside the scenario, for editors that complete and check keys."""


class Wanted(NamedTuple):
    """What goes into the scenario. Paths are written as somebody in the current folder would write them."""

    model: str
    data: str
    reward: str
    policy: str
    engine: str


def write_new_scenario(file: Path, wanted: Wanted, console: Console) -> None:
    """Write a scenario that loads, with the schema beside it, and say what comes next.

    Raises:
        UserFault: a file of this name is there, or what is wanted makes no scenario; nothing is written then.
    """
    check_new_output(file, "")
    text = shipped_scenarios()[TEMPLATE].read_text(encoding="utf-8")
    text = text[text.index("\nrun:") :]  # what leads it is about the template
    first = _first_row(wanted.data)
    prompt_key, label_key = (next((key for key in keys if _has(first, key)), keys[0]) for keys in (PROMPTS, LABELS))
    for block, key, value in (
        ("run", "name", _run_name(file)),
        ("model", "path", _from(file.parent, wanted.model)),
        ("data", "path", _from(file.parent, wanted.data)),
        ("data", "prompt_key", prompt_key),
        ("data", "label_key", label_key),
        ("reward", "function", _from(file.parent, wanted.reward)),
        ("staleness", "policy", _from(file.parent, wanted.policy)),
    ):
        text = _with(text, block, key, value)
    if isinstance(first.get(prompt_key), list):
        text = text.replace("\n  chat_template: false ", "\n  chat_template: true  ")
    text = re.sub(r"\n  max_staleness: .*", "", text)  # each policy has a bound of its own, which goes without saying
    text = text.replace("\nengines:\n", f"\nengines:\n  backend: {_plain(wanted.engine)}\n")
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        scratch.write_text(f"# yaml-language-server: $schema={SCHEMA}\n{text}", encoding="utf-8")
        load_scenario(scratch)
        (file.parent / SCHEMA).write_text(schema_text(), encoding="utf-8")
        scratch.rename(file)
    except OSError as error:
        raise UserFault(f"{file}: cannot be written: {(error.strerror or str(error)).lower()}") from None
    except UserFault as error:
        raise UserFault(str(error).replace(str(scratch), str(file))) from None
    finally:
        scratch.unlink(missing_ok=True)
    if (prompt_key, label_key) != (PROMPTS[0], LABELS[0]):
        found = f"data.prompt_key is {prompt_key}, data.label_key is {label_key}"
        console.print(f"by the names of the columns: {found}", soft_wrap=True)
    console.print(f"wrote {escape(terminal_lines(str(file)))}. What comes next:", soft_wrap=True)
    shown = escape(terminal_lines(shlex.quote(str(file))))
    for command, meaning in (
        (f"penstock data check {shown}", "read all rows, and show the first prompts as the model will see them"),
        (f"penstock run {shown} --dry-run", "what it sets, who runs where, and what is missing here"),
        (f"penstock run {shown}", "train"),
    ):
        console.print(f"  [bold]{command}[/]  [dim]{meaning}[/]", soft_wrap=True)


def _run_name(file: Path) -> str:
    """As ``run.name`` has to be; of a file that is called something else altogether, one that says nothing."""
    return re.sub(r"[^\w.-]", "_", file.stem, flags=re.ASCII).strip("._-")[:64] or "run"


def _first_row(data: str) -> Mapping[str, object]:
    """Its columns, those that may be meant at least; rows that cannot be read here are asked about later."""
    if data.partition(":")[0] in GENERATED:
        return {}
    known = [key.partition(".")[0] for key in (*PROMPTS, *LABELS)]
    try:
        first = next(read_rows(parse_source(data), (), seed=0, optional=known), None)
    except DataError:
        return {}
    return first.columns if isinstance(first, RawRow) else {}


def _has(columns: Mapping[str, object], key: str) -> bool:
    name, _, inner = key.partition(".")
    found = columns.get(name)
    return name in columns and (not inner or (isinstance(found, dict) and inner in found))


def _from(folder: Path, value: str) -> str:
    """The path as it has to stand in a file of this folder; what is no path that is here stays as it is."""
    path, mark, rest = value.rpartition(":") if is_user_code(value) else value.partition("@[")
    here = Path(path).expanduser()
    if here.is_absolute() or not here.exists():
        return value
    return f"{os.path.relpath(here, folder)}{mark}{rest}"


def _with(text: str, block: str, key: str, value: str) -> str:
    found = re.search(rf"^{block}:\n(?:  .*\n)*?  {key}: (?P<value>\S+)(?P<gap> *)", text, re.MULTILINE)
    assert found is not None, f"{TEMPLATE} has no {block}.{key}"
    written = _plain(value)
    gap = " " * max(1, len(found["value"]) + len(found["gap"]) - len(written)) if found["gap"] else ""
    return text[: found.start("value")] + written + gap + text[found.end() :]


def _plain(value: str) -> str:
    """As YAML writes it on one line."""
    return plain_text(value, width=10_000).splitlines()[0]
