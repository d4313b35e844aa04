"""How an embedded engine is laid out, and how it draws."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from penstock.backends.engines.torch.sampling import Sampler
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.engines.torch.generic_config import ModelLimits
    from penstock.backends.engines.torch.stopping import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSampling:
    """A way to draw for requests that ask for it, where it is not that of the engine."""

    sampler: Sampler
    stop_token_ids: frozenset[int]
    stop_strings: StopStrings | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How an engine is laid out and what it does with logits."""

    num_slots: int = 64
    max_context: int = 512
    """Prompt and response together, in tokens."""
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sampler: Sampler = field(default_factory=Sampler)
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: StopStrings | None = None
    others: tuple[OtherSampling, ...] = ()
    """Request ``sampling_index: k`` is drawn by the one at place k − 1."""
    progress_tokens: int | None = None
    """A running request reports its tokens after every so many; None: never."""
    records_experts: bool = False
    """Ended requests say which experts their tokens went to."""
    learner_model: Path | None = None
    """The folder of the model, if it is to be computed with the learner's own products; see :mod:`.learner_model`."""

    def check(self, config: ModelLimits) -> None:
        """Raise where the model does not allow them.

        Raises:
            UserFault: ``max_context`` is beyond what the model was made for, or a stop token outside its vocabulary.
        """
        if self.max_context > config.max_positions:
            raise UserFault(
                f"max_context must be at most the model's max_position_embeddings, {config.max_positions},"
                f" got {self.max_context}"
            )
        if self.records_experts and config.experts is None:
            raise UserFault("engines.record_experts is true, and the model has no experts; set it to false")
        stops = self.stop_token_ids.union(*(other.stop_token_ids for other in self.others))
        outside = sorted(token for token in stops if not 0 <= token < config.vocab_size)
        if outside:
            raise UserFault(f"stop_token_ids must be below the vocabulary's size, {config.vocab_size}, got {outside}")

    def sampler_of(self, sampling_index: int) -> Sampler:
        """How a response of this sampling_index is drawn."""
        return self.others[sampling_index - 1].sampler if sampling_index else self.sampler

    def stop_ids_of(self, sampling_index: int) -> frozenset[int]:
        """Tokens that end a response of this sampling_index."""
        return self.others[sampling_index - 1].stop_token_ids if sampling_index else self.stop_token_ids

    def stop_tables(self, config: ModelLimits) -> list[torch.Tensor]:
        """Bool ``[V]`` of each sampling_index: whether a token ends a response of it."""
        tables = torch.zeros(1 + len(self.others), config.vocab_size, dtype=torch.bool, device=self.device)
        for place, table in enumerate(tables):
            table[sorted(self.stop_ids_of(place))] = True
        return list(tables)

    def stop_strings_of(self, sampling_index: int) -> StopStrings | None:
        """Strings that do."""
        return self.others[sampling_index - 1].stop_strings if sampling_index else self.stop_strings

    @property
    def has_stop_strings(self) -> bool:
        """Whether any response is ended by strings."""
        return self.stop_strings is not None or any(other.stop_strings is not None for other in self.others)
