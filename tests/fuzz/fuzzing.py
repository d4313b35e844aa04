"""What the fuzzers of this folder share. Each is a process of its own, as libFuzzer ends the one it runs in, and is
guided by the coverage of the code it is about. Whatever its check raises is a finding.

    python tests/fuzz/fuzz_judge.py --minutes 10     # new cases each time
    python tests/fuzz/fuzz_judge.py --runs 2000      # the same cases each time
    python tests/fuzz/fuzz_judge.py --repeat FILE    # the one that failed
"""

# atheris has no types:
# pyright: reportAttributeAccessIssue=false, reportUnknownMemberType=false, reportMissingTypeStubs=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import os
import random
import secrets
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import atheris

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from contextlib import AbstractContextManager

MAX_CASE_BYTES = 800
LONG = 100_000
"""Characters of a text that is to be read in time in proportion."""
LONG_CPU_S = 5.0
"""For :data:`LONG` characters, with every branch being counted; what grows with their square takes minutes."""
HANG_S = 120
NUM_RANDOM_SEEDS = 100

T = TypeVar("T")


def instrumented(*packages: str) -> AbstractContextManager[None]:
    """Modules of these packages that are imported within are those whose coverage guides the fuzzer."""
    guided: AbstractContextManager[None] = atheris.instrument_imports(include=list(packages))
    return guided


class Draw:
    """A case, out of a fuzzer's bytes; and when they are used up, by chance that depends on them alone: most of what is
    tested decides by regular expressions, whose coverage nobody counts, so that short cases seem to be as good."""

    def __init__(self, data: bytes) -> None:
        self._of = atheris.FuzzedDataProvider(data)
        self._rng = random.Random(data)

    def number(self, low: int, high: int) -> int:
        if not self._of.remaining_bytes():
            return self._rng.randint(low, high)
        return int(self._of.ConsumeIntInRange(low, high))

    def flag(self) -> bool:
        return self.number(0, 1) == 1

    def pick(self, items: Sequence[T]) -> T:
        return items[self.number(0, len(items) - 1)]

    def text(self, words: Sequence[str], *, max_pieces: int = 12, surrogates: bool = False) -> str:
        """Some of the words, alone or many times, with other characters between them."""
        return "".join(self._piece(words, surrogates) for _ in range(self.number(0, max_pieces)))

    def _piece(self, words: Sequence[str], surrogates: bool) -> str:
        kind = self.number(0, 9)
        if kind < 6:
            return self.pick(words)
        if kind < 8:
            return self.pick(words) * self.number(1, 40)
        return "".join(self._character(surrogates) for _ in range(self.number(0, 4)))

    def _character(self, surrogates: bool) -> str:
        place = self.number(0, self.pick((0x7F, 0xFF, 0x2FFF, 0x10FFFF)))
        return chr(place) if surrogates or not 0xD800 <= place < 0xE000 else "\ufffd"

    def long_text(self, words: Sequence[str]) -> str:
        """:data:`LONG` characters: the same few again and again between two ends."""
        unit = self.text(words, max_pieces=3) or " "
        return (
            f"{self.text(words, max_pieces=2)}{(unit * (LONG // len(unit) + 1))[:LONG]}{self.text(words, max_pieces=2)}"
        )

    def value(self, words: Sequence[str], depth: int = 3) -> object:
        """Something that JSON can say."""
        match self.number(0, 9 if depth else 6):
            case 0:
                return None
            case 1:
                return self.flag()
            case 2:
                return self.pick((0, 1, -1, 2**31, 2**63, -(2**63), 2**64, 10**40))
            case 3:
                return self.pick((0.0, -0.0, 0.5, 1e308, -1e308, 5e-324, 1e9))
            case 4 | 5 | 6:
                return self.text(words, max_pieces=3)
            case 7:
                return [self.value(words, depth - 1) for _ in range(self.number(0, 3))]
            case _:
                names = [self.text(words, max_pieces=1) for _ in range(self.number(0, 3))]
                return {name: self.value(words, depth - 1) for name in names}

    def changed(self, raw: bytes) -> bytes:
        """With some bytes replaced, left out or doubled."""
        found = bytearray(raw)
        for _ in range(self.number(0, 6)):
            place = self.number(0, len(found))
            length = self.pick((0, 1, 1, 1, 4, 40))
            found[place : place + length] = bytes(self.number(0, 255) for _ in range(self.pick((0, 1, 1, 2, 8))))
        return bytes(found)


@contextmanager
def in_time(what: str) -> Generator[None]:
    """Fail if this takes more than :data:`LONG_CPU_S`."""
    began_s = time.process_time()
    yield
    took_s = time.process_time() - began_s
    assert took_s < LONG_CPU_S, f"{what}: {took_s:.1f} s of CPU time"


def fuzz(check: Callable[[bytes], None], seeds: Iterable[bytes] = ()) -> None:
    """Run the check as the command line says, and exit."""
    parser = argparse.ArgumentParser()
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--minutes", type=float)
    how.add_argument("--runs", type=int)
    how.add_argument("--repeat", type=Path)
    asked = parser.parse_args()
    if asked.repeat is not None:
        check(asked.repeat.read_bytes())
        sys.exit(0)
    folder = Path(tempfile.mkdtemp(prefix="penstock-fuzz-"))
    corpus = folder / "corpus"
    corpus.mkdir()
    rng = random.Random(1)
    num_random = NUM_RANDOM_SEEDS if asked.runs is None else min(NUM_RANDOM_SEEDS, asked.runs // 2)
    begin_with = [*seeds, *(rng.randbytes(rng.randint(20, MAX_CASE_BYTES)) for _ in range(num_random))]
    for number, seed in enumerate(begin_with):
        (corpus / f"seed{number}").write_bytes(seed)
    if asked.runs is not None:
        limits = [f"-runs={asked.runs}", "-seed=1"]
    else:
        limits = [f"-max_total_time={asked.minutes * 60:.0f}", f"-seed={secrets.randbelow(1 << 31) + 1}"]
    pid = os.fork()
    if not pid:
        files = [f"-artifact_prefix={folder}/", str(corpus)]
        bounds = [f"-max_len={MAX_CASE_BYTES}", "-len_control=0", f"-timeout={HANG_S}", "-rss_limit_mb=8192"]
        atheris.Setup([sys.argv[0], *limits, *bounds, *files], check)
        atheris.Fuzz()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        print(f"a finding: python {sys.argv[0]} --repeat {folder}/crash-…")
    else:
        shutil.rmtree(folder)
    sys.exit(code)
