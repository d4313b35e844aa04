"""From the flags of a slime launch script to the text of a scenario.

Invariants:

* Every flag of the script is in the scenario, or in the list of what is not, with the reason and what it means.
* Where slime's or Megatron's default differs from ours and changes what is trained, theirs is written down, and both
  are named beside it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec
import yaml

from penstock.backends.engines.options import OptionValue
from penstock.backends.engines.served.sglang.server_options import ServerOptionError, check_server_options
from penstock.backends.learners.megatron.layout.config_fields import Section, check_config_fields, fields_of
from penstock.backends.learners.megatron_options import MegatronOptions, MtpOptions
from penstock.messages.errors import UserFault
from penstock.runtime.safe_text import terminal_text
from penstock.runtime.slime.effective import apply_config_file, leave_without_effect
from penstock.runtime.slime.evaluation import evaluation_block
from penstock.runtime.slime.mapping import (
    ARGUMENTS_DIFFER,
    FUNCTIONS,
    KEYS,
    READ_TOGETHER,
    SHAPE_OF_MODEL,
    SWITCHES,
    TO_BE_WRITTEN_ANEW,
    TRACKER_PREFIXES,
)
from penstock.runtime.slime.reasons import REASONS, SGLANG_NAMES
from penstock.runtime.slime.rollout import (
    write_data,
    write_engines,
    write_policy,
    write_precision,
    write_reward,
    write_sampling,
)
from penstock.runtime.slime.training import is_supervised, write_learner, write_objective
from penstock.runtime.slime.writer import Left, Taken, Writer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.runtime.slime.mapping import Plain
    from penstock.runtime.slime.reasons import Effect
    from penstock.runtime.slime.script import Flag, LaunchScript

ORDER: Final = (
    "run", "data", "model", "sampling", "episode", "reward", "filter", "staleness", "engines", "learner", "evaluation",
    "weights",
)  # fmt: skip
HEADINGS: Final[Mapping[Effect, str]] = {
    "other": "Makes it another job",
    "but_for": "Not in this scenario, or not quite as it was",
    "same": "Not in this scenario, with the same result",
}
SECTIONS: Final[tuple[Section, ...]] = ("transformer", "ddp", "optimizer")
DISPATCHER: Final = "learner.megatron.transformer.moe_token_dispatcher_type"
DEEPEP: Final = "learner.megatron.transformer.moe_enable_deepep"
SFT_NEEDS_NO: Final = frozenset(("debug-train-only", "disable-compute-advantages-and-returns"))
_NUMBER: Final = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class Converted(NamedTuple):
    """A scenario and what is not in it."""

    text: str
    """YAML, with the notes at its end."""
    notes: str
    """Comments: which defaults were taken, what is left, why, and what that means."""
    left: tuple[Left, ...]
    taken: tuple[Taken, ...]


def to_scenario(script: LaunchScript, name: str) -> Converted:
    """The scenario that comes nearest, with the name given."""
    writer = Writer(script)
    writer.set("run.name", name)
    for flag in script.unread:
        writer.leave(flag, " ".join(flag.values), "other")
    apply_config_file(writer)
    leave_without_effect(writer)
    for flag in (*(flag for flag in script.flags if not flag.name), *writer.flags.values()):
        _one(writer, flag)
    write_data(writer)
    write_reward(writer)
    write_sampling(writer)
    write_objective(writer)
    write_learner(writer)
    write_engines(writer)
    _expert_dispatch(writer)
    _further_tokens(writer)
    write_precision(writer)
    write_policy(writer)
    _filter(writer)
    _evaluation(writer)
    document = {block: writer.document[block] for block in ORDER if block in writer.document}
    text, notes = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100), _notes(writer)
    return Converted(text + notes, notes, tuple(writer.left), tuple(writer.taken))


def _notes(writer: Writer) -> str:
    lines: list[str] = []
    if writer.taken:
        lines.append("# Defaults that the script leans on, as they differ:\n")
        lines += [f"#   {_one_line(taken)}\n" for taken in writer.taken]
    for effect, heading in HEADINGS.items():
        left = [item for item in writer.left if item.effect == effect]
        lines += [f"# {heading}:\n"] if left else []
        lines += [f"#   {_one_line(item)}\n" for item in left]
    return "".join(lines)


def _one_line(item: object) -> str:
    """A comment ends with its line, whatever a script's text has."""
    return terminal_text(" ".join(str(item).split()))


# --- flag by flag -----------------------------------------------------------------------------------------------------


def _one(writer: Writer, flag: Flag) -> None:
    if flag.unread:
        written = " ".join(flag.values)
        writer.leave(flag, f"{written + ': ' if written else ''}{'; '.join(flag.unread)}", _effect_of_unread(flag))
    if flag.name in KEYS:
        key, read = KEYS[flag.name]
        try:
            writer.set(key, read(flag.values[0]))
        except (ValueError, IndexError):
            found = " ".join(flag.values) or "nothing"
            writer.leave(flag, f"would be {key}; its value, {found}, cannot be read", "other")
    elif flag.name in SWITCHES:
        writer.set(*SWITCHES[flag.name])
    elif flag.name in TO_BE_WRITTEN_ANEW:
        reason = f"{FUNCTIONS[flag.name]}: {TO_BE_WRITTEN_ANEW[flag.name]} (docs/from_slime.md)"
        writer.leave(flag, reason, "other")
    elif flag.name in FUNCTIONS:
        _named(writer, flag)
    elif flag.name and not _left_for_a_reason(writer, flag) and flag.name not in READ_TOGETHER:
        if flag.name.startswith("sglang-"):
            _server_option(writer, flag)
        elif not _is_field_of_megatron(writer, flag):
            writer.leave(flag, "nothing here is known to do the same", "other")


def _left_for_a_reason(writer: Writer, flag: Flag) -> bool:
    if flag.name in SFT_NEEDS_NO and is_supervised(writer):
        writer.leave(flag, "not needed: nothing is generated", "same")
    elif flag.name in REASONS:
        effect, reason = REASONS[flag.name]
        writer.leave(flag, reason, effect)
    elif flag.name.startswith(TRACKER_PREFIXES):
        writer.leave(flag, REASONS["use-wandb"][1], "same")
    elif flag.name in SHAPE_OF_MODEL:
        writer.leave(flag, "not needed: the checkpoint's config.json says it", "same")
    else:
        return False
    return True


def _effect_of_unread(flag: Flag) -> Effect:
    needless = flag.name.startswith(TRACKER_PREFIXES) or flag.name in SHAPE_OF_MODEL
    return "same" if needless or REASONS.get(flag.name, ("",))[0] == "same" else "but_for"


def _named(writer: Writer, flag: Flag) -> None:
    """A function, and what else its place needs."""
    writer.set(FUNCTIONS[flag.name], _function(writer, flag.name))
    match flag.name:
        case "custom-generate-function-path":
            writer.set("episode.kind", "function")
        case "rollout-sample-filter-path":
            writer.set("filter.drop_samples", "after_statistics")
        case "custom-rm-path" if "group-rm" in writer.flags:
            writer.set("reward.per_group", True)
        case _:
            pass


def _function(writer: Writer, name: str) -> str | None:
    """``package.module.function`` as ``package/module.py:function``."""
    path = writer.value(name)
    if path is None:
        return None
    module, _, function = path.replace(".py:", ".").replace("/", ".").rpartition(".")
    found = f"{module.replace('.', '/')}.py:{function}"
    writer.leave(writer.flags[name], f"written as {found}; {ARGUMENTS_DIFFER}")
    return found


def _server_option(writer: Writer, flag: Flag) -> None:
    name, value = flag.name.removeprefix("sglang-").replace("-", "_"), _plain(flag.values)
    option = SGLANG_NAMES.get(name, name)
    try:
        check_server_options(msgspec.convert({option: value}, dict[str, OptionValue]))
    except (ServerOptionError, msgspec.ValidationError) as error:
        writer.leave(flag, getattr(error, "text", str(error)))
    else:
        writer.set(f"engines.sglang.{option}", value)


def _is_field_of_megatron(writer: Writer, flag: Flag) -> bool:
    """Whether it was one that megatron-core's configuration has, and that a scenario may set."""
    is_off = flag.name.startswith("no-")
    name = flag.name.removeprefix("no-").replace("-", "_")
    value = False if is_off and not flag.values else _plain(flag.values)
    for section in SECTIONS:
        if name in fields_of(section):
            try:
                given = msgspec.convert({section: {name: value}}, MegatronOptions)
                check_config_fields(given, is_cpu=False)
            except (UserFault, msgspec.ValidationError) as error:
                writer.leave(flag, str(error))
            else:
                writer.set(f"learner.megatron.{section}.{name}", value)
            return True
    return False


def _plain(values: tuple[str, ...]) -> Plain:
    """The value of an option as its program reads it; a flag without one is true."""
    read = [_scalar(value) for value in values]
    return read[0] if len(read) == 1 else [*read] if read else True


def _scalar(text: str) -> Plain:
    """``1e-15`` is a number, which YAML 1.1 takes for a text."""
    if _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    if text[:1] in ("[", "{"):
        try:
            return cast("Plain", json.loads(text))
        except ValueError:
            return text
    return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


# --- what takes several flags -----------------------------------------------------------------------------------------


def _expert_dispatch(writer: Writer) -> None:
    """DeepEP is a way of the flexible dispatcher, and megatron-core takes neither without the other."""
    if writer.get(DISPATCHER) == "allgather":
        writer.set(DISPATCHER, "alltoall")  # as slime does, since lengths differ
    if writer.get(DEEPEP) and writer.get(DISPATCHER) != "flex":
        transformer = writer.get("learner.megatron.transformer")
        assert isinstance(transformer, dict)
        del transformer["moe_enable_deepep"]
        reason = "megatron-core takes it with --moe-token-dispatcher-type flex only"
        writer.leave_named("moe-enable-deepep", reason, "same")


def _further_tokens(writer: Writer) -> None:
    """Layers that predict further tokens are trained where slime trains them, apart from the policy as there."""
    if "enable-mtp-training" in writer.flags:
        writer.set("learner.megatron.mtp.loss_coef", writer.number("mtp-loss-scaling-factor", MtpOptions().loss_coef))
        writer.leave_named("mtp-num-layers", "not needed: config.json says how many there are", "same")
    else:
        reason = "such layers are not trained without --enable-mtp-training; what is saved keeps them as they are"
        for name in ("mtp-num-layers", "mtp-loss-scaling-factor"):
            writer.leave_named(name, reason, "same")


def _filter(writer: Writer) -> None:
    name = writer.value("dynamic-sampling-filter-path") or ""
    is_ours = name.endswith("check_reward_nonzero_std")
    if name and not is_ours:
        writer.set("filter.function", _function(writer, "dynamic-sampling-filter-path"))
    writer.set("filter.drop_zero_spread", is_ours)


def _evaluation(writer: Writer) -> None:
    mapped = writer.document.pop("evaluation", {})
    assert isinstance(mapped, dict)
    generates = not is_supervised(writer)
    block, left = evaluation_block(writer.flags, mapped, writer.get("model.max_context"), generates=generates)
    if block is not None:
        writer.document["evaluation"] = block
    for flag, reason in left:
        writer.leave(flag, reason)
