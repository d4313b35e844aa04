"""How likely given texts are, several of them packed into one forward pass.

The model of the embedded engine without anything that decodes: no slots, no cache, weights that are loaded once. Every
product but attention sees each token once, and only the places that predict a wanted token go through the output head.

Legend: N rows of a pass, W wanted tokens of it, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.engines.teacher_options import check_num_top
from penstock.backends.engines.torch.attention import FreshAttention, RaggedRows
from penstock.backends.engines.torch.cache import KeyValueCache
from penstock.backends.engines.torch.model import DecoderModel, Rows
from penstock.backends.engines.torch.weights import FusedWeights
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_HEAD_ROWS: Final = 512
"""Rows of logits that are held at once."""


class UnscorableError(Exception):
    """A text that the model cannot take; the message says why."""


class Text(NamedTuple):
    """Tokens whose log-probs are wanted, after their context."""

    context: Sequence[int]
    tokens: Sequence[int]

    @property
    def num_rows(self) -> int:
        """Inputs: the last token predicts nothing."""
        return len(self.context) + len(self.tokens) - 1


class Scored(NamedTuple):
    """What the model says of a text, on the CPU."""

    logprobs: torch.Tensor
    """Of its tokens, float32 ``[T]``."""
    top_ids: torch.Tensor
    """The likeliest in the place of each, the likeliest first, int32 ``[T, k]``."""
    top_logprobs: torch.Tensor
    """float32 ``[T, k]``"""


class TextScorer:
    """One model of fixed weights on one device. Not thread-safe."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_context: int,
        temperature: float,
        num_top: int = 0,
    ) -> None:
        """Loads the weights.

        Args:
            folder: a Hugging Face checkpoint.
            dtype: of the weights; log-probs are float32.
            device: where they are.
            max_context: of the longest text.
            temperature: that logits are divided by.
            num_top: k, of the likeliest tokens.

        Raises:
            UserFault: a folder that this engine cannot serve, or a model that was made for shorter texts.
        """
        config = read_model_config(folder)
        if max_context > config.max_positions:
            raise UserFault(
                f"teacher.model: {folder} takes at most {config.max_positions} tokens, and model.max_context is "
                f"{max_context}; lower that, or take another teacher"
            )
        check_num_top(num_top, config.vocab_size)
        self.config = config
        self._num_top = num_top
        self._max_context = max_context
        self._temperature = temperature
        self._device = device
        with torch.inference_mode():
            weights = FusedWeights(config, dtype, device, fold=dtype == torch.float32 and device.type == "cpu")
            with CheckpointTensors(folder) as tensors:
                weights.load(tensors)
            unused = KeyValueCache(config, 1, 1, dtype, device)  # every text is computed from its first token
            self._model = DecoderModel(weights, unused, max_context)

    def check(self, text: Text) -> None:
        """
        Raises:
            UnscorableError: nothing stands before it, it is too long, or an id is outside the vocabulary.
        """
        length, size = len(text.context) + len(text.tokens), self.config.vocab_size
        if not text.context:
            raise UnscorableError("nothing stands before the first token, so nothing predicts it")
        if length > self._max_context:
            raise UnscorableError(f"it has {length} tokens, at most {self._max_context} fit (model.max_context)")
        for token in (*text.context, *text.tokens):
            if not 0 <= token < size:
                raise UnscorableError(f"token id {token} is outside the {size} of the teacher's vocabulary")

    def score(self, texts: Sequence[Text]) -> list[Scored]:
        """Each text, by one forward pass.

        Args:
            texts: that were checked.
        """
        wanted = [text for text in texts if text.tokens]
        scored = iter(self._score(wanted) if wanted else ())
        of_top = torch.zeros(0, self._num_top)
        nothing = Scored(torch.zeros(0), of_top.int(), of_top)
        return [next(scored) if text.tokens else nothing for text in texts]

    @torch.inference_mode()
    def _score(self, texts: Sequence[Text]) -> list[Scored]:
        ragged = RaggedRows.pack([[*t.context, *t.tokens][:-1] for t in texts], [0] * len(texts), self._device)
        rows = Rows(ragged.tokens, ragged.positions, None, num_kept=ragged.num_rows)
        hidden = self._model.hidden_states(rows, FreshAttention(self.config, ragged))
        places: list[int] = []
        first = 0
        for text in texts:
            places.extend(range(first + len(text.context) - 1, first + text.num_rows))
            first += text.num_rows
        hidden = hidden.index_select(0, torch.tensor(places, device=self._device))
        targets = torch.tensor([token for text in texts for token in text.tokens], device=self._device)[:, None]
        parts: list[Scored] = []
        for begin in range(0, len(places), MAX_HEAD_ROWS):
            part = slice(begin, begin + MAX_HEAD_ROWS)
            logprobs = torch.log_softmax(self._model.logits(hidden[part]) / self._temperature, -1)
            top = logprobs.topk(self._num_top, dim=-1)
            parts.append(Scored(logprobs.gather(1, targets[part])[:, 0], top.indices.int(), top.values))
        lengths = [len(text.tokens) for text in texts]
        columns = (torch.split(torch.cat(column).cpu(), lengths) for column in zip(*parts, strict=True))
        return [Scored(*found) for found in zip(*columns, strict=True)]
