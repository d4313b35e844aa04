"""Which flags of a script count: a file may go over them, and some change nothing beside the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import yaml

from penstock.runtime.slime.expansion import find_file
from penstock.runtime.slime.mapping import FUNCTIONS, KEYS, READ_TOGETHER, SHAPE_OF_MODEL, SWITCHES
from penstock.runtime.slime.reasons import REASONS
from penstock.runtime.slime.rollout import SCALE_FLAGS
from penstock.runtime.slime.script import Flag
from penstock.runtime.slime.training import is_supervised

if TYPE_CHECKING:
    from penstock.runtime.slime.mapping import Plain
    from penstock.runtime.slime.writer import Writer

KNOWN: Final = frozenset((*KEYS, *SWITCHES, *FUNCTIONS, *READ_TOGETHER, *SHAPE_OF_MODEL))
ROLLOUT_KEYS: Final = ("sampling.", "reward.", "episode.", "filter.", "staleness.", "learner.objective.")
ROLLOUT_FLAGS: Final = frozenset((
    "advantage-estimator", "use-kl-loss", "kl-loss-coef", "kl-coef", "use-tis", "tis-clip", "use-rollout-logprobs",
    "use-opsm", "opsm-delta", "rm-type", "group-rm", "dynamic-sampling-filter-path", "over-sampling-batch-size",
    "rollout-num-gpus", "rollout-num-gpus-per-engine", "rollout-top-k", "rollout-stop", "rollout-stop-token-ids",
    "rollout-external-engine-addrs", "colocate", "use-rollout-routing-replay", "partial-rollout",
    "rollout-max-prompt-len",
))  # fmt: skip
"""Further ones that say nothing where rows are imitated."""
SFT_HAS: Final = ("n-samples-per-prompt", "calculate-per-token-loss")
ONLY_WITH: Final = {
    "kl-loss-coef": "use-kl-loss",
    "tis-clip": "use-tis",
    "opsm-delta": "use-opsm",
    "optimizer-offload-fraction": "optimizer-cpu-offload",
    **dict.fromkeys(SCALE_FLAGS, "fp16"),
}


def apply_config_file(writer: Writer) -> None:
    """``--custom-config-path`` names a file whose keys go over the flags; others in it are for the user's own code."""
    flag, script = writer.flags.get("custom-config-path"), writer.script.path
    if flag is None or not flag.values:
        return
    path = None if script is None else find_file(flag.values[0], (Path.cwd(), script.parent), script)
    try:
        found: object = None if path is None else yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        writer.leave(flag, f"{path} cannot be read: {error}", "other")
        return
    if path is None or not isinstance(found, dict):
        writer.leave(flag, f"{flag.values[0]} is not here, and its keys go over the flags", "other")
        return
    for key, value in cast("dict[object, Plain]", found).items():
        name = str(key).replace("_", "-")
        own = Flag(name, _words(value), flag.line, path.name)
        if value is None or value is False:
            writer.leave_named(name, f"{path.name} takes it back", "same")
            writer.flags.pop(name, None)
        elif name in KNOWN or name in REASONS:
            writer.flags[name] = own
        else:
            writer.leave(own, "no flag of slime: what the user's own code reads, which takes it elsewhere here")


def leave_without_effect(writer: Writer) -> None:
    """Flags that change nothing beside the others of the script, in slime either."""
    for name, switch in ONLY_WITH.items():
        if switch not in writer.flags:
            writer.leave_named(name, f"has no effect without --{switch}", "same")
    if not is_supervised(writer):
        return
    for name, flag in list(writer.flags.items()):
        key = KEYS.get(name, SWITCHES.get(name, (FUNCTIONS.get(name, ""),)))[0]
        if name not in SFT_HAS and (
            key.startswith(ROLLOUT_KEYS) or name.startswith("sglang-") or name in ROLLOUT_FLAGS
        ):
            writer.leave(flag, "not needed: nothing is generated, and every row is imitated", "same")
            del writer.flags[name]


def _words(value: Plain) -> tuple[str, ...]:
    """A value of a file as the command line would have it."""
    if value is True:
        return ()
    values = value if isinstance(value, list) else [value]
    return tuple(each if isinstance(each, str) else json.dumps(each) for each in values)
