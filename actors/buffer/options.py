"""The ``staleness:`` block of a scenario: all there is to choose between synchronous and asynchronous."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.messages.base import Options
from penstock.messages.option_keys import PolicyKey
from penstock.messages.training import OnStale, UpdateMode


class StalenessOptions(Options, frozen=True, kw_only=True):
    """The staleness policy of the buffer."""

    policy: PolicyKey = "fully_async"
    """``sync``, ``one_step_off``, ``fully_async``, or ``file.py:Name`` for one of your own."""
    max_staleness: Annotated[int, Meta(ge=0, le=1024)] | None = None
    """η: how many versions old a trained token may be at most; null: the policy's own (0, 1, 2)."""
    update_mode: UpdateMode | None = None
    """How engines take new weights: ``drain``, ``interrupt``, ``in_flight``; null: the policy's own."""
    on_stale: OnStale = OnStale.WAIT
    """What becomes of a group that could get older than the bound: ``wait`` paces the run so that none does; ``drop``
    gives it up; ``requeue`` gives it up and grants its prompt anew; ``mask`` trains it without its tokens beyond the
    bound."""
    mask_old_tokens: bool = False
    """Tokens of a response that are older than the version which finished it are left out of the loss; with any policy
    and any ``on_stale``. They are masked tokens in the receipt, and the age of a sample is then that of its newest
    token."""
    target_outstanding: Literal["auto"] | Annotated[int, Meta(ge=1)] = "auto"
    """Groups granted and not yet trained. ``auto`` keeps as few as keep the learner busy; a number fixes it."""
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    """Groups granted and not yet admitted, at most."""
    over_sampling: Annotated[float, Meta(ge=1, le=16)] = 1.0
    """Multiplies admission; each batch takes the first that are ready, the surplus is cancelled."""
    max_requeues: Annotated[int, Meta(ge=0)] = 1
    """With ``on_stale: requeue``: how often one prompt is granted anew."""
    reuse: Annotated[int, Meta(ge=1, le=64)] = 1
    """How often a group may be trained: in so many batches, while its oldest token is within the bound. New groups go
    first; used ones fill a batch that would have to be waited for."""
    max_rejected_batches: Annotated[int, Meta(ge=1)] = 20
    """The run stops with advice when the filter turned away so many batches' worth of groups without one batch."""
