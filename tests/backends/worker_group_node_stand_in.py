"""The launcher of a node as it is, whose ranks are those of :mod:`worker_group_stand_in`; it waits briefly."""

from __future__ import annotations

from penstock.backends.learners.worker_group import node_main, rank_process

if __name__ == "__main__":
    rank_process.RANK_MODULE = "worker_group_stand_in"  # type: ignore[misc]  # pyright: ignore[reportConstantRedefinition]
    node_main.SHARED_WAIT_S = 0.5  # type: ignore[misc]  # pyright: ignore[reportConstantRedefinition]
    node_main.main()
