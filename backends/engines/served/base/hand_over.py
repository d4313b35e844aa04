"""What a process asks and compares before it takes over a server that an earlier one has left.

| waits for | who ends it |
|---|---|
| the guardian's word, once its launcher is gone | ``HAND_OVER_TIMEOUT_S`` |
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.served.base.settings import SERVER_VARIABLE
from penstock.backends.processes.guardian import Handed, Started, decode_word
from penstock.backends.processes.process_facts import environment_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.engines.served.base.guardian_line import GuardianLine
    from penstock.backends.engines.served.base.settings import ServerSettings

HAND_OVER_TIMEOUT_S: Final = 15.0
NUM_NAMED: Final = 3
OF_NO_ACCOUNT: Final = frozenset(("COLUMNS", "LINES", "PWD", "OLDPWD", "SHLVL", "_"))
"""Variables of a shell and its terminal, which may change between two launches of the same."""


class NotHandedOverError(Exception):
    """A server that an earlier process of the same owner has left is not taken over; the message says why."""


def id_of(pid: int) -> str:
    """What marks the server that a process belongs to; empty when it is gone."""
    mark = f"{SERVER_VARIABLE}=".encode()
    return next((each.removeprefix(mark).decode() for each in environment_of(pid) if each.startswith(mark)), "")


def socket_name_of(server_id: str) -> str:
    """Where its guardian listens for a successor, among the abstract names of Unix sockets."""
    return f"penstock-server-{server_id}"


async def handed_over(guardian: GuardianLine) -> tuple[int, Handed]:
    """The server's main process, and what is handed over."""
    main_pid = 0
    try:
        async with asyncio.timeout(HAND_OVER_TIMEOUT_S):
            while line := await guardian.word():
                word = decode_word(line)
                if isinstance(word, Handed):
                    return main_pid, word
                if isinstance(word, Started):
                    main_pid = word.pid
    except TimeoutError:
        raise NotHandedOverError(f"its launcher is still there after {HAND_OVER_TIMEOUT_S:g} s") from None
    raise NotHandedOverError("it ended meanwhile")


def compare(settings: ServerSettings, handed: Handed, server_id: str, guardian_pid: int) -> None:
    """Command line and environment are those that it would be launched with."""
    wanted = settings.command(Path(handed.secret_path))
    if handed.command != wanted:
        other = sorted(_options(handed.command) ^ _options(wanted))
        raise NotHandedOverError(f"it was started with other options: {_named(other or wanted)}")
    variables = {f"{name}={value}".encode() for name, value in settings.environment_of(os.environ, server_id).items()}
    differing = variables ^ {each for each in environment_of(guardian_pid) if each}
    names = {each.partition(b"=")[0].decode(errors="replace") for each in differing}
    if other := sorted(names - OF_NO_ACCOUNT):
        raise NotHandedOverError(f"it was started in another environment: {_named(other)}")


def _options(command: Sequence[str]) -> set[str]:
    """The words of a command line, each option with its value."""
    pairs = zip(command, (*command[1:], "--"), strict=True)
    return {word if after.startswith("--") else f"{word} {after}" for word, after in pairs if word.startswith("--")}


def _named(words: Sequence[str]) -> str:
    more = f" and {len(words) - NUM_NAMED} more" if len(words) > NUM_NAMED else ""
    return ", ".join(words[:NUM_NAMED]) + more
