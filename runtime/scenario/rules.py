"""What no single key can know: how the blocks of a scenario have to fit together.

Each rule is one function that returns the key to change and a sentence with what is wrong and how to mend it. None
of them asks which staleness policy is chosen; they see its numbers only.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from penstock.backends.engines.options import engine_groups, take_turns
from penstock.backends.engines.spec import ENGINES, are_modelled, capabilities_of
from penstock.backends.learners.objectives.spec import OBJECTIVES, loss_of
from penstock.backends.learners.objectives.validity import (
    compares_rewards,
    ignores_spread,
    is_unbounded,
    objective_problem,
)
from penstock.backends.learners.spec import is_modelled
from penstock.backends.protocol import Capability
from penstock.backends.weights.spec import AUTO, TRANSPORTS
from penstock.messages.training import UpdateMode
from penstock.runtime.scenario.capabilities import lacking
from penstock.runtime.scenario.data_rules import data_rules
from penstock.runtime.scenario.disk_rules import disk_rules
from penstock.runtime.scenario.elastic_rules import elastic_rules, notice_rules
from penstock.runtime.scenario.episode_rules import episode_rules
from penstock.runtime.scenario.evaluation_rules import evaluation_rules
from penstock.runtime.scenario.exact_rules import exact_rules
from penstock.runtime.scenario.freeze_rules import freeze_rules
from penstock.runtime.scenario.function_rules import function_rules
from penstock.runtime.scenario.keys import dotted
from penstock.runtime.scenario.lora_rules import lora_rules
from penstock.runtime.scenario.low_precision_rules import low_precision_rules
from penstock.runtime.scenario.megatron_rules import megatron_rules
from penstock.runtime.scenario.objective import OBJECTIVE
from penstock.runtime.scenario.part_names import engine_keys, part_rules_of
from penstock.runtime.scenario.part_rules import part_rules
from penstock.runtime.scenario.profiling_rules import profiling_rules
from penstock.runtime.scenario.rank_rules import rank_rules
from penstock.runtime.scenario.recorded_rules import recorded_rules
from penstock.runtime.scenario.reuse_rules import reuse_rules
from penstock.runtime.scenario.reward_model_rules import reward_model_rules
from penstock.runtime.scenario.reward_rules import reward_rules, unasked_rules
from penstock.runtime.scenario.run_options import ObservabilityOptions
from penstock.runtime.scenario.sampling_rules import sampling_rules
from penstock.runtime.scenario.teacher_rules import teacher_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.backends.engines.options import EngineGroupOptions
    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

Broken = tuple["KeyPath", str]

MADE_CONTEXT_TOKENS = 512
"""Of the models that ``model.make`` makes."""
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def broken_rule(scenario: Scenario, *, is_begun: bool = False) -> Broken | None:
    """The first rule that a resolved scenario breaks: the key to change, and what is wrong with it. ``is_begun``: it is
    that of a run, which goes on whatever has no effect in it."""
    rules = RULES if is_begun else (*RULES, *IDLE_RULES)
    return next((broken for rule in rules for broken in rule(scenario)), None)


def idle_keys(scenario: Scenario) -> Iterator[str]:
    """Each key that has no effect, and why."""
    for path, text in (broken for rule in IDLE_RULES for broken in rule(scenario)):
        yield f"{dotted(path)}: {text.partition(';')[0]}"


def _names(s: Scenario) -> Iterator[Broken]:
    if not _RUN_NAME.fullmatch(s.run.name):
        yield ("run", "name"), f"names a folder: letters, digits, '.', '_' and '-', at most 64; found '{s.run.name}'"
    devices = [((*path, "device"), group.device) for path, group in _engine_groups(s)]
    for key, device in (*devices, (("learner", "device"), s.learner.device)):
        if not _DEVICE.fullmatch(device):
            yield key, f"must be auto, cpu, cuda or cuda:N; found '{device}'"


def _host(s: Scenario) -> Iterator[Broken]:
    if s.runtime.host == "local" and s.runtime.ray_address is not None:
        yield ("runtime", "host"), "is local, and a Ray cluster is named by runtime.ray_address; leave one of them out"


def _model(s: Scenario) -> Iterator[Broken]:
    simulated = [Capability.MODELLED in capabilities_of(group) for group in engine_groups(s.engines)]
    simulated.append(is_modelled(s.learner))
    if any(simulated) != all(simulated):
        yield (
            ("engines", "backend"),
            "simulated engines and a simulated learner belong together: what a model of an engine generates cannot "
            "be trained on, and a model of a learner has no weights to serve; set both or neither",
        )
    given = [name for name in ("path", "make") if getattr(s.model, name) is not None]
    if len(given) == 2:
        yield ("model", "path"), "exactly one of model.path and model.make can be given; remove one"
    if not given and not all(simulated):
        yield ("model",), "a model is needed: give model.path (a checkpoint folder) or model.make (xs, s or m)"


def _lengths(s: Scenario) -> Iterator[Broken]:
    context, response = s.model.max_context, s.sampling.max_response_tokens
    if s.model.make is not None and context > MADE_CONTEXT_TOKENS:
        yield ("model", "max_context"), f"the models of model.make have room for {MADE_CONTEXT_TOKENS}; found {context}"
    if response >= context:
        yield (
            ("sampling", "max_response_tokens"),
            f"{response} response tokens leave no room for a prompt in model.max_context of {context}; lower the one "
            "or raise the other",
        )
    if s.data.max_prompt_tokens is not None and s.data.max_prompt_tokens >= context:
        yield (
            ("data", "max_prompt_tokens"),
            f"prompts of {s.data.max_prompt_tokens} tokens leave no room for a response in model.max_context of "
            f"{context}; lower the one or raise the other",
        )
    shortest, longest = s.filter.min_response_tokens, s.filter.max_response_tokens
    if shortest > response or (longest is not None and shortest > longest):
        limit = response if shortest > response else longest
        yield ("filter", "min_response_tokens"), f"no response can have {shortest} tokens where {limit} are the most"


def _groups(s: Scenario) -> Iterator[Broken]:
    n, objective = s.sampling.samples_per_group, s.learner.objective
    if s.filter.drop_zero_spread and ignores_spread(objective):
        yield (
            ("filter", "drop_zero_spread"),
            f"{objective.name} learns from a group whose rewards are all equal too, which would be turned away; set it "
            "to false",
        )
    if n < 2 and s.filter.drop_zero_spread and not OBJECTIVES.spec(objective.name).imitates:
        yield (
            ("sampling", "samples_per_group"),
            "the rewards of a group of one are always equal, so filter.drop_zero_spread would turn every group away; "
            "draw at least 2 samples per group, or set filter.drop_zero_spread=false",
        )
    if s.filter.min_group_size > max(n, 2):
        yield (
            ("filter", "min_group_size"),
            f"no group can have {s.filter.min_group_size} samples where sampling.samples_per_group is {n}",
        )
    if s.sampling.temperature == 0:
        yield (
            ("sampling", "temperature"),
            "at temperature 0 all samples of a group are the same and there is nothing to learn from; set it above 0",
        )


def _staleness(s: Scenario) -> Iterator[Broken]:
    bound, per_batch = s.staleness.max_staleness, s.learner.groups_per_batch
    assert bound is not None, "rules are checked on resolved scenarios"
    if s.weights.publish_every > bound + 1:
        yield (
            ("weights", "publish_every"),
            f"a publish every {s.weights.publish_every} batches needs staleness.max_staleness of at least "
            f"{s.weights.publish_every - 1}, which is {bound}: with older weights no sample would be young enough; "
            f"set it to {bound + 1} or less, or raise the bound",
        )
    target = s.staleness.target_outstanding
    if isinstance(target, int) and target < per_batch:
        yield (
            ("staleness", "target_outstanding"),
            f"{target} groups outstanding can never fill a batch of learner.groups_per_batch = {per_batch}; set it "
            f"to {per_batch} or more, or to auto",
        )


def _objective(s: Scenario) -> Iterator[Broken]:
    options, samples = s.learner.objective, s.sampling.samples_per_group
    if problem := objective_problem(options, num_steps=s.learner.num_updates * s.learner.num_passes):
        key, text = problem
        yield (*OBJECTIVE, key), text
    steps = s.learner.num_updates * s.learner.num_passes
    if s.staleness.max_staleness and is_unbounded(options, num_steps=steps) and not options.allow_unbounded:
        yield (
            (*OBJECTIVE, "allow_unbounded"),
            f"tokens of up to {s.staleness.max_staleness} policies ago would be trained as if the policy had just "
            "drawn them: no ratio is bounded, and none weighs them. Set old_logprobs: engine with a clipped "
            "policy_loss, or a correction; or staleness.policy: sync; or this to true",
        )
    whole, unit = s.learner.groups_per_batch, "groups"
    if not compares_rewards(options):
        whole, unit = whole * samples, "samples"
    if s.learner.num_updates > whole:
        yield (
            ("learner", "num_updates"),
            f"{s.learner.num_updates} optimizer steps cannot be made from the {whole} {unit} of a batch, each of which "
            f"stays whole; set it to {whole} or less, or go through the batch more often with learner.num_passes",
        )
    if loss_of(options).needs_reference_point and min(whole // s.learner.num_updates, s.learner.groups_per_batch) < 2:
        yield (
            ("learner", "groups_per_batch"),
            f"{options.name} puts responses behind other prompts to find the KL to the reference, and an optimizer "
            "step would have one prompt only; raise it, or lower learner.num_updates",
        )
    if options.critic_only_steps >= s.run.num_steps:
        yield (
            (*OBJECTIVE, "critic_only_steps"),
            f"with {options.critic_only_steps} of the run's {s.run.num_steps} batches for the critic alone the policy "
            "is never trained; set it below run.num_steps",
        )
    compares = compares_rewards(options) and options.advantage_function is None
    if samples < 2 and compares and not is_modelled(s.learner):
        yield (
            ("sampling", "samples_per_group"),
            f"learner.objective: {options.name} compares the samples of a group, and with one there is nothing to "
            "compare; draw at least 2, or set learner.objective=reinforce_plus_plus",
        )


def _engines(s: Scenario) -> Iterator[Broken]:
    """What each kind of engine has to say against its block, and what it cannot do."""
    for path, group in _engine_groups(s):
        yield from engine_keys(path, group)
        yield from ENGINES.spec(group.backend).rules(path, group, s.engines)
        if s.learner.lora is not None and s.learner.lora.publish == "adapter":
            yield from ENGINES.spec(group.backend).adapter_rules(path, group, s.engines)
        yield from lacking(s, path, group.backend, capabilities_of(group))


def _transport(s: Scenario) -> Iterator[Broken]:
    wanted = s.weights.transport
    for _, group in _engine_groups(s):
        spec = ENGINES.spec(group.backend)
        taken, safe = spec.transports, spec.safe_transports(group)
        if safe is not None and wanted not in safe:
            yield (
                ("weights", "transport"),
                f"a folder of weights is loaded into the model that drafts as well; set {' or '.join(safe)}, which "
                f"leave that as it is; found '{wanted}'",
            )
        if wanted != AUTO and taken is not None and wanted not in taken:
            yield ("weights", "transport"), f"{group.backend} engines take {', '.join(taken)}; found '{wanted}'"


def _placement(s: Scenario) -> Iterator[Broken]:
    staleness = s.staleness
    max_staleness = staleness.max_staleness or 0
    if s.engines.placement == "colocate" and (max_staleness > 1 or staleness.update_mode is UpdateMode.IN_FLIGHT):
        yield (
            ("engines", "placement"),
            "colocated engines and the learner take turns on their devices, so engines may be one batch ahead and no "
            "more, and swap nothing while they generate; set staleness.policy to sync, or to one_step_off with "
            "staleness.update_mode drain or interrupt, or take another placement",
        )
    if s.engines.placement == "colocate":
        yield from _colocation(s)
    transport = s.weights.transport
    is_on_gpus = "cuda" in (s.engines.device, s.learner.device)
    if take_turns(s.engines) and is_on_gpus and transport != AUTO and not TRANSPORTS.spec(transport).shares_gpus:
        yield (
            ("weights", "transport"),
            "a group of NCCL takes each GPU once, and engines that take turns with the learner are on its GPUs; set it "
            "to auto, or remove engines.placement: colocate or engines.lent",
        )


def _colocation(s: Scenario) -> Iterator[Broken]:
    engines, learner = s.engines, s.learner
    if engines.addresses:
        yield (
            ("engines", "placement"),
            "colocated engines are started here, on the learner's devices; remove engines.addresses, or take another "
            "placement",
        )
    devices = {engines.device, learner.device}
    if not are_modelled(engines) and not engines.more and len(devices) > 1 and "auto" not in devices:
        yield (
            ("engines", "placement"),
            f"the engines are on {engines.device} and the learner on {learner.device}, so they share nothing; give "
            "both the same device, or take another placement",
        )


def _engine_groups(s: Scenario) -> Iterator[tuple[KeyPath, EngineGroupOptions]]:
    yield ("engines",), s.engines
    for index, group in enumerate(s.engines.more):
        yield ("engines", "more", index), group


def _timing(s: Scenario) -> Iterator[Broken]:
    if s.runtime.heartbeat_timeout_s < 2 * s.runtime.heartbeat_s:
        yield (
            ("runtime", "heartbeat_timeout_s"),
            f"{s.runtime.heartbeat_timeout_s:g} s is less than two heartbeats of {s.runtime.heartbeat_s:g} s: healthy "
            "actors would be replaced; raise it",
        )


def _metrics(s: Scenario) -> Iterator[Broken]:
    host = s.observability.metrics_host
    if host == "localhost":
        return
    try:
        ipaddress.ip_address(host)
    except ValueError:
        yield (
            ("observability", "metrics_host"),
            f"must be an address of this machine, such as 127.0.0.1 or 0.0.0.0 for every one; found '{host}'",
        )
        return
    if host != ObservabilityOptions().metrics_host and s.observability.metrics_port is None:
        yield (
            ("observability", "metrics_host"),
            "has no effect without observability.metrics_port; set it, or remove this one",
        )


def _without_effect(s: Scenario) -> Iterator[Broken]:
    if s.observability.otlp_endpoint is not None and not s.observability.tracing:
        yield ("observability", "otlp_endpoint"), "has no effect with observability.tracing=false; remove one of them"
    if s.learner.warm_start is not None and is_modelled(s.learner):
        yield ("learner", "warm_start"), "a simulated learner has no weights to warm up; remove the block"


RULES: tuple[Callable[[Scenario], Iterator[Broken]], ...] = (
    _names, _host, data_rules, function_rules, reward_rules, sampling_rules, _model, _lengths, _groups, _staleness,
    reuse_rules, _objective, megatron_rules, freeze_rules, lora_rules, exact_rules, low_precision_rules, rank_rules,
    _engines, elastic_rules, notice_rules, part_rules_of, _transport, _placement, _timing, _metrics, disk_rules,
    episode_rules, recorded_rules, part_rules, teacher_rules, reward_model_rules, evaluation_rules, profiling_rules,
)  # fmt: skip
IDLE_RULES: tuple[Callable[[Scenario], Iterator[Broken]], ...] = (unasked_rules, _without_effect)
"""About keys that do nothing: who sets them for a new run believes that they do."""
