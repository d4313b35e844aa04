"""What OpenTelemetry's conventions for generative models call attributes of our spans.

Viewers for language models look for these names. They stand beside our own, added when a span is exported, so that no
actor pays for them. Conventions without a fit (a model's name, which every span of a run would repeat; messages, which
are in ``samples.sqlite``) are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.runtime.observability.spans import AttributeValue

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
EVALUATION: Final = "gen_ai.evaluation.name"
SCORE: Final = "gen_ai.evaluation.score.value"
ERROR: Final = "error.type"
OUR_FAULT: Final = "infra_error"


def conventional(name: str, attributes: dict[str, AttributeValue]) -> dict[str, AttributeValue]:
    """What to add to a span of this name that has these attributes."""
    if name == "generate":
        found: dict[str, AttributeValue] = {OPERATION: "text_completion", PROVIDER: "penstock"}
        if "num_tokens" in attributes:
            found[OUTPUT_TOKENS] = attributes["num_tokens"]
        if attributes.get("outcome") == OUR_FAULT:
            found[ERROR] = OUR_FAULT
        return found
    if name == "score" and "failure" in attributes:
        return {EVALUATION: "reward", ERROR: "scoring_failed"}
    if name == "score" and "reward" in attributes:
        return {EVALUATION: "reward", SCORE: attributes["reward"]}
    return {}
