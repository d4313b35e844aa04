"""Each cause in words: who it is about, what was seen, by which figures, and which knob turns it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from penstock.messages.names import BUFFER, FILTER, LEARNER, PROMPT_SOURCE, SCORER, WEIGHT_PUBLISHER
from penstock.runtime.observability.explain.causes import Cause, Evidence

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.runtime.observability.explain.facts import Facts, SampleTimes, Waits

LANES, SPANS, LEDGER, STEPS, SCENARIO = "activity.jsonl", "traces/", "ledger.sqlite", "metrics.jsonl", "scenario.yaml"


class Story(NamedTuple):
    """What is said of a cause."""

    who: str
    text: str
    evidence: tuple[Evidence, ...]


def story_of(facts: Facts, cause: Cause) -> Story:
    """A cause in words, with the figures that it was found by."""
    who, text, figures = _STORIES[cause]
    return Story(who(facts) if callable(who) else who, text, tuple(figures(facts)))


# --- figures -------------------------------------------------------------------------------------------------------


def _waiting(facts: Facts) -> Evidence:
    return Evidence("the learner waits for samples", 100 * facts.learner.waiting, "%", LANES)


def _training(facts: Facts) -> Evidence:
    return Evidence("the learner trains", 100 * facts.learner.training, "%", LANES)


def _occupied(facts: Facts) -> Evidence:
    return Evidence("slots of the engines in use", 100 * facts.occupied, "%", LANES)


def _stage(what: str, facts: Facts, of: Callable[[SampleTimes], float | None]) -> list[Evidence]:
    """Time of a stage, where it is known."""
    seconds = None if facts.samples is None else of(facts.samples)
    return [] if seconds is None else [Evidence(what, seconds, "s", SPANS)]


def _generation(facts: Facts) -> list[Evidence]:
    return [
        *_stage("generation of a sample, a mean", facts, lambda samples: samples.generate),
        *_stage("half of the generations are shorter than", facts, lambda samples: samples.generate_median),
        *_stage("the longest generation of a batch", facts, lambda samples: samples.generate_longest),
    ]


def _waited(what: str, facts: Facts, of: Callable[[Waits], float]) -> list[Evidence]:
    """Share of the Learner's wait in which that was waited for, and slots were free."""
    return [] if facts.waits is None else [Evidence(f"of this wait, {what}", 100 * of(facts.waits), "%", SPANS)]


def _groups(facts: Facts) -> list[Evidence]:
    found = (("groups granted and not admitted, a mean", facts.in_generation, LEDGER),)
    limits = (
        ("staleness.max_concurrent", facts.max_concurrent, SCENARIO),
        ("groups granted and not trained, a mean", facts.outstanding, LEDGER),
        ("staleness.target_outstanding", facts.target_outstanding, SCENARIO),
    )
    return [Evidence(what, value, "groups", source) for what, value, source in (*found, *limits) if value is not None]


def _speeds(facts: Facts) -> list[Evidence]:
    slow = facts.slow_engines
    quick = max(facts.engines, key=lambda engine: engine.tokens_per_s or 0.0)
    return [
        Evidence(f"{engine.name}, of one request", engine.tokens_per_s, "tokens/s", SPANS)
        for engine in (*slow, quick)
        if engine.tokens_per_s is not None
    ]


def _slow_names(facts: Facts) -> str:
    names = [engine.name for engine in facts.slow_engines]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _publish(facts: Facts) -> list[Evidence]:
    return [
        Evidence("the learner exports weights", 100 * facts.learner.publishing, "%", LANES),
        Evidence("engines wait for weights or apply them", 100 * facts.for_weights, "%", LANES),
        *_stage("from the export of a version to its announcement", facts, lambda samples: samples.announce),
        *_stage("swap of weights in one engine", facts, lambda samples: samples.swap),
    ]


def _cores(facts: Facts) -> list[Evidence]:
    cores = facts.cores
    if cores is None:
        return []
    return [
        Evidence("the learner trained longer, waiting for a core", 100 * cores.learner, "%", STEPS),
        Evidence("an engine worked longer, waiting for a core", 100 * cores.engines, "%", STEPS),
        Evidence("used by all actors", cores.used, "cores", STEPS),
        _waiting(facts),
    ]


_STORIES: dict[Cause, tuple[str | Callable[[Facts], str], str, Callable[[Facts], list[Evidence]]]] = {
    Cause.FEW_ENGINES: (
        "engines",
        "The engines' slots are in use and the learner waits: there is too little generation for it.",
        lambda facts: [_occupied(facts), _waiting(facts)],
    ),
    Cause.SLOW_REWARD: (
        SCORER,
        "Samples that are generated wait for their reward, while the learner waits for them and slots are free.",
        lambda facts: [
            _waiting(facts),
            *_waited("for rewards", facts, lambda waits: waits.score),
            *_stage("from a sample's generation to its reward", facts, lambda samples: samples.score),
            *_stage("its generation", facts, lambda samples: samples.generate),
            _occupied(facts),
        ],
    ),
    Cause.SMALL_BOUND: (
        BUFFER,
        "Engines and learner wait for each other: the bound of staleness lets too few groups be under way.",
        lambda facts: [
            Evidence("max_staleness", facts.max_staleness, "versions", SCENARIO),
            _waiting(facts),
            _occupied(facts),
            *_groups(facts),
        ],
    ),
    Cause.LONG_TAIL: (
        "engines",
        "A few long responses keep a batch back while most slots are free.",
        lambda facts: [
            _waiting(facts),
            *_waited("for generations of more than twice the median", facts, lambda waits: waits.tail),
            *_generation(facts),
            _occupied(facts),
        ],
    ),
    Cause.SLOW_PUBLISH: (
        WEIGHT_PUBLISHER,
        "New weights take long on their way from the learner to the engines.",
        _publish,
    ),
    Cause.HEAVY_LEARNER: (
        LEARNER,
        "Training is most of what a step takes, and engines have free slots meanwhile.",
        lambda facts: [_training(facts), _waiting(facts), _occupied(facts)],
    ),
    Cause.LOW_CONCURRENCY: (
        BUFFER,
        "A limit of the scenario keeps groups back, while slots are free and the learner waits.",
        lambda facts: [*_groups(facts), _occupied(facts), _waiting(facts)],
    ),
    Cause.FILTER: (
        FILTER,
        "Much of what is generated is turned away, and generated anew with other prompts.",
        lambda facts: [
            Evidence("tokens of samples that were filtered", 100 * facts.rejected, "%", STEPS),
            _waiting(facts),
        ],
    ),
    Cause.SLOW_TOOL: (
        "episodes",
        "Episodes wait for tools and other things outside the model, and hold their slots meanwhile.",
        lambda facts: [
            Evidence("slots held by episodes that wait for something outside", 100 * facts.outside, "%", LANES),
            _occupied(facts),
            *_stage("an episode, a mean", facts, lambda samples: samples.generate),
            _waiting(facts),
        ],
    ),
    Cause.SLOW_ROWS: (
        PROMPT_SOURCE,
        "Groups that may start wait for their rows, while slots are free and the learner waits.",
        lambda facts: [
            _waiting(facts),
            *_waited("for rows", facts, lambda waits: waits.rows),
            *_stage("from the grant of a group to its row", facts, lambda samples: samples.rows),
            *_stage("generation of a sample, a mean", facts, lambda samples: samples.generate),
            _occupied(facts),
        ],
    ),
    Cause.SLOW_ENGINE: (
        _slow_names,
        "Engines that are slower than others hold their samples back.",
        lambda facts: [*_speeds(facts), _waiting(facts)],
    ),
    Cause.EARLY_BOUND: (
        PROMPT_SOURCE,
        "Requests queue at an engine that is full, while others have free slots: they were given to it too early.",
        lambda facts: [
            _waiting(facts),
            *_waited("for full engines while others had free slots", facts, lambda waits: waits.early),
            *_stage("in the queue of an engine, a mean", facts, lambda samples: samples.queue),
            _occupied(facts),
        ],
    ),
    Cause.CHECKPOINTS: (
        LEARNER,
        "Batches are there and wait for checkpoints that are still being written: the disk is slower than the steps.",
        lambda facts: [Evidence("batches wait for a checkpoint", 100 * facts.learner.checkpointing, "%", LANES)],
    ),
    Cause.LOST_TIME: (
        "engines and learner",
        "Actors were lost, and were down until their replacements were ready.",
        lambda facts: [
            Evidence(f"{name} down or starting", 100 * down, "%", LANES)
            for name, down in ((LEARNER, facts.learner.down), *((each.name, each.down) for each in facts.engines))
            if down > 0
        ][:4],
    ),
    Cause.EVALUATION: (
        "engines",
        "Evaluations take slots that samples for training wait for.",
        lambda facts: [Evidence("tokens of evaluations", 100 * facts.evaluated, "%", STEPS), _occupied(facts)],
    ),
    Cause.FEW_CORES: (
        "machine",
        "Engines and learner could go on and no core is free: what runs on the machine wants more cores than it has.",
        _cores,
    ),
    Cause.UNKNOWN: (
        "unknown",
        "The learner waits and slots are free. Without traces nobody can say what the samples waited for.",
        lambda facts: [_waiting(facts), _occupied(facts)],
    ),
    Cause.HARDWARE: (
        "devices",
        "Nothing binds but the hardware: of the causes that are known, none costs 15 % of a step.",
        lambda facts: [_training(facts), _occupied(facts)],
    ),
}  # fmt: skip


# --- knobs -----------------------------------------------------------------------------------------------------------


def knob_of(facts: Facts, cause: Cause, cost_s: float) -> tuple[str, str]:
    """The key to turn, and how; the first is empty where no key helps."""
    quicker = facts.step_s / max(1e-9, facts.step_s - cost_s)
    num_engines = len(facts.engines)
    more_engines = max(num_engines + 1, math.ceil(num_engines * quicker))
    eta = facts.max_staleness
    limit = "max_concurrent" if facts.max_concurrent is not None else "target_outstanding"
    told: dict[Cause, tuple[str, str]] = {
        Cause.FEW_ENGINES: ("engines.count", f"{num_engines} → {more_engines}; or more engines.slots"),
        Cause.SLOW_REWARD: ("reward", "a quicker function, or more processes for it (reward.num_workers)"),
        Cause.SMALL_BOUND: ("staleness.max_staleness", f"{eta} → {max(1, 2 * eta)}"),
        Cause.LONG_TAIL: ("staleness.max_staleness", f"{eta} → {eta + 1}; or a lower sampling.max_response_tokens"),
        Cause.SLOW_PUBLISH: ("weights", "another transport, or fewer publishes (publish_every)"),
        Cause.HEAVY_LEARNER: ("learner.num_ranks", "more ranks, or devices of engines given to the learner"),
        Cause.LOW_CONCURRENCY: (f"staleness.{limit}", "a larger number, or none"),
        Cause.FILTER: ("data", "prompts that are neither solved nor hopeless, or a milder filter"),
        Cause.SLOW_TOOL: ("engines.slots", "more slots, so that others generate meanwhile; or a quicker tool"),
        Cause.SLOW_ROWS: ("data", "rows that are read ahead (data.prefetch_rows), or a quicker prompt_source.priority"),
        Cause.SLOW_ENGINE: ("engines", f"look at the machine of {_slow_names(facts)}"),
        Cause.EARLY_BOUND: ("prompt_source.max_load", "nearer to 1"),
        Cause.CHECKPOINTS: ("learner.save_every", "a larger number"),
        Cause.EVALUATION: ("evaluation.every", "a larger number"),
        Cause.FEW_CORES: ("machine", "more cores; or less on these: engines, their num_threads, other programs"),
    }  # fmt: skip
    return told.get(cause, ("", ""))
