"""The engine that answers with what rows hold, as the house knows it. It draws, runs and loads nothing, so most of what
others have to be able to do holds of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.spec import EngineContext, EngineSpec
from penstock.backends.protocol import Capability

if TYPE_CHECKING:
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import EngineCommand


def _open(context: EngineContext) -> Backend[EngineCommand]:
    from penstock.backends.engines.recorded.backend import RecordedEngine

    recorded, max_context = context.recorded, context.max_context
    assert recorded is not None, "given to every engine that answers from rows"
    if context.data.source is not None:
        from penstock.backends.data.pushed.responses import PushedResponses

        return RecordedEngine(PushedResponses(context.run_folder), num_slots=context.options.slots)
    from penstock.backends.data.dataset import load_dataset

    dataset = load_dataset(
        context.data, context.model_folder, seed=context.seed, max_context=max_context, recorded=recorded,
        keeps_responses=True,
    )  # fmt: skip
    return RecordedEngine(dataset, num_slots=context.options.slots)


RECORDED: Final = EngineSpec(
    open=_open,
    capabilities=frozenset(
        {
            Capability.SEEDED_SAMPLING,
            Capability.IN_FLIGHT,
            Capability.INTERRUPT,
            Capability.STAGED_WEIGHTS,
            Capability.FROM_ROWS,
            Capability.EXACT,
        }
    ),
    size=lambda options: None,
)
