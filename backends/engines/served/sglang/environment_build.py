"""Builds the environment of stock SGLang: a virtual environment, the lock's packages, stand-ins, an import.

Invariants:

* One builder at a time for a folder, across processes: the others wait for its file lock, and then find the
  environment ready. The installer holds the lock as well, so that one that has lost its builder is waited for.
* A folder is emptied only if it carries our mark, and not for other stand-ins alone: servers may run from it.
  Whatever cuts a build off leaves the mark at ``building``.
* Packages come as wheels, at the versions of the lock and no others; from where is pip's configuration.

===========================  =========================================  ==================
waits for                    ended by                                   at the latest
===========================  =========================================  ==================
another builder              its end, however it comes                  ``BUILD_TIMEOUT_S``
pip                          its exit                                   ``BUILD_TIMEOUT_S``
the import of the server     its exit                                   ``IMPORT_TIMEOUT_S``
===========================  =========================================  ==================
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.engines.served.sglang.environment import (
    SGLANG_VERSION,
    Mark,
    SglangEnvironment,
    build_command,
    default_folder,
    device_name,
    find_environment,
    has_cuda_gpu,
    lock_digest,
    lock_file,
    pins,
    python_of,
    read_mark,
    stand_in_modules,
    stand_ins_digest,
    write_mark,
)
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    Report = Callable[["Progress"], None]

BUILD_TIMEOUT_S: Final = 3600.0
IMPORT_TIMEOUT_S: Final = 300.0
OLDEST_PYTHON: Final = (3, 11)
NEWEST_PYTHON: Final = (3, 12)
STAND_INS_AT_START: Final = "stand_in_"
"""Modules with such names are imported when the environment's Python starts."""

_PACKAGE: Final = re.compile(r"^(?:Collecting|Processing|Requirement already satisfied:) (?P<what>\S+)")
_DOWNLOAD: Final = re.compile(r"^\s+Downloading (?P<file>\S+)(?: \((?P<size>[^)]+)\))?")
_PROBE_PYTHON: Final = "import ensurepip, sys, venv; print(*sys.version_info[:2])"
_PROBE_SERVER: Final = """
import json, sys
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler
import sglang, torch
sys.stdout.write("\\n" + json.dumps({
    "sglang": sglang.__version__, "torch": torch.__version__, "cuda": torch.version.cuda,
    "num_gpus": torch.cuda.device_count(),
}))
"""


class Progress(NamedTuple):
    """How far a build is."""

    text: str
    num_packages: int = 0
    """Of which the installer has begun to fetch so many, of ``total_packages``."""
    total_packages: int = 0


class Versions(msgspec.Struct, frozen=True):
    """What the environment's Python says once it has imported the server."""

    sglang: str
    torch: str
    cuda: str | None
    num_gpus: int


class Built(NamedTuple):
    """The outcome of a build."""

    environment: SglangEnvironment
    folder: Path
    was_ready: bool
    """Nothing had to be done."""


def build_environment(
    *,
    folder: Path | None = None,
    stand_ins: Path | None = None,
    python: Path | None = None,
    recreate: bool = False,
    report: Report = lambda progress: None,
) -> Built:
    """Build the environment for CUDA, or with ``stand_ins`` for the CPU, unless it is ready.

    Raises:
        UserFault: it cannot be built; the message says why and what to do.
    """
    is_cpu = stand_ins is not None or not has_cuda_gpu()
    folder = default_folder(is_cpu=is_cpu) if folder is None else folder.expanduser().absolute()
    wanted = Mark(
        state="ready", version=SGLANG_VERSION, is_cpu=is_cpu, lock=lock_digest(is_cpu=is_cpu),
        stand_ins=None if stand_ins is None else stand_ins_digest(stand_ins),
        stand_in_modules=() if stand_ins is None else tuple(module.name for module in stand_in_modules(stand_ins)),
    )  # fmt: skip
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_builder(folder, report) as lock:
            kept = None if recreate else _kept(folder, wanted)
            if kept is not None and wanted.stand_ins in (None, kept.stand_ins):
                return Built(find_environment(folder, is_cpu=is_cpu), folder, was_ready=True)
            if is_cpu and stand_ins is None:
                raise UserFault(
                    f"this machine has no NVIDIA GPU, and SGLang {SGLANG_VERSION} cannot be loaded without its "
                    "packages for CUDA; on a CPU it serves only with stand-ins for them, which a checkout of Penstock "
                    f"has, for tests: {build_command(folder, is_cpu=True)}"
                )
            if kept is None:
                _install(folder, wanted, python or Path(sys.executable), report, lock)
            return Built(_finish(folder, wanted, kept, stand_ins, report), folder, was_ready=False)
    except OSError as error:
        place = error.filename or folder
        raise UserFault(
            f"{place}: {(error.strerror or str(error)).lower()}; the environment needs a place that can be written, "
            "with some gigabytes free: choose one with --folder"
        ) from None


def _kept(folder: Path, wanted: Mark) -> Mark | None:
    """The mark of an environment whose packages are those that are wanted."""
    try:
        find_environment(folder, is_cpu=wanted.is_cpu)
    except UserFault:
        return None
    return read_mark(folder)


def _install(folder: Path, wanted: Mark, python: Path, report: Report, lock: int) -> None:
    _clear(folder)
    folder.mkdir()
    write_mark(folder, msgspec.structs.replace(wanted, state="building"))
    _make_virtual_environment(folder, python, report, lock)
    _install_pins(folder, report, lock, is_cpu=wanted.is_cpu)


def _finish(folder: Path, wanted: Mark, kept: Mark | None, stand_ins: Path | None, report: Report) -> SglangEnvironment:
    if stand_ins is not None:
        report(Progress("installing the stand-ins"))
        write_mark(folder, msgspec.structs.replace(wanted, state="building"))
        (packages,) = folder.glob("lib/python*/site-packages")
        for name in () if kept is None else kept.stand_in_modules:
            (packages / name).unlink(missing_ok=True)
        _install_stand_ins(packages, stand_ins)
    report(Progress("importing the server in it"))
    environment = SglangEnvironment(python_of(folder), wanted.is_cpu, SGLANG_VERSION)
    check_import(environment)
    write_mark(folder, wanted)
    return environment


def check_import(environment: SglangEnvironment) -> Versions:
    """Import the server in the environment: some ten seconds of one core.

    Raises:
        UserFault: it cannot be imported, or torch is the wrong build.
    """
    command = [str(environment.python), "-I", "-W", "ignore", "-c", _PROBE_SERVER]
    try:
        done = subprocess.run(
            command, env=os.environ | environment.variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=IMPORT_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserFault(f"importing SGLang with {environment.python} took more than {IMPORT_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise UserFault(f"{environment.python} cannot be started: {error.strerror}") from None
    if done.returncode != 0:
        raise UserFault(
            f"SGLang cannot be imported with {environment.python}: {_last_lines(done.stderr, 3)}; build the "
            "environment anew with --recreate"
        )
    versions = msgspec.json.decode(done.stdout.rpartition("\n")[2], type=Versions)
    if environment.is_cpu and versions.cuda is not None:
        raise UserFault(f"torch {versions.torch} in {environment.python} is a build for CUDA, not for the CPU")
    if not environment.is_cpu and versions.num_gpus == 0:
        raise UserFault(
            f"torch {versions.torch} in {environment.python} sees no GPU of this machine: it is a build for CUDA "
            f"{versions.cuda or '(none)'}, for which the NVIDIA driver may be too old"
        )
    return versions


@contextmanager
def _only_builder(folder: Path, report: Report) -> Generator[int]:
    """Hold the folder's lock, waiting for whoever holds it; its descriptor is for processes that hold it as well."""
    place = folder.with_name(f"{folder.name}.lock")
    deadline_s = time.monotonic() + BUILD_TIMEOUT_S
    with place.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise UserFault(
                        f"another process has been building {folder} for {BUILD_TIMEOUT_S:g} s; end it and try again"
                    ) from None
                report(Progress("waiting for another process that builds it"))
                time.sleep(0.5)
        yield file.fileno()


def _clear(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or (any(folder.iterdir()) and read_mark(folder) is None):
        raise UserFault(
            f"{folder}: there is something else at this place, which is not overwritten; choose another with --folder"
        )
    shutil.rmtree(folder)


def _make_virtual_environment(folder: Path, python: Path, report: Report, lock: int) -> None:
    report(Progress("making a virtual environment"))
    try:
        probe = subprocess.run(
            [python, "-c", _PROBE_PYTHON], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=True
        )
        version = tuple(int(part) for part in probe.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserFault(
            f"{python} is no Python that can make virtual environments ({type(error).__name__}); on Debian and Ubuntu "
            "install python3-venv, or name another with --python"
        ) from None
    if not OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        raise UserFault(
            f"{python} is Python {'.'.join(map(str, version))}, and the packages are locked for 3.11 and 3.12; "
            "name one of these with --python"
        )
    # With a marked folder there already: venv fills what exists.
    done = subprocess.run(
        [python, "-m", "venv", folder], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False,
        pass_fds=(lock,),
    )  # fmt: skip
    if done.returncode != 0:
        raise UserFault(f"{python} -m venv {folder} failed: {_last_lines(done.stderr or done.stdout, 3)}")


def _install_pins(folder: Path, report: Report, lock: int, *, is_cpu: bool) -> None:
    total = len(pins(is_cpu=is_cpu))
    command = [
        str(python_of(folder)), "-I", "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-color",
        "--progress-bar", "off", "--no-deps", "--only-binary", ":all:", "-r", str(lock_file(is_cpu=is_cpu)),
    ]  # fmt: skip
    log = folder.with_name(f"{folder.name}.log")
    num_packages, text, tail = 0, "asking the package index", list[str]()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(lock,),
        text=True, errors="replace",
    )  # fmt: skip
    report(Progress(text, 0, total))
    timer = threading.Timer(BUILD_TIMEOUT_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None, "it is a pipe"
        with log.open("w", encoding="utf-8") as file:
            for line in process.stdout:
                file.write(line)
                tail = [*tail, line][-6:]
                if found := _PACKAGE.match(line):
                    num_packages, text = num_packages + 1, f"fetching {found['what'].rpartition('/')[2]}"
                elif found := _DOWNLOAD.match(line):
                    text = f"fetching {found['file'].split('-')[0]}, {found['size'] or 'size unknown'}"
                elif line.startswith("Installing collected packages"):
                    text = f"unpacking {total} packages"
                report(Progress(text, min(num_packages, total), total))
        status = process.wait(timeout=IMPORT_TIMEOUT_S)
    finally:
        timer.cancel()
        process.kill()
        process.wait()
    if status != 0:
        raise UserFault(_why_pip_failed("".join(tail), log, is_cpu=is_cpu))


def _why_pip_failed(tail: str, log: Path, *, is_cpu: bool) -> str:
    if "No matching distribution found for torch==" in tail and is_cpu:
        return (
            "pip finds no torch for the CPU: the packages that it is pointed at have only the build for CUDA; add the "
            "index of CPU wheels that torch's installation guide names, with PIP_EXTRA_INDEX_URL (all of pip's output "
            f"is in {log})"
        )
    return f"pip could not install SGLang for {device_name(is_cpu=is_cpu)}: {_last_lines(tail, 2)} (all of it: {log})"


def _install_stand_ins(packages: Path, stand_ins: Path) -> None:
    """Copy the modules beside the installed packages, where the processes that a server spawns find them too."""
    modules = stand_in_modules(stand_ins)
    for module in modules:
        shutil.copyfile(module, packages / module.name)
    at_start = [module.stem for module in modules if module.name.startswith(STAND_INS_AT_START)]
    (packages / "penstock_stand_ins.pth").write_text("".join(f"import {name}\n" for name in at_start))


def _last_lines(text: str, count: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-count:]) or "it said nothing"
