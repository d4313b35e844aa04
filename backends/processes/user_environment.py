"""The environment variables that processes with functions of the user see: rewards, filters, hooks, tools, episodes.

What these run is often handed text that a model or a stranger wrote, so they hold no secret that they do not need: of
our own environment they get what is listed here, and what the scenario names. Tokens of the run (``RAY_AUTH_TOKEN``)
and keys of the user's (``WANDB_API_KEY``, ``HF_TOKEN``) are not among it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

ALWAYS: Final = frozenset((
    # where things are, and how they are written
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TEMP", "TMP", "LANG", "LANGUAGE", "TZ", "TERM", "NO_COLOR",
    "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "SSL_CERT_FILE", "SSL_CERT_DIR", "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE", "NO_PROXY", "no_proxy", "NLTK_DATA",
    # where libraries keep files, and whether they may fetch more
    "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_ENDPOINT",
    "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "TORCH_HOME", "TRITON_CACHE_DIR",
    # by which what a run left behind is found and ended
    "PENSTOCK_RUN_ID", "PENSTOCK_RUN_FOLDER",
))  # fmt: skip
PREFIXES: Final = ("LC_", "XDG_", "PYTHON", "CUDA_", "NVIDIA_", "ROCR_", "HIP_", "OMP_", "MKL_", "OPENBLAS_",
                   "PENSTOCK_CHAOS_")  # fmt: skip
ONE_THREAD: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_named: set[str] = set()


def pass_variables(names: Iterable[str]) -> None:
    """Processes that are started from here on see these as well: the scenario's ``runtime.pass_env``."""
    _named.clear()
    _named.update(names)


def user_environment(named: Iterable[str] = ()) -> dict[str, str]:
    """Of a process with functions of the user. The places that Python looks in are ours, and libraries that would take
    every core have one thread.

    Args:
        named: variables that this one process needs.
    """
    wanted = ALWAYS | _named | set(named)
    environment = {name: value for name, value in os.environ.items() if name in wanted or name.startswith(PREFIXES)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    for name in ONE_THREAD:
        environment.setdefault(name, "1")
    return environment
