"""What a worker group's ranks and the process that started them say to each other.

Invariants:

* Everything is msgpack of a closed union. Nothing is ever unpickled.
* Every rank gets the very same bytes, so what they contain is encoded once.
* The first rank alone answers; each rank says when it has done an order.

```
rank 0    RankCame ─ StoreOpened ─ RankReady ─ (GaugesShown, Answered, OrderDone)… ─ end of the process
others    RankCame ─ RankReady ─ OrderDone… ─ end of the process
launcher  Join ─ StoreAt ─ (Order)… ─ Finish
```
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

# msgspec reads the annotations:
from penstock.backends.learners.plan import LearnerPlan
from penstock.messages.base import Metric
from penstock.messages.commands import LearnerCommand
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    LearnerOpened,
    LearnerSlept,
    LearnerWoken,
    WeightsCopied,
    WeightsPublished,
)

LOOPBACK: Final = "127.0.0.1"
"""Address at which ranks of one node meet."""
LearnerAnswer = (
    BatchTrained | CheckpointWritten | LearnerOpened | LearnerSlept | LearnerWoken | WeightsCopied | WeightsPublished
)


class Word(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Base of all of them."""


# --- of the launcher ------------------------------------------------------------------------------------------


class Join(Word, frozen=True, kw_only=True):
    """The first word: be a part of this learner."""

    plan: LearnerPlan
    num_ranks: int
    timeout_s: float
    """How long ranks wait for each other."""
    start_timeout_s: float
    """How long they wait for each other to start."""
    node_hosts: tuple[str, ...] = (LOOPBACK,)
    """Addresses of the nodes, the first rank's first. Each has as many ranks as the others, in order."""


class StoreAt(Word, frozen=True):
    """Where the first rank's store listens, for the others."""

    port: int


class Order(Word, frozen=True):
    """Carry this out."""

    number: int
    """Counts from 1."""
    command: LearnerCommand


class Finish(Word, frozen=True):
    """Nothing more will come: the first rank lets the published weights go, and the process ends with 0."""


LauncherWord = Join | StoreAt | Order | Finish


# --- of a rank ------------------------------------------------------------------------------------------------


class RankCame(Word, frozen=True):
    """The first word: which rank this is."""

    rank: int


class StoreOpened(Word, frozen=True):
    """The first rank's store listens at this port, which the kernel has chosen."""

    port: int


class RankReady(Word, frozen=True):
    """It has met the others and takes orders."""

    device: str


class RankLives(Word, frozen=True):
    """Said every few seconds by a thread that does nothing else."""


class OrderDone(Word, frozen=True):
    """It has carried this out; with the answer where this is the first rank and there is one now."""

    number: int
    answer: LearnerAnswer | None = None


class Answered(Word, frozen=True):
    """An answer that came later than its order was done."""

    answer: LearnerAnswer


class GaugesShown(Word, frozen=True):
    """All figures of the first rank as they are now."""

    gauges: tuple[Metric, ...]


class FailureKind(StrEnum):
    """Whose business a failure is."""

    USERS = "users"
    """The scenario or what it names has to be changed; trying again would not help."""
    DIVERGED = "diverged"
    """So has the training, with the same batches."""
    DISK_FULL = "disk_full"
    PEER_LOST = "peer_lost"
    """Another rank died or did not come: that one has the reason."""
    CRASH = "crash"


class RankFailed(Word, frozen=True, kw_only=True):
    """Its last word: it cannot go on. The traceback is in its log."""

    kind: FailureKind
    name: str
    """Name of the exception's type."""
    message: str


RankWord = RankCame | StoreOpened | RankReady | RankLives | OrderDone | Answered | GaugesShown | RankFailed

_encoder: Final = msgspec.msgpack.Encoder()
_launcher_words: Final[msgspec.msgpack.Decoder[LauncherWord]] = msgspec.msgpack.Decoder(LauncherWord)
_rank_words: Final[msgspec.msgpack.Decoder[RankWord]] = msgspec.msgpack.Decoder(RankWord)


def encode_word(word: Word) -> bytes:
    """As it travels."""
    return _encoder.encode(word)


def decode_launcher_word(data: bytes | memoryview) -> LauncherWord:
    """What a rank has read."""
    return _launcher_words.decode(data)


def decode_rank_word(data: bytes | memoryview) -> RankWord:
    """What the launcher has read."""
    return _rank_words.decode(data)
