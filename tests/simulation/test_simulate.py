"""``penstock simulate``: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import gc
import io
import re
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console

from penstock.backends.ledger.memory import MemoryStore
from penstock.messages.errors import UserFault
from penstock.messages.training import Activity
from penstock.runtime.hosts.virtual.simulate import Simulation, simulate_scenario
from penstock.runtime.observability.accounting import read_accounts
from penstock.runtime.observability.shares import Shares
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.trackers import read_activity, read_run_events, read_steps
from penstock.runtime.run.modelled_rows import num_rows
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.modelled import load_modelled

if TYPE_CHECKING:
    from penstock.messages.training import StepReported
    from penstock.runtime.scenario import Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"
SMALL = (
    "engines.count=8",
    "learner.groups_per_batch=8",
    "run.num_steps=5",
)
LONG = (
    "engines.count=2",
    "sampling.samples_per_group=4",
    "learner.groups_per_batch=2",
    "learner.save_every=10",
    "engines.simulated.response_tokens_median=20",
    "engines.simulated.response_tokens_sigma=0",
    "run.num_steps=260",
)


def scenario(*overrides: str) -> Scenario:
    return load_scenario(SCENARIOS / "simulated_1024_engines.yaml", [*SMALL, *overrides])


def simulate(one: Scenario, *, seed: int = 7, folder: Path | None = None) -> tuple[int, str]:
    out = io.StringIO()
    console = Console(file=out, width=120, no_color=True)
    return simulate_scenario(one, seed=seed, console=console, run_folder=folder), out.getvalue()


def test_same_seed_prints_the_same_digest_and_another_seed_another_one() -> None:
    digests = [re.findall(r"digest\W+([0-9a-f]{32})", simulate(scenario(), seed=seed)[1]) for seed in (7, 7, 8)]
    assert len(digests[0]) == 1
    assert digests[0] == digests[1] != digests[2]


def test_where_nothing_can_be_lost_nothing_is_said_twice() -> None:
    often, rare = scenario("runtime.resend_after_s=0.05"), scenario()
    sent: list[tuple[int, float]] = []
    for one, may_lose in ((often, True), (often, False), (rare, False)):
        simulation = Simulation(one, may_lose=may_lose)
        at_s = simulation.run().at_s
        sent.append((simulation.host.links.num_sent, at_s))
    assert sent[1] == sent[2]
    assert sent[0][0] > 1.3 * sent[1][0]
    assert sent[0][1] == pytest.approx(sent[1][1], rel=0.02)
    # Engines that come and go are told again whatever was on its way.
    scaled = "engines.max=12", "engines.scale=by_bound"
    again = [Simulation(scenario(*scaled, f"runtime.resend_after_s={s}"), may_lose=False) for s in (0.05, 5)]
    assert [one.run().completed for one in again] == [True, True]
    assert again[0].host.links.num_sent > again[1].host.links.num_sent


def test_a_long_run_takes_no_more_memory_than_a_short_one() -> None:
    """What stays of each step is a few figures; without the rule it is a note of every sample."""
    grown: list[float] = []
    for may_lose in (False, True):
        seen: dict[int, int] = {}

        def told(report: StepReported, seen: dict[int, int] = seen) -> None:
            if report.version in (60, 240):
                gc.collect()
                seen[report.version] = tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        simulation = Simulation(scenario(*LONG), on_step=told, with_digest=False, may_lose=may_lose)
        assert simulation.run().completed
        tracemalloc.stop()
        grown.append((seen[240] - seen[60]) / 180)
    brief, whole = grown
    assert brief < 1000, f"{brief:.0f} bytes a step"
    assert whole > 10 * brief
    entries = MemoryStore(simulation.host.ledger).entries()
    assert sum(1 for _ in entries) > 260, "where somebody may follow the Buffer, its ledger is whole"


def test_result_says_what_people_look_for() -> None:
    code, text = simulate(scenario())
    assert code == 0
    for words in ("events/s", "of virtual time", "staleness", "issued =", "goodput", "% working", "step time"):
        assert words in text, words


def test_times_of_engines_and_learner_divide_without_remainder() -> None:
    simulation = Simulation(scenario())
    ending = simulation.run()
    result = simulation.result(ending, 1.0)
    assert result.engines.total_s == pytest.approx(8 * ending.at_s)
    assert result.learner.total_s == pytest.approx(ending.at_s)
    for shares in (result.engines, result.learner):
        assert sum(shares.percentages().values()) == pytest.approx(100.0)
    assert result.learner.seconds[Activity.WORKING] == pytest.approx(5 * 3.0)
    assert result.balance.is_balanced
    assert 0 < (result.goodput or 0) <= 1


def test_folder_has_what_a_real_run_leaves(tmp_path: Path) -> None:
    folder = tmp_path / "simulated"
    code, _ = simulate(scenario("engines.count=3"), folder=folder)
    assert code == 0
    summary = read_summary(folder)
    assert summary is not None
    assert (summary.completed, summary.version, summary.seed) == (True, 5, 7)
    assert summary.balance.is_balanced
    steps = read_steps(folder)
    assert [step.version for step in steps] == [1, 2, 3, 4, 5]
    lanes = read_activity(folder)
    assert (folder / "lanes.png").read_bytes().startswith(b"\x89PNG")
    assert set(lanes) == {"learner", "engine/0", "engine/1", "engine/2", "scorer"}
    for lane in lanes.values():
        assert Shares(lane).total_s == pytest.approx(summary.wall_s)
    accounts = read_accounts(folder)
    assert [lane.name for lane in accounts.lanes] == ["learner", "engine/0", "engine/1", "engine/2", "scorer"]
    assert all(abs(lane.remainder_s) < 1e-6 * summary.wall_s for lane in accounts.lanes)
    assert accounts.tokens.remainder == 0
    assert accounts.tokens.generated == summary.tokens_generated == steps[-1].tokens_generated
    events = read_run_events(folder)
    assert events[0].at_s <= events[-1].at_s <= summary.wall_s
    assert {event.actor for event in events} >= {"buffer", "scorer", "engine/0"}
    assert (folder / "report.html").stat().st_size > 1000
    assert load_scenario(folder / "scenario.yaml", []).run.seed == 7


def test_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserFault, match="not empty"):
        simulate(scenario(), folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("quickstart", ["engines.backend", "learner.backend", "learner.warm_start"]),
        ("learner_ranks", ["engines.backend", "learner.backend", "learner.num_ranks", "learner.warm_start"]),
        ("distill", ["engines.backend", "learner.backend", "learner.warm_start", "teacher.backend"]),
        ("simulated_1024_engines", []),
    ],
)
def test_a_scenario_of_real_parts_is_modelled_and_says_what_was_changed(name: str, changed: list[str]) -> None:
    one, said = load_modelled(SCENARIOS / f"{name}.yaml")
    assert said == changed
    assert (one.engines.backend, one.learner.backend) == ("simulated", "simulated")


def test_engines_of_further_kinds_are_modelled_with_slots_of_their_own() -> None:
    def simulated(slots: int) -> tuple[int, float]:
        more = f"engines.more=[{{backend: torch, count: 1, slots: {slots}}}]"
        one, said = load_modelled(SCENARIOS / "fully_async.yaml", [more, "run.num_steps=2", "engines.count=1"])
        assert "engines.more.0.backend" in said
        simulation = Simulation(one)
        result = simulation.result(simulation.run(), 1.0)
        assert result.completed
        return result.num_steps, result.virtual_s

    assert simulated(1) != simulated(64)


def test_the_quickstart_is_simulated_as_it_stands() -> None:
    one, _ = load_modelled(SCENARIOS / "quickstart.yaml", ["run.num_steps=2"])
    code, said = simulate(one)
    assert code == 0
    assert "digest" in said


@pytest.mark.parametrize("name", ["sync", "one_step_off", "fully_async"])
def test_every_policy_keeps_its_bound(name: str) -> None:
    one = scenario(f"staleness.policy={name}", "staleness.max_staleness=null")
    simulation = Simulation(one)
    result = simulation.result(simulation.run(), 1.0)
    assert result.completed
    assert result.max_staleness <= result.bound
    assert result.bound == {"sync": 0, "one_step_off": 1, "fully_async": 2}[name]


def test_asynchronous_run_is_faster_on_the_same_cluster_and_the_same_tokens() -> None:
    step_s: list[float] = []
    for name in ("sync", "one_step_off", "fully_async"):
        simulation = Simulation(scenario(f"staleness.policy={name}", "staleness.max_staleness=null", "run.num_steps=8"))
        step_s.append(simulation.result(simulation.run(), 1.0).step_s or 0.0)
    assert step_s[0] > step_s[1] > step_s[2]


def test_run_that_ends_otherwise_has_another_exit_code_and_its_story() -> None:
    """Rewards are all alike, so every group is turned away."""
    one = scenario("staleness.max_rejected_batches=1", "filter.min_response_tokens=8192")
    code, text = simulate(one)
    assert code == 1
    assert "not completed" in text
    assert "turned away" in text


def test_rows_of_made_data_are_known_and_those_of_files_are_not_needed() -> None:
    assert num_rows(scenario("data.path=lines:500")) == 500
    one = scenario("data.num_epochs=1")
    files = msgspec.structs.replace(one, data=msgspec.structs.replace(one.data, path="rows.jsonl"))
    with pytest.raises(UserFault, match=r"data\.path=lines:N for rows\.jsonl"):
        num_rows(files)


def test_dataset_that_ends_ends_the_run() -> None:
    simulation = Simulation(scenario("data.path=lines:20", "data.num_epochs=1", "run.num_steps=50"))
    result = simulation.result(simulation.run(), 1.0)
    assert result.completed
    assert result.balance.issued == 20 * 8
    assert result.balance.in_system == 0


def test_target_that_adapts_is_as_fast_as_the_full_bound_at_less_than_half_its_staleness() -> None:
    quick = ("engines.simulated.token_s=0.001", "engines.slots=64", "run.num_steps=40", "staleness.max_staleness=8")
    adapting = Simulation(scenario(*quick))
    full = Simulation(scenario(*quick, f"staleness.target_outstanding={9 * 8}"))
    auto, bound = adapting.result(adapting.run(), 1.0), full.result(full.run(), 1.0)
    assert auto.step_s is not None
    assert bound.step_s is not None
    assert auto.mean_staleness is not None
    assert bound.mean_staleness is not None
    assert bound.step_s / auto.step_s >= 0.97
    assert auto.mean_staleness < bound.mean_staleness / 2
