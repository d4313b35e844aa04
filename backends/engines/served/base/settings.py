"""How one server of ours is launched: its environment, and the words in its log that are waited for.

Invariants:

* The port is the kernel's choice when the server binds it, and the server's log says which.
* The admin key is on no command line, where every user of the machine could read it.
* Nothing of this process's Python, of its torch.distributed group, of Ray or of a proxy gets into the environment. A
  proxy would get what the server sends to itself, the admin key included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SERVER_VARIABLE: Final = "PENSTOCK_SERVER"
"""In the environment of every process of a server: a random word of its own."""
OWNER_VARIABLE: Final = "PENSTOCK_SERVER_OWNER"
"""Beside it: who launched it."""
RUN_VARIABLES: Final = ("PENSTOCK_RUN_ID", "PENSTOCK_RUN_FOLDER")
"""By these a resumed run finds what an earlier drive has left on the machine."""


def owner_marks(owner: str, environment: Mapping[str, str]) -> list[bytes]:
    """What is in the environment of an owner's servers.

    Args:
        owner: who launched them.
        environment: that of a process of the same run.
    """
    run = [f"{name}={environment[name]}" for name in RUN_VARIABLES if name in environment]
    return [mark.encode() for mark in (f"{OWNER_VARIABLE}={owner}", *run)]


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


class Decoded(NamedTuple):
    """A server has made some decode passes since it last said so."""

    num_running: int
    """Requests in the last of them."""
    num_tokens: int
    """That its cache holds for them, each prefix that several share once; 0: it does not say."""
    tokens_per_s: float
    """Tokens made since it last said so ÷ the time since then, whatever went on in it."""


class Told(Enum):
    """What else a line may say of passes."""

    READ = auto()
    """A prompt was read, or read again."""
    UNREADABLE = auto()
    """It tells of decode passes in words that are not known."""


class LogWords(Protocol):
    """What the lines of a server's log say. A module may be one."""

    def port_in(self, line: str) -> int | None:
        """The port that the server has bound, when this is the line that says so."""
        ...

    def says_ready(self, line: str, *, serves: bool) -> bool:
        """Whether the server takes requests, or a node that takes none has loaded its part."""
        ...

    def news_in(self, line: str) -> str:
        """What a line says to somebody who waits for a start; empty: nothing."""
        ...

    def reason_in(self, lines: Sequence[str]) -> str:
        """The error that the server ended with; empty when none is named."""
        ...

    def tail_of(self, lines: Sequence[str]) -> tuple[str, ...]:
        """The last lines that are worth reading."""
        ...

    def passes_in(self, line: str) -> Decoded | Told | None:
        """What a line says of passes; None: nothing."""
        ...


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ABC):
    """One server on one node. A server over several nodes has one of these for each, alike but for ``node_rank``."""

    kind: ClassVar[str]
    """Name of the software, for people."""
    title_prefix: ClassVar[str]
    """How the titles of those of its processes begin whose end is the end of the server."""
    log_words: ClassVar[LogWords]

    python: Path
    """Interpreter of the server's environment."""
    model_folder: Path
    options: tuple[str, ...]
    """Words of the command line, checked elsewhere."""
    admin_api_key: str
    log_path: Path
    """Its folder exists. One older file is kept beside it."""
    start_timeout_s: float
    owner: str = ""
    """Name of the actor that launches it; servers that an earlier process of this owner has left are ended first."""
    linger_s: float = 0.0
    """When its launcher ends without a word, the server waits for so long to be taken over by a successor."""
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

    @property
    def serves(self) -> bool:
        """Whether this node answers requests; the others of a server only compute."""
        return self.node_rank == 0

    @abstractmethod
    def command(self, key_path: Path) -> tuple[str, ...]:
        """The command line; the file at ``key_path`` has what ``key_file_text`` says."""

    @abstractmethod
    def key_file_text(self) -> str:
        """Text of the file that holds what is on no command line."""

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
            kept["OMP_NUM_THREADS"] = str(self.num_threads)
        kept.update(self.environment)
        return kept


def _is_kept(name: str) -> bool:
    if name in RUN_VARIABLES:
        return True
    return not (name.startswith(_LEFT_OUT_PREFIXES) or name in _LEFT_OUT or name.lower() in _PROXIES)
