"""Whether a learner has been given what its warm start needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.learners.options import WarmStartOptions


def check_demonstrations(warm_start: WarmStartOptions | None, demonstrations: Sequence[object] | None) -> None:
    """Demonstrations are given exactly when there is a warm start.

    Raises:
        UserFault: there is a warm start and no row for it.
        ValueError: there are rows and no warm start.
    """
    if warm_start is None and demonstrations is not None:
        raise ValueError("demonstrations were given and learner.warm_start is not set; set it or leave them out")
    if warm_start is not None and not demonstrations:
        raise UserFault(f"learner.warm_start.path: {warm_start.path} has no rows; expected at least one")
