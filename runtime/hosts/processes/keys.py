"""The keys of a run: one client key that every process of the run holds, one server key for each inbox."""

from __future__ import annotations

import zmq

from penstock.messages.base import Value


class KeyPair(Value, frozen=True):
    """A CURVE key pair, Z85-encoded."""

    public: bytes
    secret: bytes


def make_keys() -> KeyPair:
    """A pair that nobody has seen before."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public, secret)
