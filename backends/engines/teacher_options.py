"""The ``teacher:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from penstock.backends.engines.options import HttpUrl

# msgspec reads the annotation:
from penstock.backends.learners.options import WarmStartOptions
from penstock.messages.base import Options, OptionValue
from penstock.messages.errors import UserFault
from penstock.messages.option_keys import ModelKey

Seconds = Annotated[float, Meta(gt=0)]


class TeacherModelOptions(Options, frozen=True, kw_only=True):
    """Which model teaches. Exactly one of ``path`` and ``make``. Its tokenizer has to be that of the student."""

    path: ModelKey | None = None
    """A folder that transformers' ``save_pretrained`` wrote, with its tokenizer; also for servers that run already."""
    make: Literal["xs", "s", "m", "moe_xs"] | None = None
    """As ``model.make``; made in the run's folder, and worth learning from only with a warm start."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """As ``model.dtype``."""
    warm_start: WarmStartOptions | None = None
    """Of a model that is made: the demonstrations that it imitates before the run, once."""


class TeacherLatencyOptions(Options, frozen=True, kw_only=True):
    """The model of a simulated teacher."""

    sample_s: Annotated[float, Meta(ge=0)] = 0.02
    """Of one sample, whatever its length."""
    token_s: Annotated[float, Meta(ge=0)] = 0.0001
    """Added per token. Samples are worked on one after the other."""
    failure_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of attempts that end with an error."""


class TeacherOptions(Options, frozen=True, kw_only=True):
    """A model that says how likely it finds the tokens of each sample, for `learner.objective.opd_kl_coef`, or which it
    finds likeliest in their places, for `learner.objective: gkd`."""

    model: TeacherModelOptions = TeacherModelOptions()
    """Its weights never change."""
    backend: str = "torch"
    """`torch`: the embedded engine; `sglang`: stock servers; `simulated`: beside simulated engines, and only there."""
    count: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Teachers, which are asked in turn."""
    slots: Annotated[int, Meta(ge=1)] = 64
    """Samples that one teacher has at a time; the others wait at the Scorer."""
    max_tokens: Annotated[int, Meta(ge=1)] = 4096
    """Tokens of one forward pass of the embedded engine; a longer sample is alone in its own."""
    top_logprobs: Annotated[int, Meta(ge=0)] = 0
    """k: so many of the teacher's likeliest tokens travel with each token of a sample, 8 bytes for each, for
    `learner.objective: gkd`."""
    device: str = "auto"
    """As ``engines.device``."""
    num_threads: Annotated[int, Meta(ge=1)] = 1
    """Of each teacher, on a CPU."""
    sglang: dict[str, OptionValue] = field(default_factory=dict[str, OptionValue])
    """Options of the SGLang server, by its own names."""
    addresses: tuple[HttpUrl, ...] = ()
    """SGLang servers that run already, one for each teacher. They are asked and otherwise left alone."""
    start_timeout_s: Seconds = 300.0
    """A teacher that is not ready by then is replaced."""
    timeout_s: Seconds = 300.0
    """A teacher that was asked and answers nothing at all for so long is replaced; and of one request to a server."""
    max_losses: Annotated[int, Meta(ge=0)] = 5
    """A sample with which more teachers than this have died counts as failed."""
    simulated: TeacherLatencyOptions = TeacherLatencyOptions()
    """How long things take under the backend `simulated`."""


def check_num_top(num_top: int, vocab_size: int) -> None:
    """
    Raises:
        UserFault: more likeliest tokens are asked for than there are tokens.
    """
    if num_top > vocab_size:
        raise UserFault(
            f"teacher.top_logprobs: {num_top} is more than the {vocab_size} tokens of the teacher's "
            "vocabulary; lower it"
        )
