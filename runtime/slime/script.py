"""The arguments that a launch script gives to slime's training program, in the order in which they stand.

Nothing is run: :mod:`.shell` follows variables, arrays, loops and sourced files as bash does. What comes of other
commands or of the environment stays as it is written, and is said.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.errors import UserFault
from penstock.runtime.slime.shell import Shell

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.runtime.slime.expansion import Field

_PROGRAMS: Final = ("train.py", "train_async.py")
_DECISIVE: Final = re.compile(r"\b(?:OPEN_TRAINING|INDEXER|MEGATRON_USE_SGLANG|SLIME_DEEPGEMM)_\w+")
"""Environment variables that are options of slime: fake quantization, rotary style, kernels of its own."""
_VARIABLE: Final = re.compile(r"\$\{?\w+\}?")
"""Where a flag has its value already, and only the environment knows the variable, it may stand for further flags."""
_FLAG: Final = re.compile(r"--([A-Za-z][\w.-]*)(=?)(.*)", re.DOTALL)


class Flag(NamedTuple):
    """One ``--flag`` and what stands behind it."""

    name: str
    """Without the dashes."""
    values: tuple[str, ...]
    line: int
    file: str = ""
    """Where it stands, if it is not the script itself."""
    unread: tuple[str, ...] = ()
    """What of its values is not known here; they have that as it is written."""

    @property
    def place(self) -> str:
        """``line 12``, with the file where it is another one."""
        return f"{self.file} line {self.line}" if self.file else f"line {self.line}"


class LaunchScript(NamedTuple):
    """What a script gives to the training program."""

    flags: tuple[Flag, ...]
    program: str
    """``train.py`` or ``train_async.py``."""
    unread: tuple[Flag, ...] = ()
    """Places that could not be followed; ``values`` say why."""
    path: Path | None = None


def read_script(path: Path) -> LaunchScript:
    """
    Raises:
        UserFault: the file cannot be read, is no shell script, or starts no training.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserFault(f"{path} cannot be read: {error}") from None
    shell = Shell(path, _PROGRAMS)
    try:
        shell.run(text, path)
    except RecursionError:
        raise UserFault(f"{path}: brackets are nested too deep to be read") from None
    if not shell.launches:
        raise UserFault(
            f"{path}: no command in it starts slime's {' or '.join(_PROGRAMS)}, and only such launch scripts "
            "are converted; the keys of verl and TRL are in docs/from_verl.md and docs/from_trl.md, and a scenario "
            "that has one is told its name here"
        )
    *earlier, launch = shell.launches
    flags = _flags(launch.words[1:], path.name)
    if not flags:
        raise UserFault(f"{path}:{launch.line}: there is not one --flag behind {launch.words[0].text}")
    unread = [Flag("", (each.text,), each.line, _elsewhere(each.file, path.name)) for each in shell.problems]
    unread += [
        Flag("", ("starts a training too; only the last one of the script is converted",), each.line)
        for each in earlier
    ]
    unread += [
        Flag("", (f"sets {name}, which changes what slime trains, and nothing here reads it",), launch.line)
        for name in sorted(set(_DECISIVE.findall(launch.surroundings)))
    ]
    program = launch.words[0].text.rpartition("/")[2]
    return LaunchScript(tuple(flags), program, tuple(unread), path)


def _flags(words: Sequence[Field], script: str) -> list[Flag]:
    flags: list[Flag] = []
    for word in words:
        found = _FLAG.fullmatch(word.text)
        if found:
            name, has_value, value = found.groups()
            file = _elsewhere(word.file, script)
            flags.append(Flag(name, (value,) if has_value else (), word.line, file, word.unread))
        elif flags and not (flags[-1].values and word.unread and _VARIABLE.fullmatch(word.text)):
            last = flags[-1]
            unread = tuple(dict.fromkeys((*last.unread, *word.unread)))
            flags[-1] = last._replace(values=(*last.values, word.text), unread=unread)
        elif word.unread:
            flags.append(Flag("", (word.text,), word.line, _elsewhere(word.file, script), word.unread))
    return flags


def _elsewhere(file: str, script: str) -> str:
    return "" if file == script else file
