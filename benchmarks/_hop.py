"""The receiving ends of :mod:`penstock.benchmarks.hop`; a module of its own, so that Ray's workers import little."""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np

from penstock.backends.processes.curve import KeyPair
from penstock.messages.flow import GroupAdmitted
from penstock.messages.names import BUFFER, FILTER
from penstock.messages.samples import Completed, Group, Part, Prompt, Reward, Sample, SampleKey, VersionSpan
from penstock.messages.wire import Envelope, Header
from penstock.runtime.hosts.processes.control import Address
from penstock.runtime.hosts.processes.links import Links

CALLEE: Final = BUFFER
SENDER: Final = "sender"
NUM_SAMPLES: Final = 8
NUM_TOKENS: Final = 512
IDLE_TIMEOUT_MS: Final = 600_000


def message() -> Envelope:
    """One group as the Filter sends it to the Buffer: about 33 kB of tokens and log-probs."""
    part = Part(
        tokens=np.arange(NUM_TOKENS, dtype=np.int32).tobytes(),
        logprobs=np.linspace(-3, 0, NUM_TOKENS, dtype=np.float32).tobytes(),
        spans=(VersionSpan(7, NUM_TOKENS),),
    )
    samples = tuple(
        Sample(key=SampleKey(12, index), parts=(part,), outcome=Completed(reward=Reward(value=1.0)))
        for index in range(NUM_SAMPLES)
    )
    prompt = Prompt(row=12, epoch=0, tokens=np.arange(16, dtype=np.int32).tobytes())
    group = Group(group_id=12, prompt=prompt, samples=samples)
    return (Header(FILTER, 1, 1, 1, 1), GroupAdmitted(group=group))


class ZmqReceiver:
    """Receives as the loop of an actor does, and acknowledges now and then."""

    def open(
        self, keys: tuple[bytes, bytes] | None, endpoint: str, server_key: bytes, window: int
    ) -> tuple[int, str, bytes]:
        """Bind the inbox; pid, endpoint and key of it."""
        self._links = Links(client_keys=None if keys is None else KeyPair(*keys))
        self._links.connect(Address(SENDER, 1, endpoint, server_key))
        self._every = window // 2
        return os.getpid(), self._links.endpoint, self._links.server_key

    def serve(self) -> None:
        """Until nothing has come for ten minutes, or the process is killed."""
        unacknowledged = 0
        while self._links.poller.poll(IDLE_TIMEOUT_MS):
            for _ in self._links.receive(64):
                unacknowledged += 1
                if unacknowledged == self._every:
                    unacknowledged = 0
                    self._links.send(SENDER, b"")


class Callee:
    """A Ray actor that is called."""

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def hear(self, data: bytes) -> None:
        """Take the message."""


class Taker:
    """Takes from a queue."""

    def __init__(self, queue: Any) -> None:  # noqa: ANN401 - Ray has no types
        self._queue = queue

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def take(self, num_messages: int) -> None:
        """Take so many."""
        for _ in range(num_messages):
            self._queue.get()
