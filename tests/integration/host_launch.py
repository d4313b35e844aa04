"""``penstock run`` with echo actors: ``python host_launch.py RUN_FOLDER PLAN_JSON``."""

from __future__ import annotations

import sys
from pathlib import Path

import host_echo
import msgspec
from host_harness import HOST

from penstock.backends.engines.options import num_engines
from penstock.messages.names import engine_name
from penstock.runtime.hosts.driver.launcher import launch
from penstock.runtime.hosts.processes.job import DriverJob
from penstock.runtime.hosts.ray.cluster import make_temp_folder
from penstock.runtime.scenario import Scenario

SCENARIO: dict[str, dict[str, object]] = {
    "run": {"name": "echo", "num_steps": 100},
    "data": {"path": "rows.jsonl"},
    "engines": {"backend": "simulated"},
    "learner": {"backend": "simulated"},
    "runtime": {"heartbeat_s": 0.5, "host": HOST},
}


def main() -> int:
    folder = Path(sys.argv[1])
    plan = msgspec.json.decode(sys.argv[2], type=host_echo.RunPlan)
    given = msgspec.json.decode(sys.argv[3], type=dict[str, dict[str, object]])
    blocks = {name: SCENARIO.get(name, {}) | given.get(name, {}) for name in (*SCENARIO, *given)}
    scenario = msgspec.convert(blocks, Scenario)
    job = DriverJob(
        run_id=folder.name,
        run_folder=str(folder),
        temp_folder=str(make_temp_folder()),
        scenario=scenario,
        wiring="host_echo",
        names=(*host_echo.NAMES, *map(engine_name, range(1, num_engines(scenario.engines)))),
        plan=msgspec.msgpack.encode(plan),
    )
    print(job.temp_folder, flush=True)
    end = launch(job)
    if end.exit_code:
        sys.stderr.write(f"penstock: {end.story}\n")
    return end.exit_code


if __name__ == "__main__":
    sys.exit(main())
