"""By which of this machine's networks the ranks of a worker group meet."""

from __future__ import annotations

import logging
import os
from typing import Final

import psutil

from penstock.backends.learners.worker_group.words import LOOPBACK

GLOO_VARIABLE: Final = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE: Final = "NCCL_SOCKET_IFNAME"

_log: Final = logging.getLogger(__name__)


def meet_over(host: str) -> None:
    """Have gloo and NCCL listen where this address of the machine is; what the user has said about it stays.

    Called before there is a process group, on every rank. gloo would listen wherever the machine's name leads to.
    """
    name = interface_of(host)
    if not name:
        _log.warning("no network of this machine has the address %s; gloo and NCCL choose one themselves", host)
        return
    os.environ.setdefault(GLOO_VARIABLE, name)
    if host != LOOPBACK:  # on one node NCCL needs no network
        os.environ.setdefault(NCCL_VARIABLE, f"={name}")


def interface_of(host: str) -> str:
    """The name of the network that has this address, as ``eth0``; empty: none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    return ""
