"""The views of the dashboard, in the order of their tabs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.runtime.dashboard.devices_view import DEVICES
from penstock.runtime.dashboard.explain_view import EXPLAIN
from penstock.runtime.dashboard.flow_view import FLOW
from penstock.runtime.dashboard.learning_view import LEARNING
from penstock.runtime.dashboard.ledger_view import LEDGER
from penstock.runtime.dashboard.samples_view import SAMPLES

if TYPE_CHECKING:
    from penstock.runtime.dashboard.routes import View

VIEWS: Final[tuple[View, ...]] = (FLOW, DEVICES, LEARNING, SAMPLES, LEDGER, EXPLAIN)
