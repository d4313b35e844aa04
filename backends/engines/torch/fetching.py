"""One publish as an embedded engine holds it between fetch and swap: a whole model, or adapters and, where the engine
has not loaded it, the model beneath them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.engines.torch.generic_config import GenericConfig
from penstock.backends.engines.torch.low_rank import Adapters, check_adapters
from penstock.backends.engines.torch.weights import check_parameters, parameter_shapes, shapes_of
from penstock.backends.weights.fetched import is_finite
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from penstock.backends.checkpoint.model_config import ModelConfig
    from penstock.backends.weights.protocol import FetchedWeights, WeightFetcher
    from penstock.messages.weights import WeightManifest


class FetchedPublish:
    """See :class:`.FetchedWeights`."""

    def __init__(self, manifest: WeightManifest, weights: FetchedWeights, base: FetchedWeights | None) -> None:
        """``base``: None: there is none, or the engine has it."""
        self._manifest, self._weights, self._base = manifest, weights, base

    @property
    def has_base(self) -> bool:
        """Whether the model beneath the adapters was fetched with them."""
        return self._base is not None

    @property
    def model(self) -> Mapping[str, torch.Tensor] | None:
        """The parameters to load; None: the engine has them."""
        if self._manifest.low_rank is None:
            return self._weights.tensors
        return None if self._base is None else self._base.tensors

    @property
    def adapters(self) -> Adapters | None:
        """To load beside them."""
        low_rank = self._manifest.low_rank
        return None if low_rank is None else Adapters(self._weights.tensors, low_rank)

    @property
    def digest(self) -> str:
        """Of what was read."""
        return self._weights.digest

    def digest_now(self) -> str:
        """See :class:`.FetchedWeights`; where the model beneath the adapters is not what was exported any more, that
        of the model, which no manifest of adapters has."""
        if self._base is not None and self._base.digest_now() != self._manifest.base_digest:
            return self._base.digest_now()
        return self._weights.digest_now()

    def close(self) -> None:
        """Let go of the bytes."""
        self._weights.close()
        if self._base is not None:
            self._base.close()

    def what_is_wrong(self, config: ModelConfig | GenericConfig) -> str:
        """Why it cannot be served; empty when it can."""
        model, adapters = self.model, self.adapters
        try:
            if isinstance(config, GenericConfig):
                _check_generic(config, model, adapters)
            else:
                if model is not None:
                    check_parameters(config, shapes_of(model))
                if adapters is not None:
                    check_adapters(config, parameter_shapes(config), shapes_of(adapters.tensors), adapters.low_rank)
        except UserFault as error:
            return str(error)
        for tensors in (model or {}, adapters.tensors if adapters else {}):
            for name, tensor in tensors.items():
                if not is_finite(tensor):
                    return f"{name} holds values that are not finite: the learner has diverged"
        return ""


def _check_generic(config: GenericConfig, model: Mapping[str, torch.Tensor] | None, adapters: Adapters | None) -> None:
    if adapters is not None:
        raise UserFault(f"learner.lora.publish: adapter, and {config.notice}; set it to merged")
    assert model is not None, "without adapters a publish is a whole model"
    from penstock.backends.engines.torch.generic_weights import check_generic  # brings transformers

    check_generic(config, shapes_of(model))


def fetch_publish(fetcher: WeightFetcher, manifest: WeightManifest, loaded_base: str) -> FetchedPublish:
    """Bring a publish near.

    Args:
        fetcher: of the engine.
        manifest: of the publish.
        loaded_base: digest of the model beneath adapters that the engine has; empty: it has none.

    Raises:
        WeightFetchError: it, or the model beneath it, is not to be had.
    """
    weights = fetcher.fetch(manifest)
    if manifest.base is None or manifest.base_digest == loaded_base:
        return FetchedPublish(manifest, weights, None)
    try:
        return FetchedPublish(manifest, weights, fetcher.fetch(manifest.base))
    except BaseException:
        weights.close()
        raise
