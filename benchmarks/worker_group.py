"""What a batch costs on its way to the ranks of a learner: encoded and written once, sent and read for each rank, and
sent to each further node once.

One process plays both ends, so that every part is seen apart. Counted is CPU time, so that other load on the machine
does not count; the medians of the repetitions are printed.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from itertools import pairwise
from typing import Final, NamedTuple

from rich.console import Console

from penstock.backends.learners.worker_group.channel import Channel, Parcel
from penstock.backends.learners.worker_group.node_line import LinesToNodes, line_to_launcher
from penstock.backends.learners.worker_group.node_words import NodeCame, ToRanks, decode_order, encode_node_word
from penstock.backends.learners.worker_group.words import Order, decode_launcher_word, encode_word
from penstock.benchmarks._progress import in_turn
from penstock.messages.arrays import LOGPROB_BYTES, TOKEN_BYTES
from penstock.messages.commands import Train
from penstock.messages.samples import Completed, Group, Part, Prompt, Reward, Sample, SampleKey, VersionSpan

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


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="penstock bench worker_group", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="of each group")
    parser.add_argument("--tokens", type=int, default=8000, help="of each sample")
    parser.add_argument("--repetitions", type=int, default=7)
    given = parser.parse_args(arguments)
    order = order_of(given.groups, given.samples, given.tokens)
    passages = [measure(order) for _ in in_turn(range(given.repetitions), lambda number: f"repetition {number + 1}")]
    encode_ms, write_ms, send_ms, read_ms = (1e3 * statistics.median(part) for part in zip(*passages, strict=True))
    console = Console()
    console.print(f"{len(encode_word(order)) / 1e6:.1f} MB, {given.groups} × {given.samples} samples of {given.tokens}")
    console.print(f"once:      encode {encode_ms:.1f} ms, write {write_ms:.1f} ms")
    console.print(f"each rank: send {send_ms:.2f} ms, map and decode {read_ms:.1f} ms")
    travels = [measure_line(order) for _ in range(given.repetitions)]
    console.print(f"each further node: {1e3 * statistics.median(travels):.1f} ms at both ends together")
    return 0
