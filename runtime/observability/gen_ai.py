"""What OpenTelemetry's conventions for generative models call attributes of our spans.

Viewers for language models look for these names. They stand beside our own, added when a span is exported, so that no
actor pays for them. Conventions without a fit (a model's name, which every span of a run would repeat; messages, which
are in ``samples.sqlite``) are left out, and so are what a tool was asked and what it answered: foreign text, and large.
A ``generate`` in which an episode is played is the agent's, and leaves the tokens to its turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.runtime.observability.spans import CHAT, COMPLETION, TOOL

if TYPE_CHECKING:
    from penstock.runtime.observability.spans import AttributeValue

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_CALL: Final = "gen_ai.tool.call.id"
EVALUATION: Final = "gen_ai.evaluation.name"
SCORE: Final = "gen_ai.evaluation.score.value"
ERROR: Final = "error.type"
OUR_FAULT: Final = "infra_error"


_NAMES: Final = frozenset(("generate", "score", CHAT, COMPLETION))


def has_convention(name: str) -> bool:
    """Whether :func:`conventional` has anything to say of spans of this name."""
    return name in _NAMES or name.startswith(TOOL)


def conventional(name: str, attributes: dict[str, AttributeValue]) -> dict[str, AttributeValue]:
    """What to add to a span of this name that has these attributes."""
    if name == "generate":
        return _of_generation(attributes)
    if name in (CHAT, COMPLETION):
        tokens = {INPUT_TOKENS: attributes["num_context_tokens"], OUTPUT_TOKENS: attributes["num_tokens"]}
        return {OPERATION: name, PROVIDER: "penstock", **tokens}
    if name.startswith(TOOL):
        told = {TOOL_CALL: attributes.get("call_id"), ERROR: attributes.get("error")}
        known = {key: value for key, value in told.items() if value is not None}
        return {OPERATION: TOOL.strip(), TOOL_NAME: attributes["tool"], TOOL_TYPE: "function", **known}
    if name == "score" and "failure" in attributes:
        return {EVALUATION: "reward", ERROR: "scoring_failed"}
    if name == "score" and "reward" in attributes:
        return {EVALUATION: "reward", SCORE: attributes["reward"]}
    return {}


def _of_generation(attributes: dict[str, AttributeValue]) -> dict[str, AttributeValue]:
    is_episode = "num_turns" in attributes
    found: dict[str, AttributeValue] = {OPERATION: "invoke_agent" if is_episode else COMPLETION, PROVIDER: "penstock"}
    if "num_tokens" in attributes and not is_episode:
        found[OUTPUT_TOKENS] = attributes["num_tokens"]
    if attributes.get("outcome") == OUR_FAULT:
        found[ERROR] = OUR_FAULT
    return found
