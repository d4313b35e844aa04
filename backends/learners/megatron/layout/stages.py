"""How the layers of a model are divided over pipeline stages.

A stage holds one piece of the model, or several with virtual stages. Pieces are counted in the order of the model, so
piece ``i`` of ``p`` stages is on stage ``i % p``.

Invariants:

* Every layer is in one piece, or :class:`UserFault` is raised: what megatron-core would leave out in silence is
  refused here.
* The division is megatron-core's own. Nothing here imports it, or torch.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.learners.megatron_options import ConfigValue

FIRST: Final = "num_layers_in_first_pipeline_stage"
LAST: Final = "num_layers_in_last_pipeline_stage"
WITH_EMBEDDING: Final = "account_for_embedding_in_pipeline_split"
WITH_LOSS: Final = "account_for_loss_in_pipeline_split"
WRITTEN_OUT: Final = "pipeline_model_parallel_layout"
UNEVEN_STAGES: Final = (FIRST, LAST, WRITTEN_OUT, WITH_EMBEDDING, WITH_LOSS)
"""Fields of megatron-core that say how many layers a stage has."""

_REPEATED_GROUP: Final = re.compile(r"\(([^()]*)\)\*(\d+)")
_REPEATED: Final = re.compile(r"([EtmL|])\*(\d+)")


def layers_of_pieces(
    num_layers: int, *, num_stages: int, pieces_per_stage: int = 1, fields: Mapping[str, ConfigValue]
) -> tuple[int, ...]:
    """Layers of each piece, in the order of the model.

    Args:
        num_layers: of the model.
        num_stages: that share them.
        pieces_per_stage: that each stage holds.
        fields: of megatron-core's ``TransformerConfig`` that a scenario sets.

    Raises:
        UserFault: that is not possible.
    """
    given = {name: fields[name] for name in UNEVEN_STAGES if fields.get(name)}
    if WRITTEN_OUT in given:
        pieces = _written_out(str(given[WRITTEN_OUT]), num_stages, pieces_per_stage)
    elif FIRST in given or LAST in given:
        pieces = _with_own_ends(num_layers, num_stages, pieces_per_stage, given)
    else:
        pieces = _even(num_layers, num_stages, pieces_per_stage, given)
    if sum(pieces) != num_layers:
        names = ", ".join(f"transformer.{name}" for name in given)
        raise UserFault(f"the model has {num_layers} layers, and {names} gives the stages {sum(pieces)}")
    return pieces


def layers_of_stages(pieces: tuple[int, ...], num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, of those of its pieces."""
    return tuple(sum(pieces[stage::num_stages]) for stage in range(num_stages))


def _even(num_layers: int, num_stages: int, pieces_per_stage: int, given: Mapping[str, ConfigValue]) -> tuple[int, ...]:
    counted = [name for name in (WITH_EMBEDDING, WITH_LOSS) if name in given]
    num_pieces = num_stages * pieces_per_stage
    if (num_layers + len(counted)) % num_pieces:
        what = f"pipeline_parallel {num_stages}" + (
            f" × virtual_pipeline {pieces_per_stage}" if pieces_per_stage > 1 else ""
        )
        more = f", {num_layers + len(counted)} with what {' and '.join(counted)} counts" if counted else ""
        raise UserFault(f"the model has {num_layers} layers{more}, which {what} does not divide")
    pieces = [(num_layers + len(counted)) // num_pieces] * num_pieces
    pieces[0] -= WITH_EMBEDDING in given
    pieces[-1] -= WITH_LOSS in given
    return tuple(pieces)


def _with_own_ends(
    num_layers: int, num_stages: int, pieces_per_stage: int, given: Mapping[str, ConfigValue]
) -> tuple[int, ...]:
    if others := [name for name in (WITH_EMBEDDING, WITH_LOSS) if name in given]:
        raise UserFault(f"transformer.{FIRST} and {LAST} say how many layers a stage has, and so does {others[0]}")
    own = {stage: _count(given[name]) for name, stage in ((FIRST, 0), (LAST, num_stages - 1)) if name in given}
    rest, num_rest = num_layers - sum(own.values()), num_stages - len(own)
    if num_rest and (rest < num_rest or rest % num_rest):
        raise UserFault(
            f"the model has {num_layers} layers, of which {rest} are left for {num_rest} stages, which does not divide "
            "them"
        )
    stages = [own.get(stage, rest // max(1, num_rest)) for stage in range(num_stages)]
    if uneven := [layers for layers in stages if layers % pieces_per_stage]:
        raise UserFault(f"a stage has {uneven[0]} layers, which virtual_pipeline {pieces_per_stage} does not divide")
    return tuple(stages[piece % num_stages] // pieces_per_stage for piece in range(num_stages * pieces_per_stage))


def _count(value: ConfigValue) -> int:
    assert isinstance(value, int), "fields are checked before they are used"
    return value


def _written_out(text: str, num_stages: int, pieces_per_stage: int) -> tuple[int, ...]:
    """``Et*3|(tt|)*2,L``: a letter for each layer (``t``), for the embedding and the loss, and ``|`` after a piece."""
    plain = re.sub(r"[\s,]", "", text)
    while (found := _REPEATED_GROUP.search(plain)) or (found := _REPEATED.search(plain)):
        plain = plain[: found.start()] + found[1] * int(found[2]) + plain[found.end() :]
    if unknown := sorted(set(plain) - set("EtmL|")):
        raise UserFault(f"transformer.{WRITTEN_OUT} has {unknown[0]!r}; it is written with E, t, L, |, ( ) and *")
    if not (plain.startswith("E") and plain.endswith("L")):
        raise UserFault(f"transformer.{WRITTEN_OUT} has to begin with E, the embedding, and end with L, the loss")
    pieces = plain.split("|")
    if len(pieces) != num_stages * pieces_per_stage:
        raise UserFault(
            f"transformer.{WRITTEN_OUT} has {len(pieces)} pieces, and pipeline_parallel {num_stages} × "
            f"virtual_pipeline {pieces_per_stage} is {num_stages * pieces_per_stage}"
        )
    return tuple(piece.count("t") for piece in pieces)
