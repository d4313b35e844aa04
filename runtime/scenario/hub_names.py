"""Names of models and datasets on a hub, as scenarios have them in the place of a path.

| | a name | what is meant |
|---|---|---|
| a model | `ORG/NAME`, `ORG/NAME@REVISION` | the whole repository |
| rows | `ORG/NAME`, `ORG/NAME@REVISION` | its only file of rows for training |
| rows | `hub:ORG/NAME/FILE`, `hub:ORG/NAME@REVISION/FILE` | this file of it |

`hub:` may lead any of them, and rows may end with a slice. Without it, whatever is there as a file or folder is that
file or folder, and a name that ends like a file of rows is one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.option_keys import Names
from penstock.runtime.scenario.named import named_values

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.runtime.scenario.named import Named
    from penstock.runtime.scenario.structure import Scenario

PREFIX: Final = "hub:"
ROW_SUFFIXES: Final = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json")
ON_HUBS: Final = (Names.MODEL, Names.ROWS)
_NAME: Final = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-]+))?(/(?P<file>[^@]+))?(?P<slice>@\[.*\])?"
)


class HubName(NamedTuple):
    """What a scenario names."""

    repository: str
    revision: str | None
    file: str | None
    """Within the repository; of rows."""
    slice: str
    """As it stands behind the name; may be empty."""


def read_hub_name(value: str, names: Names) -> HubName | None:
    """The name in this value of a key that names such a thing, if it is written like one."""
    found = _NAME.fullmatch(value.removeprefix(PREFIX))
    if names not in ON_HUBS or found is None:
        return None
    name = HubName(found["repository"], found["revision"], found["file"], found["slice"] or "")
    if names is Names.MODEL:
        return None if name.file or name.slice else name
    if not value.startswith(PREFIX) and (name.file or name.repository.endswith(ROW_SUFFIXES)):
        return None  # the path of a file that is not there
    return name


def is_left_to_the_hub(names: Names, value: str, folder: Path) -> bool:
    """Whether no path is meant: a name, and nothing is there from ``folder`` on that is called so."""
    if value.startswith(PREFIX):
        return names in ON_HUBS
    return read_hub_name(value, names) is not None and not (folder / value.partition("@[")[0]).exists()


def not_yet_paths(scenario: Scenario) -> Iterator[Named]:
    """What a loaded scenario has in the place of an absolute path, of those keys that may name something on a hub. Made
    rows are among them."""
    return (each for each in named_values(scenario) if each.names in ON_HUBS and not each.value.startswith("/"))
