"""The ``sampling:`` and ``engines:`` blocks of a scenario."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, field

from penstock.messages.base import Options
from penstock.messages.base import OptionValue as OptionValue
from penstock.messages.kept_tokens import MAX_KEPT
from penstock.messages.names import engine_name
from penstock.messages.option_keys import FileKey

NOTICE_CLOUDS: Final = ("aws", "azure", "gcp")
"""Whose machines can ask whether they will be taken."""


class SamplingOptions(Options, frozen=True, kw_only=True):
    """How responses are drawn."""

    samples_per_group: Annotated[int, Meta(ge=1, le=4096)] = 8
    """Responses to one prompt. Rewards are compared within them, so more of them mean less noise: 16 where few answers
    are right."""
    temperature: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """0 takes the likeliest token; log-probs are then those of temperature 1."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that make up this probability together; 1: from all. What is cut off here is not
    learnt."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """0: all."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Draw only tokens that are at least this share as likely as the likeliest one; 0: all."""
    replay_kept: Annotated[int, Meta(ge=1, le=MAX_KEPT)] | None = None
    """Record which tokens ``top_p``, ``top_k`` and ``min_p`` leave for each draw, so that the learner takes log-probs
    over the same ones (docs/objectives.md). At most so many are left; each takes 4 bytes of a sample, and each token of
    the response 2. null: log-probs are of the whole vocabulary."""
    max_response_tokens: Annotated[int, Meta(ge=1)] = 256
    """Of one response (of an episode: of one turn). There it is cut off, and counts as truncated."""
    stop: tuple[str, ...] = ()
    """Texts that end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides the tokenizer's end-of-sequence token."""


class EpisodeModelOptions(Options, frozen=True, kw_only=True):
    """The model of an episode with several turns: its responses are turns, and between them it waits for tools, with
    its slot held and nothing generated."""

    turns: Annotated[tuple[Annotated[float, Meta(ge=0)], ...], Meta(min_length=1)] = (0.0, 1.0)
    """Of the episodes, those with one turn, with two, and so on: divided by their sum these are shares."""
    tool_s: Annotated[float, Meta(ge=0)] = 1.0
    """Median of the time from the end of a turn to the begin of the next."""
    tool_sigma: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """Of its logarithm."""
    end_s: Annotated[float, Meta(ge=0)] = 0.0
    """From the end of the last turn to that of the episode."""
    reply_tokens: Annotated[int, Meta(ge=0)] = 32
    """That tools put before a turn. They are read, and stand in the response without being trained."""
    reread_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Of what stands before them, the share that is read again for every turn but the first."""


class LatencyOptions(Options, frozen=True, kw_only=True):
    """The model of a simulated engine: lengths of responses, time of prefill and decode, limits, and weights. `penstock
    calibrate` fits it to runs (docs/prediction.md)."""

    response_tokens_median: Annotated[float, Meta(gt=0)] = 400.0
    """Half of the responses are longer, before max_response_tokens cuts them off."""
    response_tokens_sigma: Annotated[float, Meta(ge=0, le=10)] = 0.8
    """Of the logarithm of the length: 0 makes all equally long; the larger, the longer the longest."""
    response_tokens_quantiles: tuple[Annotated[float, Meta(ge=1)], ...] = ()
    """Evenly spaced quantiles of recorded lengths, two or more, the shortest first. Empty: median and sigma count."""
    response_tokens_correlation: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Of the lengths within a group: 1 makes them all equal."""
    response_tokens_course: tuple[Annotated[float, Meta(gt=0)], ...] = ()
    """Factors of the lengths as training goes on, evenly spaced from the first group of the run to that of the number
    ``response_tokens_course_groups``, and on straight lines between; later groups have the last. Empty: lengths do not
    change."""
    response_tokens_course_groups: Annotated[int, Meta(ge=1)] = 1000
    """See there."""
    episode: EpisodeModelOptions | None = None
    """null: each sample is one response. Otherwise lengths are those of turns."""
    prompt_tokens: Annotated[int, Meta(ge=1)] = 64
    """Of every simulated prompt."""
    prefill_s: Annotated[float, Meta(ge=0)] = 0.05
    """Before the first token of a response; holds up no other request."""
    prefill_token_s: Annotated[float, Meta(ge=0)] = 0.0
    """Of each token that is read, while which nothing is decoded. A prompt is read once for its group as long as the
    engine remembers it."""
    prompt_reread_tokens: Annotated[float, Meta(ge=0)] = 0.0
    """Of a prompt that the engine remembers, so many are read all the same for each further request."""
    token_s: Annotated[float, Meta(gt=0)] = 0.01
    """Of one token with one request running."""
    token_load_s: Annotated[float, Meta(ge=0)] = 0.00005
    """Added per token for every further request that runs beside it."""
    context_token_s: Annotated[float, Meta(ge=0)] = 0.0
    """Added per token for every token that the running requests hold together."""
    kv_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Tokens that all running requests may hold; beyond them requests wait or are sent back. null: as slots allow."""
    apply_weights_s: Annotated[float, Meta(ge=0)] = 0.5
    """To swap new weights in, with requests held meanwhile."""
    fetch_weights_s: Annotated[float, Meta(ge=0)] = 1.0
    """To fetch new weights, while requests go on."""
    apply_byte_s: Annotated[float, Meta(ge=0)] = 0.0
    """Added for every byte of them (``learner.simulated.size_bytes``)."""
    fetch_byte_s: Annotated[float, Meta(ge=0)] = 0.0
    """Likewise."""
    fetch_shared_byte_s: Annotated[float, Meta(ge=0)] = 0.0
    """Likewise, for every engine of its kind: what goes over the learner's link, which they share, once for each."""
    start_s: Annotated[float, Meta(ge=0)] = 0.0
    """From the start of its process until it is ready, of a replacement too."""
    failure_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of generations that end as ``infra_error``."""
    sleep_s: Annotated[float, Meta(ge=0)] = 0.2
    """To give device memory up, with ``engines.placement: colocate``."""
    wake_s: Annotated[float, Meta(ge=0)] = 0.5
    """To take it again, before weights are applied."""
    cores: Annotated[float, Meta(ge=0)] = 0.0
    """That it wants while it works, those of other actors who work for it among them. It counts with
    ``runtime.simulated_cores``."""
    cold_cost: Annotated[float, Meta(ge=0)] = 0.0
    """Likewise: by what share its work takes more CPU time where it hardly has a core, as caches are cold each time
    that it gets one back; with a share f of the cores that it wants, 1 − f times as much."""


HttpUrl = Annotated[str, Meta(pattern=r"^https?://[^/\s]+$")]


class EngineGroupOptions(Options, frozen=True, kw_only=True):
    """Engines of one kind."""

    backend: str = "torch"
    """``recorded`` generates nothing: it answers with the responses that the rows of the dataset hold
    (``data.recorded``)."""
    count: Annotated[int, Meta(ge=1, le=65536)] = 1
    """Engines, each an actor with its own model; under `sglang` servers."""
    slots: Annotated[int, Meta(ge=1)] = 64
    """Requests that one engine decodes side by side."""
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1``; ``auto`` takes a GPU where Ray assigns one."""
    num_threads: Annotated[int, Meta(ge=1)] = 1
    """Of each engine, on a CPU."""
    double_buffering: bool | None = None
    """Embedded engines: prepare new weights in a second set while decoding with the first, so that a swap exchanges the
    two and no more. It takes the memory of one more set. null: on a CPU with two cores or more, where ten sets would go
    into the memory that is free."""
    sglang: dict[str, OptionValue] = field(default_factory=dict[str, OptionValue])
    """Options of the SGLang server, by its own names: ``tp_size: 2``, ``mem_fraction_static: 0.8``."""
    options: dict[str, OptionValue] = field(default_factory=dict[str, OptionValue])
    """Of an engine that another package brings, as that says (docs/extending.md)."""
    addresses: tuple[HttpUrl, ...] = ()
    """SGLang servers that run already, one for each engine: ``http://10.0.0.7:30000``. Empty: they are started here."""
    router: HttpUrl | None = None
    """An sglang-router in front of all ``addresses``, which are then one engine."""
    simulated_speed: Annotated[float, Meta(gt=0)] = 1.0
    """Of engines of the backend `simulated`: 0.5 takes twice as long for a token as ``engines.simulated`` says."""
    simulated_fetch_s: Annotated[float, Meta(ge=0)] | None = None
    """Of engines of the backend `simulated`: how long new weights are on their way to these, in place of
    ``engines.simulated.fetch_weights_s``: engines behind a slow link."""


class EngineProfileOptions(Options, frozen=True, kw_only=True):
    """Profile engines while they make tokens of some versions: step N begins for an engine when it has the weights of
    version N − 1, and ends with the next ones. Embedded engines use torch's profiler, SGLang servers their own; the
    traces lie in `profiles/` (docs/profiling.md)."""

    first_step: Annotated[int, Meta(ge=1)] = 2
    """The first that is profiled."""
    last_step: Annotated[int, Meta(ge=1)] = 2
    """The last one."""
    max_passes: Annotated[int, Meta(ge=1, le=10_000)] = 100
    """Forward passes of each step after which its profile ends: it makes an engine slow, and its file large."""
    stacks: bool = False
    """Name the lines of Python that called each operator."""
    memory: bool = False
    """On CUDA also a snapshot of the allocator's history, for pytorch.org/memory_viz; in traces of embedded engines
    every allocation as well."""

    def takes(self, version: int) -> bool:
        """Whether the tokens of this version are profiled."""
        return self.first_step <= version + 1 <= self.last_step


class EnginesOptions(EngineGroupOptions, frozen=True, kw_only=True):
    """How many engines, of what kind."""

    min: Annotated[int, Meta(ge=1, le=65536)] | None = None
    """Engines that are left at least when some leave during the run (`penstock scale`), or are given up since they were
    lost too often (`runtime.max_restarts`). null: `count`."""
    max: Annotated[int, Meta(ge=1, le=65536)] | None = None
    """Engines that there are at most when some join during the run. null: `count`."""
    scale: Literal["fixed", "by_bound"] = "fixed"
    """``by_bound``: engines join where the learner waits for samples and engines are full, and leave where it does not
    wait and fewer are enough, within ``min`` and ``max``."""
    scale_hold_s: Annotated[float, Meta(gt=0)] = 60.0
    """Of ``by_bound``: a reading of the run takes so long at least, and the first one begins so long after the last
    change, when whoever came is ready. Longer than a response takes."""
    lent: Annotated[int, Meta(ge=0, le=65536)] = 0
    """The last so many of ``max`` have no devices of their own: they live on the learner's, asleep, and take them while
    it waits for a batch. They join and leave as the others do, with `penstock scale` or ``by_bound``, which lets them
    go where lending does not pay. They need the learner's ``device``, and together no more GPUs than it has ranks."""
    lend_after_s: Annotated[float, Meta(gt=0)] = 1.0
    """The learner lends its devices when it has waited so long for a batch."""
    leave_timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    """An engine that is to leave hands back what it has, and goes; after so long it is taken anyway."""
    gpu_timeout_s: Annotated[float, Meta(gt=0)] | None = 900.0
    """On a cluster (``runtime.ray_address``) an engine that joins is given GPUs of its own then, and waits so long for
    them at most, as for a node that an autoscaler brings; when it leaves, they go back. null: the GPUs of ``max``
    engines are reserved from the start to the end, as they are on one machine."""
    notice_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds between word that an engine's machine will be taken, and that moment. Such word is SIGTERM to the
    engine's process, `notice_file`, or `notice_url`. The engine then hands back what it has, with every token, and
    another takes its place when the notice has run out. null: SIGTERM ends the process."""
    notice_file: str | None = None
    """A file on the machines of engines that appears, or is touched, when the machine will be taken; it is looked for
    every `runtime.heartbeat_s`. Needs `notice_s`."""
    notice_url: str | None = None
    """Who is asked every 2 s whether the machine will be taken: ``aws``, ``gcp`` or ``azure``, whose machines can ask
    their cloud, or an address that answers with status 200 when it will be, and 404 or 204 before. Needs `notice_s`."""
    more: tuple[EngineGroupOptions, ...] = ()
    """Engines of other kinds beside these, in the same run."""
    placement: Literal["auto", "pack", "spread", "colocate"] = "auto"
    """Of GPUs: ``pack``, which ``auto`` is too, takes as few nodes as it can, ``spread`` as many. ``colocate`` puts the
    learner on the GPUs of the first engines, as many as have one for each of its ranks (simulated: of all); they take
    turns, and whoever has not the turn holds no GPU memory, so it needs the policy ``sync`` or ``one_step_off``."""
    quantization: Literal["fp8"] | None = None
    """``fp8``: engines get the matrices of layers as e4m3 numbers with a scale for each block of 128 × 128; the
    learner trains what it has. SGLang servers compute in FP8, embedded engines with what the numbers stand for
    (docs/models.md)."""
    fp8_model: FileKey | None = None
    """The copy of the model that SGLang servers are started from under ``quantization: fp8``; `penstock convert MODEL
    COPY --dtype fp8` writes it."""
    seeded_sampling: bool = False
    """Refuse engines whose samples do not follow from the seed."""
    record_experts: bool = False
    """Say of each token which experts of a mixture it went to (`learner.megatron.router_replay`): engines of torch, and
    SGLang servers on GPUs, which get ``enable_return_routed_experts``."""
    progress_tokens: Annotated[int, Meta(ge=1)] = 64
    """A running request reports its tokens after every so many."""
    judge_slots: Annotated[int, Meta(ge=1, le=4096)] = 8
    """Questions of a judge (`reward.judge.engine: self`) that one embedded engine answers side by side, beside
    ``slots``; further ones wait. Without such a judge there are no such places."""
    start_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    """An engine that is not ready by then, with its model loaded, is replaced. Large models take minutes."""
    request_timeout_s: Annotated[float, Meta(gt=0)] = 3600.0
    """For one generation by an SGLang server."""
    hang_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """An SGLang server that neither makes a token nor answers for so long is given up."""
    profile: EngineProfileOptions | None = None
    """null: no engine is profiled."""
    simulated: LatencyOptions = LatencyOptions()
    """How long things take under the backend `simulated`."""


def engine_groups(options: EnginesOptions) -> tuple[EngineGroupOptions, ...]:
    """The kinds of engines of a run, in the order in which engines are numbered."""
    return (options, *options.more)


def largest_groups(options: EnginesOptions) -> tuple[EngineGroupOptions, ...]:
    """The same, each with as many engines as there may be."""
    if options.max is None:
        return engine_groups(options)
    return (msgspec.structs.replace(options, count=max(options.count, options.max)), *options.more)


def num_engines(options: EnginesOptions) -> int:
    """Engines of all kinds."""
    return sum(group.count for group in engine_groups(options))


def fewest_engines(options: EnginesOptions) -> int:
    """Engines that are left at least."""
    return options.count if options.min is None else options.min


def most_engines(options: EnginesOptions) -> int:
    """Engines of all kinds that there are at most."""
    return num_engines(options) if options.max is None else options.max


def lent_engines(options: EnginesOptions) -> frozenset[str]:
    """Those that live on the learner's devices and take them while it waits."""
    most = most_engines(options)
    return frozenset(engine_name(index) for index in range(most - options.lent, most))


def take_turns(options: EnginesOptions) -> bool:
    """Whether any are on the learner's devices, and hold no memory of these in its turn."""
    return options.placement == "colocate" or options.lent > 0


def are_elastic(options: EnginesOptions) -> bool:
    """Whether engines may join or leave during the run; then all are of one kind."""
    return fewest_engines(options) < options.count or options.count < (options.max or 0)


def engines_kept(options: EnginesOptions) -> int | None:
    """Engines that are left at least when others are given up; None: the run can do without none of them."""
    return fewest_engines(options) if are_elastic(options) else None


def num_slots(options: EnginesOptions) -> int:
    """Requests that all engines together decode side by side."""
    return sum(group.count * group.slots for group in engine_groups(options))


def group_of(options: EnginesOptions, index: int) -> tuple[EngineGroupOptions, int]:
    """The kind of this engine of the run, and which of its kind it is, both counted from 0."""
    if options.max is not None and index < options.max:
        return options, index  # all are of one kind, those that join as well
    for group in engine_groups(options):
        if index < group.count:
            return group, index
        index -= group.count
    raise IndexError(f"there is no engine {index}")


def options_of(options: EnginesOptions, index: int) -> EnginesOptions:
    """What this engine of the run is told: the options of its kind, as those of a run that has only this kind."""
    group, _ = group_of(options, index)
    own = {name: getattr(group, name) for name in EngineGroupOptions.__struct_fields__}
    return msgspec.structs.replace(options, **own, more=())


def kinds(options: EnginesOptions) -> frozenset[str]:
    """The backends of all engines of a run."""
    return frozenset(group.backend for group in engine_groups(options))
