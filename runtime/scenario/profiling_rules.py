"""What cannot be written down or profiled, and how much a dump of steps takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.engines.options import engine_groups
from penstock.backends.engines.spec import capabilities_of, engines_that
from penstock.backends.learners.recording_options import DumpOptions
from penstock.backends.learners.spec import LEARNERS
from penstock.backends.protocol import Capability

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.rules import Broken
    from penstock.runtime.scenario.structure import Scenario


def profiling_rules(s: Scenario) -> Iterator[Broken]:
    """See :mod:`penstock.runtime.scenario.rules`."""
    learner = s.learner
    for key, given in (("dump", learner.dump), ("profile", learner.profile)):
        if given is not None and not LEARNERS.spec(learner.backend).can_record_steps:
            able = " or ".join(LEARNERS.having(lambda spec: spec.can_record_steps))
            yield ("learner", key), f"a {learner.backend} learner cannot; set learner.backend: {able}, or remove it"
    if s.engines.profile is not None:
        for group in engine_groups(s.engines):
            if Capability.PROFILED not in capabilities_of(group):
                able = " and ".join(engines_that(Capability.PROFILED))
                yield ("engines", "profile"), f"{group.backend} engines have no profiler, {able} have; remove it"
    blocks = {("learner", "dump"): learner.dump, ("learner", "profile"): learner.profile}
    for path, block in {**blocks, ("engines", "profile"): s.engines.profile}.items():
        if block is None:
            continue
        if block.first_step > s.run.num_steps:
            yield (
                (*path, "first_step"),
                f"the run ends with step {s.run.num_steps}, so there is no step {block.first_step}; lower it",
            )
        if block.last_step is not None and block.last_step < block.first_step:
            yield (*path, "last_step"), f"is before first_step, which is {block.first_step}; raise it"


def dumped_bytes(s: Scenario) -> tuple[int, int]:
    """How many steps are written down, and the bytes of each at most and uncompressed (of an episode: of each of its
    parts)."""
    from penstock.backends.learners.step_dumps import CONTEXT_BYTES, TOKEN_BYTES

    dump = s.learner.dump or DumpOptions(first_step=s.run.num_steps + 1)
    num_steps = sum(map(dump.takes, range(1, s.run.num_steps + 1)))
    response = s.sampling.max_response_tokens
    of_sample = TOKEN_BYTES * response + CONTEXT_BYTES * (s.model.max_context - response)
    return num_steps, s.learner.groups_per_batch * s.sampling.samples_per_group * of_sample
