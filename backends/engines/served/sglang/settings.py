"""How one SGLang server of ours is launched: its command line.

Invariants:

* The port is 0: the kernel chooses it when the server binds it. The server's own warm-up would send requests to port 0,
  so it is always off.
* The admin key is in a configuration file that the server reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from penstock.backends.engines.served.base.settings import LogWords, ServerSettings
from penstock.backends.engines.served.sglang import log_lines
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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


@dataclass(frozen=True, kw_only=True)
class SglangSettings(ServerSettings):
    """See :class:`~penstock.backends.engines.served.base.settings.ServerSettings`."""

    kind = "SGLang"
    title_prefix = "sglang::"
    log_words: ClassVar[LogWords] = log_lines

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, value in _pairs(self.options):
            if option in OURS:
                raise UserFault(f"{option} is set by Penstock itself; remove it from the options of the engine")
            if option in LOG_LEVEL_OPTIONS and value.lower() not in TELLING_LOG_LEVELS:
                raise UserFault(
                    f"{option} is {value!r}, but the port is read from the server's log; use info or debug, "
                    "or leave it out"
                )

    def command(self, key_path: Path) -> tuple[str, ...]:
        """The command line, with the configuration file at ``key_path``."""
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
        """Text of the configuration file with the key."""
        return f"admin-api-key: {self.admin_api_key}\n"

    def environment_of(self, base: Mapping[str, str], server_id: str) -> dict[str, str]:
        """As of every server, and that it computes on a CPU, and keeps nothing of what it sees in images: neither new
        weights nor a flush would make it forget that."""
        own = {"SGLANG_VLM_CACHE_SIZE_MB": "0"} | ({"SGLANG_USE_CPU_ENGINE": "1"} if self.on_cpu else {})
        return super().environment_of({**base, **own}, server_id)


def _pairs(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each option with the word behind it; ``--a=b`` counts as ``--a b``."""
    pairs: list[tuple[str, str]] = []
    for word, after in zip(words, (*words[1:], ""), strict=True):
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            pairs.append((option, value if equals else after))
    return pairs
