"""Programs of a scheduler, called. Every call has a deadline, and what they say is shown as text of strangers."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, Final

from penstock.messages.errors import UserFault
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CALL_TIMEOUT_S: Final = 120.0
LAUNCH_TIMEOUT_S: Final = 3600.0
"""Machines of a cloud take their time."""
HINTS: Final = {
    "sbatch": "Slurm's programs are on the cluster's login nodes: give the command there",
    "squeue": "Slurm's programs are on the cluster's login nodes: give the command there",
    "scancel": "Slurm's programs are on the cluster's login nodes: give the command there",
    "kubectl": "install Kubernetes' command line, and point it at a cluster with the KubeRay operator",
    "sky": 'install it in an environment of its own: pip install "skypilot[kubernetes]", or with another cloud',
}


def require(program: str) -> None:
    """Refuse where a program is missing.

    Raises:
        UserFault: it is; with what to do, and what can be done without it.
    """
    if shutil.which(program) is None:
        raise UserFault(f"{program}: not on the PATH; {HINTS[program]} (--dry-run writes the job's file without it)")


def call(words: Sequence[str], *, timeout_s: float = CALL_TIMEOUT_S) -> str:
    """What it prints.

    Raises:
        UserFault: the program is missing, fails, or does not answer in time.
    """
    done = try_call(words, timeout_s=timeout_s)
    if done.returncode:
        said = terminal_text((done.stderr or done.stdout).strip(), max_chars=1000)
        raise UserFault(f"{' '.join(words[:2])}: exit code {done.returncode}: {said}")
    return done.stdout


def try_call(words: Sequence[str], *, timeout_s: float = CALL_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """As :func:`call`, also where it fails."""
    require(words[0])
    try:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserFault(f"{' '.join(words[:2])}: no answer within {timeout_s:g} s; try again later") from None


def stream(words: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a program whose lines are read as they come; who starts it ends it."""
    require(words[0])
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
        errors="replace", env=None if environment is None else dict(environment),
    )  # fmt: skip
