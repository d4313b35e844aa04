"""What the launcher of a worker group and the launchers of its further nodes say to each other.

Everything is msgpack of a closed union. What is for ranks travels as the bytes that they get.

```
node      NodeCame ─ (RankSaid, RankShown)… ─ the end of the line, maybe after NodeFailed
launcher  StartRanks ─ ToRanks… ─ the end of the line
```
"""

from __future__ import annotations

from typing import Final

import msgspec

# msgspec reads the annotations:
from penstock.backends.learners.worker_group.words import FailureKind, RankWord


class NodeWord(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Base of all of them."""


# --- of the launcher ------------------------------------------------------------------------------------------


class StartRanks(NodeWord, frozen=True, kw_only=True):
    """The first word: start these ranks."""

    first_rank: int
    log_paths: tuple[str, ...]
    """Where each rank of that node writes its output."""
    model_folder: str
    """Has to be there."""
    mark_path: str
    """A file in the run's folder that has to be seen there: ranks write one checkpoint together."""


class ToRanks(NodeWord, frozen=True):
    """Hand these bytes, a word of the launcher, to ranks."""

    ranks: tuple[int, ...]
    """Empty: to all of the node."""
    data: bytes


OrderToNode = StartRanks | ToRanks


# --- of a node ------------------------------------------------------------------------------------------------


class NodeCame(NodeWord, frozen=True):
    """The first word: tell this node what to start."""


class RankSaid(NodeWord, frozen=True):
    """A rank has said this."""

    rank: int
    word: RankWord


class RankShown(NodeWord, frozen=True, kw_only=True):
    """What is known of a rank's process, when it has changed."""

    rank: int
    pid: int
    exit_code: int | None
    is_gone: bool
    is_stopped: bool
    lines: tuple[str, ...]
    """The end of what it has written, once something is wrong with it."""


class NodeFailed(NodeWord, frozen=True, kw_only=True):
    """The last word: this node cannot take part."""

    kind: FailureKind
    message: str


WordOfNode = NodeCame | RankSaid | RankShown | NodeFailed

_encoder: Final = msgspec.msgpack.Encoder()
_orders: Final[msgspec.msgpack.Decoder[OrderToNode]] = msgspec.msgpack.Decoder(OrderToNode)
_words: Final[msgspec.msgpack.Decoder[WordOfNode]] = msgspec.msgpack.Decoder(WordOfNode)


def encode_node_word(word: NodeWord) -> bytes:
    """As it travels."""
    return _encoder.encode(word)


def decode_order(data: bytes) -> OrderToNode:
    """What a node has read.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _orders.decode(data)


def decode_word_of_node(data: bytes) -> WordOfNode:
    """What the launcher has read.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _words.decode(data)
