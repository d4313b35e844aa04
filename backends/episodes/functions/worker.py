"""The process that plays episodes: ``python -m penstock.backends.episodes.functions.worker``.

Invariants:

* It dies with the thread that started it, whatever it is doing: the kernel sends SIGKILL.
* Each ``Begin`` is answered by one ``Ended``, also after a ``Stop``, whatever the function raises: ``SystemExit`` and
  ``KeyboardInterrupt`` end its episode and no other. A function that never ends is the parent's to end, by killing this
  process.

| waits for | who ends it |
|---|---|
| an order | the parent, whose death ends this process |
| a turn of the model | the parent; a ``Stop`` cancels the function |
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.episodes.dialogue import MalformedError
from penstock.backends.episodes.functions.ends import end_of, failure_of
from penstock.backends.episodes.functions.loading import load_functions
from penstock.backends.episodes.functions.wire import (
    ORDERS,
    Begin,
    Called,
    Ping,
    Pong,
    SavedState,
    Setup,
    Stop,
    Taken,
    TurnMade,
    WantTurn,
)
from penstock.backends.episodes.interfaces import JsonObject, Task
from penstock.backends.episodes.play import Play
from penstock.backends.processes.frames import Ready, frame
from penstock.backends.processes.function_child import line_to_parent, load_failure, orders_beside
from penstock.backends.processes.user_loop import run_beside_functions

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.images import ImageIntake
    from penstock.backends.episodes.functions.loading import PlayFunction
    from penstock.backends.episodes.functions.wire import Said
    from penstock.backends.episodes.images import EpisodeImages
    from penstock.backends.episodes.playing import Answer, PlayRules, TurnAsked
    from penstock.backends.episodes.protocol import CallMade
    from penstock.messages.samples import Media


def main() -> None:
    """There are no arguments."""
    line, _ = line_to_parent()
    run_beside_functions(_serve(line), "episode.generate")


class _ModelWords:
    """See :class:`~penstock.backends.episodes.playing.Words`."""

    def __init__(self, folder: Path, rules: PlayRules) -> None:
        self.tokenizer = TextTokenizer(folder)
        self._folder = folder
        self._rules = rules.images

    def images(self, media: Sequence[Media]) -> EpisodeImages | None:
        """What takes the images of an episode whose prompt has these."""
        if self._rules is None:
            return None
        from penstock.backends.episodes.images import EpisodeImages  # here, as it brings Pillow and transformers

        return EpisodeImages(self._intake, self._rules, media)

    @cached_property
    def _intake(self) -> ImageIntake:
        from penstock.backends.episodes.images import open_intake

        assert self._rules is not None
        return open_intake(self._folder, self._rules)

    @property
    def template(self) -> ChatTemplate:
        return self._template

    @cached_property
    def _template(self) -> ChatTemplate:
        from penstock.backends.data.chat import ChatTemplate  # here, as it brings transformers
        from penstock.backends.data.problems import DataError

        try:
            return ChatTemplate(self._folder)
        except DataError as error:
            raise MalformedError(f"{error}; or use `generate` instead of `say`") from None


class _Link:
    """See :class:`~penstock.backends.episodes.playing.ModelLink`."""

    def __init__(self, episode: int, writer: asyncio.StreamWriter) -> None:
        self._episode = episode
        self._writer = writer
        self._answer: asyncio.Future[Answer] | None = None

    async def turn(self, asked: TurnAsked) -> Answer:
        self._answer = asyncio.get_running_loop().create_future()
        self._writer.write(frame([WantTurn(self._episode, asked)]))
        return await self._answer

    def take(self, choice: int, into: int) -> None:
        self._writer.write(frame([Taken(self._episode, choice, into)]))

    def save(self, saved: bytes) -> None:
        self._writer.write(frame([SavedState(self._episode, saved)]))

    def called(self, call: CallMade) -> None:
        self._writer.write(frame([Called(self._episode, call)]))

    def made(self, answer: Answer) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)


class _Running(NamedTuple):
    link: _Link
    task: asyncio.Task[None]


class _Server:
    def __init__(
        self,
        rules: PlayRules,
        words: _ModelWords,
        functions: dict[str, PlayFunction],
        writer: asyncio.StreamWriter,
    ) -> None:
        self._rules = rules
        self._functions = functions
        self._words = words
        self._writer = writer
        self._running: dict[int, _Running] = {}

    def take(self, order: Begin | TurnMade | Stop | Ping) -> None:
        match order:
            case Begin():
                link = _Link(order.id, self._writer)
                task = asyncio.create_task(self._play(order, link))
                self._running[order.id] = _Running(link, task)
            case TurnMade():
                if (running := self._running.get(order.id)) is not None:
                    running.link.made(order.answer)
            case Stop():
                if (running := self._running.get(order.id)) is not None:
                    running.task.cancel()
            case Ping():
                self._say(Pong(order.number))

    async def _play(self, begin: Begin, link: _Link) -> None:
        function = self._functions[begin.function]
        play: Play | None = None
        try:
            images = self._words.images(begin.media)
            play = Play(_task(begin, images), begin.num_prompt_tokens, self._rules, self._words, link, images)
            if begin.saved:
                play.restore(begin.saved)
            ended = end_of(begin.id, await function.run(play), is_cut_off=play.is_cut_off)
        except BaseException as error:  # foreign code may raise anything, and that is its answer
            ended = failure_of(begin.id, error, function.path)
        del self._running[begin.id]
        self._say(ended)

    def _say(self, said: Said) -> None:
        self._writer.write(frame([said]))


def _task(begin: Begin, images: EpisodeImages | None) -> Task:
    messages: list[JsonObject] = [{"role": "user", "content": begin.prompt}]
    if begin.messages:
        messages = msgspec.json.decode(begin.messages, type=list[JsonObject])
    return Task(
        prompt=begin.prompt,
        messages=messages if images is None else images.of_task(messages),
        label=begin.label,
        metadata=msgspec.json.decode(begin.metadata, type=JsonObject) if begin.metadata else {},
        group_id=begin.group_id,
        index=begin.index,
        attempt=begin.attempt,
        seed=begin.seed,
        is_evaluation=begin.is_evaluation,
        images=tuple(each.reference for each in begin.media),
    )


async def _serve(line: socket.socket) -> None:
    stream, writer = await asyncio.open_connection(sock=line)
    server: _Server | None = None
    async for order in orders_beside(stream, ORDERS):
        if isinstance(order, Setup):
            server = _loaded(order, writer)
            await writer.drain()
            if server is None:
                return
        else:
            assert server is not None, "the first order is the setup"
            server.take(order)


def _loaded(setup: Setup, writer: asyncio.StreamWriter) -> _Server | None:
    try:
        words = _ModelWords(Path(setup.model_folder), setup.rules)
        server = _Server(setup.rules, words, load_functions(setup.specs), writer)
        if setup.rules.uses_chat:
            _ = words.template, words.images(())  # it takes seconds, in which no episode could go on
    except BaseException as error:  # foreign code may raise anything while it is set up
        writer.write(frame([load_failure(error, setup.specs.in_words())]))
        return None
    writer.write(frame([Ready()]))
    return server


if __name__ == "__main__":
    main()
