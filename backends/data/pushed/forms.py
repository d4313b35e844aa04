"""What is pushed, what is answered, and what is kept of it in the folder of a run."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from penstock.backends.data.recording import RecordedSample
from penstock.backends.data.row import Message
from penstock.messages.base import Value
from penstock.messages.samples import MAX_REWARD, Loss, Prompt

MAX_TOKENS: Final = 1 << 22
MAX_TEXT: Final = 1 << 24
MAX_SAMPLES: Final = 4096
MAX_METADATA_BYTES: Final = 1 << 20

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Ids = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)]
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_SAMPLES)]
Logprob = Annotated[float, Meta(ge=-1e9, le=0)]  # what float32 does not have would become infinite
Version = Annotated[int, Meta(ge=0, le=2**53)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class PushedSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One response: ``tokens``, ``text``, or the ``messages`` that follow those of the prompt."""

    tokens: Ids | None = None
    text: Text | None = None
    messages: Messages | None = None
    """Turns of the assistant are trained, the others are not."""
    logprobs: Annotated[list[Logprob], Meta(max_length=MAX_TOKENS)] | None = None
    """Of each of the tokens, as whatever drew them reported them; None: nobody knows, and the learner computes its own
    where the objective can do with these."""
    spans: Annotated[list[tuple[Count, Count]], Meta(max_length=MAX_SAMPLES)] | None = None
    """Which tokens the model made, as ``[first, end]`` ascending; None: all of them."""
    versions: Annotated[list[tuple[Version, Count]], Meta(min_length=1, max_length=MAX_SAMPLES)] | None = None
    """Which version made how many tokens, one after the other; None: the group's made them all."""
    reward: Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)] | None = None
    """None: the scenario's reward function scores it."""
    is_truncated: bool | None = None
    """None: so where its tokens do not end with one that ends a response."""


class PushedGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /trajectories``: the samples of one prompt."""

    key: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:/@+-]{0,127}$")]
    """Of the client's choice, another one for each group. Whoever pushes under it again gets the first answer."""
    version: Version
    """Of the policy that made the samples."""
    prompt: Text | Messages | None = None
    prompt_tokens: Ids | None = None
    """In place of ``prompt``."""
    label: Annotated[str, Meta(max_length=MAX_METADATA_BYTES)] = ""
    metadata: dict[str, object] = msgspec.field(default_factory=dict[str, object])
    """For reward functions."""
    samples: Annotated[list[PushedSample], Meta(min_length=1, max_length=MAX_SAMPLES)]


class PushAccepted(msgspec.Struct, frozen=True, kw_only=True):
    """The group is on disk, and one of the run's groups is drawn from it."""

    key: str
    row: int
    """Groups that were pushed are numbered from 0; the ledger says which group of the run has which row."""
    version: int


class PushStanding(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /trajectories``: what is taken now."""

    version: int
    """The newest that may be named; −1: none yet."""
    oldest_version: int | None
    """The oldest that the next group may be of; None: none is wanted now."""
    wanted: int
    """Groups that are taken before training has to go on."""
    accepted: int
    """Groups that were ever taken."""


class PushedHead(Value, frozen=True, kw_only=True):
    """What is known by heart of a group that was taken."""

    key: str
    digest: str
    """SHA-256 of what was pushed."""
    version: int


class PushedRow(PushedHead, frozen=True, kw_only=True, omit_defaults=True):
    """A group that was taken, as it lies in the journal."""

    text: str
    tokens: bytes
    """int32 ids of the prompt."""
    label: str = ""
    metadata: bytes = b""
    loss: Loss = Loss.OBJECTIVE
    samples: tuple[RecordedSample, ...]

    def prompt(self, number: int) -> Prompt:
        """Of the group that is drawn from it."""
        return Prompt(
            row=number,
            epoch=0,
            tokens=self.tokens,
            text=self.text,
            label=self.label,
            metadata=self.metadata,
            is_recorded=True,
            loss=self.loss,
            pushed=self.key,
        )
