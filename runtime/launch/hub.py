"""Fetches models and datasets that a scenario names as a hub does, into the cache that other tools use as well.

Invariants:

* Code of a repository is neither fetched nor run: of a model come configuration, tokenizer and safetensors.
* The scenario that comes out names folders and files of the cache, whose path has the commit: a run that is resumed
  reads what it began with, and needs no network.
"""

# huggingface_hub is typed in part only:
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import io
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.markup import escape

from penstock.messages.errors import UserFault, first_line
from penstock.messages.option_keys import Names
from penstock.runtime.safe_text import terminal_lines
from penstock.runtime.scenario.hub_names import PREFIX, ROW_SUFFIXES, HubName, not_yet_paths, read_hub_name
from penstock.runtime.scenario.named import with_values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from penstock.runtime.scenario import Scenario
    from penstock.runtime.scenario.source import KeyPath

MODEL_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
REPLY_TIMEOUT_S: Final = 20.0
"""For the hub to say what a repository has."""
SAY_EVERY_S: Final = 10.0
MAX_NAMED: Final = 6


def with_hub(scenario: Scenario, console: Console) -> Scenario:
    """The same scenario with paths in the place of names on the hub, once their files are here.

    Raises:
        UserFault: one cannot be fetched.
    """
    paths: dict[KeyPath, str] = {}
    for each in sorted(not_yet_paths(scenario), key=lambda each: each.names is Names.ROWS):  # models first
        if name := read_hub_name(each.value, each.names):
            paths[each.path] = _fetched(name, each.names, each.key, console)
        elif each.value.startswith(PREFIX):
            raise UserFault(f"{each.key}: {each.value}: expected hub:ORG/NAME, then @REVISION, and of rows /FILE")
    return with_values(scenario, lambda each: paths.get(each.path, each.value))


def fetched_model(model: Path, console: Console) -> Path:
    """The folder of a model that the command line names: this one if it is there, or else that of the hub.

    Raises:
        UserFault: it cannot be fetched.
    """
    name = None if model.exists() else read_hub_name(str(model), Names.MODEL)
    return model if name is None else Path(_fetched(name, Names.MODEL, "model", console))


def _fetched(name: HubName, names: Names, at: str, console: Console) -> str:
    import httpx2
    from huggingface_hub.errors import HFValidationError

    say: Callable[[str], None] = partial(_say, console)
    say(f"{at}: {name.repository} is no file or folder here, so the hub is asked")
    try:
        path = _fetch_rows(name, at, say, console) if names is Names.ROWS else _fetch_model(name, say, console)
    except (HFValidationError, OSError, httpx2.HTTPError) as error:  # the library's own, and those of its HTTP client
        raise UserFault(f"{at}: {name.repository}: {_why(error)}") from None
    say(f"{at}: {path}")
    return path + name.slice


def _say(console: Console, text: str) -> None:
    console.print(escape(terminal_lines(text)), soft_wrap=True, highlight=False)


def _fetch_model(name: HubName, say: Callable[[str], None], console: Console) -> str:
    from huggingface_hub import snapshot_download

    return str(
        snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=list(MODEL_FILES),
            etag_timeout=REPLY_TIMEOUT_S,
            tqdm_class=None if console.is_terminal else _lines(say),
        )
    )


def _fetch_rows(name: HubName, at: str, say: Callable[[str], None], console: Console) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    file = name.file or _only_file(name, at)
    try:
        return hf_hub_download(
            name.repository,
            file,
            repo_type="dataset",
            revision=name.revision,
            etag_timeout=REPLY_TIMEOUT_S,
            tqdm_class=None if console.is_terminal else _lines(say),
        )
    except RemoteEntryNotFoundError:
        text = f"{at}: {name.repository} has no file {file}; {_choice(name, _files_of(name))}"
        raise UserFault(text) from None


def _only_file(name: HubName, at: str) -> str:
    files = _files_of(name)
    rows = [file for file in files if file.endswith(ROW_SUFFIXES[:-1])]
    training = [file for file in rows if "train" in file] or rows
    if len(training) != 1:
        raise UserFault(f"{at}: {name.repository}: {len(training)} files may be meant; {_choice(name, training)}")
    return training[0]


def _choice(name: HubName, files: Sequence[str]) -> str:
    revision = f"@{name.revision}" if name.revision else ""
    named = [f"{PREFIX}{name.repository}{revision}/{file}" for file in files if file.endswith(ROW_SUFFIXES)]
    if not named:
        return "it has no file of rows (Parquet or JSON lines)"
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    return f"name one: {', '.join(named[:MAX_NAMED])}{more}"


def _files_of(name: HubName) -> list[str]:
    """What the repository has; where the hub cannot be reached, what was fetched of it before."""
    import httpx2
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.file_download import repo_folder_name

    try:
        info = HfApi().dataset_info(name.repository, revision=name.revision, timeout=REPLY_TIMEOUT_S)
        return sorted(each.rfilename for each in info.siblings or ())
    except HfHubHTTPError:  # it has answered
        raise
    except (httpx2.HTTPError, OfflineModeIsEnabled):
        cache = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repository, repo_type="dataset")
        revision = cache / "refs" / (name.revision or constants.DEFAULT_REVISION)
        commit = revision.read_text() if revision.is_file() else name.revision or ""
        snapshot = cache / "snapshots" / commit
        if not commit or not snapshot.is_dir():
            raise
        return sorted(str(file.relative_to(snapshot)) for file in snapshot.rglob("*") if file.is_file())


def _lines(say: Callable[[str], None]) -> type[Any]:
    """The library's progress bar, as lines for what is no terminal."""
    library: Any = import_module("tqdm")  # which comes with huggingface_hub, and has no types
    said_s = time.monotonic()

    def display(bar: Any, msg: str | None = None, pos: int | None = None) -> None:  # noqa: ANN401 - typed nowhere
        nonlocal said_s
        if bar.unit == "B" and time.monotonic() - said_s >= SAY_EVERY_S:
            said_s = time.monotonic()
            say(f"fetching: {bar.n / 1e6:,.0f} of {(bar.total or 0) / 1e6:,.0f} MB")

    def begin(bar: Any, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        library.tqdm.__init__(bar, *arguments, **options | {"file": io.StringIO()})  # it ends with an empty line

    return type("Lines", (library.tqdm,), {"__init__": begin, "display": display})


def _why(error: Exception) -> str:
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = constants.ENDPOINT
    match error:
        case HFValidationError():
            return first_line(error)
        case GatedRepoError():
            return f"{where} gives it to those who have accepted its terms there, and asks for a token: set HF_TOKEN"
        case RevisionNotFoundError():
            return f"{where} has it, but not in this revision"
        case RepositoryNotFoundError():
            return (
                f"nothing is here under this name, and {where} has nothing of it that can be seen without a token "
                "(a private one takes HF_TOKEN)"
            )
        case LocalEntryNotFoundError():
            return (
                f"{where} cannot be reached, and {constants.HF_HUB_CACHE} does not have the whole of it: fetch it "
                "where there is a network (hf download), and copy that folder here or name it in HF_HUB_CACHE"
            )
        case httpx2.TransportError() | OfflineModeIsEnabled():
            return f"{where} cannot be reached ({first_line(error)})"
        case _:
            return f"cannot be fetched from {where}: {first_line(error)}"
