"""A hub of a test's own: what huggingface_hub asks of one, over HTTP, for folders on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class SmallHub:
    """Serves ``models`` and ``datasets``: folders by the name of their repository. A context manager."""

    def __init__(self, *, models: dict[str, Path] | None = None, datasets: dict[str, Path] | None = None) -> None:
        self.folders = {"models": models or {}, "datasets": datasets or {}}
        self.asked: list[str] = []
        """Method and path, in the order of the requests."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path).strip("/")
        self.asked.append(f"{request.command} {path}")
        match path.split("/"):
            case ["api", kind, org, name, "revision", revision] if revision in ("main", COMMIT):
                self.tell(request, kind, f"{org}/{name}")
            case ["api", kind, org, name]:
                self.tell(request, kind, f"{org}/{name}")
            case ["api", kind, org, name, "tree", *_] if folder := self.folders.get(kind, {}).get(f"{org}/{name}"):
                self.reply(request, json.dumps([entry(folder, file) for file in files(folder)]).encode())
            case ["datasets", org, name, "resolve", _, *file]:
                self.give(request, self.folders["datasets"].get(f"{org}/{name}"), "/".join(file))
            case [org, name, "resolve", _, *file]:
                self.give(request, self.folders["models"].get(f"{org}/{name}"), "/".join(file))
            case ["api", kind, org, name, "revision", _] if f"{org}/{name}" in self.folders.get(kind, {}):
                self.reply(request, b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
            case _:
                self.reply(request, b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    def tell(self, request: BaseHTTPRequestHandler, kind: str, repository: str) -> None:
        folder = self.folders.get(kind, {}).get(repository)
        if folder is None:
            self.reply(request, b"{}", 404, {"X-Error-Code": "RepoNotFound"})
            return
        siblings = [{"rfilename": file} for file in files(folder)]
        about = {"_id": "1", "id": repository, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
        self.reply(request, json.dumps(about).encode())

    def give(self, request: BaseHTTPRequestHandler, folder: Path | None, file: str) -> None:
        if folder is None or file not in files(folder):
            self.reply(request, b"", 404, {"X-Error-Code": "EntryNotFound"})
            return
        body = (folder / file).read_bytes()
        self.reply(request, body, 200, {"ETag": f'"{digest(body)}"', "X-Repo-Commit": COMMIT})

    def reply(
        self, request: BaseHTTPRequestHandler, body: bytes, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


def files(folder: Path) -> list[str]:
    """Relative, sorted."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def entry(folder: Path, file: str) -> dict[str, object]:
    """Of a listing."""
    body = (folder / file).read_bytes()
    return {"type": "file", "path": file, "size": len(body), "oid": digest(body)}


def digest(body: bytes) -> str:
    """What stands for these bytes."""
    return hashlib.sha1(body).hexdigest()
