"""Whether learner and engine look at the images that they are given, found out before the first batch is trained.

A run whose engine or learner leaves the images out trains all the same, and its figures look as they should. So the
log-probs of some responses are computed twice, with their images and with blank ones of the same size: same shapes,
same kernels, so nothing but the images can make a difference.
"""

# torch.from_numpy is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.learners.batch.packing import pack
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from penstock.backends.learners.batch.sequences import TrainBatch, TrainSequence
    from penstock.backends.learners.torch.model import PackedModel

MAX_PROMPTS: Final = 8
LEAST_CHANGE: Final = 1e-7
"""Nats by which some log-prob has to change with the images."""
NOISE: Final = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Mean nats between engine and learner that rounding explains."""

AS_FAR: Final = 0.9
"""Share of the distance of blank images from which on an engine is no nearer; rounding must not decide."""


class BlindModelError(UserFault):
    """Training that would not see its images."""


class FirstLook:
    """Asks once whether engine and learner look at their images: before the first batch that can tell."""

    def __init__(self, model: PackedModel, temperature: float) -> None:
        """``temperature``: of the sampling."""
        self._model, self._temperature = model, temperature
        self._is_done = False

    def at(self, batch: TrainBatch, *, version: int) -> None:
        """Look at a batch that is about to be trained; see :func:`check_sight`."""
        if not self._is_done:
            self._is_done = check_sight(self._model, batch, version=version, temperature=self._temperature)


@torch.no_grad()
def check_sight(model: PackedModel, batch: TrainBatch, *, version: int, temperature: float) -> bool:
    """Look whether log-probs depend on the images; whether there was any response to ask about.

    Args:
        model: of the learner.
        batch: that is about to be trained.
        version: that the model has now; tokens of others say nothing about the engine.
        temperature: of the sampling.

    Raises:
        BlindModelError: the learner's log-probs do not depend on them, or the engine's are of a model that saw none.
    """
    chosen: dict[int, TrainSequence] = {}
    for sequence in batch.sequences:
        if sequence.media and len(chosen) < MAX_PROMPTS:
            chosen.setdefault(sequence.prompt, sequence)
    if not chosen or model.eyes is None:
        return False
    sequences = list(chosen.values())
    packed = pack(sequences)
    seen = model.logprobs(packed, temperature=temperature).cpu()
    model.eyes.is_blank = True
    try:
        blank = model.logprobs(packed, temperature=temperature).cpu()
    finally:
        model.eyes.is_blank = False
    change = (seen - blank).abs()
    if not float(change.max()) > LEAST_CHANGE:
        raise BlindModelError(
            f"the learner does not look at its images: over {len(sequences)} prompts with images no log-prob of a "
            "response changes when every image is made blank, so training would go on without them; look whether the "
            "weights of the vision part are those of the model (model.path: visual.*), and whether the chat template "
            "shows the model where the images are"
        )
    versions = torch.cat([torch.from_numpy(sequence.versions) for sequence in sequences])
    engine = torch.from_numpy(packed.rollout_logprobs)
    known = engine.isfinite() & (versions == version)
    if not bool(known.any()):
        return False
    apart = float((engine - seen)[known].abs().mean())
    if apart > NOISE[model.dtype] and apart >= AS_FAR * float(change[known].mean()):
        raise BlindModelError(
            f"the engine does not look at its images: the log-probs that it reports are {apart:.2g} nats from those of "
            f"the learner with the images, which is no nearer than blank images are ({float(change[known].mean()):.2g} "
            "nats); its responses are to other prompts than those that are trained"
        )
    return True
