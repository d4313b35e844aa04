"""Episodes played by agents outside, who come to an HTTP server in the EngineWorker's process.

Invariants:

* Everything but the driver's methods runs on one event loop, on a thread of its own.
* The server's address is in the run's folder from when it listens until it closes.
* Whatever ends the thread is told through ``fail``.

| waits for | who ends it |
|---|---|
| the thread, for requests and samples | ``close`` |
| ``close`` for the thread | its own deadline |
"""

from __future__ import annotations

import errno
import secrets
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.data.options import DataOptions, metadata_names
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.episodes.loop_thread import LoopThread
from penstock.backends.episodes.registry import (
    GatewayAddress,
    log_file,
    reachable_url,
    remove_address,
    run_token,
    write_address,
)
from penstock.backends.episodes.server import GatewayServer
from penstock.backends.episodes.sessions import Rules, Session
from penstock.backends.episodes.table import SessionTable
from penstock.backends.processes.http_server import listen
from penstock.messages.base import Metric
from penstock.messages.errors import UserFault
from penstock.messages.names import engine_index
from penstock.messages.samples import InfraError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.options import SourceOptions
    from penstock.backends.episodes.api import SessionLine
    from penstock.backends.episodes.context import EpisodeContext
    from penstock.backends.episodes.images import EpisodeImages
    from penstock.backends.episodes.playing import ImageRules
    from penstock.backends.episodes.protocol import Episode
    from penstock.backends.protocol import Fail
    from penstock.messages.samples import Media

SHUTDOWN_S: Final = 1.0
"""For answers that are being written when the server closes."""


class GatewayEpisodes:
    """See the module; an :class:`~penstock.backends.episodes.protocol.EpisodeDriver`."""

    def __init__(self, context: EpisodeContext) -> None:
        self._context = context
        self._thread = LoopThread("gateway", self._run)
        self.address: Future[GatewayAddress] = Future()
        """Once it listens; failed when it cannot."""
        self._sessions: dict[int, Session] = {}
        """By the identity of their episode."""
        self._table: SessionTable | None = None
        self._server: GatewayServer | None = None
        self._rules: Rules | None = None

    # --- EpisodeDriver ----------------------------------------------------------------------------------------

    def start(self, fail: Fail) -> None:
        """See :class:`~penstock.backends.episodes.protocol.EpisodeDriver`."""
        self._fail = fail
        self._thread.start()

    def opened(self, episode: Episode) -> None:
        """Offer it to agents."""
        self._thread.soon(self._open, episode)

    def resumed(self, episode: Episode) -> None:
        """It can be taken again."""
        self._thread.soon(self._note_change)

    def closed(self, episode: Episode, reason: str) -> None:
        """Its agent is told at its next request."""
        self._thread.soon(self._close_session, episode, reason)

    def gauges(self) -> tuple[Metric, ...]:
        """Sessions that no agent has yet, that agents have, and totals of how they ended."""
        table, server = self._table, self._server
        if table is None or server is None:
            return ()
        return (
            Metric("gateway/open", float(table.num_open)),
            Metric("gateway/taken", float(table.num_taken)),
            Metric("gateway/finished", float(server.num_finished)),
            Metric("gateway/abandoned", float(server.num_abandoned)),
        )

    def close(self, timeout_s: float) -> None:
        """See :class:`~penstock.backends.episodes.protocol.EpisodeDriver`."""
        self._thread.close(timeout_s)

    # --- the loop ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._thread.runner() as runner:
                runner.run(self._serve())
        except BaseException as error:  # the thread's end must not go unnoticed, whatever ended it
            if not self.address.done():
                self.address.set_exception(error)
            self._fail(error)

    async def _serve(self) -> None:
        context, folder, model_folder = self._context, self._context.run_folder, self._context.model_folder
        self._rules = Rules(
            context.options,
            context.sampling,
            context.max_context,
            model_folder.name,
            TextTokenizer(model_folder),
            _open_template(model_folder, context.data),
            frozenset(context.can),
            None if context.images is None else _open_images(model_folder, context.images),
        )
        # The index tells the front door whose a session is, what follows which incarnation's.
        self._table = SessionTable(f"{engine_index(context.engine)}-{secrets.token_hex(4)}-")
        blocks: tuple[DataOptions | SourceOptions, ...] = (context.data, *context.data.sources)
        keys = metadata_names(blocks) - {block.label_key for block in blocks}
        self._server = GatewayServer(
            self._table,
            self._rules,
            engine=context.engine,
            token=run_token(folder),
            metadata_keys=sorted(keys),
            write_line=self._write_line,
        )
        host = context.options.host
        try:
            listener = await listen(self._server.app(host), host, 0, shutdown_s=SHUTDOWN_S)
        except OSError as error:
            why = "is no address of this machine" if error.errno == errno.EADDRNOTAVAIL else f"cannot be used ({error})"
            raise UserFault(f"episode.host: {host} {why}; use 127.0.0.1, or 0.0.0.0 for every one") from None
        try:
            address = self._address_at(listener.port)
            write_address(folder, address)
            self.address.set_result(address)
            await self._thread.closing.wait()
            remove_address(folder, address)
        finally:
            await listener.close()

    def _address_at(self, port: int) -> GatewayAddress:
        url = reachable_url(self._context.options.host, port)
        return GatewayAddress(self._context.engine, self._context.epoch, url)

    def _open(self, episode: Episode) -> None:
        assert self._table is not None
        assert self._rules is not None
        session = Session(self._table.new_name(), episode, self._rules, self._on_over)
        self._sessions[id(episode)] = session
        self._table.add(session)

    def _close_session(self, episode: Episode, reason: str) -> None:
        session = self._sessions.get(id(episode))
        if session is not None:
            session.was_closed(reason)

    def _note_change(self) -> None:
        if self._table is not None:
            self._table.note_change()

    def _on_over(self, session: Session) -> None:
        assert self._table is not None
        assert self._server is not None
        self._table.remove(session)
        if self._sessions.pop(id(session.episode), None) is not None and session.is_abandoned:
            self._server.note_end(session, InfraError(detail=session.over_because))

    def _write_line(self, line: SessionLine) -> None:
        with log_file(self._context.run_folder, self._context.engine).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def _open_template(folder: Path, data: DataOptions) -> ChatTemplate | None:
    from penstock.backends.data.chat import ChatTemplate  # here, as it brings transformers
    from penstock.backends.data.problems import DataError

    try:
        return ChatTemplate(folder, data.template_arguments)
    except DataError:
        if data.chat_template:
            raise
        return None


def _open_images(model_folder: Path, rules: ImageRules) -> Callable[[Sequence[Media]], EpisodeImages]:
    from penstock.backends.episodes.images import EpisodeImages, open_intake  # here, as it brings Pillow

    return partial(EpisodeImages, open_intake(model_folder, rules), rules)
