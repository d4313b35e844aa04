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

from penstock.runtime.scenario.paths import MODEL_PATH, ROW_KEYS, TEACHER_MODEL_PATH, blocks_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.runtime.scenario.source import KeyPath, Plain

PREFIX: Final = "hub:"
ROW_SUFFIXES: Final = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json")
HUB_KEYS: Final = (MODEL_PATH, TEACHER_MODEL_PATH, *ROW_KEYS)
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


def read_hub_name(value: str, key: KeyPath) -> HubName | None:
    """The name in this value, if it is written like one.

    Args:
        value: of a key.
        key: one of :data:`HUB_KEYS`.
    """
    found = _NAME.fullmatch(value.removeprefix(PREFIX))
    if key not in HUB_KEYS or found is None:
        return None
    name = HubName(found["repository"], found["revision"], found["file"], found["slice"] or "")
    if key not in ROW_KEYS:
        return None if name.file or name.slice else name
    if not value.startswith(PREFIX) and (name.file or name.repository.endswith(ROW_SUFFIXES)):
        return None  # the path of a file that is not there
    return name


def is_left_to_the_hub(key: KeyPath, value: str, folder: Path) -> bool:
    """Whether no path is meant: a name, and nothing is there from ``folder`` on that is called so."""
    if value.startswith(PREFIX):
        return key in HUB_KEYS
    return read_hub_name(value, key) is not None and not (folder / value.partition("@[")[0]).exists()


def not_yet_paths(scenario: Plain) -> Iterator[tuple[KeyPath, KeyPath, dict[str, Plain], str]]:
    """What a loaded scenario has in the place of an absolute path: which of :data:`HUB_KEYS` it is, where it stands,
    the block that it stands in, and the value. Made rows are among them.

    Args:
        scenario: as plain data.
    """
    for key in HUB_KEYS:
        for path, block in blocks_at(scenario, key[:-1]):
            value = block.get(str(key[-1]))
            if isinstance(value, str) and not value.startswith("/"):
                yield key, (*path, key[-1]), block, value
