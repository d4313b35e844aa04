"""A Ray that does not start is a message."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path
from penstock.runtime.hosts.ray.cluster import RayCluster, UserFault, prepare_environment

prepare_environment(None)
import ray

def late(**_):
    raise {kind}("The current node timed out during startup.\\nSee the logs.")

ray.init = late
try:
    RayCluster(address=None, temp_folder=Path(sys.argv[1]))
except UserFault as error:
    print(error)
"""


def ended(kind: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A process of its own: whoever starts Ray becomes the parent of what Ray orphans."""
    command = [sys.executable, "-c", PROGRAM.format(kind=kind), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("kind", ["Exception", "ConnectionError"])
def test_whatever_ray_raises_at_its_start_is_a_reason(kind: str, tmp_path: Path) -> None:
    done = ended(kind, tmp_path)
    assert done.stdout == "Ray could not be started: The current node timed out during startup.\n", done.stderr


def test_an_error_of_ours_at_its_start_stays_what_it_is(tmp_path: Path) -> None:
    assert "TypeError: The current node timed out" in ended("TypeError", tmp_path).stderr
