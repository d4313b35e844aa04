"""The client of the page on the gateway makes a group anew that came too late, and pushes each number once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"
TOO_OLD = {"error": {"message": "version: 0 is older", "type": "invalid_request_error", "code": "version_too_old"}}
ENDS = {"error": {"message": "the test is over", "type": "invalid_request_error", "code": "other"}}


class Door(BaseHTTPRequestHandler):
    """Has served a newer version each time that it is asked; the second group comes too late once."""

    pushed: ClassVar[list[tuple[str, int]]] = []
    version: ClassVar[int] = 0

    def do_GET(self) -> None:
        type(self).version += 1
        self._answer(200, {"version": self.version, "oldest_version": 0, "wanted": 1})

    def do_POST(self) -> None:
        group: Mapping[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.pushed.append((group["key"], group["version"]))
        match len(self.pushed):
            case 2:
                self._answer(409, TOO_OLD)
            case 4:
                self._answer(409, ENDS)
            case _:
                self._answer(200, {"key": group["key"], "row": 0, "version": group["version"]})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the class above has it
        """Nothing on the terminal."""

    def _answer(self, code: int, body: object) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


def test_a_group_that_came_too_late_is_made_anew(tmp_path: Path) -> None:
    code = re.search(r"```text\n(# push\.py.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    file = tmp_path / "push.py"
    file.write_text(code[1])
    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        command = [sys.executable, str(file), url, "key"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        server.shutdown()
    assert Door.pushed == [("group 0", 1), ("group 1", 2), ("group 1", 3), ("group 2", 4)]
    assert (ended.returncode, json.loads(ended.stderr)) == (1, ENDS)
