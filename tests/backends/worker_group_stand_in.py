"""A rank without a model: it speaks as one does, and on ``Train`` does what the ``dtype`` of its plan says.

``kill:1``      rank 1 kills itself in the middle of the order
``stop:1``      rank 1 stops itself, and the others say nothing about it
``late:1``      rank 1 does not carry the order out, and lives
``blame:1``     rank 1 kills itself, after rank 0 has said that an exchange broke
``user:1``      rank 1 finds that the scenario is wrong
``disk:0``      rank 0 finds the disk full
``crash:1``     rank 1 raises
``hold:0``      rank 0 works until it is told to finish

It prints a digest of what it is told, so that its log shows what every rank got.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Final

from penstock.backends.learners.worker_group.channel import Channel
from penstock.backends.learners.worker_group.words import (
    Answered,
    FailureKind,
    Finish,
    GaugesShown,
    Join,
    Order,
    OrderDone,
    RankCame,
    RankFailed,
    RankLives,
    RankReady,
    StoreAt,
    StoreOpened,
    decode_launcher_word,
    encode_word,
)
from penstock.messages.base import Metric
from penstock.messages.commands import OpenLearner, SaveCheckpoint, Train
from penstock.messages.local import BatchTrained, CheckpointWritten, LearnerOpened

if TYPE_CHECKING:
    from penstock.backends.learners.worker_group.words import LauncherWord, LearnerAnswer, Word

BEAT_S: Final = 0.2


class StandIn:
    """One rank."""

    def __init__(self, channel: Channel, rank: int) -> None:
        self._channel = channel
        self._rank = rank

    def say(self, word: Word) -> None:
        self._channel.say(encode_word(word), wait_s=10.0)

    def hear(self) -> LauncherWord:
        def decode(data: bytes | memoryview) -> LauncherWord:
            word = decode_launcher_word(data)
            if isinstance(word, Order):
                digest = hashlib.sha256(data).hexdigest()[:16]
                print(f"order {word.number} {type(word.command).__name__} {len(data)} {digest}", flush=True)
            return word

        while not select.select([self._channel], [], [], BEAT_S)[0]:
            self.say(RankLives())
        return self._channel.receive(decode)

    def run(self) -> None:
        self.say(RankCame(self._rank))
        join = self.hear()
        assert isinstance(join, Join)
        what, _, whose = join.plan.dtype.partition(":")
        self._fate = what if whose == str(self._rank) else f"not {what}"
        if self._rank == 0:
            self.say(StoreOpened(4711))
        else:
            assert self.hear() == StoreAt(4711)
        self.say(RankReady("cpu"))
        while not isinstance(word := self.hear(), Finish):
            assert isinstance(word, Order)
            answer = self.carry_out(word)
            if self._rank == 0:
                self.say(GaugesShown((Metric(name="learner/orders", value=float(word.number)),)))
            self.say(OrderDone(word.number, answer if self._rank == 0 else None))
            if isinstance(word.command, SaveCheckpoint) and self._rank == 0:
                self.say(Answered(CheckpointWritten(version=word.command.version, path="later")))
        print("finished", flush=True)

    def carry_out(self, order: Order) -> LearnerAnswer | None:
        match order.command:
            case OpenLearner():
                return LearnerOpened(version=0)
            case Train(version=version):
                self.meet_fate()
                return BatchTrained(version=version, num_trained_tokens=1, num_masked_tokens=0, metrics=())
            case _:
                return None

    def meet_fate(self) -> None:
        match self._fate:
            case "kill":
                print("about to die", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "late":
                while isinstance(self.hear(), Order):
                    pass
            case "blame":
                time.sleep(0.2)  # so that the news of its death comes behind what the others say
                os.kill(os.getpid(), signal.SIGKILL)
            case "not blame":
                self.fail(FailureKind.PEER_LOST, "RuntimeError", "gloo: connection closed by peer")
            case "user":
                self.fail(FailureKind.USERS, "CheckpointError", "expected another dtype")
            case "diverge":
                self.fail(FailureKind.DIVERGED, "DivergedError", "the loss is nan")
            case "disk":
                self.fail(FailureKind.DISK_FULL, "OSError", "no space")
            case "crash":
                self.fail(FailureKind.CRASH, "KeyError", "'x'")
            case "hold":
                assert isinstance(self.hear(), Finish)
                print("left within an order", flush=True)
                os._exit(0)
            case _:
                pass

    def fail(self, kind: FailureKind, name: str, message: str) -> None:
        self.say(RankFailed(kind=kind, name=name, message=message))
        os._exit(1)


def main() -> None:
    path, rank = sys.argv[1:]
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(path)
    StandIn(Channel(line), int(rank)).run()


if __name__ == "__main__":
    main()
