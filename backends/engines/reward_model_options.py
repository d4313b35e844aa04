"""The ``reward_model:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from penstock.messages.base import Options, OptionValue

# msgspec reads the annotation:
from penstock.messages.option_keys import ModelKey

Seconds = Annotated[float, Meta(gt=0)]


class RewardModelOptions(Options, frozen=True, kw_only=True):
    """A model with one number as its output, the score of a prompt with its response, for `reward.function:
    reward_model`. Its weights never change."""

    path: ModelKey
    """A folder that transformers' ``save_pretrained`` wrote, with its tokenizer, of a model for sequence classification
    with ``num_labels=1``."""
    backend: str = "torch"
    """`torch`: transformers in the actor's own process; `sglang`: stock servers, started with ``--is-embedding``."""
    count: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Reward models, which are asked in turn."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights."""
    chat_template: bool = True
    """The messages of the row and the response are rendered with the reward model's own template. false: the response
    stands right behind the text of the prompt."""
    slots: Annotated[int, Meta(ge=1)] = 64
    """Samples that one pass, or one server, has at a time."""
    max_tokens: Annotated[int, Meta(ge=1)] = 16384
    """Tokens of one forward pass of `torch`, with padding; a longer sample is alone in its own."""
    max_context: Annotated[int, Meta(ge=1)] | None = None
    """Tokens of the longest sample; a longer one has no reward. null: the model's ``max_position_embeddings``."""
    device: str = "auto"
    """As ``engines.device``."""
    num_threads: Annotated[int, Meta(ge=1)] = 1
    """Of each, on a CPU."""
    sglang: dict[str, OptionValue] = field(default_factory=dict[str, OptionValue])
    """Options of the SGLang server, by its own names."""
    start_timeout_s: Seconds = 300.0
    """A server that is not ready by then is replaced."""
    timeout_s: Seconds = 120.0
    """A server that does not answer a request within this is replaced."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """None: what runs elsewhere is asked by the reward ``remote``."""
        return ()
