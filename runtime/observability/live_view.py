"""How the state of a run is drawn on a terminal. Pure: the same state and size give the same picture."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from penstock.messages.names import is_engine
from penstock.messages.texts import counted
from penstock.messages.training import Activity
from penstock.runtime.observability.live_state import PAUSED_TEXT
from penstock.runtime.observability.shares import LABELS
from penstock.runtime.observability.texts import clock_text, fixed, short_count, sparkline
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.runtime.observability.live_state import ActorState, LiveState

MAX_ENGINE_LINES: Final = 8
"""With more engines they share one line that counts them by state."""
MIN_BAR: Final = 10
MAX_BAR: Final = 40
SPARK_WIDTH: Final = 32
COLOURS: Final[dict[Activity, str]] = {
    Activity.WORKING: "green",
    Activity.WAITING_FOR_SAMPLES: "yellow",
    Activity.WAITING_FOR_DEMAND: "yellow",
    Activity.WAITING_FOR_WEIGHTS: "dark_orange3",
    Activity.WAITING_FOR_TOOLS: "cyan",
    Activity.APPLYING_WEIGHTS: "magenta",
    Activity.PUBLISHING: "blue",
    Activity.CHECKPOINTING: "blue",
    Activity.ASLEEP: "bright_black",
    Activity.STARTING: "bright_black",
    Activity.DOWN: "red",
    Activity.ABSENT: "bright_black",
}
_FIRST: Final = ("learner", "engine", "teacher", "reward_model")
_ROLES: Final = (*_FIRST, "prompt_source", "scorer", "filter", "buffer", "weight_publisher")
_spinner: Final = Spinner("dots", style="cyan")


def draw(state: LiveState, now_s: float, width: int, height: int) -> RenderableType:
    """The whole view, no higher than the terminal."""
    parts: list[RenderableType] = [_head(state, now_s, width)]
    if state.phase:
        parts.append(_phase(state))
    if state.version:
        parts.append(_figures(state, width))
    if state.is_paused:
        parts.append(Text(PAUSED_TEXT, style="yellow"))
    if first := next(iter(state.figures.failures.counts), None):
        told = (
            f"{counted(state.figures.failures.num_samples, 'sample')} failed, most often: "
            f"{terminal_text(first.example)}"
        )
        parts.append(Text(told, style="red", no_wrap=True, overflow="ellipsis"))
    room = height - 10
    if state.actors and room >= 3:
        parts += [Text(), _actors(state, room)]
    return Padding(Group(*parts), (1, 1, 0, 1))


def _head(state: LiveState, now_s: float, width: int) -> RenderableType:
    elapsed = clock_text(now_s - state.began_s)
    table = Table.grid(padding=(0, 1))
    if state.total_answers:
        bar = ProgressBar(total=state.total_answers, completed=state.num_answers, width=MAX_BAR)
        told = Text(f"{state.num_answers}/{counted(state.total_answers, 'answer')}")
        table.add_row(Text(state.name, style="bold"), bar, told, Text(elapsed, style="dim"))
        return table
    if not state.version:
        table.add_row(Text(state.name, style="bold"), Text(elapsed, style="dim"))
        return table
    progress = f"step {state.version}/{state.num_steps}"
    times = f"{elapsed} · {clock_text(state.left_s)} left"
    room = width - len(state.name) - len(progress) - len(times) - 8
    row: list[RenderableType] = [Text(state.name, style="bold")]
    if room >= MIN_BAR:
        row.append(ProgressBar(total=state.num_steps, completed=state.version, width=min(MAX_BAR, room)))
    table.add_row(*row, Text(progress), Text(times, style="dim"))
    return table


def _phase(state: LiveState) -> RenderableType:
    _spinner.update(text=Text(state.phase))
    return _spinner


def _figures(state: LiveState, width: int) -> Table:
    figures = state.figures
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=9)
    table.add_column(no_wrap=True, overflow="ellipsis")
    spark = sparkline(figures.rewards, min(SPARK_WIDTH, width - 24))
    table.add_row("reward", Text.assemble((fixed(state.recent_reward, 3), "bold"), "  ", (spark, "green")))
    policy = f" ({terminal_text(state.policy)})" if state.policy else ""
    table.add_row("staleness", f"mean {fixed(state.recent_staleness, 1)}, largest {state.max_staleness}{policy}")
    generated, trained = figures.generated_per_s, figures.trained_per_s
    table.add_row("tokens/s", f"{short_count(generated)} generated, {short_count(trained)} trained")
    totals = f"{short_count(figures.tokens_generated)} generated, {short_count(figures.tokens_trained)} trained"
    table.add_row("in all", totals)
    return table


def _actors(state: LiveState, room: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    engines = state.engines
    many = len(engines) > min(MAX_ENGINE_LINES, max(1, room - 6))
    names = [name for name in sorted(state.actors, key=_order) if not (many and is_engine(name))]
    rows = [_actor_row(name, state.actors[name]) for name in names]
    if many:
        rows.insert(1 if "learner" in state.actors else 0, _engines_row(engines))
    for row in rows[:room]:
        table.add_row(*row)
    return table


def _order(name: str) -> tuple[int, int, str]:
    head, _, tail = name.partition("/")
    role = _ROLES.index(head) if head in _ROLES else len(_ROLES)
    return role, int(tail) if tail.isdecimal() else 0, name


def _actor_row(name: str, actor: ActorState) -> tuple[Text, Text, Text]:
    label = Text(name.replace("_", " "))
    if actor.num_restarts:
        label.append(f" ↻{actor.num_restarts}", style="yellow")
    if actor.is_down:
        return label, Text("● down, being replaced", style="red"), Text()
    if actor.activity is None:
        return label, Text("● ", style="bright_black").append(actor.state, style="default"), Text()
    text = Text("● ", style=COLOURS[actor.activity]).append(LABELS[actor.activity], style="default")
    return label, text, Text(_business(actor), style="dim")


def _business(actor: ActorState) -> str:
    parts = [f"busy {100 * actor.shares.busy:.0f} %"]
    occupancy = actor.shares.occupancy
    if actor.running is not None:
        parts.append(f"{actor.running:.0f} running")
        if occupancy is not None:
            parts.append(f"slots {100 * occupancy:.0f} %")
    return ", ".join(parts)


def _engines_row(engines: dict[str, ActorState]) -> tuple[Text, Text, Text]:
    counts = Counter(_activity(actor) for actor in engines.values())
    states = Text()
    for activity in LABELS:
        if counts[activity]:
            states.append("● ", style=COLOURS[activity]).append(f"{counts[activity]} {LABELS[activity]}  ")
    busy = sum(actor.shares.busy for actor in engines.values()) / len(engines)
    restarts = sum(actor.num_restarts for actor in engines.values())
    label = Text(f"{counted(len(engines), 'engine')}")
    if restarts:
        label.append(f" ↻{restarts}", style="yellow")
    return label, states, Text(f"busy {100 * busy:.0f} %", style="dim")


def _activity(actor: ActorState) -> Activity:
    if actor.is_down:
        return Activity.DOWN
    return actor.activity or Activity.STARTING
