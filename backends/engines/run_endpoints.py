"""Where a run's own engines can be asked by a judge, and where those are that joined it by their address: files in the
run's folder.

Invariants:

* A server's file is written when it is ready, its successor replaces it, and only its owner reads it. Who reads that of
  a server which has died asks in vain, and then another.
* An address that only its own machine can reach is left out on others.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.engines.surroundings import Surroundings

FOLDER: Final = "endpoints"
SUFFIX: Final = ".endpoint.json"
JOINED: Final = ".joined"
"""What ends the name of a file with the address of a server that has joined."""
PREFIXES: Final = {"self": "engine", "teacher": "teacher", "reward_model": "reward_model"}
LOOPBACKS: Final = ("http://127.", "http://localhost", "http://[::1]")


class RunEndpoint(msgspec.Struct, frozen=True):
    """One server."""

    name: str
    url: str
    machine: str
    key: str = ""
    """Whoever asks has to name it, if there is one."""


def write_endpoint(run_folder: Path, name: str, url: str, key: str = "") -> None:
    """Say where this server is."""
    _write(_file(run_folder / FOLDER, name), msgspec.json.encode(RunEndpoint(name, url, socket.gethostname(), key)))


def remove_endpoint(run_folder: Path, name: str, url: str) -> None:
    """It is not there any more; a successor's word stays."""
    file = _file(run_folder / FOLDER, name)
    if file.is_file() and msgspec.json.decode(file.read_bytes(), type=RunEndpoint).url == url:
        file.unlink()


def write_joined(run_folder: Path, name: str, address: str) -> None:
    """The engine of this name is the server at this address, from its next start on."""
    _write(_file(run_folder / FOLDER, name, JOINED), address.encode())


def joined_address(run_folder: Path, name: str) -> str | None:
    """Of a server that has joined; None: this engine is one that the scenario names."""
    try:
        return _file(run_folder / FOLDER, name, JOINED).read_text()
    except FileNotFoundError:
        return None


def attached_address(run_folder: Path, name: str, listed: Sequence[str], place: int) -> str:
    """Where the engine of this name is, of a run that starts none: a server that has joined, or the one that the
    scenario lists at this place."""
    return joined_address(run_folder, name) or listed[place]


class RunEndpoints:
    """The servers of one kind, as they are at the moment."""

    def __init__(self, kind: Literal["self", "teacher", "reward_model"], surroundings: Surroundings) -> None:
        self._folder = Path(surroundings.run_folder) / FOLDER
        self._prefix = PREFIXES[kind]
        fixed = {"self": surroundings.engine_addresses, "teacher": surroundings.teacher_addresses}
        self._fixed = fixed.get(kind, ())

    def now(self) -> Sequence[RunEndpoint]:
        """Those that the scenario names, then those that the run has started, in the order of their names."""
        found: list[RunEndpoint] = []
        for file in sorted(self._folder.glob(f"{self._prefix}*{SUFFIX}")):
            try:
                found.append(msgspec.json.decode(file.read_bytes(), type=RunEndpoint))
            except FileNotFoundError:  # it has ended in this very moment
                continue
        here = socket.gethostname()
        reachable = [each for each in found if each.machine == here or not each.url.startswith(LOOPBACKS)]
        return [*(RunEndpoint(url, url, "") for url in self._fixed), *reachable]


def _write(file: Path, data: bytes) -> None:
    """Whole or not at all, and for its owner alone."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".{os.getpid()}")
    scratch.touch(mode=0o600)
    scratch.write_bytes(data)
    scratch.replace(file)


def _file(folder: Path, name: str, suffix: str = SUFFIX) -> Path:
    return folder / f"{name.replace('/', '-')}{suffix}"
