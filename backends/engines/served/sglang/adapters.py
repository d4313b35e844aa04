"""Adapters that are published alone, on SGLang servers: loaded beside the model under the name of their publish, while
requests that began with others go on with those.

Invariants:

* The model beneath them is loaded once, as whole models are, under a label that is no version: which version made a
  token follows from the adapter that its request named, which is the same from its beginning to its end.
* What a server hears of has passed the checks of :mod:`~penstock.backends.engines.served.base.staging`, and each
  adapter is there in both its parts, finite, and of a matrix of the model.
"""

# safetensors is typed in part only:
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import shutil
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
import torch
from safetensors.torch import save_file

from penstock.backends.engines.served.base.staging import stage
from penstock.backends.engines.served.base.versions import label_of
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.transports import open_fetcher
from penstock.messages.weights import ADAPTER_DOWN, ADAPTER_UP

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from penstock.backends.engines.options import OptionValue
    from penstock.backends.engines.served.base.staging import StagedFile
    from penstock.backends.engines.served.expectation import Expectation
    from penstock.backends.engines.served.sglang.endpoint import SglangEndpoint
    from penstock.backends.learners.options import LoraOptions
    from penstock.backends.weights.protocol import FetchedWeights
    from penstock.messages.weights import LowRank, WeightManifest

DENSE: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Of a decoder layer."""
PARTS: Final = (ADAPTER_DOWN, ADAPTER_UP)
PREFIX: Final = "base_model.model."
"""How every name in a file of peft begins."""
NOTHING: Final[Mapping[str, torch.Tensor]] = MappingProxyType({})


class _AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``adapter_config.json``, as far as a server reads it."""

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    peft_type: str = "LORA"
    task_type: str = "CAUSAL_LM"
    bias: str = "none"


def launch_options(lora: LoraOptions, weights: Iterable[str], *, is_cpu: bool) -> dict[str, OptionValue]:
    """Of a server that is to take these adapters.

    Args:
        lora: what the learner adapts.
        weights: names of the model's weights.
        is_cpu: it has no kernels.
    """
    own: dict[str, OptionValue] = {
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "lora_target_modules": [*modules_of(lora, weights)],
    }
    return {**own, "lora_backend": "torch_native"} if is_cpu else own


def modules_of(lora: LoraOptions, weights: Iterable[str]) -> tuple[str, ...]:
    """Last parts of the names of the matrices. With ``auto`` those of attention and MLP; experts have no adapters."""
    if lora.target_modules != "auto":
        return tuple(dict.fromkeys(name.rpartition(".")[2] for name in lora.target_modules))
    found = {name.removesuffix(".weight").rpartition(".")[2] for name in weights if ".experts." not in name}
    return tuple(name for name in DENSE if name in found)


class LoadedBase:
    """The model that the servers of one engine have beneath adapters."""

    def __init__(self) -> None:
        self.digest = ""
        """Empty: none was loaded yet."""


class StagedAdapter:
    """See :class:`~penstock.backends.engines.served.base.dialect.Loadable`."""

    def __init__(
        self,
        manifest: WeightManifest,
        folder: Path,
        weights: FetchedWeights,
        base: StagedFile | None,
        loaded: LoadedBase,
    ) -> None:
        """``base``: None where the servers have it."""
        self.manifest = manifest
        self._folder, self._weights, self._base, self._loaded = folder, weights, base, loaded

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Of the model, where it is loaded too: a server's checksums are of that alone."""
        return NOTHING if self._base is None else self._base.tensors

    def digest_now(self) -> str:
        """Of the adapters; where the model beneath them is not what was exported any more, that of the model."""
        if self._base is not None:
            found = self._base.digest_now()
            if found != self.manifest.base_digest:
                self._loaded.digest = ""
                return found
        return self._weights.digest_now()

    async def load(self, endpoint: SglangEndpoint, label: str, *, flush: bool, timeout_s: float) -> None:
        """Have a server of this node load them, and before them the model if it lacks that.

        Raises:
            CallError: it could not.
        """
        if self._base is not None:
            await self._base.load(endpoint, f"base-{self.manifest.base_digest[:16]}", flush=flush, timeout_s=timeout_s)
        await endpoint.load_adapter(label, self._folder, timeout_s)
        self._loaded.digest = self.manifest.base_digest

    def close(self) -> None:
        """Let go of the bytes. The server has read the folder."""
        self._weights.close()
        if self._base is not None:
            self._base.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def stage_adapter(
    manifest: WeightManifest, *, model_folder: Path, folder: Path, expected: Expectation, loaded: LoadedBase
) -> StagedAdapter:
    """Make a folder in ``folder`` that servers can load an adapter from, and one with the model beneath it where they
    lack that.

    Raises:
        WeightFetchError: something is gone, not that of the manifest, or not of this model.
    """
    assert manifest.low_rank is not None
    assert manifest.base is not None
    place = folder / f"{label_of(manifest)}-adapter"
    with contextlib.ExitStack() as undo:
        weights = open_fetcher().fetch(manifest)
        undo.callback(weights.close)
        _check(weights.tensors, manifest.low_rank, expected)
        undo.callback(shutil.rmtree, place, ignore_errors=True)
        try:
            _write(place, weights.tensors, manifest.low_rank)
        except OSError as error:
            raise WeightFetchError(f"{place} cannot be made: {error.strerror}") from error
        base = None
        if loaded.digest != manifest.base_digest:
            base = stage(manifest.base, model_folder=model_folder, folder=folder, expected=expected)
        staged = StagedAdapter(manifest, place, weights, base, loaded)
        undo.pop_all()
    return staged


def _write(place: Path, tensors: Mapping[str, torch.Tensor], low_rank: LowRank) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    config = _AdapterConfig(
        r=low_rank.rank, lora_alpha=low_rank.scale * low_rank.rank, target_modules=low_rank.target_modules
    )
    (place / "adapter_config.json").write_bytes(msgspec.json.encode(config))
    save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, place / "adapter_model.safetensors")


def _check(tensors: Mapping[str, torch.Tensor], low_rank: LowRank, expected: Expectation) -> None:
    paths = {name.removesuffix(PARTS[0]).removesuffix(PARTS[1]) for name in tensors}
    for path in sorted(paths):
        matrix = expected.tensors.get(f"{path}.weight")
        if matrix is None or len(matrix.shape) != 2:
            raise WeightFetchError(f"{path} has an adapter, and is no matrix of the model in {expected.source}")
        shapes = ((low_rank.rank, matrix.shape[1]), (matrix.shape[0], low_rank.rank))
        for part, shape in zip(PARTS, shapes, strict=True):
            tensor = tensors.get(path + part)
            if tensor is None or tuple(tensor.shape) != shape:
                found = "none" if tensor is None else str(list(tensor.shape))
                raise WeightFetchError(f"{path}{part}: expected shape {list(shape)}, found {found}")
            if not torch.isfinite(tensor).all():
                raise WeightFetchError(f"{path}{part} holds values that are not finite: the learner has diverged")
