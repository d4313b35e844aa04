"""What every backend is to its shell.

A backend carries out commands and answers with local events. ``execute`` returns at once; the work happens on the
backend's own threads or processes, and every answer goes through ``emit``, which may be called from any thread.
A backend that cannot go on raises from ``execute``, or calls ``fail`` from its thread: its process then ends with
the story, and the supervisor decides.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from penstock.messages.local import LocalEvent

if TYPE_CHECKING:
    from penstock.messages.base import Metric

Emit = Callable[[LocalEvent], None]
Fail = Callable[[BaseException], None]
CommandT = TypeVar("CommandT", contravariant=True)


class Capability(StrEnum):
    """What an engine or learner can do; a scenario that demands what is missing is refused with the reason."""

    SEEDED_SAMPLING = "seeded_sampling"
    IN_FLIGHT = "in_flight"
    INTERRUPT = "interrupt"
    STAGED_WEIGHTS = "staged_weights"
    CANARY = "canary"
    RETRACT = "retract"
    """Under ``interrupt`` it holds its requests itself and computes them again under the new weights."""
    GENERATES = "generates"
    """Real text that follows from a prompt, so episodes can be played with it."""
    FROM_ROWS = "from_rows"
    """It answers with the responses that the rows of the dataset hold."""
    MODELLED = "modelled"
    """It says how long things take and does nothing; on the virtual clock too."""
    HOLDS_WEIGHTS = "holds_weights"
    """They have to be carried to it. Who holds none is asked for no canary."""
    EXACT = "exact"
    """In float32 its log-probs are those of the learner but for rounding."""
    RECORDS_EXPERTS = "records_experts"
    """It can say which experts of a mixture each token went to."""
    RECORDS_KEPT = "records_kept"
    """It can say which tokens cut-offs left for each draw (``sampling.replay_kept``)."""
    MEDIA = "media"
    """It takes images, video and sound by their references, and looks at them itself."""
    SEES = "sees"
    """It looks at the images of files as the learner does, so prompts can hold all their tokens."""
    ANSWERS_JUDGES = "answers_judges"
    """Questions of a judge beside its samples."""
    EMBEDDED = "embedded"
    """It runs in its actor's process, so several, and the learner, can share a GPU."""
    JOINS = "joins"
    """It can join and leave a run that goes on, as embedded and modelled ones always can."""
    SAMPLES_PER_CALL = "samples_per_call"
    """It heeds ``Generate.sampling``: temperature, cut-offs and seed of one turn."""
    CONSTRAINED = "constrained"
    """It can hold one turn to a JSON schema or a regular expression."""
    PROFILED = "profiled"
    """It heeds ``engines.profile``."""
    TAKES_FP8 = "takes_fp8"
    """Weights may come to it as e4m3 numbers with scales of their blocks (``engines.quantization``)."""
    TAKES_ADAPTERS = "takes_adapters"
    """A publish may be low-rank adapters beside a model that came once (``learner.lora.publish: adapter``)."""


class Timers(Protocol):
    """A clock that calls back; simulated parts run on one."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call once after the delay; callbacks that fall due together are called in the order of their asking."""
        ...


class Backend(Protocol[CommandT]):
    """The heavy half of an actor."""

    def start(self, emit: Emit, fail: Fail) -> None:
        """Called once, before the first command, on the thread that owns the actor."""
        ...

    def execute(self, command: CommandT, /) -> None:
        """Begin one command; never blocks."""
        ...

    def gauges(self) -> tuple[Metric, ...]:
        """Current figures for metrics and the terminal (``engine/running``, ``engine/occupancy``); cheap."""
        ...

    def close(self, timeout_s: float) -> None:
        """End everything within the time, child processes included. Called once, also after a failure."""
        ...


@runtime_checkable
class Leaver(Protocol):
    """A backend that would leave something to the next incarnation of its actor, if the process ends without a word."""

    def leaves(self) -> None:
        """This actor is to leave, so nobody comes after it: what would be left ends with this process. Never blocks."""
        ...
