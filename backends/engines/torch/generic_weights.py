"""A model of transformers as an engine holds it: its weights come by their names in a checkpoint.

Invariants:

* A publish has exactly the weights that ``save_pretrained`` would write, or it is refused before anything changes.
* The cache that transformers keeps for it says the same as a pass over the whole context; this is measured with the
  first weights, and a model for which it does not hold is refused.
"""

# torch and transformers are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import inspect
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import DynamicCache

from penstock.backends.checkpoint.checkpoint_names import CheckpointNames, kept_tensors
from penstock.backends.checkpoint.huggingface_classes import auto_class
from penstock.backends.checkpoint.open_config import open_config
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.engines.torch.weights import check_shapes
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import Cache, PreTrainedModel

    from penstock.backends.engines.torch.generic_config import GenericConfig

CACHE_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Mean nats between a pass over a context and one token at a time."""
CACHE_KEYS: Final = ("past_key_values", "cache_params")
"""What models call the cache that they are handed."""
PROBE_LENGTH: Final = 12
PROBE_PREFILLED: Final = 5


class GenericWeights:
    """One model on one device, unset until the first ``load``."""

    def __init__(self, config: GenericConfig, dtype: torch.dtype, device: torch.device) -> None:
        """
        Raises:
            UserFault: transformers cannot build it, or it takes no cache that it is handed.
        """
        self.config, self.dtype, self.device = config, dtype, device
        self.model = cast("Any", _built(config.folder, dtype)).to(device).eval()
        self._names = CheckpointNames(self.model)
        self._is_loaded = False
        parameters = inspect.signature(self.model.forward).parameters
        keys = [key for key in CACHE_KEYS if key in parameters]
        if not keys:
            raise UserFault(
                f"{config.folder}: {type(self.model).__name__} takes no cache of transformers' own kind, which an "
                "embedded engine needs; use engines.backend: sglang"
            )
        self._cache_key = keys[0]
        self._only_last: dict[str, int] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def tensors(self) -> list[torch.Tensor]:
        """The memory of all weights; what is computed from the config beside them is small, and no load brings it."""
        return [parameter.data for parameter in self.model.parameters()]

    def new_cache(self) -> Cache:
        """An empty one."""
        return DynamicCache(config=self.model.config)

    def extend(self, cache: Cache, tokens: torch.Tensor) -> torch.Tensor:
        """Append ``tokens [B, T]`` to the contexts in the cache; float32 ``[B, V]``, the logits after the last."""
        output = self.model(input_ids=tokens, use_cache=True, **{self._cache_key: cache}, **self._only_last)
        return cast("torch.Tensor", output.logits)[:, -1].float()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """After each of ``tokens [T]``, float32 ``[T, V]``, by one pass without a cache."""
        return cast("torch.Tensor", self.model(input_ids=tokens[None], use_cache=False).logits)[0].float()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take these weights (names of the checkpoint).

        Raises:
            UserFault: they are of another model; or, the first time, its cache says otherwise than a whole pass.
        """
        check_generic(self.config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        if self._names.can_rename_one_by_one:
            for name, tensor in kept_tensors(self.model):
                for saved, part in self._names.rename({name: tensor.detach()}).items():
                    part.copy_(tensors[saved])
        else:  # transformers makes several of one, or the reverse
            self._convert(tensors)
        if not self._is_loaded:
            self._check_cache()
            self._is_loaded = True

    def _convert(self, tensors: Mapping[str, torch.Tensor]) -> None:
        state = {name: tensors[name] for name in tensors}
        with quiet_transformers():
            loaded = type(self.model).from_pretrained(
                None, config=self.model.config, state_dict=state, dtype=self.dtype, local_files_only=True
            )
        sources = dict(kept_tensors(cast("PreTrainedModel", loaded)))
        for name, tensor in kept_tensors(self.model):
            tensor.detach().copy_(sources[name])

    def _check_cache(self) -> None:
        """Two contexts in turn, each with a cache of its own: what a model keeps elsewhere would be the other's."""
        difference = 0.0
        contexts = [
            torch.tensor([(7 + 31 * place + start) % self.config.vocab_size for place in range(PROBE_LENGTH)])
            for start in (0, 5)
        ]
        caches, said = [self.new_cache() for _ in contexts], [list[torch.Tensor]() for _ in contexts]
        for begin, end in pairwise((0, *range(PROBE_PREFILLED, PROBE_LENGTH + 1))):
            for tokens, cache, steps in zip(contexts, caches, said, strict=True):
                steps.append(self.extend(cache, tokens[None, begin:end].to(self.device)))
        for tokens, steps in zip(contexts, said, strict=True):
            whole = self.logits(tokens.to(self.device))[PROBE_PREFILLED - 1 :].log_softmax(-1)
            difference = max(difference, float((torch.cat(steps).log_softmax(-1) - whole).abs().mean()))
        if not difference <= CACHE_TOLERANCE[self.dtype]:
            raise UserFault(
                f"{self.config.folder}: {type(self.model).__name__} says other log-probs with transformers' cache than "
                f"without, by {difference:.2g} nats on average; an embedded engine cannot serve it, use "
                "engines.backend: sglang"
            )


def check_generic(config: GenericConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless these are exactly the weights of the model (one that is tied may be there twice).

    Raises:
        UserFault: names what is missing, unknown or of another shape.
    """
    expected, tied = _weight_shapes(config.folder)
    check_shapes(expected, shapes, may_be_there=tied)


@functools.cache
def _weight_shapes(folder: Path) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    """Of every weight by its name in a checkpoint; and names of weights that are another one."""
    with torch.device("meta"):
        model = _built(folder, torch.float32)
    saved = CheckpointNames(model).rename({name: tensor.detach() for name, tensor in kept_tensors(model)})
    ties = cast("Mapping[str, str]", model.get_expanded_tied_weights_keys())
    return {name: tuple(tensor.shape) for name, tensor in saved.items()}, frozenset(ties)


def _built(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    with quiet_transformers():
        try:
            config: Any = open_config(folder)
            # What transformers calls sdpa leaves the bending of scores out.
            is_bent = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
            attention = {"attn_implementation": "eager"} if is_bent else {}
            model = cast("Any", auto_class(folder)).from_config(config, dtype=dtype, **attention)
        except (OSError, ValueError, StrictDataclassError) as error:
            raise UserFault(f"{folder}: transformers cannot build it as a causal model: {error}") from error
    return cast("PreTrainedModel", model)
