"""What cannot run is refused by the real command: one message, exit code 2, no stack trace, no folder, no process."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

SCENARIOS = Path(__file__).parents[2] / "scenarios"
PENSTOCK = [sys.executable, "-c", "from penstock.runtime.cli import main; main()"]


def refused(folder: Path, *arguments: str, within: tuple[str, ...] = ()) -> str:
    """Run ``penstock run`` in a session of its own and return its one message."""
    process = subprocess.Popen(
        [*within, *PENSTOCK, "run", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"TERM": "dumb"},
    )
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 2, stdout + stderr
    assert "Traceback" not in stdout + stderr
    assert stderr.startswith("penstock: ")
    assert stderr.count("\n") == 1
    assert not (folder / "runs").exists()
    assert not [left for left in psutil.pids() if session_of(left) == process.pid]
    return stderr


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def test_a_misspelt_key(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text((SCENARIOS / "sync.yaml").read_text().replace("num_steps: 20", "num_step: 20"))
    assert "mine.yaml:6: run.num_step: no such key; did you mean 'num_steps'?" in refused(tmp_path, "mine.yaml")


def test_a_value_out_of_bounds(tmp_path: Path) -> None:
    message = refused(tmp_path, str(SCENARIOS / "sync.yaml"), "sampling.top_p=1.5")
    assert (
        "override 'sampling.top_p=1.5': sampling.top_p: must be a number, above 0 and at most 1; found 1.5" in message
    )


def test_a_missing_checkpoint(tmp_path: Path) -> None:
    message = refused(tmp_path, str(SCENARIOS / "local_model.yaml"), "model.path=nowhere", "data.path=lines:5")
    assert f"model.path: {tmp_path}/nowhere: no such folder" in message


def test_a_malformed_line_of_jsonl(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a=", "label": "Aa"}\n{"prompt": "b=",\n')
    message = refused(tmp_path, str(SCENARIOS / "sync.yaml"), "data.path=rows.jsonl")
    assert f"data.path: {tmp_path}/rows.jsonl:2:" in message


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        message = refused(tmp_path, str(SCENARIOS / "sync.yaml"), f"observability.metrics_port={port}")
    assert f"observability.metrics_port: port {port} is in use; choose another" in message


def test_a_missing_function_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def rewards(prompt, response, label): ...\n")
    message = refused(tmp_path, str(SCENARIOS / "sync.yaml"), "reward.function=mine.py:reward")
    assert f"reward.function: {tmp_path}/mine.py: defines no 'reward'; it has rewards" in message


def in_small_shared_memory(size: str) -> tuple[str, ...]:
    """Words to put before a command, so that it finds a /dev/shm of this size."""
    if not shutil.which("unshare"):
        pytest.skip("needs unshare (util-linux)")
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    words = ("unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh")
    probe = subprocess.run([*words, "true"], capture_output=True, text=True, timeout=30)
    if probe.returncode:
        pytest.skip(f"this machine lets nobody mount: {probe.stderr.strip()}")
    return words


def test_less_shared_memory_than_the_weights_need(tmp_path: Path) -> None:
    small = in_small_shared_memory("256k")
    arguments = (str(SCENARIOS / "sync.yaml"), "weights.transport=shared_memory")
    message = refused(tmp_path, *arguments, within=small)
    assert "weights.transport is shared_memory, but /dev/shm has" in message
    assert "weights.transport: disk" in message
