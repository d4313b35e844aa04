"""``penstock chaos``: a run with faults in it, and the verdict."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.markup import escape
from rich.table import Table

from penstock.backends.engines.spec import are_modelled
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted
from penstock.runtime.chaos.faults import (
    LINK_FAULTS,
    REWARD_FAULTS,
    ChaosKind,
    last_reward_progress,
    plan_faults,
)
from penstock.runtime.chaos.injector import Injector, Tools
from penstock.runtime.chaos.verdict import judge
from penstock.runtime.chaos.watch import WatchedRun
from penstock.runtime.observability.texts import tokens_text
from penstock.runtime.run.wiring import actor_names
from penstock.runtime.run_folder import RUNS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from penstock.runtime.chaos.faults import ChaosFault
    from penstock.runtime.chaos.verdict import FaultVerdict, Verdict
    from penstock.runtime.scenario import Scenario

DEFAULT_TIMEOUT_S: Final = 900.0


def run_chaos(
    scenario: Scenario,
    scenario_path: Path,
    overrides: Sequence[str],
    faults: Sequence[ChaosFault],
    *,
    seed: int,
    timeout_s: float,
    console: Console,
) -> int:
    """Run a scenario with these faults; 0 when the verdict is clean, otherwise 1.

    Raises:
        UserFault: something that the faults need is missing here.
    """
    verdict = play(scenario, scenario_path, overrides, faults, seed=seed, timeout_s=timeout_s, console=console)
    show_verdict(verdict, console)
    return 0 if verdict.is_clean else 1


def planned_faults(
    scenario: Scenario, texts: Sequence[str], *, num_faults: int | None, seed: int, duration_s: float | None = None
) -> tuple[ChaosFault, ...]:
    """See :func:`~penstock.runtime.chaos.faults.plan_faults`; of a run of this scenario.

    Raises:
        UserFault: as there.
    """
    return plan_faults(
        texts,
        num_faults=num_faults,
        seed=seed,
        names=actor_names(scenario),
        num_ranks=scenario.learner.num_ranks,
        duration_s=duration_s,
        last_reward=last_reward_progress(scenario.run.num_steps, scenario.staleness.max_staleness or 0),
    )


def play(
    scenario: Scenario,
    scenario_path: Path,
    overrides: Sequence[str],
    faults: Sequence[ChaosFault],
    *,
    seed: int,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    console: Console | None = None,
) -> Verdict:
    """The same, without a word about the verdict.

    Raises:
        UserFault: something that the faults need is missing here, or the run refused to start.
    """
    kinds = {fault.kind for fault in faults}
    _check(kinds, scenario)
    if ChaosKind.DISK_FULL in kinds:
        from penstock.runtime.chaos.disk import enter_namespace

        enter_namespace(("-m", "penstock.runtime.cli", *sys.argv[1:]))
    parent = _make_parent(scenario)
    arguments = [str(scenario_path.absolute()), *overrides]
    with ExitStack() as stack:
        run = WatchedRun(parent, parent / RUNS)
        tools = _open_tools(stack, kinds, scenario, parent, run, seed, arguments)
        stack.enter_context(run)
        run.start(arguments)
        tell = _teller(console)
        tell(f"run folder below {parent}; {counted(len(faults), 'fault')}, seed {seed}; the verdict comes at its end")
        injector = Injector(run, faults, num_steps=scenario.run.num_steps, tools=tools, tell=tell)
        in_time = injector.play(timeout_s)
        if not in_time:
            run.end()  # so that its files are whole when they are read
        if not run.has_folder:
            raise UserFault(f"the run did not start: {run.output.strip() or 'it said nothing'}")
        board = tools.switchboard
        verdict = judge(
            run,
            injector.injected,
            num_steps=scenario.run.num_steps,
            staleness_bound=scenario.staleness.max_staleness or 0,
            progress_tokens=scenario.engines.progress_tokens,
            in_time=in_time,
            orders=tools.orders,
            hits={} if board is None else {str(kind): count for kind, count in board.table.num_hit.items()},
        )
        if tools.disk is not None:
            tools.disk.keep(run.folder, parent)
    return verdict


def _teller(console: Console | None) -> Callable[[str], None]:
    """Nothing else is on the terminal for minutes, as the run's own output goes into a file."""

    def tell(line: str) -> None:
        if console is not None:
            console.print(escape(line), soft_wrap=True)

    return tell


def _check(kinds: set[ChaosKind], scenario: Scenario) -> None:
    """The scenario has what these faults are done to."""
    rewards = sorted(kinds & REWARD_FAULTS)
    if rewards and are_modelled(scenario.engines):
        raise UserFault(
            f"--faults: {rewards[0]}: with simulated engines the rewards are simulated too, and no reward function is "
            "called; take a scenario with real ones"
        )
    if ChaosKind.NODE_LOSS in kinds and scenario.runtime.host != "ray":
        raise UserFault("--faults: node_loss takes a Ray node away; set runtime.host=ray")
    if ChaosKind.NODE_LOSS in kinds and scenario.runtime.ray_address is not None:
        raise UserFault(
            "--faults: node_loss starts two Ray nodes of its own; leave runtime.ray_address out of the scenario"
        )


def _make_parent(scenario: Scenario) -> Path:
    stem = Path(scenario.run.folder).expanduser().absolute() / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        stem.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise UserFault(f"{stem}: cannot create the folder for the run: {error.strerror}") from None
    return stem


def _open_tools(
    stack: ExitStack,
    kinds: set[ChaosKind],
    scenario: Scenario,
    parent: Path,
    run: WatchedRun,
    seed: int,
    arguments: list[str],
) -> Tools:
    """What these kinds of faults need; adds to the run's arguments and environment."""
    environment: dict[str, str] = {}
    from penstock.runtime.chaos.switchboard import Switchboard

    switchboard, orders, disk, nodes = None, None, None, None
    if kinds & LINK_FAULTS:
        from penstock.runtime.hosts.processes.rerouting import SOCKET_VARIABLE

        switchboard = stack.enter_context(Switchboard(seed=seed, pid_of=lambda name: (run.find(name) or (None,))[0]))
        environment[SOCKET_VARIABLE] = str(switchboard.path)
    if kinds & REWARD_FAULTS:
        from penstock.runtime.chaos import rewards

        orders = parent / "orders"
        orders.mkdir()
        orders.with_name(rewards.MET_FOLDER).mkdir()
        environment |= {rewards.FUNCTION_VARIABLE: scenario.reward.function, rewards.ORDERS_VARIABLE: str(orders)}
        arguments.append(f"reward.function={Path(rewards.__file__)}:Misbehaving")
    if ChaosKind.DISK_FULL in kinds:
        from penstock.runtime.chaos.disk import SmallDisk

        disk = SmallDisk(parent / RUNS)
    if ChaosKind.NODE_LOSS in kinds:
        from penstock.runtime.chaos.nodes import TwoNodes

        nodes = stack.enter_context(TwoNodes(environment))
        arguments.append(f"runtime.ray_address={nodes.address}")
    run.set_environment(environment)
    return Tools(switchboard=switchboard, orders=orders, disk=disk, nodes=nodes)


def show_verdict(verdict: Verdict, console: Console) -> None:
    """Print it."""
    columns = ("fault", "at step", "at", "lasted", "replaced after", "full speed after")
    faults = Table(*columns, title="faults", title_justify="left")
    for row in verdict.faults:
        faults.add_row(*_fault_cells(row))
    console.print(faults)
    restarts = ", ".join(f"{name} × {count}" for name, count in sorted(verdict.restarts.items())) or "none"
    usual = verdict.usual_tokens_per_s
    rows = (
        (
            "completed",
            f"{'yes' if verdict.completed else 'NO'}, {verdict.version} of {counted(verdict.num_steps, 'step')}",
        ),
        ("drives", f"{len(verdict.exit_codes)}, exit codes {', '.join(map(str, verdict.exit_codes)) or '–'}"),
        ("balance", _balance(verdict)),
        ("staleness", f"largest {verdict.max_staleness}, bound {verdict.staleness_bound}"),
        (
            "duplicates",
            f"{counted(verdict.duplicate_groups, 'group')} trained twice, {verdict.generated_again} issued again",
        ),
        ("tokens", tokens_text(verdict.balance)),
        (
            "beside these",
            f"about {verdict.tokens_lost_estimate:,} lost with killed engines; {verdict.tokens_saved:,} saved",
        ),
        ("speed", "–" if usual is None else f"{usual:,.0f} tokens/s before the first fault"),
        ("restarts", restarts),
    )
    table = Table("what", "came to", title="verdict", title_justify="left")
    for what, came_to in rows:
        table.add_row(what, came_to)
    if verdict.hits:
        table.add_row("links", ", ".join(f"{kind} × {count}" for kind, count in sorted(verdict.hits.items())))
    console.print(table)
    for problem in verdict.problems:
        console.print(f"[bold red]✗[/] {escape(problem)}")
    console.print("[bold green]clean[/]" if verdict.is_clean else "[bold red]NOT clean[/]")


def _balance(verdict: Verdict) -> str:
    text = f"{counted(verdict.issued, 'sample')} issued, {verdict.trained:,} trained"
    return f"{text}, {verdict.evaluated:,} evaluated" if verdict.evaluated else text


def _fault_cells(row: FaultVerdict) -> tuple[str, ...]:
    never = row.at_s is None
    restored, back = row.restored_after_s, row.back_after_s
    return (
        row.fault,
        "never" if never else str(row.version),
        "–" if row.at_s is None else f"{row.at_s:.1f} s",
        f"{row.duration_s:.2f} s" if row.duration_s else "–",
        "–" if back is None else f"{back:.1f} s",
        "–" if restored is None else f"{restored:.1f} s",
    )
