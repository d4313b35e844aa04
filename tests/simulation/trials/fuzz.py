"""Runs trials under the oracle: ``PYTHONPATH=tests/simulation python -m trials.fuzz --policy sync --trials 2000``.

``--processes 2 --first-seed random --keep FILE`` is the form of every night: on all cores, with seeds that nobody has
seen, and with those that fail written down.

A trial fails when the oracle or an actor asserts, when the run does not complete, when nothing comes closer to the end
for ``PATIENCE_S`` of virtual time, or when somebody still keeps something after the end. The seed says it all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.backends.engines.options import lent_engines
from penstock.messages.ledger import RowsRecorded
from penstock.messages.rows import RowSource
from penstock.runtime.hosts.virtual.event_digest import EventDigest
from penstock.runtime.hosts.virtual.host import VirtualHost
from penstock.runtime.hosts.virtual.process import Status
from penstock.runtime.run.evaluating import evaluation_schedule
from trials.device_watch import DeviceWatch
from trials.draws import colocated, draw_trial
from trials.elastic_watch import ElasticWatch
from trials.fan_out import FanOutWatch
from trials.faults import inject
from trials.late_gpus import LateGpus
from trials.late_watch import LateWatch
from trials.lending_watch import LendingWatch
from trials.oracle import Oracle
from trials.oracle_checks import Rules, kept_by
from trials.publish_watch import PublishWatch
from trials.requests import OperatorWatch
from trials.row_watch import RowRules
from trials.source_watch import SourceWatch
from trials.stops import Stops
from trials.weights_watch import WeightsWatch

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from contextlib import AbstractContextManager

    from penstock.backends.ledger.memory import MemoryLedger
    from trials.trial import Trial

POLICIES: Final = ("sync", "one_step_off", "fully_async")
CHUNK: Final = 100
"""Trials that a process runs before it is asked for the next ones."""
PATIENCE_S: Final = 2000.0
"""Virtual seconds without a step, and without the end of any sample, after which a run counts as hanging: many times
the longest pause between two repeats of a message."""
STEP_PATIENCE_S: Final = 40_000.0
"""Without a step, though samples end: where failures and filters leave little, a batch takes many groups."""
QUIET_S: Final = 400.0
"""Virtual seconds after the end until which everyone must have heard of it."""
SNAPSHOT_EVERY: Final = 5
"""Entries of the ledger: a replaced Buffer begins from one wherever its run may have any."""


class StalledError(AssertionError):
    """Nothing comes closer to the end any more."""


class UnfinishedError(AssertionError):
    """The run ended, and not because it was complete."""


class NeedlessError(AssertionError):
    """Something that was finished, and was not lost, was generated again; or who was well was replaced."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial came to."""

    digest: str
    num_events: int
    end_s: float
    max_staleness: int
    num_generated_twice: int
    num_restarts: int


class TrialRun:
    """One trial under the oracle; others may watch it too."""

    def __init__(self, trial: Trial, *, with_digest: bool = True) -> None:
        self.trial = trial
        self.digest = EventDigest() if with_digest else None
        self.archived: set[int] = set()
        """Steps whose samples were."""
        casting = trial.casting(lambda: has_recorded_rows(self.host.ledger), self.archived.add)
        self.host = VirtualHost(trial.names, casting, trial.host, digest=self.digest)
        self.host.ledger.snapshot_every = SNAPSHOT_EVERY
        self.oracle = Oracle(rules_of(trial), self.host)
        self.host.watch(self.oracle)
        if trial.max_engines is not None or trial.has_notices:
            salvages = trial.save_share is None
            self.host.watch(ElasticWatch(self.host, salvages=salvages, loses_nothing=trial.loses_nothing))
        self.is_calm = trial.is_calm
        """Nobody is to be replaced; a test that hurts an actor by other means than faults says otherwise."""
        self.gpus = None if trial.gpus is None else LateGpus(trial.gpus, self.host)
        self.late = LateWatch()
        self.host.watch(self.late)
        self.publishes = PublishWatch()
        self.host.watch(self.publishes)
        self.weights = WeightsWatch()
        self.host.watch(self.weights)
        self.host.watch(SourceWatch(salvages=trial.save_share is None))
        self.fan_out = FanOutWatch()
        if trial.passes_on:
            self.host.watch(self.fan_out)
        lent = lent_engines(trial.scenario.engines)
        self.lending = LendingWatch(lent)
        if lent:
            self.host.watch(self.lending)
        if trial.colocated or lent:
            self.host.watch(DeviceWatch(lent or trial.engines, self.host))
        self.operator = OperatorWatch(trial.requests, self.host)
        self.host.watch(self.operator, events=False)
        self.stops = Stops(trial.stops_s, self.host, self.oracle)
        inject(self.host, trial.faults)

    def run(self) -> Outcome:
        """Go on to the end of the run and to quiet after it.

        Raises:
            AssertionError: something is wrong; the note says who was doing what.
        """
        host, oracle, trial = self.host, self.oracle, self.trial
        while (ending := host.run(host.clock.now_s + PATIENCE_S / 4)) is None or self.stops.resumes(ending):
            without_step_s = host.clock.now_s - oracle.progress_s
            without_end_s = host.clock.now_s - max(oracle.progress_s, oracle.ended_s)
            if without_end_s > PATIENCE_S or without_step_s > STEP_PATIENCE_S:
                raise StalledError(
                    f"no step since {oracle.progress_s:.1f} s, now {host.clock.now_s:.1f} s\n{host.story()}"
                )
        if not ending.completed:
            raise UnfinishedError(f"{ending.story}\n{host.story()}")
        oracle.assert_ended()
        if trial.archive_s is not None:
            assert self.archived == set(range(1, oracle.version + 1)), f"archived are only {sorted(self.archived)}"
        if trial.is_quick and oracle.num_needless:
            raise NeedlessError(f"{oracle.num_needless} samples were issued again while somebody had them finished")
        if trial.loses_nothing and oracle.num_regenerated:
            raise NeedlessError(f"{oracle.num_regenerated} samples of admitted groups were issued again")
        if self.is_calm and host.supervisor.num_restarts:
            raise NeedlessError(f"{host.supervisor.num_restarts} actors were replaced with nothing wrong with them")
        _await_quiet(host, ending.at_s)
        return Outcome(
            digest="" if self.digest is None else self.digest.digest,
            num_events=host.num_events,
            end_s=ending.at_s,
            max_staleness=oracle.max_staleness_seen,
            num_generated_twice=oracle.num_generated_twice,
            num_restarts=host.supervisor.num_restarts,
        )


def run_trial(trial: Trial, *, with_digest: bool = True) -> Outcome:
    """Run a trial under the oracle; see :meth:`TrialRun.run`."""
    return TrialRun(trial, with_digest=with_digest).run()


def fails(trial: Trial) -> bool:
    """Whether anybody notices anything in this trial."""
    try:
        run_trial(trial, with_digest=False)
    except (AssertionError, ArithmeticError, LookupError, RuntimeError, ValueError):
        return True
    return False


def living_engines(run: TrialRun) -> set[str]:
    """Those whose processes have not ended."""
    processes = run.host.supervisor.processes.items()
    return {name for name, process in processes if name.startswith("engine/") and process.status is not Status.DEAD}


@contextmanager
def several(*plants: AbstractContextManager[Any]) -> Generator[None]:
    """Plants of bugs as one."""
    with ExitStack() as stack:
        for plant in plants:
            stack.enter_context(plant)
        yield


def rules_of(trial: Trial) -> Rules:
    """What the oracle is to know of a trial."""
    return Rules(
        num_steps=trial.num_steps,
        groups_per_batch=trial.groups_per_batch,
        samples_per_group=trial.samples_per_group,
        max_staleness=trial.max_staleness,
        on_stale=trial.on_stale,
        over_sampling=trial.over_sampling,
        max_concurrent=trial.max_concurrent,
        max_requeues=trial.max_requeues,
        max_uses=trial.reuse,
        num_prompts=None if trial.num_epochs is None else trial.order.num_prompts(trial.num_epochs),
        keep_checkpoints=trial.keep_checkpoints,
        has_teachers=bool(trial.num_teachers),
        keep_after_batches=trial.keep_when_insufficient,
        counts_dropped=trial.drop_samples == "after_statistics",
        rows=RowRules(
            sources=trial.sources or (RowSource(name="lines", num_rows=trial.num_rows),),
            chooses=trial.chooses_rows and not trial.row_choices,
            may_choose=trial.chooses_rows or bool(trial.row_choices),
            row_of=trial.order.row_of,
        ),
        evaluation=evaluation_schedule(trial.plan),
    )


def has_recorded_rows(ledger: MemoryLedger) -> bool:
    """Whether rows of the run were chosen so far."""
    return any(isinstance(entry, RowsRecorded) for entry in ledger.entries)


def _await_quiet(host: VirtualHost, end_s: float) -> None:
    until_s = end_s
    while kept := kept_by(host.supervisor.processes.values()):
        if until_s > end_s + QUIET_S:
            raise StalledError(f"{until_s - end_s:.0f} s after the end: {'; '.join(kept)}")
        until_s += 5.0
        host.run(until_s)


def failures(policy: str, seeds: Iterable[int], *, are_colocated: bool = False) -> list[tuple[int, str]]:
    """The seeds whose trials fail, each with its traceback."""
    return list(iterate_failures(policy, seeds, are_colocated=are_colocated))


def iterate_failures(policy: str, seeds: Iterable[int], *, are_colocated: bool = False) -> Iterator[tuple[int, str]]:
    """As ``failures``, each as soon as it is found."""
    for seed in seeds:
        try:
            trial = draw_trial(policy, seed)
            run_trial(colocated(trial) if are_colocated else trial, with_digest=False)
        except (AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            yield seed, traceback.format_exc()


def failed_seeds(
    policy: str, seeds: range, num_processes: int, *, are_colocated: bool = False
) -> Iterator[tuple[int, str]]:
    """As ``iterate_failures``, over several processes; in no order."""
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        asked = [pool.submit(failures, policy, chunk, are_colocated=are_colocated) for chunk in chunks]
        for found in as_completed(asked):
            yield from found.result()


def main(arguments: list[str]) -> int:
    """The command line; the exit code is 1 when a trial failed."""
    parser = argparse.ArgumentParser(description="Run random trials on the virtual host under the oracle.")
    parser.add_argument("--policy", choices=(*POLICIES, "all"), default="fully_async")
    parser.add_argument("--trials", type=int, default=2000, help="of each policy")
    parser.add_argument("--first-seed", default="0", help="a number, or 'random'")
    parser.add_argument("--colocated", action="store_true", help="learner and engines share their devices in each")
    parser.add_argument("--processes", type=int, default=1, help="how many run side by side")
    parser.add_argument("--keep", type=Path, help="append the policies and seeds that failed to this file")
    parser.add_argument("--show", type=int, default=3, help="print the tracebacks of so many failures")
    options = parser.parse_args(arguments)
    first = random.SystemRandom().randrange(10**6, 2**40) if options.first_seed == "random" else int(options.first_seed)
    num_failed = 0
    for policy in POLICIES if options.policy == "all" else (options.policy,):
        start_s = time.perf_counter()
        seeds = range(first, first + options.trials)
        print(f"{policy}: {options.trials} trials from seed {first}", flush=True)
        found = 0
        for seed, story in failed_seeds(policy, seeds, options.processes, are_colocated=options.colocated):
            found += 1
            print(story if found <= options.show else "", f"failed: {policy} {seed}", sep="", flush=True)
            if options.keep is not None:
                with options.keep.open("a") as file:
                    file.write(f"{policy} {seed}\n")
        took_s = time.perf_counter() - start_s
        print(f"{policy}: {found} of {options.trials} trials failed in {took_s:.0f} s", flush=True)
        num_failed += found
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
