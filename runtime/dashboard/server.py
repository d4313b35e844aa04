"""The dashboard's server: one page, its assets, JSON about runs, and a stream that says what has changed.

Invariants:

* It listens on this machine alone, and answers to no other name and no page of another site (``http_server``). What is
  below ``/api/`` needs the token, which stands in the link that the command prints and nowhere else: other users of
  this machine see nothing of a run, whose folder they cannot read either.
* The page runs its own scripts only, and none of it can be made of text (content security policy, Trusted Types).
* It reads the runs' folders and changes nothing in them; what a run is told goes to its driver. Answers are made in a
  few threads, have a deadline and a bound; so has the number of pages that listen.

| waits for | who ends it |
|---|---|
| an answer of a thread | the thread; the route's deadline |
| a page that listens | a change; the page that goes away, seen every ``PULSE_S``; ``close`` |
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from penstock.backends.processes.http_server import Bounds, RequestError, application, check_token, decoded, listen
from penstock.messages.errors import UserFault
from penstock.runtime.dashboard.answers import SharedAnswers
from penstock.runtime.dashboard.heads import HEAD_FILES, RunHead, head_of
from penstock.runtime.dashboard.routes import LIMIT_S
from penstock.runtime.dashboard.watching import MAX_CLIENTS, Client, Watch
from penstock.runtime.safe_text import terminal_lines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from aiohttp.typedefs import Handler

    from penstock.backends.processes.http_server import Listener
    from penstock.runtime.dashboard.routes import Route, View

HOST: Final = "127.0.0.1"
ASSETS: Final = Path(__file__).parent / "assets"
REPORT_STYLE: Final = Path(__file__).parents[1] / "observability" / "report.css"
BOUNDS: Final = Bounds(idle_s=30.0, body_s=10.0, max_body_bytes=64 * 1024, max_connections=128)
MAX_ANSWER_BYTES: Final = 32 * 2**20
NUM_THREADS: Final = 4
MAX_UNDER_WAY: Final = 32
PULSE_S: Final = 10.0
STOP_S: Final = 1.0
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_LIGHT_AND_DARK: Final = re.compile(r"(?s):root \{(.*?)\}.*?:root \{(.*?)\}")

_log: Final = logging.getLogger(__name__)


class ViewHead(msgspec.Struct, frozen=True):
    """One tab."""

    name: str
    title: str
    files: tuple[str, ...]


class Overview(msgspec.Struct, frozen=True):
    """What the page begins with."""

    views: list[ViewHead]
    runs: list[RunHead]
    head_files: tuple[str, ...]


class Refusal(msgspec.Struct, frozen=True):
    """An answer that is no success; the text is for the person."""

    error: str


class Dashboard:
    """Shows some runs."""

    def __init__(self, folders: Sequence[Path], views: Sequence[View]) -> None:
        """
        Args:
            folders: of the runs, the first of which is shown first.
            views: that the page has.
        """
        self.token = secrets.token_urlsafe(32)
        self._folders = tuple(folders)
        self._views = tuple(views)
        self._watch = Watch(self._folders, sorted({*HEAD_FILES, *(name for view in views for name in view.files)}))
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="dashboard")
        self._num_under_way = 0
        self._shared = SharedAnswers()
        self._assets = _assets()

    async def open(self, port: int) -> Listener:
        """Listen; 0 takes a free port.

        Raises:
            OSError: it cannot listen there.
        """
        app = application(host=HOST, errors=_answer_errors, check_key=self._check_key, bounds=BOUNDS)
        app.on_response_prepare.append(_add_headers)
        app.cleanup_ctx.append(self._watching)
        app.router.add_get("/api/overview", self._overview)
        app.router.add_get("/api/changes", self._changes)
        for view in self._views:
            for route in view.routes:
                app.router.add_get(f"/api/{route.path}", self._handler(route, view.files))
        app.router.add_post("/api/command", self._command)
        app.router.add_get("/{path:.*}", self._asset)
        return await listen(app, HOST, port, bounds=BOUNDS, shutdown_s=STOP_S, handler_cancellation=True)

    async def _watching(self, _app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch.run())
        yield
        task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/api/") and not check_token(request.headers, self.token):
            raise RequestError(401, "token", "open the link that penstock dashboard has printed: it carries the token")
        return await handler(request)

    # --- answers ----------------------------------------------------------------------------------------------

    async def _asset(self, request: web.Request) -> web.Response:
        body, kind = self._assets.get(request.path, (b"", ""))
        if not kind:
            raise RequestError(404, "not_found", "there is nothing of this name")
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def _overview(self, _request: web.Request) -> web.Response:
        def made() -> Overview:
            views = [ViewHead(view.name, view.title, view.files) for view in self._views]
            return Overview(views, [head_of(folder) for folder in self._folders], HEAD_FILES)

        return await self._answer(self._begin(made), LIMIT_S)

    def _handler(self, route: Route, files: Sequence[str]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            given = dict(request.query)
            folder = self._folder(given.pop("run", "0"))
            try:
                query = msgspec.convert(given, route.query, strict=False)
            except msgspec.ValidationError as error:
                raise RequestError(400, "invalid_request", f"the query: {error}") from None

            def begin() -> asyncio.Future[bytes]:
                return self._begin(lambda: route.answer(folder, query))

            if not route.is_shared:
                return await self._answer(begin(), route.limit_s)
            work = self._shared.ask((route.path, folder, query), [folder / name for name in files], begin)
            return await self._answer(work, route.limit_s)

        return handle

    async def _command(self, request: web.Request) -> web.Response:
        from penstock.runtime.dashboard import controls  # dear to import, for the few who tell anything

        if "Origin" not in request.headers:  # another one is refused already: only the page itself may ask
            raise RequestError(403, "other_origin", "only the page of this dashboard may tell a run something")
        folder = self._folder(request.query.get("run", "0"))
        told = decoded(await request.read(), controls.Told)
        return await self._answer(self._begin(lambda: controls.tell_run(folder, told)), controls.LIMIT_S)

    def _folder(self, run: str) -> Path:
        if not run.isdecimal() or len(run) > 4 or int(run) >= len(self._folders):
            raise RequestError(404, "not_found", f"there are {len(self._folders)} runs here, counted from 0")
        return self._folders[int(run)]

    def _begin(self, make: Callable[[], msgspec.Struct]) -> asyncio.Future[bytes]:
        if self._num_under_way >= MAX_UNDER_WAY:
            raise RequestError(503, "busy", "too many questions at a time; they are answered one after the other")
        self._num_under_way += 1
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, lambda: msgspec.json.encode(make()))
        work.add_done_callback(self._done)
        return work

    async def _answer(self, work: asyncio.Future[bytes], limit_s: float) -> web.Response:
        try:
            async with asyncio.timeout(limit_s):
                body = await asyncio.shield(work)
        except TimeoutError:
            raise RequestError(504, "timeout", f"there was no answer within {limit_s:g} s; ask for less") from None
        if len(body) > MAX_ANSWER_BYTES:
            raise RequestError(413, "too_large", f"the answer is larger than {MAX_ANSWER_BYTES:,} bytes; ask for less")
        return web.Response(body=body, content_type="application/json")

    def _done(self, work: asyncio.Future[bytes]) -> None:
        self._num_under_way -= 1
        if not work.cancelled():
            work.exception()  # it was raised where somebody waited, if anybody did

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: one for each look that found something, and a comment now and then."""
        if len(self._watch.clients) >= MAX_CLIENTS:
            raise RequestError(503, "busy", f"{MAX_CLIENTS} pages listen already; close one of them")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        client = Client()
        self._watch.clients.add(client)
        try:
            await response.prepare(request)
            await response.write(b": listening\n\n")
            while True:
                changes = await client.changes(PULSE_S)
                lines = [b"data: " + msgspec.json.encode(change) + b"\n\n" for change in changes]
                await response.write(b"".join(lines) or b":\n\n")
        finally:
            self._watch.clients.discard(client)


def _assets() -> dict[str, tuple[bytes, str]]:
    """Path of an address → what is there. Read once, so no address can name another file."""
    files = (path for path in ASSETS.rglob("*") if path.suffix in _TYPES)
    found = {f"/{path.relative_to(ASSETS)}": (path.read_bytes(), _TYPES[path.suffix]) for path in files}
    return {**found, "/": found["/index.html"], "/palette.css": (_palette().encode(), "text/css")}


def _palette() -> str:
    """The report's colours, where the person may also choose light or dark."""
    found = _LIGHT_AND_DARK.search(REPORT_STYLE.read_text(encoding="utf-8"))
    assert found is not None, "the report has a light and a dark palette"
    light, dark = found.groups()
    by_browser = f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{{dark}}} }}"
    return f":root {{{light}}}\n{by_browser}\n:root[data-theme=dark] {{{dark}}}\n"


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return _refused(error.status, error.message)
    except web.HTTPException as error:
        return _refused(error.status, error.reason)
    except UserFault as error:
        return _refused(422, str(error))


def _refused(status: int, text: str) -> web.Response:
    body = msgspec.json.encode(Refusal(terminal_lines(text)))
    return web.Response(status=status, body=body, content_type="application/json")
