"""What the stages of ``penstock bench gpu`` share: the device, a model of the size that people begin with, a clock.

With ``--pretend`` a stage goes the same way on the CPU, with a model that no figure means anything of.
"""

# torch and transformers are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.backends.checkpoint.make import ModelShape, write_made_model
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.benchmarks._harness import Benchmark
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")
VOCABULARY: Final = 151_936
"""Of Qwen3."""
SHAPE: Final = ModelShape(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072)
"""Of Qwen3-0.6B."""
TINY: Final = ModelShape(hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=192)
TINY_VOCABULARY: Final = 500
MAX_POSITIONS: Final = 4096


class Stand(NamedTuple):
    """What a stage measures on."""

    is_real: bool
    device: torch.device
    dtype: torch.dtype
    """That models compute in."""

    @property
    def vocabulary(self) -> int:
        return VOCABULARY if self.is_real else TINY_VOCABULARY

    @property
    def dtype_name(self) -> str:
        """As a scenario has it."""
        return "bfloat16" if self.dtype == torch.bfloat16 else "float32"

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.is_real:
            torch.cuda.synchronize(self.device)

    def timed(self, act: Callable[[], T]) -> tuple[T, float]:
        """What this gives, and the seconds that it takes on the device."""
        self.wait()
        began_s = time.perf_counter()
        found = act()
        self.wait()
        return found, time.perf_counter() - began_s

    def free_bytes(self) -> int:
        """Memory that the driver has for others; 0 on a CPU."""
        return int(torch.cuda.mem_get_info(self.device)[0]) if self.is_real else 0

    def peak_bytes(self) -> int:
        """The most that tensors have taken since the last call; 0 on a CPU."""
        if not self.is_real:
            return 0
        peak = int(torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


def stage(file: str, doc: str | None, *, repetitions: int) -> Benchmark:
    """A stage's command line."""
    name = file.rpartition("/")[2].removesuffix(".py")
    prog = f"penstock bench gpu --only {name}"
    benchmark = Benchmark(file, doc, repetitions=repetitions, name=f"gpu_{name}", prog=prog)
    benchmark.option("--pretend", action="store_true", help="on the CPU, with a tiny model: figures mean nothing")
    return benchmark


def stand_of(given: argparse.Namespace) -> Stand:
    """The first GPU that this process may use.

    Raises:
        UserFault: there is none, and nothing is pretended.
    """
    if given.pretend:
        return Stand(False, torch.device("cpu"), torch.float32)
    if not torch.cuda.is_available():
        raise UserFault(
            "no GPU that torch can use was found; penstock doctor says what is here, and --pretend runs on the CPU"
        )
    return Stand(True, torch.device("cuda:0"), torch.bfloat16)


def made_checkpoint(stand: Stand, folder: Path) -> Path:
    """A model with Qwen3-0.6B's config and random weights, without a tokenizer."""
    shape = SHAPE if stand.is_real else TINY
    with torch.random.fork_rng(), torch.device(stand.device), quiet_transformers():
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=stand.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
        )
        model: Any = Qwen3ForCausalLM(config)
        model.to(stand.dtype).save_pretrained(folder)
    return folder


def made_model_of_letters(stand: Stand, folder: Path) -> Path:
    """As :func:`made_checkpoint`, with the alphabet and the tokenizer of the tasks that Penstock makes itself."""
    write_made_model(SHAPE if stand.is_real else TINY, folder, seed=0)
    return folder
