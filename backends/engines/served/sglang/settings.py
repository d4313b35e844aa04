"""How one server of ours is launched: its command line and its environment.

Invariants:

* The port is 0: the kernel chooses it when the server binds it, and the server's log says which. The server's own
  warm-up would send requests to port 0, so it is always off.
* The admin key is on no command line, where every user of the machine could read it.
* Nothing of this process's Python, of its torch.distributed group, of Ray or of a proxy gets into the environment. A
  proxy would get what the server sends to itself, the admin key included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SERVER_VARIABLE: Final = "PENSTOCK_SERVER"
"""In the environment of every process of a server: a random word of its own."""
OWNER_VARIABLE: Final = "PENSTOCK_SERVER_OWNER"
"""Beside it: who launched it."""
RUN_VARIABLES: Final = ("PENSTOCK_RUN_ID", "PENSTOCK_RUN_FOLDER")
"""By these a resumed run finds what an earlier drive has left on the machine."""

OURS: Final = frozenset(
    {
        *("--model-path", "--model", "--host", "--port", "--admin-api-key", "--config"),
        *("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr"),
    }
)
"""Options that the launch sets itself."""
LOG_LEVEL_OPTIONS: Final = ("--log-level", "--log-level-http")
TELLING_LOG_LEVELS: Final = ("info", "debug", "trace")
"""Others would leave out the line with the port."""
ACCESS_LOG_OPTION: Final = "--uvicorn-access-log-exclude-prefixes"
WARM_UP_OPTION: Final = "--skip-server-warmup"

_LEFT_OUT_PREFIXES: Final = ("PYTHON", "RAY_", "PENSTOCK_", "TORCHELASTIC_", "OMP_", "MKL_", "KMP_", "GOMP_")
_LEFT_OUT: Final = frozenset(
    {
        *("VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "__PYVENV_LAUNCHER__", "CONDA_PREFIX"),
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
        *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    }
)
_PROXIES: Final = frozenset(("http_proxy", "https_proxy", "all_proxy", "ftp_proxy"))


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """One server on one node. A server over several nodes has one of these for each, alike but for ``node_rank``."""

    python: Path
    """Interpreter of SGLang's environment."""
    model_folder: Path
    options: tuple[str, ...]
    """Words of the command line, checked against the pinned version's options elsewhere."""
    admin_api_key: str
    log_path: Path
    """Its folder exists. One older file is kept beside it."""
    start_timeout_s: float
    owner: str = ""
    """Name of the actor that launches it; servers that an earlier process of this owner has left are ended first."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    on_cpu: bool = False
    num_threads: int = 1
    """Of one process of the server, on a CPU."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that are added, or replace others."""
    max_log_bytes: int = 64 << 20
    num_nodes: int = 1
    node_rank: int = 0
    dist_init_address: str = ""
    """``host:port`` at which the server's processes meet, the same on all nodes; needed for several nodes and for
    data-parallel attention."""

    def __post_init__(self) -> None:
        if self.num_nodes > 1 and not self.dist_init_address:
            raise ValueError(f"a server over {self.num_nodes} nodes needs dist_init_address, the place where they meet")
        if not 0 <= self.node_rank < self.num_nodes:
            raise ValueError(f"node_rank must be between 0 and {self.num_nodes - 1}, got {self.node_rank}")
        if not self.admin_api_key.isalnum():
            raise ValueError("admin_api_key must consist of letters and digits")  # without the key: this gets logged
        for option, value in _pairs(self.options):
            if option in OURS:
                raise UserFault(f"{option} is set by Penstock itself; remove it from the options of the engine")
            if option in LOG_LEVEL_OPTIONS and value.lower() not in TELLING_LOG_LEVELS:
                raise UserFault(
                    f"{option} is {value!r}, but the port is read from the server's log; use info or debug, "
                    "or leave it out"
                )

    @property
    def serves(self) -> bool:
        """Whether this node answers requests; the others of a server only compute."""
        return self.node_rank == 0

    def command(self, key_path: Path) -> tuple[str, ...]:
        """The command line; the file at ``key_path`` has what ``key_file_text`` says."""
        words = [str(self.python), "-m", "sglang.launch_server", "--config", str(key_path)]
        words += ["--model-path", str(self.model_folder), "--host", self.host, "--port", "0"]
        if self.dist_init_address:
            words += ["--nnodes", str(self.num_nodes), "--node-rank", str(self.node_rank)]
            words += ["--dist-init-addr", self.dist_init_address]
        given = {option for option, _ in _pairs(self.options)}
        if WARM_UP_OPTION not in given:
            words.append(WARM_UP_OPTION)
        words += self.options
        if ACCESS_LOG_OPTION not in given:
            words += [ACCESS_LOG_OPTION, "/"]  # a line for every request would fill the log
        return tuple(words)

    def key_file_text(self) -> str:
        """Text of the configuration file that holds what is on no command line."""
        return f"admin-api-key: {self.admin_api_key}\n"

    def environment_of(self, base: Mapping[str, str], server_id: str) -> dict[str, str]:
        """The environment of all processes of the server.

        Args:
            base: that of this process.
            server_id: what marks them.
        """
        kept = {name: value for name, value in base.items() if _is_kept(name)}
        kept["PATH"] = f"{self.python.parent}:{kept.get('PATH', '/usr/bin:/bin')}"  # compilers of its environment
        kept["HF_HUB_OFFLINE"] = "1"
        kept["TRANSFORMERS_OFFLINE"] = "1"
        kept["PYTHONUNBUFFERED"] = "1"
        kept[SERVER_VARIABLE] = server_id
        kept[OWNER_VARIABLE] = self.owner
        if self.on_cpu:
            kept["SGLANG_USE_CPU_ENGINE"] = "1"
            kept["OMP_NUM_THREADS"] = str(self.num_threads)
        kept.update(self.environment)
        return kept


def _is_kept(name: str) -> bool:
    if name in RUN_VARIABLES:
        return True
    return not (name.startswith(_LEFT_OUT_PREFIXES) or name in _LEFT_OUT or name.lower() in _PROXIES)


def _pairs(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each option with the word behind it; ``--a=b`` counts as ``--a b``."""
    pairs: list[tuple[str, str]] = []
    for word, after in zip(words, (*words[1:], ""), strict=True):
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            pairs.append((option, value if equals else after))
    return pairs
