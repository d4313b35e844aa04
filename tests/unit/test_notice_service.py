"""Clouds, and addresses of a user's own, that are asked whether a machine will be taken."""

from __future__ import annotations

import select
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from penstock.backends.engines.options import NOTICE_CLOUDS
from penstock.runtime.hosts.processes import notice_service
from penstock.runtime.hosts.processes.machine_notice import MachineNotice
from penstock.runtime.hosts.processes.notice_service import CLOUDS, NoticeService, NoticeServiceError, is_taken

if TYPE_CHECKING:
    from collections.abc import Generator

AWS_ACTION = "/latest/meta-data/spot/instance-action"
GCP_FLAG = "/computeMetadata/v1/instance/preempted"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"


class Metadata:
    """A metadata service: what it answers by method and path, and what it was asked, with which headers."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], tuple[int, str] | tuple[int, str, dict[str, str]]] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.has_asked = threading.Event()
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                metadata.asked.append((self.command, self.path, dict(self.headers)))
                status, text, *headers = metadata.answers.get((self.command, self.path), (404, "none"))
                self.send_response(status)
                for name, value in headers[0].items() if headers else ():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())
                metadata.has_asked.set()

            do_GET = do_PUT = _answer  # noqa: N815 (as http.server calls them)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (as http.server names it)
                """Not on the terminal."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Generator[Metadata]:
    service = Metadata()
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
    monkeypatch.setenv("GCE_METADATA_HOST", service.url.removeprefix("http://"))
    monkeypatch.setattr(notice_service, "METADATA", service.url)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a cloud's metadata is never behind it
    yield service
    service.close()


def test_a_scenario_may_name_every_cloud_that_can_be_asked() -> None:
    assert set(CLOUDS) == set(NOTICE_CLOUDS)


def test_aws_is_asked_with_a_session_token(metadata: Metadata) -> None:
    metadata.answers["PUT", "/latest/api/token"] = (200, "a-token")
    assert not is_taken("aws")
    metadata.answers["GET", AWS_ACTION] = (200, '{"action": "terminate", "time": "2026-01-01T00:00:00Z"}')
    assert is_taken("aws")
    (put, get) = metadata.asked[-2:]
    assert "X-aws-ec2-metadata-token-ttl-seconds".lower() in {name.lower() for name in put[2]}
    assert {name.lower(): value for name, value in get[2].items()}["x-aws-ec2-metadata-token"] == "a-token"
    metadata.answers["PUT", "/latest/api/token"] = (403, "no")
    with pytest.raises(NoticeServiceError, match=r"no session token \(HTTP 403\)"):
        is_taken("aws")


def test_gcp_says_true_or_false(metadata: Metadata) -> None:
    metadata.answers["GET", GCP_FLAG] = (200, "FALSE")
    assert not is_taken("gcp")
    metadata.answers["GET", GCP_FLAG] = (200, "TRUE")
    assert is_taken("gcp")
    assert {name.lower(): value for name, value in metadata.asked[-1][2].items()}["metadata-flavor"] == "Google"


@pytest.mark.parametrize(
    ("events", "is_word"),
    [
        ('{"DocumentIncarnation": 1, "Events": []}', False),
        ('{"Events": [{"EventId": "1", "EventType": "Reboot", "Resources": ["gpu-7"]}]}', False),
        ('{"Events": [{"EventType": "Preempt", "Resources": ["gpu-70", "gpu-8"]}]}', False),
        ('{"Events": [{"EventType": "Preempt", "Resources": ["gpu-8", "gpu-7"]}]}', True),
    ],
)
def test_azure_tells_of_other_machines_too(metadata: Metadata, events: str, is_word: bool) -> None:
    metadata.answers["GET", AZURE_NAME] = (200, "gpu-7")
    metadata.answers["GET", AZURE_EVENTS] = (200, events)
    assert is_taken("azure") is is_word
    assert all(headers.get("Metadata") == "true" for _, _, headers in metadata.asked)


def test_events_that_cannot_be_read_are_no_word(metadata: Metadata) -> None:
    metadata.answers["GET", AZURE_NAME] = (200, "gpu-7")
    metadata.answers["GET", AZURE_EVENTS] = (200, '{"Events": 3}')
    with pytest.raises(NoticeServiceError, match="scheduled events cannot be read"):
        is_taken("azure")


@pytest.mark.parametrize(("status", "is_word"), [(200, True), (404, False), (204, False), (410, False)])
def test_an_address_says_it_by_its_status(metadata: Metadata, status: int, is_word: bool) -> None:
    metadata.answers["GET", "/taken"] = (status, "")
    assert is_taken(f"{metadata.url}/taken") is is_word


def test_another_status_or_no_answer_is_an_error(metadata: Metadata) -> None:
    metadata.answers["GET", "/taken"] = (500, "")
    with pytest.raises(NoticeServiceError, match="HTTP 500"):
        is_taken(f"{metadata.url}/taken")
    metadata.close()
    with pytest.raises(NoticeServiceError, match="does not answer"):
        is_taken(f"{metadata.url}/taken")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_nobody_is_sent_elsewhere(metadata: Metadata, status: int) -> None:
    """A login page is no word, and a token is told to nobody else."""
    elsewhere = {"Location": f"{metadata.url}/login"}
    metadata.answers["GET", "/login"] = (200, "please log in")
    metadata.answers["GET", "/taken"] = (status, "", elsewhere)
    with pytest.raises(NoticeServiceError, match=f"HTTP {status}"):
        is_taken(f"{metadata.url}/taken")
    metadata.answers["PUT", "/latest/api/token"] = (200, "secret")
    metadata.answers["GET", AWS_ACTION] = (status, "", elsewhere)
    with pytest.raises(NoticeServiceError, match=f"HTTP {status}"):
        is_taken("aws")
    assert "/login" not in [path for _, path, _ in metadata.asked]


def test_word_wakes_the_loop_and_counts_from_when_it_was_heard(metadata: Metadata) -> None:
    url = f"{metadata.url}/taken"
    metadata.answers["GET", "/taken"] = (200, "")
    notice = MachineNotice(30.0, None, url)
    assert notice.word() is None
    notice.listen()
    assert select.select([notice.fileno()], [], [], 10.0)[0]
    assert notice.take()
    word = notice.word()
    assert word is not None
    assert word.how == f"the notice service {url}"
    assert 20.0 < word.left_s <= 30.0
    notice.close()


def test_what_answers_wrongly_is_warned_of_once_and_asked_again(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notice_service, "ASK_EVERY_S", 0.01)
    metadata.answers["GET", "/taken"] = (500, "")
    woken = threading.Event()
    service = NoticeService(f"{metadata.url}/taken", woken.set)
    service.start()
    for _ in range(3):
        assert metadata.has_asked.wait(10.0)
        metadata.has_asked.clear()
    metadata.answers["GET", "/taken"] = (200, "")
    assert woken.wait(10.0)
    assert service.heard_s is not None
    assert [record.message for record in caplog.records] == [
        "engines.notice_url: whether this machine will be taken is not known, as "
        f"{metadata.url}/taken was asked and it answered with HTTP 500; it is asked again every 0.01 s"
    ]
