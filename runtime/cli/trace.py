"""``penstock trace``: lives of samples and steps as trees, and as a file for a viewer."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.markup import escape
from rich.text import Text
from rich.tree import Tree

from penstock.messages.errors import UserFault
from penstock.messages.samples import SampleKey, group_name
from penstock.messages.texts import counted
from penstock.runtime.launch.runs import read_record
from penstock.runtime.observability.lives import (
    OF_ATTEMPT,
    Fate,
    failed_or_dropped,
    read_fates,
    read_lives,
    sample_key,
    slowest,
)
from penstock.runtime.observability.pushed import pushed_keys
from penstock.runtime.observability.removed import SPANS, removed_text
from penstock.runtime.observability.samples import reason_counts
from penstock.runtime.observability.spans import step_trace_id, version_trace_id
from penstock.runtime.observability.subjects import step_subject, version_subject
from penstock.runtime.observability.texts import length_text, told
from penstock.runtime.observability.trace_view import write_view
from penstock.runtime.observability.traces import run_salt, spans_by_trace, write_otlp
from penstock.runtime.observability.trackers import read_activity, read_events_about
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.observability.lives import Life, Stage
    from penstock.runtime.observability.traces import SpanRow
    from penstock.runtime.observability.trackers import EventRow

MAX_REASON: Final = 500
_NOT_RECORDED: Final = "not recorded; at most so long"
DEFAULT_SLOWEST: Final = 5
MAX_STEPS: Final = 100
"""Turns and calls that are shown of one generation."""


class Chosen(NamedTuple):
    """Which lives are asked for; at most one of the first four."""

    sample: str = ""
    step: int | None = None
    slowest: int | None = None
    has_failed: bool = False
    was_dropped: bool = False
    limit: int = 20
    shows_events: bool = False

    @property
    def num_choices(self) -> int:
        """How many kinds of lives are asked for; those that failed and those that were dropped go together."""
        one_of = (self.sample, self.step is not None, self.slowest is not None, self.has_failed or self.was_dropped)
        return sum(map(bool, one_of))


def show_trace(folder: Path, console: Console, chosen: Chosen, views: Sequence[Path]) -> None:
    """Print the chosen lives, and write them into the files for a viewer. Without a choice all that are traced are
    written, or, where there is no file either, the slowest printed.

    Raises:
        UserFault: more than one thing is asked for; there is no such sample or step; the run was not traced; a file
            cannot be read or written.
    """
    record = read_record(folder)
    if chosen.num_choices > 1:
        raise UserFault(
            "penstock trace shows one of --sample GROUP/INDEX, --step N, --slowest N, --failed and --dropped; remove "
            "the others"
        )
    if not chosen.num_choices and not views:
        chosen = chosen._replace(slowest=DEFAULT_SLOWEST)
    fates, summary = _chosen_fates(folder, chosen)
    steps = _step_spans(folder, [fate.version for fate in fates] + [chosen.step])
    removed = removed_text(folder, SPANS)
    if chosen.step is not None and not steps:
        raise UserFault(
            f"{folder}: there is no trace of step {chosen.step}; {removed or 'penstock status says how many there are'}"
        )
    shown = fates if views or chosen.step is not None else fates[: chosen.limit]
    lives = [life for life in read_lives(folder, shown) if life.is_traced or chosen.num_choices]
    began_ns = round(1e9 * record.began_at)
    handled = read_events_about(folder, _subjects(lives, steps)) if chosen.shows_events else []
    if chosen.sample and not lives[0].stages:
        raise UserFault(
            f"{folder}: nothing is known of sample {chosen.sample}: it was never issued, or it is in the system still "
            f"and observability.trace_fraction left it out{removed and f'; or {removed}'}"
        )
    if chosen.step is not None:
        tree = _step_tree(chosen.step, steps, lives, chosen)
        about = (step_subject(chosen.step), version_subject(chosen.step))
        _add_events(tree, [row for row in handled if row.about in about], steps[0].start_ns - began_ns)
        console.print(tree)
    pushed = pushed_keys(folder)
    for life in lives[: chosen.limit] if chosen.num_choices and chosen.step is None else ():
        key = pushed.get(life.fate.group_id, "")
        tree = life_tree(life, pushed=key)
        of_life = [row for row in handled if row.about in _subjects_of(life)]
        _add_events(tree, of_life, life.start_ns - began_ns)
        console.print(tree)
    for line in [*summary, *([removed] if removed else [])]:
        console.print(escape(terminal_text(line)), style="dim", soft_wrap=True)
    lanes = read_activity(folder) if views else {}
    for path in views:
        count = write_view(path, began_ns=began_ns, lanes=lanes, lives=lives, steps=steps, handled=handled)
        console.print(escape(f"wrote {path}: {count:,} events; open it at ui.perfetto.dev or chrome://tracing"))


def show_otlp(folder: Path, console: Console, path: Path) -> None:
    """Write all spans of a run for a collector.

    Raises:
        UserFault: the run was not traced, or a file cannot be read or written.
    """
    console.print(escape(f"wrote {path}: {write_otlp(folder, path):,} batches of spans as OTLP/JSON"))


def _chosen_fates(folder: Path, chosen: Chosen) -> tuple[list[Fate], list[str]]:
    """Of the samples, and what is said below them."""
    if chosen.sample:
        group_id, index = sample_key(chosen.sample)
        return read_fates(folder, sample=(group_id, index)) or [Fate(group_id, index)], []
    if chosen.slowest is not None:
        fates, num_traced = slowest(folder, chosen.slowest)
        return fates, [f"the slowest {len(fates):,} of {num_traced:,} samples that are traced"]
    if chosen.has_failed or chosen.was_dropped:
        fates = failed_or_dropped(folder, failed=chosen.has_failed, dropped=chosen.was_dropped)
        causes = Counter(fate.text for fate in fates)
        open_ones = sum(count.num_samples for count in reason_counts(folder)) if chosen.has_failed and not fates else 0
        lines = [f"{count:,} × {cause}" for cause, count in causes.most_common()]
        if open_ones:
            lines = [f"{open_ones:,} have failed in groups that are not done: penstock samples {folder} --failed"]
        return fates, [f"{min(len(fates), chosen.limit):,} of {len(fates):,} such samples are shown", *lines]
    return read_fates(folder, step=chosen.step), []


def _subjects(lives: Sequence[Life], steps: Sequence[SpanRow]) -> set[str | SampleKey]:
    """What events about these lives and steps are about."""
    subjects = {subject for life in lives for subject in _subjects_of(life)}
    versions = {version for row in steps if isinstance(version := row.attributes.get("version"), int)}
    return subjects | {subject(version) for version in versions for subject in (step_subject, version_subject)}


def _subjects_of(life: Life) -> tuple[SampleKey, str]:
    return SampleKey(life.fate.group_id, life.fate.index), group_name(life.fate.group_id)


def _step_spans(folder: Path, versions: Sequence[int | None]) -> list[SpanRow]:
    """Of these steps and of the versions that they made."""
    salt = run_salt(folder)
    made = {version for version in versions if version is not None}
    ids = {trace_id(salt, version).hex() for version in made for trace_id in (step_trace_id, version_trace_id)}
    rows = [row for found in spans_by_trace(folder, ids).values() for row in found]
    return sorted(rows, key=lambda row: (row.start_ns, -row.end_ns, row.name))


# --- as trees --------------------------------------------------------------------------------------------------------


def life_tree(life: Life, *, pushed: str = "") -> Tree:
    """A life: its stages by their start, below their attempts where there are several. ``pushed``: the key of its
    group, where that came finished from outside."""
    fate = life.fate
    length = (f"  {length_text(life.duration_s)}", "cyan")
    head = Text.assemble((fate.name, "bold"), "  ", terminal_text(fate.text), length)
    head.append("" if life.is_traced else "  not traced; the times are the ledger's", style="dim")
    tree = Tree(head)
    if pushed:
        tree.add(f"made outside, and pushed as {escape(terminal_text(pushed))}")
    if fate.reason:
        tree.add(Text(terminal_text(fate.reason, max_chars=MAX_REASON), style="red"))
    attempts = {stage.attempt for stage in life.stages if stage.name in OF_ATTEMPT}
    branches: dict[int | None, Tree] = {}
    generations: dict[str, Tree] = {}
    """By span id; by attempt where they are not recorded."""
    for stage in life.stages:
        branch = tree
        if len(attempts) > 1 and stage.name in OF_ATTEMPT:
            branch = branches.get(stage.attempt) or tree.add(_attempt_text(stage.attempt, life))
            branches[stage.attempt] = branch
        added = branch.add(_line(stage.start_ns - life.start_ns, stage, is_bound=not stage.is_recorded))
        if stage.name == "generate":
            generations[stage.span_id or str(stage.attempt)] = added
    for step in life.steps:
        below = generations.get(step.parent_id) or generations.get(str(step.attempt)) or branches.get(step.attempt)
        _add_step(below or tree, step, life)
    return tree


def _add_step(branch: Tree, step: Stage, life: Life) -> None:
    """A turn or a call of an episode, if it is among the first."""
    if len(branch.children) < MAX_STEPS:
        branch.add(_line(step.start_ns - life.start_ns, step, is_bound=not step.is_recorded))
    elif len(branch.children) == MAX_STEPS:
        branch.add(Text("… and more, which --perfetto FILE holds", style="dim"))


def _attempt_text(attempt: int | None, life: Life) -> Text:
    """An attempt, and how it ended where another one came after it."""
    text = Text(f"attempt {attempt or 0}", style="bold")
    later = [s.start_ns for s in life.stages if s.name == "issue" and (s.attempt or 0) > (attempt or 0)]
    ended = any(stage.name == "generate" and stage.attempt == attempt for stage in life.stages)
    if later:
        story = "issued again" if ended else "what it generated was not recorded; issued again"
        text.append(f"  {story}", style="yellow")
    return text


def _step_tree(step: int, rows: Sequence[SpanRow], lives: Sequence[Life], chosen: Chosen) -> Tree:
    start_ns = rows[0].start_ns
    tree = Tree(Text(f"step {step}", style="bold"))
    for row in rows:
        tree.add(_line(row.start_ns - start_ns, row, is_bound=False))
    num_traced = sum(life.is_traced for life in lives)
    branch = tree.add(f"{counted(len(lives), 'sample')}, {num_traced:,} of them traced, the slowest first")
    for life in sorted(lives, key=lambda life: -life.duration_s)[: chosen.limit]:
        longest = max(life.stages, key=lambda stage: stage.duration_s)
        branch.add(
            Text.assemble(
                (life.fate.name, "bold"), (f"  {length_text(life.duration_s)}", "cyan"),
                f"  {longest.name} {length_text(longest.duration_s)} at {terminal_text(longest.actor)}",
                ("" if life.is_traced else "  not traced", "dim"),
            )
        )  # fmt: skip
    return tree


def _add_events(tree: Tree, rows: Sequence[EventRow], after_ns: int) -> None:
    """What the actors handled, by time, which is counted from so long after the run began."""
    branch = tree.add("handled events") if rows else tree
    for row in rows:
        when, what = f"+{row.at_s - after_ns / 1e9:.3f} s", f"  {terminal_text(row.event):<20}  "
        about = (f"  {terminal_text(row.summary)}", "dim")
        branch.add(Text.assemble((when, "dim"), what, terminal_text(row.actor), about))


def _line(after_ns: int, one: Stage | SpanRow, *, is_bound: bool) -> Text:
    """When, what, how long, who, and what is known of it."""
    length = ("≤ " if is_bound else "") + length_text(one.duration_s)
    facts = [*told(one.attributes), *([_NOT_RECORDED] if is_bound else [])]
    return Text.assemble(
        (f"+{after_ns / 1e9:.3f} s", "dim"), f"  {terminal_text(one.name):<11}", (f" {length:>9}", "cyan"),
        f"  {terminal_text(one.actor)}", ("  " + terminal_text(", ".join(facts), max_chars=MAX_REASON), "dim"),
    )  # fmt: skip
