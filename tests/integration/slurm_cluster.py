"""A Slurm of two nodes on this machine, with its own keys, ports and folders; whatever Slurm is here already is left
alone. A context manager that leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
SYSTEM_PATH = "/usr/sbin:/usr/local/sbin:/sbin"
NODES = ("first", "second")
UP_WITHIN_S = 60.0


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:{SYSTEM_PATH}") is None]


@contextmanager
def two_slurm_nodes() -> Generator[dict[str, str]]:
    """Their environment: with it ``sbatch`` and the rest speak to them."""
    base = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    base.chmod(0o755)  # munge wants to be reached by everybody
    path = f"{os.environ['PATH']}:{SYSTEM_PATH}"
    own = {"PATH": path, "SLURM_CONF": str(base / "slurm.conf"), "TMPDIR": str(base / "t")}
    environment = {**os.environ, **own}
    daemons: list[subprocess.Popen[bytes]] = []
    log = (base / "daemons.log").open("wb")

    def start(*words: str) -> None:
        daemons.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    try:
        _write_config(base)
        keys = f"--key-file={base}/keys/key", f"--seed-file={base}/keys/seed", f"--log-file={base}/keys/log"
        start("munged", "--foreground", *keys, f"--socket={base}/munge/socket", f"--pid-file={base}/keys/pid")
        _await((base / "munge/socket").exists, "munge's socket", base)
        start("slurmctld", "-D", "-c", "-f", str(base / "slurm.conf"))
        for node in NODES:
            start("slurmd", "-D", "-N", node, "-f", str(base / "slurm.conf"))
        _await(lambda: _num_idle(environment) == len(NODES), "idle nodes", base)
        yield environment
    finally:
        subprocess.run(("scancel", "--user", str(os.getuid())), env=environment, timeout=30, check=False)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        log.close()
        shutil.rmtree(base, ignore_errors=True)


def _write_config(base: Path) -> None:
    for name in ("keys", "munge", "state", "t", *(f"spool-{node}" for node in NODES)):
        (base / name).mkdir(mode=0o700 if name == "keys" else 0o711)
    (base / "keys/key").write_bytes(os.urandom(1024))
    (base / "keys/key").chmod(0o600)
    control, *ports = _free_ports(1 + len(NODES))
    user = subprocess.run(("id", "-un"), capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    nodes = "\n".join(
        f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"
        for node, port in zip(NODES, ports, strict=True)
    )
    (base / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={control}
AuthType=auth/munge
AuthInfo=socket={base}/munge/socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool-%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
KillWait=5
{nodes}
PartitionName=main Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE State=UP
"""
    )


def _free_ports(number: int) -> list[int]:
    """Taken all at once, so that none comes twice."""
    probes = [socket.socket() for _ in range(number)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _num_idle(environment: dict[str, str]) -> int:
    asked = subprocess.run(
        ("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"),
        env=environment, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    return len(asked.stdout.split())


def _await(what: object, name: str, base: Path) -> None:
    assert callable(what)
    end_s = time.monotonic() + UP_WITHIN_S
    while not what():
        if time.monotonic() > end_s:
            logs = "\n".join(f"{file.name}:\n{file.read_text()[-2000:]}" for file in base.glob("*.log"))
            raise AssertionError(f"no {name} within {UP_WITHIN_S:g} s\n{logs}")
        time.sleep(0.1)
