"""``models.yaml``: what calibration has fitted, from which runs, how well, and what it could not learn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from penstock.backends.engines.options import LatencyOptions
from penstock.backends.learners.options import SimulatedLearnerOptions
from penstock.backends.rewards.functions_asked import num_workers
from penstock.backends.rewards.options import SimulatedRewardOptions
from penstock.messages.base import Options
from penstock.messages.errors import UserFault
from penstock.runtime.output_file import write_output
from penstock.runtime.scenario.keys import dotted, misfit, shape_of, show, unknown_key
from penstock.runtime.scenario.source import plain_text, read_source

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.scenario.structure import Scenario

FORM: Final = 1


class SourceRun(Options, frozen=True, kw_only=True):
    """A run that the models were fitted to."""

    folder: str
    started_at: str
    policy: str
    num_steps: int
    num_cpus: int
    gpus: tuple[str, ...]
    learner_ranks: int = 1
    critic_ranks: int = 0
    """Of these, those that held the critic alone."""


class FitResult(Options, frozen=True, kw_only=True):
    """What a part of the models was fitted to, what came of it, and how far off it is."""

    what: str
    values: dict[str, float]
    """By the key in the models, or what else was found; in seconds where the key says nothing else."""
    count: int
    """Measurements that it was fitted to."""
    error: float | None
    """Mean |difference| ÷ mean, on the steps with an even number, of the fit to those with an odd one. None: there is
    nothing to say."""
    bias: float | None
    """Likewise: sum of the differences ÷ sum; above 0 the models are too slow."""


class Check(Options, frozen=True, kw_only=True):
    """A recorded run beside its own scenario, played with the models."""

    folder: str
    policy: str
    step_s: float
    step_error: float
    """(Predicted − measured) ÷ measured."""
    engines_busy: float
    engines_busy_predicted: float
    learner_busy: float
    learner_busy_predicted: float


class Models(Options, frozen=True, kw_only=True):
    """Everything in ``models.yaml``."""

    form: Annotated[int, Meta(ge=FORM, le=FORM)] = FORM
    penstock_version: str
    made_at: str
    """ISO 8601 with the offset to UTC."""
    model: str
    """The one that the runs trained."""
    max_response_tokens: int
    """Of the runs: longer responses were never seen."""
    truncated_share: float
    """Of the responses, those that were cut off there."""
    most_running: Annotated[int, Meta(ge=1)]
    """Requests that one engine was seen to run side by side."""
    fewest_running: Annotated[int, Meta(ge=0)] = 1
    """Likewise, where fewest did."""
    is_load_known: bool = True
    """Whether the runs have told what a request costs a pass from what the pass costs; else all is in ``token_s``."""
    engines: LatencyOptions
    learner: SimulatedLearnerOptions
    reward: SimulatedRewardOptions
    cores: Annotated[float, Meta(gt=0)] | None = None
    """Of the machine that engines and learner share; None: each is taken to have its own."""
    hop_s: Annotated[float, Meta(ge=0)] | None = None
    """From when an actor has said something until another handles it; None: that of a quick network."""
    fits: tuple[FitResult, ...]
    checks: tuple[Check, ...] = ()
    unknown: tuple[str, ...] = ()
    """What the runs could not say; each with what was done instead."""
    runs: tuple[SourceRun, ...] = ()

    @property
    def expected_error(self) -> float | None:
        """Largest |step_error| of the checks; None without any."""
        return max((abs(check.step_error) for check in self.checks), default=None)

    @property
    def if_requests_cost_all(self) -> Models | None:
        """Where the runs did not tell what a request costs a pass: the other extreme, in which a pass of
        ``most_running`` takes as long, and that of a request alone so many times less. What is true lies between."""
        if self.is_load_known:
            return None
        share_s = self.engines.token_s / self.most_running
        engines = msgspec.structs.replace(self.engines, token_s=share_s, token_load_s=share_s)
        return msgspec.structs.replace(self, engines=engines)

    def applied(self, scenario: Scenario) -> Scenario:
        """The scenario with these models."""
        replace = msgspec.structs.replace
        workers = min(num_workers(scenario.reward))
        cores, hop_s = scenario.runtime.simulated_cores, scenario.runtime.simulated_hop_s
        return replace(
            scenario,
            engines=replace(scenario.engines, simulated=self.engines),
            learner=replace(scenario.learner, simulated=self.learner),
            reward=replace(scenario.reward, simulated=replace(self.reward, num_workers=workers)),
            runtime=replace(
                scenario.runtime,
                simulated_cores=self.cores if cores is None else cores,
                simulated_hop_s=self.hop_s if hop_s is None else hop_s,
            ),
        )

    def doubts(self, scenario: Scenario, *, has_episodes: bool = False) -> list[str]:
        """In what a modelled scenario leaves what the runs have shown; ``has_episodes``: the real one has some."""
        longest, slots = scenario.sampling.max_response_tokens, scenario.engines.slots
        groups_per_batch = scenario.learner.groups_per_batch
        cases = (
            (
                longest > self.max_response_tokens and self.truncated_share,
                f"sampling.max_response_tokens is {longest:,}, and the runs cut responses off at "
                f"{self.max_response_tokens:,} ({100 * self.truncated_share:.1f} %): longer ones are not modelled",
            ),
            (
                slots > self.most_running,
                f"engines.slots is {slots:,}, and at most {self.most_running:,} requests ran side by side: the time of "
                "a step is extrapolated beyond that",
            ),
            (
                not self.is_load_known,
                f"engines: a response that runs alone is modelled as slow as one beside {self.most_running - 1:,} "
                "others, as the runs did not tell what each costs: where engines come to have few requests (sync, "
                "one_step_off, drains), the time of a step is an upper bound; penstock simulate says the lower one",
            ),
            (
                self.is_load_known and self.fewest_running > max(2, slots // 2),
                f"engines: {self.fewest_running:,} requests ran side by side at least: what fewer take is extrapolated",
            ),
            (
                self.engines.response_tokens_course
                and self.engines.response_tokens_course_groups < 0.9 * scenario.run.num_steps * groups_per_batch,
                f"lengths changed over the {self.engines.response_tokens_course_groups:,} groups of the runs; those of "
                "later groups are modelled as the last of these",
            ),
            (
                has_episodes and self.engines.episode is None,
                "episode: the runs had none, so turns and tools are not modelled, and each is one response",
            ),
            (
                not has_episodes and self.engines.episode is not None,
                "episode: the runs had episodes, and so they are modelled; each response is taken for one",
            ),
            (scenario.engines.placement == "colocate", "engines.placement: how long sleep and wake take is not fitted"),
            (scenario.teacher is not None, "teacher: how long it takes is not fitted"),
            (scenario.evaluation.datasets, "evaluation: its responses are modelled as long as those of training"),
        )
        return [text for is_so, text in cases if is_so]


def write_models(models: Models, path: Path) -> None:
    """Write ``models.yaml``.

    Raises:
        UserFault: it cannot be written.
    """
    write_output(path, plain_text(msgspec.to_builtins(models)))


def read_models(path: Path) -> Models:
    """Read ``models.yaml``.

    Raises:
        UserFault: it is missing, or no such file; the message says where.
    """
    source = read_source(path, "file of models")
    if not {"engines", "fits"} <= source.data.keys():
        raise UserFault(f"{path}: no file of models, as penstock calibrate writes it: it has no engines or no fits")
    if (form := source.data.get("form", FORM)) != FORM:
        raise UserFault(
            f"{path}: has form {show(form)}, and this version reads form {FORM}; write it anew with: penstock calibrate"
        )
    found = unknown_key(source.data, shape_of(Models))
    try:
        if found is None:
            return msgspec.convert(source.data, Models)
    except msgspec.ValidationError as error:
        found = misfit(error, source.data, Models)
    at, text = found
    place = source.place(at[:-1] if text.startswith("missing") else at).text
    raise UserFault(f"{place}: {dotted(at)}: {text}")
