"""The PromptSource's backend where groups come finished from outside: an HTTP server beside the gateways of engines,
with their key, their bounds and their form of errors.

Invariants:

* Whoever pushes hears that a group is taken only when it is on disk (:mod:`penstock.backends.data.pushed.intake`); so
  nothing that was taken is lost with this process, and whoever hears nothing pushes again under the same key.
* Everything but the backend's methods runs on one event loop, on a thread of its own.
* The server's address is in the run's folder from when it listens until it closes.

| waits for | who ends it |
|---|---|
| the thread, for groups and commands | ``close`` |
| ``close`` for the thread | its own deadline |
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from aiohttp import web

from penstock.backends.data.options import PUSHED
from penstock.backends.data.own_source.journal import Journal
from penstock.backends.data.pushed.forms import PushedGroup
from penstock.backends.data.pushed.intake import RETRY_AFTER_S, Intake
from penstock.backends.episodes.http import answer_errors, json_response, key_check
from penstock.backends.episodes.loop_thread import LoopThread
from penstock.backends.episodes.registry import reachable_url, remove_push_address, run_token, write_push_address
from penstock.backends.processes.http_server import RequestError, application, decoded, listen
from penstock.messages.base import Metric
from penstock.messages.commands import ChooseRows, FetchPrompts
from penstock.messages.errors import UserFault
from penstock.messages.flow import GroupRow
from penstock.messages.local import PromptsFetched, RowsDrawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from aiohttp.typedefs import Handler

    from penstock.backends.data.pushed.reading import PushReader
    from penstock.backends.protocol import Emit, Fail
    from penstock.messages.commands import PushCommand
    from penstock.messages.local import FetchedPrompt

PATH: Final = "/trajectories"
SHUTDOWN_S: Final = 1.0


class PushBackend:
    """Implements ``penstock.backends.protocol.Backend``."""

    def __init__(self, run_folder: Path, host: str, open_reader: Callable[[], PushReader]) -> None:
        self._run_folder, self._host, self._open_reader = run_folder, host, open_reader
        self._thread = LoopThread("pushes", self._run)
        self._intake: Intake | None = None
        self._num_refused = 0

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`."""
        self._emit, self._fail = emit, fail
        self._thread.start()

    def execute(self, command: PushCommand, /) -> None:
        """Rows are numbered as they come; the rest is done on the thread, in order."""
        if isinstance(command, ChooseRows):
            places = zip(command.group_ids, command.stream, strict=True)
            rows = (GroupRow(group_id, place.row, place.epoch, place.position) for group_id, place in places)
            self._emit(RowsDrawn(rows=tuple(rows)))
        elif isinstance(command, FetchPrompts):
            self._thread.soon(lambda: self._fetched(self._taker.want(command.requests)))
        else:
            self._thread.soon(self._taker_told, command)

    def gauges(self) -> tuple[Metric, ...]:
        """Groups that were taken, that are wanted now, and requests of this incarnation that were refused."""
        if (intake := self._intake) is None:
            return ()
        standing = intake.standing
        return (
            Metric("pushes/accepted", float(standing.accepted)),
            Metric("pushes/wanted", float(standing.wanted)),
            Metric("pushes/refused", float(self._num_refused)),
        )

    def close(self, timeout_s: float) -> None:
        """See :class:`~penstock.backends.protocol.Backend`."""
        self._thread.close(timeout_s)

    # --- the loop ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            reader = self._open_reader()
            journal = Journal(self._run_folder, PUSHED)
            self._intake = Intake(journal, reader)  # before the loop: it carries out commands at once
            with contextlib.closing(journal), self._thread.runner() as runner:
                runner.run(self._serve())
        except BaseException as error:  # the thread's end must not go unnoticed, whatever ended it
            self._fail(error)

    @property
    def _taker(self) -> Intake:
        assert self._intake is not None, "opened before the loop runs"
        return self._intake

    def _taker_told(self, command: PushCommand) -> None:
        assert not isinstance(command, FetchPrompts | ChooseRows)
        self._taker.tell(command)

    def _fetched(self, prompts: Iterable[FetchedPrompt]) -> None:
        if found := tuple(prompts):
            self._emit(PromptsFetched(prompts=found))

    async def _serve(self) -> None:
        app = application(host=self._host, errors=self._answer_errors, check_key=key_check(run_token(self._run_folder)))
        app.add_routes([web.post(PATH, self._push), web.get(PATH, self._standing)])
        try:
            listener = await listen(app, self._host, 0, shutdown_s=SHUTDOWN_S)
        except OSError as error:
            raise UserFault(f"episode.host: {self._host} cannot be used ({error}); use 127.0.0.1, or 0.0.0.0") from None
        try:
            url = reachable_url(self._host, listener.port)
            write_push_address(self._run_folder, url)
            await self._thread.closing.wait()
            remove_push_address(self._run_folder, url)
        finally:
            await listener.close()

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await answer_errors(request, handler)
        self._num_refused += response.status >= 400
        return response

    async def _standing(self, _: web.Request) -> web.Response:
        return json_response(self._taker.standing)

    async def _push(self, request: web.Request) -> web.Response:
        pushed = decoded(await request.read(), PushedGroup)
        try:
            accepted, prompt = self._taker.take(pushed)
        except OSError as error:
            self._fail(error)
            raise RequestError(
                503, "not_stored", f"the run cannot store it: {error.strerror}", RETRY_AFTER_S
            ) from error
        self._fetched([prompt] if prompt is not None else [])
        return json_response(accepted)
