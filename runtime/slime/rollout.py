"""Flags about data, engines and staleness that mean something together only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from penstock.runtime.slime.training import is_supervised
from penstock.runtime.slime.writer import Left

if TYPE_CHECKING:
    from penstock.runtime.slime.mapping import Plain
    from penstock.runtime.slime.reasons import Effect
    from penstock.runtime.slime.writer import Writer

PROMPT_TOKENS: Final = 2048
"""Room for prompts where the script does not bound them."""
SFT_TOKENS: Final = 32_768
"""Context where an SFT script bounds nothing."""
NODE_GPUS: Final = 8
CONCURRENCY: Final = 512
"""Requests that slime sends to one engine at a time, where the script does not say."""
START_TIMEOUT_S: Final = 1800.0
DRAFT_MODEL: Final = "sglang-speculative-algorithm"
SCALE_FLAGS: Final = ("loss-scale", "initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis")
"""Of Megatron's loss scale, which only float16 has."""
MAX_REPLAYED: Final = 1024
"""Tokens that top-p leaves for a draw at most; slime bounds them by the vocabulary."""
_FP8_COPY: Final = re.compile(r"(?P<model>.*[^/])[-_](?i:fp8)/?")
"""How folders of such copies are called."""
REWARDS: Final = {
    **{name: name for name in ("math", "deepscaler", "dapo", "gpqa", "f1", "ifbench", "random")},
    **{name: name for name in ("boxed_math", "boxed_gpqa", "boxed_f1", "boxed_ifbench")},
    "remote_rm": "remote",
}
"""Our rewards by the names that slime gives them."""


def write_data(writer: Writer) -> None:
    """``data`` and ``model``."""
    _precision(writer)
    writer.take("sampling.samples_per_group", 1)
    _load(writer)
    _context(writer)
    writer.take("data.prompt_key", "input")
    if writer.get("data.label_key") is None:
        writer.set("data.label_key", None)
    writer.set("data.shuffle", "rollout-shuffle" in writer.flags)
    if metadata := writer.value("metadata-key"):
        writer.set("data.metadata_keys", [metadata])
    elif function := writer.flags.get("custom-rm-path") or writer.flags.get("custom-generate-function-path"):
        reason = "where the rows have a column `metadata`, slime hands it on: set data.metadata_keys: [metadata]"
        writer.leave(function, reason)
    if (context := writer.get("model.max_context")) and "rollout-max-context-len" in writer.flags:
        assert isinstance(context, int)
        writer.take("data.max_prompt_tokens", context - 1, "slime's, which is --rollout-max-context-len less 1")
    if writer.get("data.max_prompt_tokens") is not None and not is_supervised(writer):
        writer.take("data.skip_long_prompts", True, "what slime does")
    _template_arguments(writer)
    if is_supervised(writer):
        writer.set("data.chat_template", True)  # slime renders the messages of the rows in any case
    _required(writer)


def _precision(writer: Writer) -> None:
    """slime trains in bfloat16 but with ``--fp16``, whatever ``--bf16`` says; its servers may compute otherwise."""
    dtype = "float16" if "fp16" in writer.flags else "bfloat16"
    writer.set("model.dtype", dtype)
    if dtype == "float16":
        for name in ("fp16", *SCALE_FLAGS):
            writer.leave_named(name, "model.dtype: float16, whose loss scale has rules of its own (docs/learner.md)")
    effect: Effect = "same" if writer.value("sglang-dtype") == dtype else "but_for"
    writer.leave_named("sglang-dtype", "engines compute in model.dtype, as the learner does", effect)


def _required(writer: Writer) -> None:
    """What slime cannot do without, and a script may take from elsewhere."""
    wanted: list[tuple[str, ...]] = [
        ("hf-checkpoint",),
        ("prompt-data",),
        ("rollout-batch-size",),
        ("num-rollout", "num-epoch"),
    ]
    if not is_supervised(writer):
        wanted.append(("rm-type", "custom-rm-path", "custom-generate-function-path", "rollout-function-path"))
    for names in wanted:
        if not any(name in writer.flags for name in names):
            writer.left.append(Left(0, names[0], "Penstock's own default stands", "other"))


def _template_arguments(writer: Writer) -> None:
    flag, key = writer.flags.get("apply-chat-template-kwargs"), "data.template_arguments"
    if flag is None:
        return
    try:
        value = cast("Plain", json.loads(" ".join(flag.values)))
    except ValueError:
        value = None
    if isinstance(value, dict) and not any(isinstance(inner, dict | list) for inner in value.values()):
        writer.set(key, value)
    else:
        writer.leave(flag, f"would be {key}; its value is no object of plain values in JSON", "other")


def _load(writer: Writer) -> None:
    """``--load``: a checkpoint of a run, which slime goes on with, or a Hugging Face one, from which it starts."""
    load = writer.value("load")
    if load is None:
        return
    if (Path(load) / "config.json").is_file():
        writer.set("model.path", load)
        writer.leave_named("load", "a Hugging Face checkpoint, from which training starts: model.path", "same")
    elif load.rstrip("/") == (writer.value("save") or "").rstrip("/"):
        writer.leave_named("load", "not needed: slime goes on with its own run; so does `penstock resume RUN`", "same")
    elif load.rstrip("/") == str(writer.get("model.path")).rstrip("/"):
        writer.leave_named("load", "not needed: model.path", "same")
    else:
        reason = (
            f"training starts from {load}, if it is there: name it in model.path if it is a Hugging Face checkpoint, "
            "and convert it to one first if it is one of slime's"
        )
        writer.leave_named("load", reason)


def _context(writer: Writer) -> None:
    if writer.get("model.max_context") is not None:
        return
    own = writer.whole("learner.megatron.context_parallel", 1) * writer.count("max-tokens-per-gpu", 0)
    if is_supervised(writer):
        writer.take("model.max_context", own or SFT_TOKENS, "the room for a row, which slime does not bound")
        return
    response = max(
        writer.whole("sampling.max_response_tokens", 0),
        writer.whole("evaluation.defaults.sampling.max_response_tokens", 0),
    )
    if not response:
        return
    needed = response + writer.whole("data.max_prompt_tokens", PROMPT_TOKENS)
    if "custom-generate-function-path" in writer.flags and own > needed:
        reason = (
            f"its turns share one context, which slime does not bound; model.max_context is {own}, as much as one "
            "micro-batch has room for"
        )
        writer.leave_named("custom-generate-function-path", reason)
        needed = own
    writer.set("model.max_context", needed)


def write_reward(writer: Writer) -> None:
    """The block ``reward`` of the scenario, from slime's flags."""
    kind = writer.value("rm-type")
    if is_supervised(writer):
        return
    if "custom-rm-path" not in writer.flags and kind is not None:
        if kind in REWARDS:
            writer.set("reward.function", REWARDS[kind])
        else:
            reason = f"there is no reward {kind!r}; name one, or write a function"
            writer.leave(writer.flags["rm-type"], reason, "other")
    if "group-rm" in writer.flags and "custom-rm-path" not in writer.flags:
        writer.leave(writer.flags["group-rm"], "the rewards of the hub see one sample each", "other")
    reward = writer.document.get("reward")
    if isinstance(reward, dict) and "remote" in reward and reward.get("function") != "remote":
        del reward["remote"]
        effect: Effect = "but_for" if "custom-rm-path" in writer.flags else "same"
        writer.leave_named("rm-url", "only remote_rm asks there; a function of yours has to know it itself", effect)


def write_sampling(writer: Writer) -> None:
    """The block ``sampling`` of the scenario, from slime's flags."""
    if is_supervised(writer):
        context = writer.whole("model.max_context", SFT_TOKENS)
        writer.document["sampling"] = {
            "samples_per_group": writer.whole("sampling.samples_per_group", 1),
            "max_response_tokens": context - 1,
        }
        return
    if writer.number("rollout-top-p", 1.0) < 1:
        if DRAFT_MODEL in writer.flags:
            reason = "what top-p cuts off stays in the loss: SGLang does not name it with a draft model"
            writer.leave_named("rollout-top-p", f"{reason} (docs/objectives.md)")
        else:
            writer.set("sampling.replay_kept", MAX_REPLAYED)
    if (top_k := writer.count("rollout-top-k", -1)) > 0:
        writer.set("sampling.top_k", top_k)
    if stop := writer.flags.get("rollout-stop"):
        writer.set("sampling.stop", list(stop.values))
    if ids := writer.flags.get("rollout-stop-token-ids"):
        writer.set("sampling.stop_token_ids", [int(value) for value in ids.values if value.isdigit()])


def write_engines(writer: Writer) -> None:
    """The block ``engines`` of the scenario, from slime's flags."""
    if is_supervised(writer):
        writer.document["engines"] = {"backend": "recorded"}
        return
    writer.set("engines.backend", "sglang")
    num_ranks, each = writer.whole("learner.num_ranks", 1), writer.count("rollout-num-gpus-per-engine", 1)
    num_gpus = writer.count("rollout-num-gpus", num_ranks)
    writer.set("engines.count", max(1, num_gpus // max(1, each)))
    if each > 1:
        writer.set("engines.sglang.tp_size", each)
    slots = writer.count("sglang-server-concurrency", CONCURRENCY)
    if "colocate" in writer.flags:
        _colocate(writer, num_ranks=num_ranks, num_gpus=num_gpus, each=max(1, each))
    writer.take("engines.slots", slots, "slime's default", unless=("sglang-server-concurrency",))
    writer.take("engines.start_timeout_s", START_TIMEOUT_S, "room for a large model, for which slime sets no limit")
    if "use-rollout-routing-replay" in writer.flags:
        writer.set("engines.record_experts", True)
        writer.set("learner.megatron.router_replay", True)
    if addresses := writer.flags.get("rollout-external-engine-addrs"):
        listed = [f"http://{address.removeprefix('http://')}" for address in addresses.values]
        writer.set("engines.addresses", [*listed])
        writer.set("engines.count", len(listed))


def _colocate(writer: Writer, *, num_ranks: int, num_gpus: int, each: int) -> None:
    """The learner lies over as many engines as have a GPU for each rank, on one node; further ones have their own, as
    slime's have."""
    shared = -(-num_ranks // each) * each
    if shared <= num_gpus and (shared <= NODE_GPUS or (shared == each and num_ranks <= NODE_GPUS)):
        writer.set("engines.placement", "colocate")
        return
    sets = num_gpus // each
    reason = (
        f"the learner shares the GPUs of engines on one node, and has {num_ranks} ranks beside {sets} engines of "
        f"{each}: {num_ranks} + {sets * each} = {num_ranks + sets * each} GPUs, where slime takes "
        f"{max(num_ranks, num_gpus)}"
    )
    writer.leave(writer.flags["colocate"], reason)


def write_policy(writer: Writer) -> None:
    """``staleness``, ``filter``, ``weights``."""
    path = writer.value("rollout-function-path") or ""
    is_async = writer.script.program == "train_async.py"
    policy = "fully_async" if "fully_async" in path else "one_step_off" if is_async else "sync"
    if path and is_supervised(writer):
        writer.leave_named("rollout-function-path", "not needed: engines.backend recorded", "same")
    elif path and policy != "fully_async":
        reason = "the seven actors take its place; what it does for one prompt is episode.generate"
        writer.leave_named("rollout-function-path", f"{reason} (docs/from_slime.md)", "other")
    writer.set("staleness.policy", policy)
    if is_async and writer.get("learner.objective.correction") == "none":
        writer.set("learner.objective.allow_unbounded", True)  # as slime trains them
    groups, more = writer.get("learner.groups_per_batch"), writer.count("over-sampling-batch-size", 0)
    if isinstance(groups, int) and more > groups:
        writer.set("staleness.over_sampling", more / groups)
    if "partial-rollout" in writer.flags:
        _partial(writer, policy)
    transport = writer.value("update-weight-transport")
    if transport == "distributed" and writer.get("engines.placement") == "colocate":
        reason = "not needed: NCCL takes no GPU twice; weights.transport: auto"
        writer.leave_named("update-weight-transport", reason, "same")
    elif transport in ("disk", "distributed"):
        writer.set("weights.transport", transport)
    elif transport is not None:
        reason = "weights.transport: auto finds the best one that works"
        writer.leave(writer.flags["update-weight-transport"], reason, "same")


def _partial(writer: Writer, policy: str) -> None:
    if policy == "fully_async":
        writer.leave_named("partial-rollout", "not needed: answers go on across new weights in any case", "same")
        return
    reason = (
        f"with staleness.policy {policy} answers are drawn to their end before new weights, so none is taken up again; "
        "staleness.policy: fully_async goes on with them"
    )
    writer.leave_named("partial-rollout", reason)


def write_precision(writer: Writer) -> None:
    """slime rolls out in FP8 where ``--hf-checkpoint`` is a copy in FP8; what it trains is loaded from elsewhere."""
    path, key = writer.get("model.path"), "learner.objective.correction"
    found = _FP8_COPY.fullmatch(path) if isinstance(path, str) and not is_supervised(writer) else None
    if found is None:
        return
    writer.set("model.path", found["model"])
    writer.set("engines.quantization", "fp8")
    writer.set("engines.fp8_model", path)
    reason = f"engines start from this copy in FP8; model.path is what is trained, taken to be {found['model']}"
    writer.leave(writer.flags["hf-checkpoint"], f"{reason}: name the folder in bfloat16", "same")
    if writer.get(key) == "none" and writer.get("learner.objective.old_logprobs") != "engine":
        writer.set(key, "tis")
        writer.leave(writer.flags["hf-checkpoint"], f"{key}: tis weighs what engines in FP8 draw, as --use-tis does")
