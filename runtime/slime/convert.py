"""From the flags of a slime launch script to the text of a scenario.

Invariants:

* Every flag of the script is in the scenario, or in the list of what is not, with the reason.
* Where slime's default differs from ours and changes what is trained, slime's is written down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import yaml

from penstock.backends.engines.options import OptionValue
from penstock.backends.engines.sglang.server_options import ServerOptionError, check_server_options
from penstock.backends.learners.megatron.config_fields import (
    MegatronOptionError,
    Section,
    check_config_fields,
    fields_of,
)
from penstock.backends.learners.megatron.options import MegatronOptions
from penstock.runtime.slime.evaluation import evaluation_block
from penstock.runtime.slime.mapping import (
    ARGUMENTS_DIFFER,
    FUNCTIONS,
    KEYS,
    NEEDS_NO_KEY,
    NO_COUNTERPART,
    READ_TOGETHER,
    SHAPE_OF_MODEL,
    SWITCHES,
    TO_BE_WRITTEN_ANEW,
    TRACKER_PREFIXES,
)

if TYPE_CHECKING:
    from penstock.runtime.slime.mapping import Plain
    from penstock.runtime.slime.script import Flag, LaunchScript

ORDER: Final = (
    "run", "data", "model", "sampling", "episode", "reward", "filter", "staleness", "engines", "learner", "evaluation",
    "weights",
)  # fmt: skip
SECTIONS: Final[tuple[Section, ...]] = ("transformer", "ddp", "optimizer")
PROMPT_TOKENS: Final = 2048
"""Room for prompts where the script does not bound them."""
OBJECTIVES: Final = {
    "grpo": "grpo",
    "gspo": "gspo",
    "cispo": "cispo",
    "ppo": "ppo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "on_policy_distillation": "distill",
}
REWARDS: Final = {
    **{name: name for name in ("math", "deepscaler", "dapo", "gpqa", "f1", "ifbench", "random")},
    **{name: name for name in ("boxed_math", "boxed_gpqa", "boxed_f1", "boxed_ifbench")},
    "remote_rm": "remote",
}
"""By slime's names."""


class Left(NamedTuple):
    """A flag that has no place in the scenario."""

    line: int
    flag: str
    reason: str


class Converted(NamedTuple):
    """A scenario and what is not in it."""

    text: str
    """YAML; what is left stands at its end as comments."""
    left: tuple[Left, ...]


def to_scenario(script: LaunchScript, name: str) -> Converted:
    """The scenario that comes nearest, with the name given."""
    writer = _Writer(script)
    writer.write(name)
    return Converted(writer.text(), tuple(writer.left))


class _Writer:
    def __init__(self, script: LaunchScript) -> None:
        self._script = script
        self._flags = {flag.name: flag for flag in script.flags}  # the last one counts, as for argparse
        self._document: dict[str, Plain] = {}
        self.left: list[Left] = []

    def write(self, name: str) -> None:
        """Fill the document."""
        self._set("run.name", name)
        for flag in self._flags.values():
            self._one(flag)
        self._model_and_data()
        self._sampling()
        self._objective()
        self._learner()
        self._engines()
        self._policy()
        self._evaluation()

    def text(self) -> str:
        """As YAML."""
        document = {block: self._document[block] for block in ORDER if block in self._document}
        lines = [yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)]
        if self.left:
            lines.append("# Not in this scenario:\n")
            lines += [f"#   --{left.flag} (line {left.line}): {left.reason}\n" for left in self.left]
        return "".join(lines)

    # --- flag by flag -----------------------------------------------------------------------------------------

    def _one(self, flag: Flag) -> None:
        if flag.name in KEYS:
            key, read = KEYS[flag.name]
            try:
                self._set(key, read(flag.values[0]))
            except (ValueError, IndexError):
                found = " ".join(flag.values) or "nothing"
                self._leave(flag, f"would be {key}; its value, {found}, cannot be read")
        elif flag.name in SWITCHES:
            self._set(*SWITCHES[flag.name])
        elif flag.name.startswith("sglang-"):
            self._server_option(flag)
        elif flag.name in TO_BE_WRITTEN_ANEW:
            self._leave(flag, f"{FUNCTIONS[flag.name]}: {TO_BE_WRITTEN_ANEW[flag.name]} (docs/from_slime.md)")
        elif flag.name in FUNCTIONS:
            self._named(flag)
        elif flag.name in NEEDS_NO_KEY:
            self._leave(flag, f"not needed: {NEEDS_NO_KEY[flag.name]}")
        elif flag.name in NO_COUNTERPART:
            self._leave(flag, NO_COUNTERPART[flag.name])
        elif flag.name.startswith(TRACKER_PREFIXES):
            self._leave(flag, NO_COUNTERPART["use-wandb"])
        elif flag.name in SHAPE_OF_MODEL:
            self._leave(flag, "not needed: the checkpoint's config.json says it")
        elif flag.name not in READ_TOGETHER and not self._is_field_of_megatron(flag):
            self._leave(flag, "nothing here is known to do the same")

    def _named(self, flag: Flag) -> None:
        """A function, and what else its place needs."""
        self._set(FUNCTIONS[flag.name], self._function(flag.name, ARGUMENTS_DIFFER))
        match flag.name:
            case "custom-generate-function-path":
                self._set("episode.kind", "function")
            case "rollout-sample-filter-path":
                self._set("filter.drop_samples", "after_statistics")
            case "custom-rm-path" if "group-rm" in self._flags:
                self._set("reward.per_group", True)
            case _:
                pass

    def _server_option(self, flag: Flag) -> None:
        option, value = flag.name.removeprefix("sglang-").replace("-", "_"), _plain(flag.values)
        try:
            check_server_options(msgspec.convert({option: value}, dict[str, OptionValue]))
        except (ServerOptionError, msgspec.ValidationError) as error:
            self._leave(flag, getattr(error, "text", str(error)))
        else:
            self._set(f"engines.sglang.{option}", value)

    def _is_field_of_megatron(self, flag: Flag) -> bool:
        """Whether it was one that megatron-core's configuration has, and that a scenario may set."""
        is_off = flag.name.startswith("no-")
        name = flag.name.removeprefix("no-").replace("-", "_")
        value = False if is_off and not flag.values else _plain(flag.values)
        for section in SECTIONS:
            if name in fields_of(section):
                try:
                    given = msgspec.convert({section: {name: value}}, MegatronOptions)
                    check_config_fields(given, is_cpu=False)
                except (MegatronOptionError, msgspec.ValidationError) as error:
                    self._leave(flag, str(error))
                else:
                    self._set(f"learner.megatron.{section}.{name}", value)
                return True
        return False

    def _leave(self, flag: Flag, reason: str) -> None:
        self.left.append(Left(flag.line, flag.name, reason))

    def _set(self, key: str, value: Plain) -> None:
        *blocks, last = key.split(".")
        place = self._document
        for block in blocks:
            inner = place.setdefault(block, {})
            assert isinstance(inner, dict), key
            place = inner
        place[last] = value

    def _get(self, key: str) -> Plain:
        place: Plain = self._document
        for part in key.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return place

    def _value(self, name: str) -> str | None:
        flag = self._flags.get(name)
        return flag.values[0] if flag is not None and flag.values else None

    def _number(self, name: str, default: float) -> float:
        text = self._value(name)
        if text is None:
            return default
        try:
            return float(text)
        except ValueError:
            self._leave(self._flags[name], f"its value, {text}, is no number; {default:g} was taken")
            return default

    def _count(self, name: str, default: int) -> int:
        return int(self._number(name, default))

    # --- what takes several flags ------------------------------------------------------------------------------

    def _model_and_data(self) -> None:
        self._set("model.dtype", "bfloat16")
        if self._get("model.max_context") is None:
            prompt = self._get("data.max_prompt_tokens")
            response = self._get("sampling.max_response_tokens")
            evaluated = self._get("evaluation.defaults.sampling.max_response_tokens")
            if isinstance(response, int):
                response = max(response, evaluated) if isinstance(evaluated, int) else response
                self._set("model.max_context", response + (prompt if isinstance(prompt, int) else PROMPT_TOKENS))
        if self._get("data.prompt_key") is None:
            self._set("data.prompt_key", "input")
        if self._get("data.label_key") is None:
            self._set("data.label_key", None)
        self._set("data.shuffle", "rollout-shuffle" in self._flags)
        if metadata := self._value("metadata-key"):
            self._set("data.metadata_keys", [metadata])
        kind = self._value("rm-type")
        if "custom-rm-path" in self._flags:
            pass
        elif kind is not None and kind in REWARDS:
            self._set("reward.function", REWARDS[kind])
        elif kind is not None:
            self._leave(self._flags["rm-type"], f"there is no reward {kind!r}; name one, or write a function")
        if "group-rm" in self._flags and "custom-rm-path" not in self._flags:
            self._leave(self._flags["group-rm"], "the rewards of the hub see one sample each")

    def _sampling(self) -> None:
        top_k = self._count("rollout-top-k", -1)
        if top_k > 0:
            self._set("sampling.top_k", top_k)
        if stop := self._flags.get("rollout-stop"):
            self._set("sampling.stop", list(stop.values))
        if ids := self._flags.get("rollout-stop-token-ids"):
            self._set("sampling.stop_token_ids", [int(value) for value in ids.values if value.isdigit()])

    def _objective(self) -> None:
        flag = self._flags.get("advantage-estimator")
        estimator = self._value("advantage-estimator") or "grpo"
        if self._value("loss-type") == "sft_loss":
            self._set("learner.objective.name", "sft")
            self._set("engines.backend", "recorded")
            return
        if self._get("learner.objective.name") is not None:  # a loss of the user's own
            self._own_loss(flag, estimator)
        elif estimator in OBJECTIVES:
            self._set("learner.objective.name", OBJECTIVES[estimator])
        elif flag is not None:
            self._leave(
                flag, f"there is no objective {estimator!r}; learner.objective has {', '.join(OBJECTIVES.values())}"
            )
        if self._get("learner.objective.clip_high") is None:
            self._set("learner.objective.clip_high", self._get("learner.objective.clip_low") or 0.2)
        if self._get("learner.objective.reduction") is None:
            self._set("learner.objective.reduction", "sequence_mean")
        self._kl()
        self._set("learner.objective.old_logprobs", "engine" if "use-rollout-logprobs" in self._flags else "recompute")
        if "use-tis" in self._flags:
            self._set("learner.objective.correction", "tis")
            self._set("learner.objective.tis_clip", self._number("tis-clip", 2.0))
        elif self._get("learner.objective.old_logprobs") == "recompute":
            self._set("learner.objective.correction", "none")
        if "use-opsm" in self._flags:
            self._set("learner.objective.opsm_delta", self._number("opsm-delta", 1e-4))

    def _own_loss(self, flag: Flag | None, estimator: str) -> None:
        """Its advantages are those of the estimator all the same."""
        name = OBJECTIVES.get(estimator)
        if name == "reinforce_plus_plus_baseline" or name == "reinforce_plus_plus":
            self._set("learner.objective.estimator", name)
        elif name not in ("grpo", "gspo", "cispo") and flag is not None:
            self._leave(flag, "beside a loss of your own set learner.objective.estimator, and what it needs")

    def _kl(self) -> None:
        in_loss, in_reward = self._number("kl-loss-coef", 0.0), self._number("kl-coef", 0.0)
        if "use-kl-loss" in self._flags and in_loss:
            self._set("learner.objective.kl_coef", in_loss)
            self._set("learner.objective.kl_in", "loss")
        elif in_reward:
            self._set("learner.objective.kl_coef", in_reward)
            self._set("learner.objective.kl_in", "reward")

    def _learner(self) -> None:
        self._set("learner.backend", "megatron")
        self._set("learner.num_ranks", self._count("actor-num-nodes", 1) * self._count("actor-num-gpus-per-node", 8))
        groups, samples = self._get("learner.groups_per_batch"), self._get("sampling.samples_per_group") or 1
        size = self._count("global-batch-size", 0)
        if isinstance(groups, int) and isinstance(samples, int) and size and self._get("learner.num_updates") is None:
            updates, rest = divmod(groups * samples, size)
            if rest or not updates:
                reason = f"{groups} prompts × {samples} samples is no multiple of it; learner.num_updates stays 1"
                self._leave(self._flags["global-batch-size"], reason)
            else:
                self._set("learner.num_updates", updates)
        context = self._get("learner.megatron.context_parallel")
        if tokens := self._count("max-tokens-per-gpu", 0):
            self._set("learner.max_tokens_per_micro_batch", tokens * (context if isinstance(context, int) else 1))
        self._set("learner.betas", [self._number("adam-beta1", 0.9), self._number("adam-beta2", 0.999)])
        if "optimizer-cpu-offload" in self._flags:
            self._set("learner.megatron.optimizer.optimizer_cpu_offload", True)
            fraction = self._number("optimizer-offload-fraction", 1.0)
            self._set("learner.megatron.optimizer.optimizer_offload_fraction", fraction)
        self._schedule()

    def _schedule(self) -> None:
        steps = self._get("run.num_steps")
        if "lr-warmup-fraction" in self._flags and isinstance(steps, int):
            self._set("learner.warmup_steps", round(self._number("lr-warmup-fraction", 0.0) * steps))
        decay = self._value("lr-decay-style")
        if decay in ("constant", "linear", "cosine"):
            self._set("learner.lr_schedule", decay)
        elif decay is not None:
            self._leave(self._flags["lr-decay-style"], f"there is no schedule {decay!r}: constant, linear, cosine")
        rate = self._get("learner.learning_rate")
        if isinstance(rate, float) and rate > 0 and "min-lr" in self._flags:
            self._set("learner.min_learning_rate_ratio", self._number("min-lr", 0.0) / rate)

    def _engines(self) -> None:
        if self._get("engines.backend") == "recorded":
            return
        self._set("engines.backend", "sglang")
        num_ranks, each = self._get("learner.num_ranks"), self._count("rollout-num-gpus-per-engine", 1)
        assert isinstance(num_ranks, int), "_learner has set it"
        num_gpus = self._count("rollout-num-gpus", num_ranks)
        self._set("engines.count", max(1, num_gpus // each))
        if each > 1:
            self._set("engines.sglang.tp_size", each)
        if colocate := self._flags.get("colocate"):
            if num_ranks <= each:
                self._set("engines.placement", "colocate")
                self._set("engines.count", 1)
            else:
                reason = (
                    f"the learner shares GPUs with one engine at most, which has {each}; it has {num_ranks} of its own"
                )
                self._leave(colocate, reason)
        if "use-rollout-routing-replay" in self._flags:
            self._set("engines.record_experts", True)
            self._set("learner.megatron.router_replay", True)
        if addresses := self._flags.get("rollout-external-engine-addrs"):
            self._set(
                "engines.addresses", [f"http://{address.removeprefix('http://')}" for address in addresses.values]
            )
            self._set("engines.count", len(addresses.values))

    def _policy(self) -> None:
        path = self._value("rollout-function-path") or ""
        is_async = self._script.program == "train_async.py"
        policy = "fully_async" if "fully_async" in path else "one_step_off" if is_async else "sync"
        if path and policy != "fully_async":
            reason = "the seven actors take its place; what it does for one prompt is episode.generate"
            self._leave(self._flags["rollout-function-path"], f"{reason} (docs/from_slime.md)")
        self._set("staleness.policy", policy)
        if is_async and self._get("learner.objective.correction") == "none":
            self._set("learner.objective.allow_unbounded", True)  # as slime trains them
        groups, more = self._get("learner.groups_per_batch"), self._count("over-sampling-batch-size", 0)
        if isinstance(groups, int) and more > groups:
            self._set("staleness.over_sampling", more / groups)
        name = self._value("dynamic-sampling-filter-path") or ""
        if name and not name.endswith("check_reward_nonzero_std"):
            function = self._function("dynamic-sampling-filter-path", ARGUMENTS_DIFFER)
            self._set("filter.function", function)
        self._set("filter.drop_zero_spread", name.endswith("check_reward_nonzero_std"))
        transport = self._value("update-weight-transport")
        if transport in ("disk", "distributed"):
            self._set("weights.transport", transport)
        elif transport is not None:
            self._leave(self._flags["update-weight-transport"], "weights.transport: auto finds the best one that works")

    def _evaluation(self) -> None:
        mapped = self._document.pop("evaluation", {})
        assert isinstance(mapped, dict)
        generates = self._get("engines.backend") != "recorded"
        block, left = evaluation_block(self._flags, mapped, self._get("model.max_context"), generates=generates)
        if block is not None:
            self._document["evaluation"] = block
        for flag, reason in left:
            self._leave(flag, reason)

    def _function(self, name: str, note: str) -> str | None:
        """``package.module.function`` as ``package/module.py:function``."""
        path = self._value(name)
        if path is None:
            return None
        module, _, function = path.rpartition(".")
        self._leave(self._flags[name], f"written as {module.replace('.', '/')}.py:{function}; {note}")
        return f"{module.replace('.', '/')}.py:{function}"


def _plain(values: tuple[str, ...]) -> Plain:
    """The value of a server's option as YAML has it; a flag without one is true."""
    if not values:
        return True
    read: list[Plain] = [yaml.safe_load(value) for value in values]
    return read[0] if len(read) == 1 else read
