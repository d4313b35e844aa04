"""Where the environment of stock SGLang lies, and whether it may be used.

SGLang pins another torch than Penstock, so its servers run in a virtual environment of their own, which
``penstock env sglang`` builds from a lock file of this package.

Invariants:

* An environment is used only if its mark says ``ready`` and names the very lock of this package. The mark says
  ``building`` from the first file on and ``ready`` only after the server has been imported in it.
* Nothing here installs, waits or imports SGLang; looking costs a few file reads.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import pynvml

from penstock.backends.user_cache import user_cache
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault

SGLANG_VERSION: Final = "0.5.23"
ENVIRONMENTS_VARIABLE: Final = "PENSTOCK_ENVS"
"""Names the folder that environments lie in; each user's cache without it."""
MARK_FILE: Final = "penstock-environment.json"
BUILD_COMMAND: Final = "penstock env sglang"

_LOCKS: Final = Path(__file__).parent / "locks"
_nvml: Final[Any] = pynvml  # it has no annotations


class SglangEnvironment(NamedTuple):
    """An environment in which a server can be started."""

    python: Path
    is_cpu: bool
    version: str

    @property
    def variables(self) -> dict[str, str]:
        """What a process of the server needs in its environment, beside what it inherits."""
        own = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        return {**own, "SGLANG_USE_CPU_ENGINE": "1"} if self.is_cpu else own


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment says about itself, in ``penstock-environment.json``."""

    state: Literal["building", "ready"]
    version: str
    is_cpu: bool
    lock: str
    """Digest of the lock that it was built from."""
    stand_ins: str | None = None
    """Digest of the stand-ins that were installed."""
    stand_in_modules: tuple[str, ...] = ()
    """File names of the modules that stand in for missing ones."""


def find_environment(folder: Path | None = None, *, is_cpu: bool | None = None) -> SglangEnvironment:
    """The environment at ``folder``, or at its usual place for CPU or CUDA, as this machine has a GPU or not.

    Raises:
        UserFault: there is none, it was not finished, or it was built from another lock.
    """
    is_cpu = (not has_cuda_gpu()) if is_cpu is None else is_cpu
    folder = default_folder(is_cpu=is_cpu) if folder is None else folder
    kind, build = device_name(is_cpu=is_cpu), build_command(folder, is_cpu=is_cpu)
    mark = read_mark(folder)
    if mark is None:
        raise UserFault(f"no environment of SGLang {SGLANG_VERSION} for {kind} at {folder}; build it with: {build}")
    if mark.is_cpu != is_cpu:
        raise UserFault(
            f"{folder} holds an environment of SGLang for {device_name(is_cpu=mark.is_cpu)}, not for {kind}; build one "
            f"in another folder: {BUILD_COMMAND} --folder ANOTHER"
        )
    python = python_of(folder)
    if mark.state != "ready" or not python.exists():
        raise UserFault(
            f"the environment of SGLang at {folder} is not whole: its building was cut off or goes on, or its Python "
            f"has been removed; build it with: {build}"
        )
    if mark.lock != lock_digest(is_cpu=is_cpu):
        raise UserFault(
            f"the environment at {folder}, of SGLang {mark.version}, was built for another version of Penstock; build "
            f"it anew with: {build}"
        )
    return SglangEnvironment(python, is_cpu, mark.version)


def has_cuda_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, whatever this process was given of it."""
    return num_cuda_gpus() > 0


def num_cuda_gpus() -> int:
    """NVIDIA GPUs of this machine."""
    try:
        _nvml.nvmlInit()
    except (pynvml.NVMLError, OSError):
        return 0
    try:
        return int(_nvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    finally:
        _nvml.nvmlShutdown()


def environments_folder() -> Path:
    """Where environments lie."""
    given = os.environ.get(ENVIRONMENTS_VARIABLE)
    if given:
        return Path(given).expanduser().absolute()
    return user_cache("the folder of environments", ENVIRONMENTS_VARIABLE) / "envs"


def default_folder(*, is_cpu: bool) -> Path:
    """The usual place of this version's environment."""
    return environments_folder() / f"sglang-{SGLANG_VERSION}-{'cpu' if is_cpu else 'cuda'}"


def build_command(folder: Path, *, is_cpu: bool) -> str:
    """What the user types to build this environment."""
    place = "" if folder == default_folder(is_cpu=is_cpu) else f" --folder {folder}"
    stand_ins = " --stand-ins tests/sglang/stand_ins" if is_cpu else ""
    return f"{BUILD_COMMAND}{place}{stand_ins}"


def python_of(folder: Path) -> Path:
    """Its interpreter. Not resolved: the link is what makes Python look for packages in ``folder``."""
    return folder / "bin" / "python"


def read_mark(folder: Path) -> Mark | None:
    """What the environment at ``folder`` says about itself; None where there is none of ours."""
    try:
        return msgspec.json.decode((folder / MARK_FILE).read_bytes(), type=Mark)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UNREADABLE:  # of another version of Penstock, or cut off; ours all the same
        return Mark(state="building", version="unknown", is_cpu=folder.name.endswith("-cpu"), lock="")
    except OSError as error:
        raise UserFault(f"{folder}: cannot be read: {(error.strerror or '').lower()}") from None


def write_mark(folder: Path, mark: Mark) -> None:
    """Put the mark in its place in one step: nobody reads half of it."""
    temporary = folder / f"{MARK_FILE}.new"
    temporary.write_bytes(msgspec.json.encode(mark))
    temporary.replace(folder / MARK_FILE)


def lock_file(*, is_cpu: bool) -> Path:
    """The exact versions of everything in it."""
    return _LOCKS / ("cpu.txt" if is_cpu else "cuda.txt")


def pins(*, is_cpu: bool) -> list[str]:
    """``name==version`` of every package in the lock."""
    lines = lock_file(is_cpu=is_cpu).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def lock_digest(*, is_cpu: bool) -> str:
    """Of the pins."""
    return hashlib.sha256("\n".join(pins(is_cpu=is_cpu)).encode()).hexdigest()


def stand_ins_digest(folder: Path) -> str:
    """Of the names and bytes of every module in a folder of stand-ins.

    Raises:
        UserFault: there is no module in it.
    """
    digest = hashlib.sha256()
    modules = stand_in_modules(folder)
    for module in modules:
        digest.update(f"{module.name}\0{module.stat().st_size}\0".encode())
        digest.update(module.read_bytes())
    return digest.hexdigest()


def stand_in_modules(folder: Path) -> list[Path]:
    """The modules to install, in the order of their names.

    Raises:
        UserFault: there is none.
    """
    modules = sorted(folder.glob("*.py"))
    if not modules:
        what = "no Python module in it" if folder.is_dir() else "no such folder"
        raise UserFault(
            f"--stand-ins {folder}: {what}; expected that of a checkout of Penstock: tests/sglang/stand_ins"
        )
    return modules


def device_name(*, is_cpu: bool) -> str:
    """For messages."""
    return "the CPU" if is_cpu else "CUDA"
