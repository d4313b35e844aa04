"""Whether this machine has what the ranks of a Megatron learner import. Nothing of it is imported here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.served.sglang.environment import has_cuda_gpu
from penstock.backends.learners.megatron.layout.config_fields import MEGATRON_VERSION, check_config_fields
from penstock.backends.learners.megatron.layout.fp8_options import check_fp8
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from penstock.runtime.scenario.structure import Scenario

INSTALL: Final = 'pip install -e ".[megatron]"'
INSTALL_LAYERS: Final = 'pip install --no-build-isolation "transformer-engine[pytorch]"'


def installed_version() -> str | None:
    """Of megatron-core; None where it is not installed."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def has_transformer_engine() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def check_megatron(scenario: Scenario) -> None:
    """megatron-core is installed, on GPUs Transformer Engine as well, and nothing is asked of gloo that it cannot do.

    Raises:
        UserFault: with what to do.
    """
    learner = scenario.learner
    if installed_version() is None:
        raise UserFault(
            f"learner.backend: megatron: megatron-core is not installed (tried with {MEGATRON_VERSION}); {INSTALL}"
        )
    if learner.device == "cpu" or not has_cuda_gpu():
        try:
            check_config_fields(learner.megatron, is_cpu=True)
            check_fp8(learner.megatron, precision=learner.megatron.precision or scenario.model.dtype, is_cpu=True)
        except UserFault as error:
            raise UserFault(f"{error} (this machine has no GPU)") from None
    elif not has_transformer_engine():
        raise UserFault(
            "learner.backend: megatron: on GPUs the layers are those of Transformer Engine, which is not installed; "
            f"{INSTALL_LAYERS}, or set learner.device: cpu"
        )
