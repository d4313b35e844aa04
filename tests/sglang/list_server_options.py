"""Prints ``server_options.json``: every option of the SGLang server that is installed, as its argument parser has it.

Runs with the Python of SGLang's environment, where Penstock is not installed::

    PYTHON tests/sglang/list_server_options.py > backends/engines/served/sglang/server_options.json

Names, types, choices and defaults are facts of the server's interface; its help texts are left out.
"""

# sglang is installed in another environment than the one that checks this file:
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # the list is the same with a GPU, which is not needed for it

TYPES = {
    "NoneType": "str",
    "str": "str",
    "nullable_str": "str",
    "parse_cuda_graph_backend_arg": "str",
    "int": "int",
    "human_readable_int": "size",
    "float": "float",
    "loads": "json",
    "json_list_type": "json",
    "parse_cuda_graph_config_arg": "json",
}
"""What the parser turns a word into, by the name of the function that does it."""
SWITCHES = ("_StoreTrueAction", "DeprecatedStoreTrueAction")
TOGGLES = ("BooleanOptionalAction",)
VALUES = ("_StoreAction", "LoRAPathAction", "DeprecatedStoreConstAction")


def describe(action: argparse.Action) -> dict[str, object]:
    kind = type(action).__name__
    if kind in SWITCHES:
        shape = "switch"
    elif kind in TOGGLES:
        shape = "toggle"
    elif kind in VALUES:
        shape = "value"
    else:
        sys.exit(f"{action.option_strings}: no shape is known for {kind}")
    type_name = type(None).__name__ if action.type is None else getattr(action.type, "__name__", "")
    if type_name not in TYPES:
        sys.exit(f"{action.option_strings}: no type is known for {action.type}")
    flags = [flag for flag in action.option_strings if not (shape == "toggle" and flag.startswith("--no-"))]
    return {
        "name": action.dest,
        "flags": flags,
        "shape": shape,
        "type": "bool" if shape != "value" else TYPES[type_name],
        "nargs": action.nargs if shape == "value" else None,
        "choices": sorted(action.choices) if action.choices is not None else None,
        "default": action.default,
    }


def main() -> None:
    from sglang.srt.arg_groups.choices import DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    from sglang.srt.server_args import ServerArgs

    version = importlib.metadata.version("sglang")
    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    options = [describe(action) for action in parser._actions]
    lines = ",\n".join(json.dumps(option) for option in sorted(options, key=lambda option: str(option["flags"])))
    backends = json.dumps(sorted(DETERMINISTIC_ATTENTION_BACKEND_CHOICES))
    print(f'{{"version": "{version}",')
    print(f'"deterministic_attention_backends": {backends},')
    print(f'"options": [\n{lines}\n]}}')


if __name__ == "__main__":
    main()
