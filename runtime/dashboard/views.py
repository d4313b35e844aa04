"""The views of the dashboard, in the order of their tabs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.runtime.dashboard.learning_view import LEARNING
from penstock.runtime.dashboard.ledger_view import LEDGER
from penstock.runtime.dashboard.samples_view import SAMPLES

if TYPE_CHECKING:
    from penstock.runtime.dashboard.routes import View

VIEWS: Final[tuple[View, ...]] = (LEARNING, SAMPLES, LEDGER)
