"""The ``model:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from penstock.messages.base import Options
from penstock.messages.option_keys import FileKey, ModelKey

ModelSize = Literal["xs", "s", "m", "moe_xs", "vlm_xs"]
"""Models that can be made."""
ModelDtype = Literal["float32", "bfloat16", "float16"]
"""Types of number that models compute in."""
SEEING_MODEL: Final = "vlm_xs"
"""The one that sees images."""


class ModelOptions(Options, frozen=True, kw_only=True):
    """Which model is trained. Exactly one of ``path`` and ``make``."""

    path: ModelKey | None = None
    """A folder that transformers' ``save_pretrained`` wrote, with its tokenizer; or a name on the Hugging Face hub,
    such as ``Qwen/Qwen3-0.6B`` or, with a revision, ``Qwen/Qwen3-0.6B@main``: it is fetched before anything starts, and
    the run's own scenario names the folder in the cache, with the commit."""
    config: FileKey | None = None
    """A copy of the checkpoint's `config.json`, such as `scenarios/models/qwen3_30b_a3b.json`: from it `--dry-run`
    plans the layout and the memory of a Megatron learner on a machine that does not have the checkpoint."""
    make: ModelSize | None = None
    """A small Qwen3 (`moe_xs`: Qwen3-MoE; `vlm_xs`: Qwen2.5-VL, which sees images) with random weights and a character
    tokenizer, made in the run's folder from the run's seed."""
    dtype: ModelDtype = "float32"
    """Type of number that the model computes in; `bfloat16` for large models on GPUs; `float16` rounds an
    eighth as much and is trained with a loss scale (docs/learner.md). The learner's own weights and
    what the optimizer keeps are float32 in any case."""
    max_context: Annotated[int, Meta(ge=16)] = 512
    """Prompt and response together, in tokens."""
