"""The terminal while a run goes on: phases of the start, progress, figures, the state of each actor.

Invariants:

* On a terminal the view redraws itself in place, twice a second, and leaves the terminal as it found it: also after
  an exception, and after a SIGTERM that nobody else handles.
* Elsewhere (a file, a CI log) it prints a plain line every few seconds and for what happens seldom; the number of lines
  a minute is bounded whatever the run does.
* All methods may be called from any thread, and none of them waits for the terminal's redraw.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Self

from rich.control import Control
from rich.live import Live
from rich.markup import escape

from penstock.messages.texts import counted
from penstock.runtime.observability.evaluations import evaluation_text
from penstock.runtime.observability.live_state import PAUSED_TEXT, LiveState
from penstock.runtime.observability.live_view import draw
from penstock.runtime.observability.start_phase import start_phase
from penstock.runtime.observability.texts import clock_text, duration_text, fixed, short_count
from penstock.runtime.safe_text import terminal_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, TracebackType

    from rich.console import Console, RenderableType

    from penstock.messages.training import ActorReported, FailuresCounted, StepReported
    from penstock.runtime.observability.accounting import Accounts
    from penstock.runtime.observability.evaluations import EvaluationRow
    from penstock.runtime.observability.summary import RunSummary
    from penstock.runtime.observability.trackers import StepRow

REDRAWS_PER_S: Final = 2
PLAIN_INTERVAL_S: Final = 5.0
MAX_NOTES: Final = 12
"""Notes printed within ``NOTES_WINDOW_S``; further ones are only counted."""
NOTES_WINDOW_S: Final = 60.0
QUIET_S: Final = 10.0
"""Without a terminal nothing is longer silent than this."""
_PHASE_KEY: Final = re.compile(r"[:\d(]")


class LiveView:
    """What ``penstock run`` shows. A context manager: enter it before anything starts, leave it when all has ended."""

    def __init__(
        self,
        scenario_name: str,
        num_steps: int,
        console: Console,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        plain_interval_s: float = PLAIN_INTERVAL_S,
    ) -> None:
        """
        Args:
            scenario_name: heads the view.
            num_steps: batches that the run is to train.
            console: where to draw.
            clock_s: any steady clock, in seconds.
            plain_interval_s: without a terminal, seconds between two lines of progress.
        """
        self._console = console
        self._clock_s = clock_s
        self._plain_interval_s = plain_interval_s
        self._lock = threading.RLock()
        self._state = LiveState(scenario_name, num_steps, now_s=clock_s())
        self._live: Live | None = None
        self._last_plain_s = -plain_interval_s
        self._phase_key = ""
        self._phase_began_s = 0.0
        self._note_times: deque[float] = deque()
        self._num_muted_notes = 0
        self._handled_sigterm = False
        self._is_followed = False

    # --- context ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._draw,
                console=self._console,
                refresh_per_second=REDRAWS_PER_S,
                transient=True,
                redirect_stdout=True,
                redirect_stderr=True,
                vertical_overflow="crop",
            )
            self._catch_sigterm()
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop_drawing()
        with self._lock:
            self._tell_muted_notes()

    # --- what the run tells -----------------------------------------------------------------------------------

    def phase(self, text: str) -> None:
        """What is being started now, such as ``starting Ray`` or ``warm start 43 %``. A text that differs from the last
        one only behind its first colon, digit or bracket is the same phase further on."""
        with self._lock:
            key = _phase_key(text)
            now_s = self._clock_s()
            if key != self._phase_key:
                self._end_phase(now_s)
                self._phase_key, self._phase_began_s = key, now_s
                self._last_plain_s = -self._plain_interval_s
            has_news, self._state.phase = text != self._state.phase, text
            if self._live is None and has_news and self._is_plain_due(now_s):
                self._print(text)

    def restore(self, rows: Sequence[StepRow], summary: RunSummary | None) -> None:
        """The run goes on from these steps of earlier drives; see ``RunFigures.restore``."""
        with self._lock:
            self._state.restore(rows, summary)

    def actor(self, report: ActorReported) -> None:
        """An actor's report."""
        with self._lock:
            known = self._state.num_answers
            self._state.actor(report, self._clock_s())
            if self._state.total_answers and self._state.num_answers > known:
                self._tell_answers()
            is_known = self._is_followed or self._state.warm_start is not None
            if is_known and not self._state.has_stepped and not self._state.num_answers:
                self.phase(start_phase(self._state))

    def follow(self) -> None:
        """Every actor is up: from now on until the first step their reports say what the run is doing."""
        with self._lock:
            self._is_followed = True
            self.phase(start_phase(self._state))

    def failures(self, counted: FailuresCounted) -> None:
        """Samples have failed, for these reasons."""
        with self._lock:
            self._state.figures.failures = counted

    def tick(self) -> None:
        """Time goes by: without a terminal, say what is going on at least every ``QUIET_S``."""
        with self._lock:
            now_s = self._clock_s()
            if self._live is not None or now_s - max(self._last_plain_s, self._state.began_s) < QUIET_S:
                return
            self._last_plain_s = now_s
            if self._phase_key:
                self._print(f"{self._state.phase} (for {duration_text(now_s - self._phase_began_s)})")
            elif self._state.has_stepped:
                self._print(self._progress_line())

    def expect_answers(self, total: int) -> None:
        """The run only evaluates, and so many answers are wanted."""
        with self._lock:
            self._state.total_answers = total

    def actor_lost(self, name: str) -> None:
        """This actor was given up and is being replaced."""
        with self._lock:
            self._state.lost(name)

    def actor_left(self, name: str) -> None:
        """This engine is not in the run any more."""
        with self._lock:
            self._state.leaves(name)

    def step(self, report: StepReported) -> None:
        """A recorded step."""
        with self._lock:
            now_s = self._clock_s()
            self._end_phase(now_s)
            self._state.step(report, now_s)
            is_last = report.version >= self._state.num_steps
            if self._live is None and (self._is_plain_due(now_s) or is_last):
                self._print(self._progress_line())

    def evaluated(self, row: EvaluationRow) -> None:
        """An evaluation is done: a line that stays."""
        with self._lock:
            self._print(evaluation_text(row))

    def sample(self, text: str) -> None:
        """A sample, so that people see what the model writes."""
        with self._lock:
            self._print(text, style="dim")

    def note(self, text: str) -> None:
        """Something that happens seldom and that people should see, such as the loss of an engine."""
        with self._lock:
            now_s = self._clock_s()
            while self._note_times and self._note_times[0] <= now_s - NOTES_WINDOW_S:
                self._note_times.popleft()
            if len(self._note_times) >= MAX_NOTES:
                self._num_muted_notes += 1
                return
            self._tell_muted_notes()
            self._note_times.append(now_s)
            self._print(text, style="yellow")

    def finish(self, summary: RunSummary, accounts: Accounts | None = None) -> None:
        """The run is over: show what it came to, and where time and tokens went."""
        with self._lock:
            self._end_phase(self._clock_s())
        self._stop_drawing()
        with self._lock:
            self._tell_muted_notes()
        from penstock.runtime.observability.summary_view import show_summary  # brings the report

        show_summary(summary, self._console, accounts)

    # --- inside -----------------------------------------------------------------------------------------------

    def _stop_drawing(self) -> None:
        with self._lock:
            live, self._live = self._live, None
        if live is None:
            return
        try:
            live.stop()
        finally:
            # Past rich: a signal that struck while it emptied its buffer leaves it buffering, and the cursor hidden.
            self._console.file.write(str(Control.show_cursor(True)))
            self._console.file.flush()
            self._release_sigterm()

    def _draw(self) -> RenderableType:
        with self._lock:
            return draw(self._state, self._clock_s(), self._console.width, self._console.height)

    def _end_phase(self, now_s: float) -> None:
        if self._phase_key:
            took = duration_text(now_s - self._phase_began_s)
            self._print(f"✓ {self._phase_key} ({took})", style="dim")
        self._phase_key = self._state.phase = ""

    def _progress_line(self) -> str:
        state = self._state
        percent = 100 * state.version / state.num_steps
        parts = [
            f"step {state.version}/{state.num_steps} ({percent:.0f} %)",
            f"reward {fixed(state.recent_reward, 3)}",
            f"staleness mean {fixed(state.recent_staleness, 1)} max {state.max_staleness}",
            f"{short_count(state.figures.trained_per_s)} trained tokens/s",
            f"left {clock_text(state.left_s)}",
            *([PAUSED_TEXT] if state.is_paused else []),
        ]
        return " · ".join(parts)

    def _tell_answers(self) -> None:
        now_s, state = self._clock_s(), self._state
        self._end_phase(now_s)
        if self._live is None and (self._is_plain_due(now_s) or state.num_answers >= state.total_answers):
            self._print(f"{state.num_answers}/{counted(state.total_answers, 'answer')}")

    def _is_plain_due(self, now_s: float) -> bool:
        if now_s - self._last_plain_s < self._plain_interval_s:
            return False
        self._last_plain_s = now_s
        return True

    def _tell_muted_notes(self) -> None:
        if self._num_muted_notes:
            count, self._num_muted_notes = self._num_muted_notes, 0
            self._print(f"({count} further notes were left out)", style="dim")

    def _print(self, text: str, style: str = "") -> None:
        """A line that stays; on a terminal it goes above the view."""
        at = clock_text(self._clock_s() - self._state.began_s)
        line = escape(terminal_lines(text))
        self._console.print(f"[dim]{at:>7}[/]  {line}", style=style, highlight=False, soft_wrap=True)

    def _catch_sigterm(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # The default action would end the process with the cursor hidden.
            signal.signal(signal.SIGTERM, _raise_exit)
            self._handled_sigterm = True

    def _release_sigterm(self) -> None:
        if self._handled_sigterm and signal.getsignal(signal.SIGTERM) is _raise_exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._handled_sigterm = False


def _raise_exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _phase_key(text: str) -> str:
    """The part of a phase that names it: ``warm start 43 %`` → ``warm start``."""
    return _PHASE_KEY.split(text, maxsplit=1)[0].strip() or text
