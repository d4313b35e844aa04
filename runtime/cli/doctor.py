"""Does this machine have what Penstock needs? One check per line, each with what to do when it fails."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
from rich.markup import escape
from rich.table import Table

from penstock.backends.engines.served.sglang.environment import (
    build_command,
    default_folder,
    device_name,
    find_environment,
    has_cuda_gpu,
    num_cuda_gpus,
    read_mark,
)
from penstock.backends.engines.served.sglang.environment_build import check_import
from penstock.backends.learners.megatron.layout.config_fields import MEGATRON_VERSION
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted
from penstock.runtime.preflight.megatron import (
    INSTALL,
    INSTALL_LAYERS,
    has_transformer_engine,
    installed_version,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

GIB = 1 << 30
MIB = 1 << 20
MIN_SHARED_MEMORY_BYTES = 60 * MIB
MIN_FREE_DISK_BYTES = 2 * GIB
MIN_MEMORY_BYTES = 4 * GIB
MIN_DESCRIPTORS = 1024
NCCL_BYTES_PER_GPU = 64 * MIB
"""Of shared memory: a rule of thumb, not a figure of NCCL's."""
SHARED_MEMORY = Path("/dev/shm")

Verdict = Literal["ok", "bad", "absent"]
MARKS: dict[Verdict, str] = {"ok": "[green]✓[/]", "bad": "[red]✗[/]", "absent": "[dim]–[/]"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; ``absent`` is something optional that is not there."""

    subject: str
    verdict: Verdict
    found: str
    fix: str = ""


def examine(console: Console, folder: Path) -> bool:
    """Run every check, print the table, and say whether all is well. ``folder`` is where runs are written."""
    checks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("Python", check_python),
        ("processor and memory", check_memory),
        ("torch", check_torch),
        ("transformers", lambda: check_package("transformers")),
        ("Ray", lambda: check_package("ray")),
        ("shared memory", check_shared_memory),
        ("disk", lambda: check_disk(folder)),
        ("file descriptors", check_descriptors),
        ("SGLang", check_sglang),
        ("Megatron", check_megatron),
        ("ranks", check_ranks),
    )
    findings: list[Finding] = []
    with console.status("looking …") as status:
        for name, check in checks:
            status.update(f"looking at {name} …")
            findings.append(check())
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "what", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        fix = finding.fix if finding.verdict != "ok" else ""
        table.add_row(MARKS[finding.verdict], finding.subject, escape(finding.found), escape(fix))
    console.print(table)
    return all(finding.verdict != "bad" for finding in findings)


def check_python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    verdict: Verdict = "ok" if sys.version_info >= (3, 11) else "bad"
    return Finding("Python", verdict, version, "use Python 3.11 or 3.12")


def check_memory() -> Finding:
    total = psutil.virtual_memory().total
    verdict: Verdict = "ok" if total >= MIN_MEMORY_BYTES else "bad"
    found = f"{os.cpu_count()} cores, {total / GIB:.1f} GiB"
    return Finding("processor and memory", verdict, found, "the quickstart needs 4 GiB")


def check_torch() -> Finding:
    fix = "install torch 2.13 from an index that has a build for this machine"
    try:
        import torch
    except (ImportError, OSError) as error:  # a build for other libraries than this machine's raises OSError
        return Finding("torch", "bad", f"cannot be imported: {error}", fix)
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if not devices and Path("/dev/nvidia0").exists():
        return Finding("torch", "bad", f"{torch.__version__}, which does not see this machine's GPU", fix)
    return Finding("torch", "ok", f"{torch.__version__}, {', '.join(devices) or 'no GPU'}")


def check_package(name: str) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "bad", "not installed", "install Penstock with its dependencies: pip install -e .")


def check_sglang(*, is_cpu: bool | None = None) -> Finding:
    """The environment of SGLang's servers, in which the server is imported if it is there."""
    is_cpu = not has_cuda_gpu() if is_cpu is None else is_cpu
    try:
        folder = default_folder(is_cpu=is_cpu)
    except UserFault as error:
        return Finding("SGLang", "absent", str(error))
    fix = f"for scenarios with engines.backend: sglang: {build_command(folder, is_cpu=is_cpu)}"
    try:
        if read_mark(folder) is None:
            return Finding("SGLang", "absent", f"no environment at {folder} (optional)", fix)
        versions = check_import(find_environment(folder, is_cpu=is_cpu))
    except UserFault as error:
        return Finding("SGLang", "bad", str(error), fix)
    gpus = f", {counted(versions.num_gpus, 'GPU')}" if versions.num_gpus else ""
    found = f"{versions.sglang} for {device_name(is_cpu=is_cpu)} with torch {versions.torch}{gpus}, {folder}"
    return Finding("SGLang", "ok", found)


def check_megatron(*, has_gpu: bool | None = None) -> Finding:
    """megatron-core, and on GPUs Transformer Engine; neither is imported, which takes seconds."""
    has_gpu = has_cuda_gpu() if has_gpu is None else has_gpu
    version = installed_version()
    if version is None:
        fix = f"for scenarios with learner.backend: megatron: {INSTALL}"
        return Finding("Megatron", "absent", "megatron-core is not installed (optional)", fix)
    found = f"megatron-core {version}"
    if version != MEGATRON_VERSION:
        found += f", tried with {MEGATRON_VERSION}"
    if not has_gpu:
        return Finding("Megatron", "ok", f"{found}; no GPU: ranks on CPUs, with layers in plain torch")
    if not has_transformer_engine():
        fix = f"for ranks on GPUs: {INSTALL_LAYERS}, or set learner.device: cpu"
        return Finding("Megatron", "bad", f"{found}, without Transformer Engine", fix)
    return Finding("Megatron", "ok", f"{found}, Transformer Engine")


def check_ranks(folder: Path = SHARED_MEMORY, *, num_gpus: int | None = None) -> Finding:
    """What a learner of several ranks needs of a machine: an address to meet at, and on GPUs shared memory for NCCL."""
    num_gpus = num_cuda_gpus() if num_gpus is None else num_gpus
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
    except OSError as error:
        fix = "allow local TCP connections: the ranks of a learner meet at 127.0.0.1"
        return Finding("ranks", "bad", f"127.0.0.1 cannot be listened on: {error.strerror}", fix)
    wanted = num_gpus * NCCL_BYTES_PER_GPU if num_gpus > 1 else 0
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    if free < wanted:
        fix = "start the container with a larger --shm-size; NCCL passes data between GPUs of a node through /dev/shm"
        found = f"{free // MIB} MiB of shared memory free, {wanted // MIB} wanted for {num_gpus} GPUs"
        return Finding("ranks", "bad", found, fix)
    return Finding("ranks", "ok", f"up to {num_gpus} on GPUs" if num_gpus else "on CPUs, with gloo")


def check_shared_memory() -> Finding:
    folder = SHARED_MEMORY
    if not folder.is_dir():
        fix = "set weights.transport=disk"
        return Finding("shared memory", "bad", "this system has no /dev/shm", fix)
    usage = shutil.disk_usage(folder)
    verdict: Verdict = "ok" if usage.free >= MIN_SHARED_MEMORY_BYTES else "bad"
    fix = "start the container with a larger --shm-size, or set weights.transport=disk"
    return Finding("shared memory", verdict, f"{usage.free // MIB} of {usage.total // MIB} MiB free", fix)


def check_disk(folder: Path) -> Finding:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    writable = os.access(there, os.W_OK)
    verdict: Verdict = "ok" if free >= MIN_FREE_DISK_BYTES and writable else "bad"
    found = f"{free / GIB:.1f} GiB free under {there}" + ("" if writable else ", not writable")
    return Finding("disk", verdict, found, "free some space, or write runs elsewhere: run.folder=/path")


def check_descriptors() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    verdict: Verdict = "ok" if soft == resource.RLIM_INFINITY or soft >= MIN_DESCRIPTORS else "bad"
    return Finding("file descriptors", verdict, f"{soft} per process", "ulimit -n 65536")
