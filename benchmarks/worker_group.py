"""What a batch costs on its way to the ranks of a learner: encoded and written once, sent and read for each rank, and
sent to each further node once.

One process plays both ends, so that every part is seen apart. Counted is CPU time, so that other load on the machine
does not count.
"""

from __future__ import annotations

import os
import socket
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.learners.worker_group.channel import Channel, Parcel
from penstock.backends.learners.worker_group.node_line import LinesToNodes, line_to_launcher
from penstock.backends.learners.worker_group.node_words import NodeCame, ToRanks, decode_order, encode_node_word
from penstock.backends.learners.worker_group.words import Order, decode_launcher_word, encode_word
from penstock.benchmarks._harness import Benchmark, Measured, figures, interleaved
from penstock.messages.arrays import LOGPROB_BYTES, TOKEN_BYTES
from penstock.messages.commands import Train
from penstock.messages.samples import Completed, Group, Part, Prompt, Reward, Sample, SampleKey, VersionSpan

if TYPE_CHECKING:
    import argparse

    from penstock.benchmarks._results import Figure

QUICK: Final = ("--groups", "8")
QUICK_S: Final = 10
PROMPT_TOKENS: Final = 500
LINE_WAIT_S: Final = 60.0


class Passage(NamedTuple):
    """CPU time of one batch, in seconds."""

    encode_s: float
    write_s: float
    send_s: float
    """To one rank."""
    read_s: float
    """In one rank: map and decode."""


def order_of(num_groups: int, num_samples: int, num_tokens: int) -> Order:
    """A batch of random bytes of the right lengths."""
    groups = [
        Group(
            group_id=group,
            prompt=Prompt(row=group, epoch=0, tokens=os.urandom(TOKEN_BYTES * PROMPT_TOKENS)),
            samples=tuple(_sample(SampleKey(group, index), num_tokens) for index in range(num_samples)),
        )
        for group in range(num_groups)
    ]
    return Order(1, Train(version=1, groups=tuple(groups), min_token_version=0))


def _sample(key: SampleKey, num_tokens: int) -> Sample:
    part = Part(
        tokens=os.urandom(TOKEN_BYTES * num_tokens),
        logprobs=os.urandom(LOGPROB_BYTES * num_tokens),
        spans=(VersionSpan(1, num_tokens),),
    )
    return Sample(key=key, parts=(part,), outcome=Completed(reward=Reward(value=1.0)))


def measure(order: Order) -> Passage:
    """Send the batch once, to one rank."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = Channel(here), Channel(there)
    times = [time.process_time()]
    data = encode_word(order)
    times.append(time.process_time())
    parcel = Parcel(data)
    times.append(time.process_time())
    sender.send(parcel)
    times.append(time.process_time())
    received = receiver.receive(decode_launcher_word)
    times.append(time.process_time())
    assert received == order
    parcel.close()
    sender.close()
    receiver.close()
    return Passage(*(after - before for before, after in pairwise(times)))


def measure_line(order: Order) -> float:
    """Send the batch once to another node: CPU time of both ends, in seconds, with all that ZeroMQ does."""
    data = encode_word(order)
    lines = LinesToNodes("127.0.0.1", LINE_WAIT_S)
    launcher, invitation = lines.open()
    node = line_to_launcher(invitation, LINE_WAIT_S, wait_s=LINE_WAIT_S)
    began_s = time.process_time()
    node.send(encode_node_word(NodeCame()))
    launcher.socket.poll(int(LINE_WAIT_S * 1000))
    launcher.send(encode_node_word(ToRanks((), data)))
    node.socket.poll(int(LINE_WAIT_S * 1000))
    (frame,) = node.receive()
    received = decode_order(frame)
    spent_s = time.process_time() - began_s
    node.socket.close()
    lines.close()
    assert isinstance(received, ToRanks)
    assert received.data == data
    return spent_s


def measured_of(given: argparse.Namespace) -> Measured:
    """The batch on its way, again and again."""
    order = order_of(given.groups, given.samples, given.tokens)
    size = f"{len(encode_word(order)) / 1e6:.1f} MB"
    passages = interleaved({"passage": lambda: measure(order)}, given.repetitions)
    lines = interleaved({"each further node, both ends": lambda: measure_line(order)}, given.repetitions)
    unit = f"CPU ms a batch of {size}"
    parts = {"encode, once": 0, "write, once": 1, "send, each rank": 2, "map and decode, each rank": 3}
    found: list[Figure] = []
    for what, at in parts.items():
        found += figures(passages, unit, lambda passage, at=at: 1e3 * passage[at], what)  # type: ignore[misc]
    return Measured(found + figures(lines, unit, lambda spent_s: 1e3 * spent_s), [])


def main(arguments: list[str]) -> int:
    """Measure and print."""
    benchmark = Benchmark(__file__, __doc__, repetitions=7)
    benchmark.option("--groups", type=int, default=32)
    benchmark.option("--samples", type=int, default=8, help="of each group")
    benchmark.option("--tokens", type=int, default=8000, help="of each sample")
    return benchmark.run(arguments, measured_of)
