"""Where the gateways of a run can be reached: files in the run's folder.

Invariants:

* ``gateway/token`` is made once for a run, whoever needs it first, and readable by its owner only.
* An engine's gateway has one file, replaced whole by its successor and removed by its owner at the end.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

FOLDER: Final = "gateway"
TOKEN_NAME: Final = "token"
ADDRESS_SUFFIX: Final = ".address.json"
PUSHES_NAME: Final = "pushes.url"
"""Where groups are pushed to."""


class GatewayAddress(msgspec.Struct, frozen=True):
    """One engine's gateway."""

    engine: str
    epoch: int
    url: str


def run_token(run_folder: Path) -> str:
    """The API key of a run; made if it is not there yet."""
    folder = run_folder / FOLDER
    folder.mkdir(exist_ok=True)
    scratch = folder / f".{TOKEN_NAME}.{os.getpid()}.{secrets.token_hex(4)}"
    scratch.touch(mode=0o600)
    scratch.write_text(f"penstock-{secrets.token_urlsafe(24)}")
    try:
        os.link(scratch, folder / TOKEN_NAME)
    except FileExistsError:
        pass  # somebody else was first, and all use theirs
    finally:
        scratch.unlink()
    return (folder / TOKEN_NAME).read_text()


def write_address(run_folder: Path, address: GatewayAddress) -> None:
    """Say where this gateway is."""
    folder = run_folder / FOLDER
    folder.mkdir(exist_ok=True)
    scratch = folder / f".{_file_name(address.engine)}.{os.getpid()}"
    scratch.write_bytes(msgspec.json.encode(address))
    scratch.replace(folder / _file_name(address.engine))


def remove_address(run_folder: Path, address: GatewayAddress) -> None:
    """It is not there any more; a successor's word stays."""
    file = run_folder / FOLDER / _file_name(address.engine)
    if file.is_file() and msgspec.json.decode(file.read_bytes(), type=GatewayAddress) == address:
        file.unlink()


def read_addresses(run_folder: Path) -> list[GatewayAddress]:
    """The gateways of a run, by engine."""
    found: list[GatewayAddress] = []
    for file in sorted((run_folder / FOLDER).glob(f"*{ADDRESS_SUFFIX}")):
        try:
            found.append(msgspec.json.decode(file.read_bytes(), type=GatewayAddress))
        except FileNotFoundError:  # it has ended in this very moment
            continue
    return found


def write_push_address(run_folder: Path, url: str) -> None:
    """Say where groups are pushed to."""
    folder = run_folder / FOLDER
    folder.mkdir(exist_ok=True)
    scratch = folder / f".{PUSHES_NAME}.{os.getpid()}"
    scratch.write_text(url)
    scratch.replace(folder / PUSHES_NAME)


def remove_push_address(run_folder: Path, url: str) -> None:
    """It is not there any more; a successor's word stays."""
    if read_push_address(run_folder) == url:
        (run_folder / FOLDER / PUSHES_NAME).unlink(missing_ok=True)


def read_push_address(run_folder: Path) -> str | None:
    """Where groups are pushed to; None: nowhere, or not yet."""
    try:
        return (run_folder / FOLDER / PUSHES_NAME).read_text()
    except FileNotFoundError:
        return None


def reachable_url(host: str, port: int) -> str:
    """The address of a server that listens on this one, as others reach it."""
    reachable = _node_host() if host in ("0.0.0.0", "::") else host
    at = f"[{reachable}]" if ":" in reachable else reachable
    return f"http://{at}:{port}"


def _node_host() -> str:
    """The address by which other machines reach this one."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent; the kernel only picks the interface
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def log_file(run_folder: Path, engine: str) -> Path:
    """Where an engine's gateway writes a line for each session that ended."""
    return run_folder / FOLDER / f"{engine.replace('/', '-')}.sessions.jsonl"


def _file_name(engine: str) -> str:
    return f"{engine.replace('/', '-')}{ADDRESS_SUFFIX}"
