"""Prints ``config_fields.json``: the fields of the configuration classes of the megatron-core that is installed.

    python tests/megatron/list_config_fields.py > backends/learners/megatron/layout/config_fields.json

Names, types and choices are facts of the library's interface; its help texts are left out.
"""

# megatron-core is typed for what Penstock uses of it only:
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import json
import types
import typing

import torch

from penstock.backends.learners.megatron.cpu import no_cuda

SECTIONS = ("transformer", "ddp", "optimizer")
PLAIN = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null", torch.dtype: "dtype"}
LISTS = (list, tuple)


def config_fields() -> dict[str, list[dict[str, object]]]:
    """By section of ``learner.megatron``."""
    no_cuda.install()
    # Only now: some versions cannot be imported without it.
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    return {
        "transformer": described(TransformerConfig, MLATransformerConfig),
        "ddp": described(DistributedDataParallelConfig),
        "optimizer": described(OptimizerConfig),
    }


def described(*classes: type) -> list[dict[str, object]]:
    fields: dict[str, dict[str, object]] = {}
    for kind in classes:
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            types_, choices = kinds_of(hints[field.name])
            fields.setdefault(field.name, {"name": field.name, "types": sorted(types_), "choices": sorted(choices)})
    return [fields[name] for name in sorted(fields)]


def kinds_of(hint: object) -> tuple[set[str], set[str]]:
    """What a field takes, and the words among it; ``object`` stands for what no scenario can write."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [kinds_of(part) for part in typing.get_args(hint)]
        return set().union(*(part[0] for part in parts)), set().union(*(part[1] for part in parts))
    if origin is typing.Literal:
        return {"str"}, {str(value) for value in typing.get_args(hint)}
    if any(origin is kind or hint is kind for kind in LISTS):
        return {"list"}, set()
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum"}, {member.name for member in hint}
    return {PLAIN.get(hint, "object") if isinstance(hint, type) else "object"}, set()


def main() -> None:
    sections = config_fields()
    print(f'{{"version": "{importlib.metadata.version("megatron-core")}",')
    for number, section in enumerate(SECTIONS):
        lines = ",\n".join(json.dumps(field) for field in sections[section])
        print(f'"{section}": [\n{lines}\n]' + ("," if number + 1 < len(SECTIONS) else "}"))


if __name__ == "__main__":
    main()
