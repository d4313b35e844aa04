"""One learner, whatever trains it and however many processes: all that it is made from, and what each of its ranks is
told at its start. Nothing here needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import field

# msgspec reads the annotations:
from penstock.backends.learners.options import LearnerOptions
from penstock.messages.arrays import pack_tokens, tokens_view
from penstock.messages.base import OptionValue, Value
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class PackedDemonstration(Value, frozen=True, array_like=True):
    """A prompt and the response to imitate, the end token included, as int32 ids."""

    prompt: bytes
    response: bytes


class ExportPlan(Value, frozen=True, kw_only=True):
    """Where weights are published; see :func:`~penstock.backends.weights.transports.open_exporter`."""

    transport: str
    run_id: str
    folder: str
    host: str
    names_function: str | None = None
    """Of the user's, for engines that call weights otherwise."""
    quantizes: bool = False
    """Matrices of layers are published in FP8, with the scales of their blocks."""
    options: dict[str, OptionValue] = field(default_factory=dict[str, OptionValue])
    """Options of the transport."""


class LearnerPlan(Value, frozen=True, kw_only=True):
    """One learner, the same for all of its ranks."""

    model_folder: str
    """A Hugging Face checkpoint, with its tokenizer."""
    checkpoints_folder: str
    """Where ``SaveCheckpoint`` writes ``version-0000123`` (``version-0000123-e4`` with epoch 4)."""
    options: LearnerOptions
    """The ``learner:`` block."""
    temperature: float
    """Of the sampling; 1 where engines draw greedily, as they then report log-probs of temperature 1."""
    dtype: str
    """``float32``, or ``bfloat16`` or ``float16`` with float32 copies of the weights in the optimizer."""
    seed: int
    """Of the run."""
    num_steps: int
    """Batches of the run, for the schedule of the learning rate."""
    max_context: int = 0
    """Tokens of prompt and response together, for ``options.true_on_policy``."""
    epoch: int
    """Of this incarnation of the learner; no two of one run have the same."""
    export: ExportPlan
    """Where weights are published."""
    demonstrations: tuple[PackedDemonstration, ...] | None = None
    """For the warm start; None: there is none."""
    rank: str = ""
    """Opens what works in a rank (:class:`.RankOpener`): ``module:function``. Empty for a learner without ranks."""

    @property
    def run_folder(self) -> Path:
        """Where dumps and profiles of steps are written."""
        return Path(self.checkpoints_folder).parent

    def check(self) -> None:
        """Demonstrations are given exactly when there is a warm start.

        Raises:
            UserFault: there is a warm start and no row for it.
            ValueError: there are rows and no warm start.
        """
        block = self.options.warm_start
        if block is None and self.demonstrations is not None:
            raise ValueError("demonstrations were given and learner.warm_start is not set; set it or leave them out")
        if block is not None and not self.demonstrations:
            raise UserFault(f"learner.warm_start.path: {block.path} has no rows; expected at least one")

    def demonstration_ids(self) -> list[tuple[list[int], list[int]]]:
        """Token ids of a prompt and of a response each."""
        return [
            (tokens_view(each.prompt).tolist(), tokens_view(each.response).tolist())
            for each in self.demonstrations or ()
        ]


def pack_demonstrations(
    demonstrations: Iterable[tuple[Sequence[int], Sequence[int]]],
) -> tuple[PackedDemonstration, ...]:
    """Those of a plan, from token ids of a prompt and of a response each."""
    return tuple(PackedDemonstration(pack_tokens(prompt), pack_tokens(response)) for prompt, response in demonstrations)
