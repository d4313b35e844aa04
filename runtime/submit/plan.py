"""What a scenario takes of a cluster, as the templates fill it in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.engines.served.sglang.environment import environments_folder
from penstock.messages.errors import UserFault
from penstock.messages.option_keys import is_user_code
from penstock.runtime.preflight.machine import needed_environments
from penstock.runtime.scenario import dump_scenario
from penstock.runtime.scenario.named import named_values
from penstock.runtime.submit.job import JobPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario import Scenario
    from penstock.runtime.submit.job import Job
    from penstock.runtime.submit.options import SubmitOptions

OF_THE_JOB: Final = "auto"
"""``runtime.ray_address`` that means the cluster which the job itself starts."""
SGLANG: Final = "SGLang's environment"


class Size(NamedTuple):
    """Nodes that are enough."""

    num_nodes: int
    gpus_per_node: int
    num_cpu_threads: int
    """Of processes without a GPU, which are on one node together."""
    num_gpu_threads: int = 0
    """Of the others, on all nodes together."""

    def cpus_per_node(self, num_nodes: int) -> int:
        """One for each thread of any node, as the first may be any; of a GPU two at least: who has it, and its loader
        or tokenizer."""
        shared = max(-(-self.num_gpu_threads // num_nodes), 2 * self.gpus_per_node)
        return max(1, self.num_cpu_threads + shared)


def for_cluster(scenario: Scenario) -> Scenario:
    """The scenario with the Ray of its job, wherever that will be.

    Raises:
        UserFault: it names a cluster that runs already, or no cluster can run it.
    """
    runtime = scenario.runtime
    if runtime.ray_address not in (None, OF_THE_JOB):
        raise UserFault(
            f"runtime.ray_address: {runtime.ray_address} is a cluster that runs already, and --submit starts one for "
            "the run: leave the key out, or submit without it"
        )
    return msgspec.structs.replace(scenario, runtime=msgspec.structs.replace(runtime, ray_address=OF_THE_JOB))


def num_nodes_of(scenario: Scenario, size: Size, options: SubmitOptions, *, has_own_cluster: bool) -> int:
    """How many nodes are asked for.

    Args:
        scenario: resolved.
        size: nodes that are enough.
        options: the submit config, which may ask for more.
        has_own_cluster: the scheduler starts Ray also for one node.

    Raises:
        UserFault: the submit config asks for fewer nodes, or the scenario cannot run on several.
    """
    num_nodes = options.nodes or size.num_nodes
    if num_nodes < size.num_nodes:
        raise UserFault(f"nodes: {num_nodes} of the submit config are too few; the scenario takes {size.num_nodes}")
    if scenario.runtime.host == "local" and (num_nodes > 1 or has_own_cluster):
        raise UserFault("runtime.host: local runs on one machine without Ray; set it to ray to submit it like this")
    return num_nodes


def plan_job(
    scenario: Scenario, job: Job, run_folder: str, size: Size, options: SubmitOptions, num_nodes: int
) -> JobPlan:
    """What is filled in.

    Args:
        scenario: resolved, as the job is to read it.
        job: the run's folder here.
        run_folder: the same as the cluster sees it.
        size: nodes that are enough.
        options: the submit config.
        num_nodes: that are asked for.
    """
    return JobPlan(
        name=job.name,
        run_folder=run_folder,
        num_nodes=num_nodes,
        gpus_per_node=size.gpus_per_node,
        cpus_per_node=options.cpus_per_node or size.cpus_per_node(num_nodes),
        uses_sglang=size.gpus_per_node > 0 and SGLANG in needed_environments(scenario),
        sglang_folder=str(environments_folder()),
        pass_env=scenario.runtime.pass_env,
        scenario=dump_scenario(scenario).rstrip("\n"),
    )


def paths_of(scenario: Scenario) -> Iterator[str]:
    """``key=path`` of each file that the scenario names."""
    for each in named_values(scenario):
        path = each.value.partition(".py:")[0] if is_user_code(each.value) else each.value
        if path.startswith("/"):
            yield f"{each.key}={each.value}"
