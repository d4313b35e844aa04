"""What training in FP8 through megatron-core needs: its fields are passed to it, and Transformer Engine computes.

Invariants:

* Weights stay in the model's precision: only what is multiplied is rounded, so they go in and out as they are.
* What a rank runs is filled up to as many tokens as the blocks of the recipe have, where it counts nothing.

Nothing here imports megatron-core or torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.learners.megatron.layout.config_fields import KEY, ConfigFieldError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.backends.learners.megatron.layout.config_fields import Section
    from penstock.backends.learners.megatron_options import MegatronOptions

FORMAT: Final = "fp8"
MULTIPLES: Final[Mapping[str, int]] = {"blockwise": 128, "mxfp8": 32}
USUAL_MULTIPLE: Final = 16
"""Of rows and columns that the tensor cores take."""


def fill_multiple(form: str | None, recipe: str | None) -> int:
    """What the number of tokens that a rank runs has to be a multiple of."""
    return 1 if form is None else MULTIPLES.get(recipe or "", USUAL_MULTIPLE)


def check_fp8(options: MegatronOptions, *, precision: str, is_cpu: bool) -> None:
    """Check what a scenario says about FP8.

    Args:
        options: of the learner.
        precision: of the model.
        is_cpu: whether there is no GPU.

    Raises:
        ConfigFieldError: the first thing that is wrong.
    """
    if problem := next(_problems(options, precision, is_cpu=is_cpu), None):
        raise ConfigFieldError(*problem)


def _problems(options: MegatronOptions, precision: str, *, is_cpu: bool) -> Iterator[tuple[Section, str, str]]:
    given = options.transformer
    if given.get(FORMAT) is None:
        for name in (name for name in given if name.startswith("fp8_")):
            yield "transformer", name, f"has no effect without {KEY}.transformer.fp8: e4m3 or hybrid; set it"
        return
    if is_cpu:
        yield (
            "transformer",
            FORMAT,
            "needs Transformer Engine and a GPU of compute capability 8.9 or higher (9.0 for fp8_recipe: blockwise), "
            "and found a CPU; remove it",
        )
    if precision != "bfloat16":
        yield "transformer", FORMAT, f"is beside weights in bfloat16; found {precision}, set {KEY}.precision: bfloat16"
    sections: tuple[tuple[Section, str, object], ...] = (
        ("transformer", "fp8_param", given.get("fp8_param")),
        ("ddp", "fp8_param_gather", options.ddp.get("fp8_param_gather")),
    )
    for section, name, value in sections:
        if value:
            yield section, name, "weights stay in bfloat16, in which they are loaded and published; remove it"
