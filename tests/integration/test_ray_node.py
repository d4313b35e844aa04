"""Nodes of Ray for a batch job: two jobs on one machine do not meet, and nothing is left of a node."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.messages.errors import UserFault
from penstock.runtime.hosts.ray.node import BLOCK_PORTS, FIXED_PORTS, claim_ports, ray_command

if TYPE_CHECKING:
    from collections.abc import Generator

NODE = (sys.executable, "-m", "penstock.runtime.hosts.ray.node")
PROGRAM = """
import logging, os, ray, sys
ray.init(address=sys.argv[-1].partition("=")[2], logging_level=logging.ERROR, log_to_driver=False)
print(len([node for node in ray.nodes() if node["Alive"]]), int(ray.cluster_resources().get("GPU", 0)))
"""


def test_jobs_on_one_machine_take_blocks_of_ports_that_nobody_uses() -> None:
    first = free_block()
    last = first + 3 * BLOCK_PORTS - 1
    with ExitStack() as stack:
        one = claim_ports(first, last, stack)
        two = claim_ports(first, last, stack)
        assert (one, two) == (first, first + BLOCK_PORTS)
        stranger = stack.enter_context(socket.socket())
        stranger.bind(("", first + 2 * BLOCK_PORTS + 1))  # where Ray's node manager would be
        with pytest.raises(UserFault, match=f"ports {first}-{last} of .* no {BLOCK_PORTS} of them are free"):
            claim_ports(first, last, stack)
    with ExitStack() as stack:
        assert claim_ports(first, last, stack) == first


def free_block() -> int:
    """Where the tests that run beside this one take none."""
    for first in range(12000, 19000, 3 * BLOCK_PORTS):
        with ExitStack() as stack:
            try:
                assert claim_ports(first, first + BLOCK_PORTS - 1, stack) == first
                for more in (first + BLOCK_PORTS, first + 2 * BLOCK_PORTS):
                    claim_ports(more, more + BLOCK_PORTS - 1, stack)
            except UserFault:
                continue
        return first
    raise AssertionError("no ports are free here")


def test_every_port_of_a_node_is_in_its_block_and_none_is_used_twice() -> None:
    head = ray_command("head", Path("/tmp/x"), 20000, num_gpus=8, address="10.0.0.1:20000")
    options = dict(word.split("=", 1) for word in head if "=" in word)
    named = [int(options[option]) for option in FIXED_PORTS]
    first, last = int(options["--min-worker-port"]), int(options["--max-worker-port"])
    assert len(set(named)) == len(FIXED_PORTS)
    assert named[0] == 20000
    assert max(named) < first < last < 20000 + BLOCK_PORTS - 1
    assert (options["--node-ip-address"], options["--num-gpus"]) == ("10.0.0.1", "8")
    worker = ray_command("worker", Path("/tmp/x"), 20256, num_gpus=8, address="10.0.0.1:20000")
    assert "--address=10.0.0.1:20000" in worker
    assert not [word for word in worker if word.startswith(("--port=", "--head"))]


@contextmanager
def node(kind: str, folder: Path, temp: Path, *more: str) -> Generator[subprocess.Popen[str]]:
    environment = {**os.environ, "TMPDIR": str(temp)}
    with (temp / f"{kind}-{folder.name}.log").open("w") as log:
        process = subprocess.Popen(
            (*NODE, kind, str(folder), "--timeout", "60", *more),
            env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def run_with(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = (*NODE, "with", str(folder), "--timeout", "60", *more, "--", sys.executable, "-c", PROGRAM)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.ray
@pytest.mark.timeout(480)
def test_two_jobs_have_clusters_of_their_own_and_leave_nothing(tmp_path: Path) -> None:
    temp = Path(
        subprocess.run(("mktemp", "-d", "/tmp/pt-XXXX"), capture_output=True, text=True, check=True).stdout.strip()
    )
    one, two = tmp_path / "one", tmp_path / "two"
    with node("head", one, temp, "--num-gpus", "1"), node("worker", one, temp, "--num-gpus", "2"):
        with node("head", two, temp):
            told = run_with(one, "--num-nodes", "2")
            assert (told.returncode, told.stdout) == (0, "2 3\n"), told.stderr
            assert run_with(two).stdout == "1 0\n"
        found = [json.loads((folder / "cluster.json").read_text()) for folder in (one, two)]
        assert found[0]["address"] != found[1]["address"]
        assert (one / "cluster.json").stat().st_mode & 0o077 == 0
        stranger = subprocess.run(
            [sys.executable, "-c", PROGRAM, f"={found[0]['address']}"],
            env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": found[1]["token"]},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert stranger.returncode != 0
        assert "InvalidAuthToken" in stranger.stderr
    assert [path.name for path in temp.iterdir() if path.is_dir()] == []
    assert processes_in(str(temp)) == []
    for file in temp.iterdir():
        file.unlink()
    temp.rmdir()


def processes_in(folder: str) -> list[str]:
    """Command lines that name it."""
    found: list[str] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if folder in words and int(pid) != os.getpid():
            found.append(words)
    return found


@pytest.mark.ray
def test_a_worker_without_a_head_and_a_command_without_its_nodes_give_up_in_time(tmp_path: Path) -> None:
    began_s = time.monotonic()
    for kind, more in (("worker", ()), ("with", ("--", "true"))):
        words = (*NODE, kind, str(tmp_path / "none"), "--timeout", "0.5", *more)
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert "the head of Ray has not come up" in done.stderr
    assert time.monotonic() - began_s < 60


@pytest.mark.ray
def test_nobody_waits_for_a_node_that_has_failed(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        words = (*NODE, "head", str(folder), "--ports", f"{port}-{port + BLOCK_PORTS - 1}", "--timeout", "60")
        assert subprocess.run(words, capture_output=True, timeout=60, check=False).returncode == 2
    began_s = time.monotonic()
    done = run_with(folder, "--num-nodes", "2")
    assert done.returncode == 2
    assert f"ports {port}-" in done.stderr
    assert time.monotonic() - began_s < 30
