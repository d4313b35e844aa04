"""How a Megatron learner would divide its model, and what that takes, as a dry run prints it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.learners.megatron.bridge.weight_map import num_weights, padded_vocab_size
from penstock.backends.learners.megatron.layout.layout import layout_of
from penstock.backends.learners.megatron.layout.memory import pieces_of
from penstock.backends.learners.megatron.layout.model_config import with_options
from penstock.backends.learners.megatron.layout.stages import layers_of_stages
from penstock.messages.texts import counted
from penstock.runtime.cli.engine_memory import engine_lines
from penstock.runtime.cli.megatron_memory import memory_lines
from penstock.runtime.cli.tables import aligned, count_text, listed
from penstock.runtime.preflight.gpu_memory import learner_parts
from penstock.runtime.scenario.architecture import MODEL_CONFIG, MODEL_PATH, find_architecture

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.backends.learners.megatron.layout.layout import Axis, Layout
    from penstock.runtime.preflight.gpu_memory import LearnerPart
    from penstock.runtime.run.node_plan import NodePlan
    from penstock.runtime.scenario import Scenario
    from penstock.runtime.scenario.architecture import Found

WITHIN_A_NODE: Final[tuple[Axis, ...]] = ("expert",)
"""Axes whose ranks exchange tokens in every layer. (Those of one tensor-parallel group never are on several nodes.)"""


class _Row(NamedTuple):
    """One axis of the layout."""

    axis: Axis
    ranks: range
    share: str
    """What each rank has of it."""


def megatron_text(scenario: Scenario, nodes: NodePlan | None, gpu_gb: float | None) -> list[str]:
    """The learner's model, layout, memory and micro-batches, one line each.

    Args:
        scenario: resolved, with a Megatron learner.
        nodes: where its ranks would be; None where they are on CPUs.
        gpu_gb: memory of a GPU, where the user has said it.
    """
    parts, options = learner_parts(scenario), scenario.learner.megatron
    layouts = [layout_of(options, part.num_ranks) for part in parts]
    ranks = " and ".join(map(_ranks_text, parts, layouts))
    found = find_architecture(scenario)
    if found is None:
        return [
            f"learner: megatron, {ranks}",
            f"  neither layout nor memory were checked: {scenario.model.path} is not there, and model.config names no "
            "copy of its config.json",
        ]
    return [
        f"learner: megatron, {ranks}",
        *_indented(_model_lines(scenario, found)),
        "",
        *_indented(line for part in parts for line in _axis_lines(scenario, found.architecture, part, nodes)),
        "",
        *(line for part in parts for line in memory_lines(scenario, found.architecture, part, nodes, gpu_gb)),
        "",
        *_batch_lines(scenario, layouts[0]),
        *engine_lines(scenario, found.architecture, gpu_gb),
    ]


def _ranks_text(part: LearnerPart, layout: Layout) -> str:
    return f"{'one rank' if layout.num_ranks == 1 else f'{layout.num_ranks} ranks'}{part.whose}" + (
        "" if layout.num_ranks == 1 else f" = {layout}"
    )


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _model_lines(scenario: Scenario, found: Found) -> Iterator[str]:
    architecture, model = found.architecture, scenario.model
    total = num_weights(architecture)
    experts = architecture.experts
    text = f"{architecture.family.model_type}, {architecture.num_layers} layers, {count_text(total)} parameters"
    if experts is not None:
        text += f"; of {experts.count} experts a token goes through {experts.per_token}"
    yield text
    options = scenario.learner.megatron
    if options.mtp is not None:
        both = with_options(architecture, options)
        beside = "with the model" if options.mtp.trains_trunk else "apart"
        more = count_text(num_weights(both) - total)
        yield f"and {both.num_mtp_layers} to predict further tokens, {more} parameters, trained {beside}"
    if found.key == MODEL_PATH:
        yield f"as {model.path} says"
    if found.key == MODEL_CONFIG:
        yield f"as model.config says; the weights are not on this machine: there is no {model.path}"


def _axis_lines(
    scenario: Scenario, architecture: Architecture, part: LearnerPart, nodes: NodePlan | None
) -> Iterator[str]:
    layout = layout_of(scenario.learner.megatron, part.num_ranks)
    found = [row for row in _rows(scenario, architecture, layout) if len(row.ranks) > 1 or row.axis == "data"]
    first = 0 if part.has_policy else scenario.learner.num_ranks - part.num_ranks
    rows = [row._replace(ranks=range(row.ranks.start + first, row.ranks.stop + first, row.ranks.step)) for row in found]
    if part.whose:
        yield f"ranks{part.whose}"
    cells = [("axis", "ranks", "such as", "on", "each has")]
    cells += [(row.axis, str(len(row.ranks)), listed(row.ranks), _where(row.ranks, nodes), row.share) for row in rows]
    yield from aligned(cells)
    for row in rows:
        if row.axis in WITHIN_A_NODE and _num_nodes(row.ranks, nodes) > 1:
            yield (
                f"slow: {row.axis} groups lie over {_num_nodes(row.ranks, nodes)} nodes, and send every token to its "
                "experts and back in each layer; keep them within a node where that is possible"
            )


def _rows(scenario: Scenario, architecture: Architecture, layout: Layout) -> Iterator[_Row]:
    options, experts = scenario.learner.megatron, architecture.experts
    samples = scenario.learner.groups_per_batch * scenario.sampling.samples_per_group
    stages = layers_of_stages(pieces_of(architecture, layout, options), layout.pipeline)
    layers = str(stages[0]) if len(set(stages)) == 1 else ", ".join(map(str, stages))
    virtual = f", in {layout.virtual_pipeline} pieces" if layout.virtual_pipeline > 1 else ""
    shares: dict[Axis, str] = {
        "tensor": _tensor_share(architecture, layout, options.vocab_multiple),
        "context": "its part of each sequence",
        "data": f"about {samples / layout.data:.4g} of {samples} samples",
        "pipeline": f"{layers} of {architecture.num_layers} layers{virtual}",
    }
    if experts is not None:
        shares |= {
            "expert tensor": f"{experts.ffn_size // layout.expert_tensor} of an expert's {experts.ffn_size} channels",
            "expert": f"{experts.count // layout.expert} of {experts.count} experts of a layer",
            "expert data": "the same experts",
        }
    return (_Row(axis, layout.group(axis), share) for axis, share in shares.items())


def _tensor_share(architecture: Architecture, layout: Layout, vocab_multiple: int) -> str:
    tensor = layout.tensor
    vocab = padded_vocab_size(architecture.vocab_size, multiple=vocab_multiple, num_tensor=tensor)
    heads = f"{architecture.num_heads // tensor} of {architecture.num_heads} heads"
    if architecture.latent is None:
        heads += f" ({max(1, architecture.num_kv_heads // tensor)} of {architecture.num_kv_heads} for keys)"
    return f"{heads}, {vocab // tensor} of {vocab} rows of the vocabulary"


def _where(ranks: Sequence[int], nodes: NodePlan | None) -> str:
    if nodes is None or not _num_nodes(ranks, nodes):
        return ""
    count = _num_nodes(ranks, nodes)
    return "one node" if count == 1 else f"{count} nodes"


def _num_nodes(ranks: Sequence[int], nodes: NodePlan | None) -> int:
    """0 where nobody knows."""
    return 0 if nodes is None else len({nodes.node_of(rank) for rank in ranks} - {None})


def _batch_lines(scenario: Scenario, layout: Layout) -> Iterator[str]:
    learner, longest = scenario.learner, scenario.model.max_context
    samples = learner.groups_per_batch * scenario.sampling.samples_per_group
    in_step = math.ceil(samples / learner.num_updates)
    bound = learner.max_tokens_per_micro_batch
    at_once = max(1, bound // longest)
    rounds = math.ceil(in_step / at_once / layout.data)
    if layout.virtual_pipeline > 1:
        rounds = math.ceil(rounds / layout.pipeline) * layout.pipeline
    steps = learner.num_updates * learner.num_passes
    yield f"batch: {counted(samples, 'sample')}, {counted(steps, 'optimizer step')} of {in_step}"
    most = f"at most {counted(rounds, 'micro-batch')} of {max(bound, longest)} tokens a step"
    yield f"  each data-parallel rank runs {most}, if all samples have the {longest} tokens of model.max_context"
    if layout.pipeline > 1:
        idle = (layout.pipeline - 1) / (layout.virtual_pipeline * rounds + layout.pipeline - 1)
        yield f"  stages wait for each other {idle:.1%} of the time then, and longer with fewer micro-batches"
