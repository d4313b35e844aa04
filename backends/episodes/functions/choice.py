"""Which function plays a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.backends.episodes.functions.wire import EVALUATION
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from penstock.backends.episodes.functions.wire import FunctionSpecs
    from penstock.messages.samples import Prompt


def chosen(specs: FunctionSpecs, prompt: Prompt) -> str:
    """The name of the function: of the row's dataset, if it is one of the evaluation with a function of its own; that
    which the row names; or the one of all others.

    Raises:
        UserFault: the row names one that there is not.
    """
    names = [named.name for named in specs.functions]
    if prompt.dataset is not None and (own := f"{EVALUATION}{prompt.dataset}") in names:
        return own
    if not specs.function_key or not prompt.metadata:
        return ""
    name = msgspec.json.decode(prompt.metadata, type=dict[str, object]).get(specs.function_key)
    if name is None or name == "":
        return ""
    if not isinstance(name, str) or name not in names or name.startswith(EVALUATION):
        known = ", ".join(known for known in names if known and not known.startswith(EVALUATION))
        raise UserFault(
            f"row {prompt.row} names {str(name)[:80]!r} as its function (episode.function_key: {specs.function_key}); "
            f"episode.functions has {known or 'none'}"
        )
    return name
