"""What the gateway hears and says: the OpenAI protocol as far as it is served, and sessions.

Unknown fields of a request are left out, as every server of this protocol does; those that would change what the model
is asked for are named in :data:`FIXED` or refused by name.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

JsonObject = dict[str, object]
"""Foreign data that is passed through: a tool's schema, a row's metadata."""


class ImageAddress(msgspec.Struct):
    url: str
    """``data:…;base64,…``; nothing is fetched."""


class ContentPart(msgspec.Struct):
    type: str
    text: str = ""
    image: str = ""
    """In an episode: a reference to an image that is kept. (:mod:`penstock.backends.episodes.images`)"""
    image_url: ImageAddress | msgspec.UnsetType = msgspec.UNSET
    """In a request: the image itself."""


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str
    """JSON."""


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One message, as it comes and as it goes out."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class JsonSchemaFormat(msgspec.Struct):
    schema: JsonObject


class ResponseFormat(msgspec.Struct):
    type: str = "text"
    json_schema: JsonSchemaFormat | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both kinds of requests have."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[ChatMessage]
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[int]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class PenstockFields(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a response says beyond the protocol."""

    session: str
    turn: int
    """Counted from 1."""
    versions: list[tuple[int, int]]
    """Which weights made the response's tokens: (version, number of tokens), in order."""
    ignored: list[str] = []
    """Fields of the request that differ from the scenario's ``sampling:`` and were not followed."""
    conversation: int = 0
    """Which of the session's; each begins where a request goes on from no answer, or from one in the middle."""
    masked: str = ""
    """Why the response is not trained: ``other_sampling`` or ``constrained``; empty: it is."""


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[object] = []


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    text_offset: list[int]
    top_logprobs: None = None


class ToolCallDelta(msgspec.Struct, frozen=True):
    index: int
    id: str
    function: FunctionCall
    type: str = "function"


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str = ""
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ReplyMessage(msgspec.Struct, frozen=True):
    """As :class:`ChatMessage`, with the nulls that clients expect."""

    content: str | None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    message: ReplyMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    index: int = 0


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    index: int = 0


class CompletionChoice(msgspec.Struct, frozen=True):
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None = None
    index: int = 0


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The frame of every response and of every chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[ChunkChoice] | list[CompletionChoice]
    usage: Usage | None = None
    penstock: PenstockFields | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    created: int = 0
    object: str = "model"
    owned_by: str = "penstock"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    code: str


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody
    type: str = "error"
    """Which Anthropic's protocol has, and OpenAI's does not look at."""


# --- sessions -----------------------------------------------------------------------------------------------------


class SessionAsked(msgspec.Struct, frozen=True):
    """``POST /sessions``."""

    wait_s: float = 30.0
    """For a session to be there; 0 answers at once."""


class SessionTaken(msgspec.Struct, frozen=True):
    """The answer: a sample to play."""

    id: str
    base_url: str
    """Base URL for the OpenAI client."""
    model: str
    sample: str
    """Group and index of the sample, as in ``penstock trace``."""
    attempt: int
    prompt: str
    """As the model's own prompt has it; with the chat template if the scenario uses it."""
    messages: msgspec.Raw
    """The same as chat messages, before the template."""
    metadata: msgspec.Raw
    """The columns that ``data.metadata_keys`` names; never the label."""
    timeout_s: float
    idle_timeout_s: float
    max_turns: int


OutcomeName = Literal["completed", "truncated", "policy_error", "infra_error"]


class SessionFinish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``POST /sessions/ID/finish``."""

    outcome: OutcomeName | None = None
    """Without one: ``truncated`` where a limit ended the last response, else ``completed``."""
    reward: float | None = None
    """Without one the scenario's reward function gives it."""
    components: dict[str, float] = {}
    """Named figures that are reported beside the reward."""
    detail: str = ""
    """What went wrong, of an error."""
    metadata: JsonObject = {}
    """Metadata for the gateway's log."""
    choice: Annotated[int, Meta(ge=0)] = 0
    """Which answer to the last request counts, where it had several (``n``)."""


class SessionEnded(msgspec.Struct, frozen=True):
    """The answer to it."""

    id: str
    sample: str
    outcome: str
    num_turns: int
    num_tokens: int
    """Of the response: the model's and the others'."""
    num_model_tokens: int


class SessionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the gateway's log."""

    id: str
    sample: str
    attempt: int
    ended_at: float
    outcome: str
    detail: str
    num_turns: int
    num_tokens: int
    metadata: JsonObject


class GatewayStatus(msgspec.Struct, frozen=True):
    """``GET /status`` of one engine's gateway."""

    engine: str
    model: str
    num_open: int
    num_taken: int
    num_finished: int
    num_abandoned: int


FIXED: Final = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "logit_bias",
)  # fmt: skip
"""Fields that the scenario decides: another value would give tokens whose log-probs are not those that training
expects, so they are not followed unless ``episode.follow_sampling`` says so, and the response names them under
``penstock.ignored``."""
FOLLOWED: Final = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Those that are followed then."""
