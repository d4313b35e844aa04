"""A Ray that does not start is a message."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from penstock.runtime.hosts.ray.ray_start import START

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path
from penstock.runtime.hosts.ray.cluster import RayCluster, prepare_environment
from penstock.messages.errors import UserFault

prepare_environment({address!r})
import ray

def late(**_):
    raise {kind}({said!r})

ray.init = late
try:
    RayCluster(address={address!r}, temp_folder=Path(sys.argv[1]))
except UserFault as error:
    print(error)
"""


LATE = "The current node timed out during startup.\nSee the logs."


def ended(kind: str, folder: Path, said: str = LATE, address: str | None = None) -> subprocess.CompletedProcess[str]:
    """A process of its own: whoever starts Ray becomes the parent of what Ray orphans."""
    command = [sys.executable, "-c", PROGRAM.format(kind=kind, said=said, address=address), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("kind", ["Exception", "ConnectionError", "ray.exceptions.RpcError"])
def test_whatever_ray_raises_at_its_start_is_a_reason(kind: str, tmp_path: Path) -> None:
    done = ended(kind, tmp_path)
    told = f"Ray could not be started: The current node timed out during startup; {START}\n"
    assert done.stdout == told, done.stderr


@pytest.mark.parametrize(
    ("kind", "said", "told"),
    [
        ("ConnectionError", "Failed to connect to Ray cluster at 10.0.0.1:6379", "ray status --address=10.0.0.1:6379"),
        ("ray.exceptions.RpcError", "failed to connect to all addresses", "ray status --address=10.0.0.1:6379"),
        (
            "RuntimeError",
            "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.11.2\n",
            "was started with: Ray: 2.9.0 Python: 3.11.2; start Penstock with the cluster's versions",
        ),
        ("ray.exceptions.AuthenticationError", "Invalid token", "; set RAY_AUTH_TOKEN to that of the cluster"),
        ("ray.exceptions.RaySystemError", "bind: Address already in use", "; end what holds the port"),
        ("ValueError", "The object store size (9 GB) exceeds /dev/shm size (0.1 GB).", "; free some of it, or give"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_named_with_what_to_do(
    kind: str, said: str, told: str, tmp_path: Path
) -> None:
    done = ended(kind, tmp_path, said, "10.0.0.1:6379")
    assert done.stdout.startswith("runtime.ray_address: 10.0.0.1:6379: "), done.stderr
    assert told in done.stdout
    assert done.stdout.count("\n") == 1


def test_an_error_of_ours_at_its_start_stays_what_it_is(tmp_path: Path) -> None:
    assert "TypeError: The current node timed out" in ended("TypeError", tmp_path).stderr


JOB = """
from pathlib import Path
from penstock.messages.errors import UserFault
from penstock.runtime.hosts.ray.node import await_nodes
import ray

def late(**_):
    raise ray.exceptions.RpcError("failed to connect to all addresses")

ray.init = late
try:
    await_nodes("10.0.0.1:6379", 2, 1.0, Path("."))
except UserFault as error:
    print(error)
"""


def test_a_batch_job_whose_nodes_cannot_be_joined_says_where_to_look() -> None:
    done = subprocess.run([sys.executable, "-c", JOB], capture_output=True, text=True, timeout=120)
    assert done.stdout == (
        "10.0.0.1:6379: Ray of this job cannot be reached: failed to connect to all addresses; the logs of its "
        "nodes say why\n"
    ), done.stderr
