"""Episodes that a user's functions play, in a pool of one process.

Invariants:

* Each episode that was opened ends here once: as its function says, or as ``infra_error`` when the function overruns
  its time or its process dies. Never with a reward that no function gave.
* A function that blocks the event loop, or does not end when it is told to, costs its process; the other episodes in it
  end as ``infra_error`` and are issued again.

| waits for | who ends it |
|---|---|
| an episode to ask for a turn, or to end | its function; ``episode.idle_timeout_s``, ``episode.timeout_s`` |
| a function that was told to stop | the function; past ``STOP_TIMEOUT_S`` its process is killed |
| an answer to ``Ping`` | the process; past ``episode.stall_timeout_s`` it is killed |
| a turn | the engine, as for any generation |
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.episodes.functions.choice import chosen
from penstock.backends.episodes.functions.wire import (
    SAID,
    Begin,
    Called,
    Ended,
    Ping,
    Pong,
    Said,
    SavedState,
    Setup,
    Stop,
    Taken,
    TurnMade,
    WantTurn,
)
from penstock.backends.episodes.playing import NOTHING, PROMPT, Answer
from penstock.backends.episodes.protocol import EpisodeOverError, TurnRequest
from penstock.backends.episodes.stops import StopWatch
from penstock.backends.processes.function_pool import FunctionPool
from penstock.backends.processes.function_process import FunctionProcess
from penstock.messages.arrays import TOKEN_BYTES, floats_view, pack_tokens, tokens_view
from penstock.messages.base import Metric
from penstock.messages.errors import UserFault
from penstock.messages.samples import (
    Cancelled,
    Completed,
    InfraError,
    PolicyError,
    Purpose,
    Reward,
    StopReason,
    Truncated,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.backends.episodes.functions.wire import Order
    from penstock.backends.episodes.options import EpisodeOptions
    from penstock.backends.episodes.playing import EndedBy
    from penstock.backends.episodes.protocol import Episode, EpisodeOutcome
    from penstock.backends.protocol import Fail
    from penstock.messages.samples import Outcome, Part

MODULE: Final = "penstock.backends.episodes.functions.worker"
STOP_TIMEOUT_S: Final = 10.0


class _Listener:
    """Whoever waits for a turn, for the backend. Its methods are called from any thread."""

    def __init__(self, driver: FunctionEpisodes, episode: int) -> None:
        self._driver = driver
        self._episode = episode
        self.masked = ""
        """Why the turn's tokens are not trained."""

    def advanced(self, new: Part) -> None:
        """See :class:`~penstock.backends.episodes.protocol.TurnListener`."""

    def ended(self, turn: Part, outcome: Outcome) -> None:
        """See :class:`~penstock.backends.episodes.protocol.TurnListener`."""
        if not isinstance(outcome, Cancelled | InfraError):
            self._driver.answered(self._episode, _answer(turn, outcome, self.masked))


class _Playing:
    """An episode in the process."""

    def __init__(self, episode: Episode, now_s: float) -> None:
        self.episode = episode
        self.began_at_s = now_s
        self.idle_since_s: float | None = now_s
        """None while the model makes a turn."""
        self.stopping_since_s: float | None = None
        """It is over for us, and its function has not ended yet."""
        self.num_turns = 0


class FunctionEpisodes(FunctionPool[Said, FunctionProcess[Said]]):
    """See the module; an :class:`~penstock.backends.episodes.protocol.EpisodeDriver`."""

    def __init__(self, setup: Setup, options: EpisodeOptions, model_folder: Path) -> None:
        super().__init__("episodes", "episode.generate", 1)
        self._setup = setup
        self._options = options
        self.model_folder = model_folder
        self._tokenizer: TextTokenizer | None = None
        self._posted: deque[Callable[[], None]] = deque()
        self._waiting: deque[Episode] = deque()
        """For the process to be loaded."""
        self._playing: dict[int, _Playing] = {}
        self._ids = itertools.count()
        self._pinged_at_s: float | None = None
        self._next_ping_s = 0.0
        self._num_ended: dict[str, int] = dict.fromkeys(("completed", "truncated", "policy_error", "infra_error"), 0)

    # --- EpisodeDriver ----------------------------------------------------------------------------------------

    def start(self, fail: Fail) -> None:
        """See :class:`~penstock.backends.episodes.protocol.EpisodeDriver`."""
        self._begin(fail)

    def opened(self, episode: Episode) -> None:
        """Play it."""
        self._post(partial(self._waiting.append, episode))

    def resumed(self, episode: Episode) -> None:
        """Its function does not know that it was paused."""

    def closed(self, episode: Episode, reason: str) -> None:
        """Its function is cancelled."""
        self._post(partial(self._on_closed, episode))

    def gauges(self) -> tuple[Metric, ...]:
        """Episodes that are played, and totals of how they ended."""
        totals = (Metric(f"episodes/{name}", float(count)) for name, count in self._num_ended.items())
        return (
            Metric("episodes/playing", float(len(self._playing))),
            *totals,
            Metric("episodes/process_restarts", float(self.num_restarts)),
        )

    @property
    def pid(self) -> int | None:
        """Of the process that plays; None while there is none."""
        return next((process.pid for process in list(self._processes)), None)

    def answered(self, number: int, answer: Answer) -> None:
        """The model has made the turn that an episode waits for. From any thread; returns at once."""
        self._post(partial(self._on_answered, number, answer))

    def _post(self, action: Callable[[], None]) -> None:
        self._posted.append(action)
        self._wake()

    # --- the pool's thread ------------------------------------------------------------------------------------

    def _open_process(self) -> FunctionProcess[Said]:
        process = FunctionProcess[Said](MODULE, said=SAID)
        self._pinged_at_s = None
        process.send([self._setup])
        return process

    def _hand_out(self) -> None:
        while self._posted:
            self._posted.popleft()()
        (process,) = self._processes
        while self._waiting and process.ready is not None:
            episode, number = self._waiting.popleft(), next(self._ids)
            self._playing[number] = playing = _Playing(episode, time.monotonic())
            try:
                function = chosen(self._setup.specs, episode.issued.prompt)
            except UserFault as error:
                del self._playing[number]
                self._end(playing, InfraError(detail=str(error)))
                continue
            process.send([_begin(number, episode, function)])

    def _on_said(self, process: FunctionProcess[Said], said: Said) -> None:
        match said:
            case WantTurn():
                self._begin_turn(said)
            case Taken():
                if (taking := self._playing.get(said.id)) is not None:
                    taking.episode.take(said.choice, said.into)
            case SavedState():
                playing = self._playing.get(said.id)
                if playing is not None and playing.stopping_since_s is None:
                    playing.episode.saved(said.saved)
            case Called():
                if (caller := self._playing.get(said.id)) is not None:
                    caller.episode.called(said.call)
            case Ended():
                self._on_ended(said)
            case Pong():
                self._pinged_at_s = None

    def _on_closed(self, episode: Episode) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove(episode)
        for number, playing in self._playing.items():
            if playing.episode is episode:
                self._stop(number, playing)

    def _on_answered(self, number: int, answer: Answer) -> None:
        if (playing := self._playing.get(number)) is not None:
            playing.idle_since_s = time.monotonic()
            self._tell(TurnMade(number, answer))

    def _tell(self, order: Order) -> None:
        for process in self._processes:
            process.send([order])

    # --- episodes ---------------------------------------------------------------------------------------------

    def _begin_turn(self, wanted: WantTurn) -> None:
        playing, asked = self._playing.get(wanted.id), wanted.asked
        if playing is None or playing.stopping_since_s is not None:
            return
        episode = playing.episode
        new, listener = pack_tokens(asked.tokens), _Listener(self, wanted.id)
        media = asked.media
        if episode.num_turns_of(asked.conversation) == 0 and asked.base != NOTHING:
            prompt, is_prompt = episode.issued.prompt, asked.base == PROMPT
            before = prompt.tokens if is_prompt else episode.so_far(asked.base)
            num_before, new = len(before) // TOKEN_BYTES, before + new
            seen = prompt.media if is_prompt else episode.media_of(asked.base)
            media = (*seen, *(each.moved(num_before) for each in media))
        request = TurnRequest(
            new,
            asked.max_new_tokens,
            listener,
            StopWatch(asked.stop, self._words()) if asked.stop else None,
            conversation=asked.conversation,
            is_trained=asked.is_trained,
            is_chat=asked.is_chat,
            sampling=asked.sampling,
            is_choice=asked.is_choice,
            media=media,
        )
        listener.masked = episode.why_masked(request)
        playing.idle_since_s = None
        with contextlib.suppress(EpisodeOverError):  # it was closed in this moment, and we shall hear of it
            episode.begin_turn(request)

    def _words(self) -> TextTokenizer:
        if self._tokenizer is None:
            self._tokenizer = TextTokenizer(self.model_folder)
        return self._tokenizer

    def _on_ended(self, ended: Ended) -> None:
        playing = self._playing.pop(ended.id, None)
        if playing is not None and playing.stopping_since_s is None:
            self._end(playing, _outcome(ended))

    def _end(self, playing: _Playing, outcome: EpisodeOutcome) -> None:
        name = type(outcome).__struct_config__.tag
        self._num_ended[str(name)] += 1
        playing.episode.end(outcome)

    def _stop(self, number: int, playing: _Playing) -> None:
        if playing.stopping_since_s is None:
            playing.stopping_since_s = time.monotonic()
            self._tell(Stop(number))

    # --- what takes too long ----------------------------------------------------------------------------------

    def _deadline_s(self, process: FunctionProcess[Said]) -> float | None:
        if not self._playing:
            return None
        return min(self._ping_deadline_s(), *(self._deadline(playing)[0] for playing in self._playing.values()))

    def _deadline(self, playing: _Playing) -> tuple[float, str]:
        """When it is overdue, and what then to say."""
        if playing.stopping_since_s is not None:
            return playing.stopping_since_s + STOP_TIMEOUT_S, ""
        options = self._options
        whole = playing.began_at_s + options.timeout_s, f"took longer than {options.timeout_s:g} s (episode.timeout_s)"
        if playing.idle_since_s is None:
            return whole
        silent = (
            playing.idle_since_s + options.idle_timeout_s,
            f"asked the model for nothing for {options.idle_timeout_s:g} s (episode.idle_timeout_s)",
        )
        return min(whole, silent)

    def _ping_deadline_s(self) -> float:
        return self._next_ping_s if self._pinged_at_s is None else self._pinged_at_s + self._options.stall_timeout_s

    def _on_overdue(self, process: FunctionProcess[Said]) -> None:
        now_s = time.monotonic()
        for number, playing in list(self._playing.items()):
            deadline_s, why = self._deadline(playing)
            if deadline_s > now_s:
                continue
            if not why:
                self._kill(process, f"a function did not end within {STOP_TIMEOUT_S:g} s of being told to")
                return
            self._stop(number, playing)
            self._end(playing, InfraError(detail=f"the episode {why}"))
        if self._playing and self._ping_deadline_s() <= now_s:
            self._ping(process, now_s)

    def _ping(self, process: FunctionProcess[Said], now_s: float) -> None:
        limit_s = self._options.stall_timeout_s
        if self._pinged_at_s is not None:
            self._kill(process, f"a function blocked it for {limit_s:g} s (episode.stall_timeout_s)")
            return
        self._pinged_at_s, self._next_ping_s = now_s, now_s + limit_s / 4
        process.send([Ping(0)])

    def _kill(self, process: FunctionProcess[Said], why: str) -> None:
        self._drop(process)
        self._on_lost(process, f"was killed: {why}")

    def _on_lost(self, process: FunctionProcess[Said], how: str) -> None:
        playings, self._playing = self._playing, {}
        for playing in playings.values():
            if playing.stopping_since_s is None:
                self._end(playing, InfraError(detail=f"the process that plays episodes {how}"))


def _begin(number: int, episode: Episode, function: str) -> Begin:
    issued = episode.issued
    prompt, prefix = issued.prompt, issued.prefix
    point = None if prefix is None or not prefix.num_tokens else prefix.save_point
    return Begin(
        id=number,
        function=function,
        prompt=prompt.text,
        num_prompt_tokens=prompt.num_tokens,
        messages=prompt.messages,
        label=prompt.label,
        metadata=prompt.metadata,
        group_id=issued.key.group_id,
        index=issued.key.index,
        attempt=issued.attempt,
        seed=issued.seed,
        is_evaluation=issued.purpose is Purpose.EVALUATE,
        media=prompt.media,
        saved=point.state if point is not None else b"",
    )


def _answer(turn: Part, outcome: Outcome, masked: str) -> Answer:
    ended_by: EndedBy = "length" if isinstance(outcome, Truncated) else "end_token"
    if isinstance(outcome, Completed) and outcome.stop is not StopReason.END_TOKEN:
        ended_by = "stop_string"
    return Answer(
        ids=tuple(tokens_view(turn.tokens).tolist()),
        logprobs=tuple(floats_view(turn.logprobs).tolist()),
        versions=tuple((span.version, span.num_tokens) for span in turn.spans),
        ended_by=ended_by,
        masked=masked,
    )


def _outcome(ended: Ended) -> EpisodeOutcome:
    components = tuple(Metric(name, value) for name, value in ended.components)
    reward = None if ended.reward is None else Reward(value=ended.reward, components=components)
    match ended.outcome:
        case "completed":
            return Completed(stop=StopReason.EPISODE, reward=reward)
        case "truncated":
            return Truncated(reward=reward)
        case "policy_error":
            return PolicyError(detail=ended.detail, reward=reward)
        case "infra_error":
            return InfraError(detail=ended.detail)
